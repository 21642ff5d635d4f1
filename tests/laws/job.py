"""Trains a whole table on the ranks it is started on: `python -m tests.laws.job LOGDIR TABLE KEY=VALUE...`"""

from __future__ import annotations

import sys
from typing import Any

import lockstep
from tests.laws.table import EVERYTHING, FEW, SOME, settings

UPDATES = 4
TABLES = {"few": FEW, "some": SOME, "everything": EVERYTHING}
WATCHED = {"watch.eval_every": 512, "watch.eval_episodes": 2}


def name_of(env: str, algo: str) -> str:
    return f"{env}-{algo}"


def train_all(logdir: str, table: str, layout: dict[str, Any]) -> None:
    """One run per experiment, named by `name_of`."""
    for env, algo in TABLES[table]:
        chosen = {**settings(UPDATES, algo, **WATCHED), **layout}
        lockstep.train(env, algo, logdir, name_of(env, algo), chosen)


if __name__ == "__main__":
    from lockstep.config import parse

    train_all(sys.argv[1], sys.argv[2], dict(parse(setting) for setting in sys.argv[3:]))
