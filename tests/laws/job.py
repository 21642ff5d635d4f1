"""A whole table, on the ranks it is started on: `python -m tests.laws.job train|resume LOGDIR TABLE MODE WORKERS`"""

from __future__ import annotations

import sys
from pathlib import Path

import lockstep
from tests.laws.table import EVERYTHING, FEW, SOME, settings

UPDATES = 4
TABLES = {"few": FEW, "some": SOME, "everything": EVERYTHING}
WATCHED = {"watch.eval_every": 512, "watch.eval_episodes": 2}


def name_of(env: str, algo: str) -> str:
    return f"{env}-{algo}"


def train_all(logdir: str, table: str, mode: str = "gather", workers: int = 0) -> None:
    """One run per experiment, named by `name_of`."""
    layout = {"layout.mode": mode, "layout.workers": workers}
    for env, algo in TABLES[table]:
        lockstep.train(env, algo, logdir, name_of(env, algo), settings(UPDATES, algo, **WATCHED, **layout))


def resume_all(logdir: str, table: str, mode: str = "gather", workers: int = 0) -> None:
    for env, algo in TABLES[table]:
        lockstep.resume(Path(logdir) / name_of(env, algo), mode=mode, workers=workers)


if __name__ == "__main__":
    verb, logdir, table, mode, workers = sys.argv[1:]
    (train_all if verb == "train" else resume_all)(logdir, table, mode, int(workers))
