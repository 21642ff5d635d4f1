"""The digest of a run's newest checkpoint, recomputed from its bytes and held against metrics.csv."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from lockstep import tree
from lockstep.run import directory
from lockstep.run.checkpoint import refuse_another_experiment
from lockstep.run.metrics import read_metrics
from lockstep.run.policy import find


class Receipt(NamedTuple):
    updates: int
    steps: int
    digest: str
    agreement: str  # how it compares with metrics.csv, in words


def receipt(run: Path, trust: bool = False) -> Receipt:
    config = directory.read_config(run, trust, played=False)
    path, saved = find(run, "newest")
    refuse_another_experiment(run, config, path, saved)
    updates, steps = saved.progress.updates, saved.progress.steps
    digest = tree.digest_of_paths(saved.learner)
    return Receipt(updates, steps, digest, _compare(run, updates, digest))


def _compare(run: Path, updates: int, digest: str) -> str:
    if updates == 0:
        return "nothing was learnt yet"
    found = read_metrics(run)
    for note in found.notes(run):
        print(f"lockstep: {note}", file=sys.stderr)
    noted = {int(row["update"]): row["digest"] for row in found.rows}
    if updates not in noted:
        return "metrics.csv has no receipt of this update"
    return "as in metrics.csv" if noted[updates] == digest else f"DIFFERS from metrics.csv ({noted[updates]})"
