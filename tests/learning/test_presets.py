"""Slow: that presets learn what they promise. The full table is benchmarks/learning.md."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from lockstep.run.evaluate import evaluate


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "bar"), [("cartpole", 490), ("acrobot", -90), ("pendulum", -220)])
def test_a_preset_learns(tmp_path: Path, preset: str, bar: float) -> None:
    scores = []
    for seed in range(3):
        run = lockstep.train(preset, logdir=tmp_path, settings={"seed": seed, "watch.eval_every": 0})
        scores.append(evaluate(lockstep.load(run.path), 50, seed).mean)
    assert sum(scores) / len(scores) >= bar, scores
