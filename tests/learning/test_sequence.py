"""What is solved stays solved: steps must not grow where a policy has become nearly deterministic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.run.metrics import read_metrics
from tests.environments import FIVE, FiveActions

SETTINGS = {"collect.steps": 32, "steps": 20_000, "watch.eval_every": 0}


@pytest.mark.parametrize("algo", ["npg", "trpo"])
def test_a_sequence_of_five_actions_is_learnt_and_kept_with_every_seed(tmp_path: Path, algo: str) -> None:
    moments = np.float32([[time / len(FiveActions.RIGHT)] for time in range(len(FiveActions.RIGHT))])
    right, largest = [], []
    for seed in range(4):
        run = lockstep.train(FIVE, algo, tmp_path, str(seed), {**SETTINGS, "seed": seed})
        right.append(int((lockstep.load(run.path).act_many(moments) == FiveActions.RIGHT).sum()))
        largest.append(max(float(row["kl"]) for row in read_metrics(run.path).rows))
    assert right == [5, 5, 5, 5]
    assert max(largest) < 0.04, "twice of what a step aims at"
