"""A whole table, on the ranks it is started on: `python -m tests.laws.job train|resume LOGDIR TABLE MODE WORKERS`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lockstep
from lockstep.algorithms import REGISTRY
from lockstep.experiment import resolve
from tests.laws.table import ENVIRONMENTS, EVERYTHING, FEW, SOME, algorithm_of, settings

UPDATES = 4
TABLES = {"few": FEW, "some": SOME, "everything": EVERYTHING}
WATCHED = {"watch.eval_every": 512, "watch.eval_episodes": 2}


def experiments(table: str) -> list[tuple[str, str]]:
    """Environments and cases of a table; of a preset, one for each algorithm."""
    return TABLES.get(table) or [(table, algo) for algo in REGISTRY]


def chosen(name: str, case: str) -> dict[str, Any]:
    """A table's experiments are small; a preset's have its own numbers, for two updates."""
    if name in ENVIRONMENTS:
        return settings(UPDATES, case, **WATCHED)
    experiment = resolve(name, case).experiment
    return {"steps": experiment.lanes * experiment.rows + 1, "watch.eval_every": 0}


def name_of(env: str, case: str) -> str:
    return f"{env}-{case}"


def train(logdir: str, env: str, case: str, mode: str = "gather", workers: int = 0) -> None:
    layout = {"layout.mode": mode, "layout.workers": workers}
    lockstep.train(env, algorithm_of(case), logdir, name_of(env, case), {**chosen(env, case), **layout})


def train_all(logdir: str, table: str, mode: str, workers: int) -> None:
    """One run per experiment, named by `name_of`."""
    for env, case in experiments(table):
        train(logdir, env, case, mode, workers)


def resume_all(logdir: str, table: str, mode: str = "gather", workers: int = 0) -> None:
    for env, case in experiments(table):
        lockstep.resume(Path(logdir) / name_of(env, case), mode=mode, workers=workers)


if __name__ == "__main__":
    verb, logdir, table, mode, workers = sys.argv[1:]
    (train_all if verb == "train" else resume_all)(logdir, table, mode, int(workers))
