"""A whole table, on the ranks it is started on: `python -m tests.laws.job train|resume LOGDIR TABLE LAYOUT ...`

A layout is a mode and a number of workers, as in `average-2`; its runs are in a folder of that name.
"""

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


def train(logdir: Path, env: str, case: str, layout: str = "gather-0") -> None:
    """One run of a table, named by `name_of`."""
    mode, workers = layout.split("-")
    where = {"layout.mode": mode, "layout.workers": int(workers)}
    lockstep.train(env, algorithm_of(case), logdir, name_of(env, case), {**chosen(env, case), **where})


def resume(logdir: Path, env: str, case: str, layout: str = "gather-0") -> None:
    mode, workers = layout.split("-")
    lockstep.resume(logdir / name_of(env, case), mode=mode, workers=int(workers))


if __name__ == "__main__":
    verb, logdir, table, *layouts = sys.argv[1:]
    for env, case in experiments(table):
        for layout in layouts:  # one after the other, for they share programs
            (train if verb == "train" else resume)(Path(logdir) / layout, env, case, layout)
