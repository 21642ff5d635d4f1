"""How good a policy is: whole episodes on fixed seeds, without noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from lockstep.address import Purpose
from lockstep.envs.local import LocalEnvs
from lockstep.run.policy import TILE, TrainedPolicy

LONGEST = 100_000  # steps after which an episode without an end of its own is cut


class Evaluation(NamedTuple):
    returns: list[float]
    lengths: list[int]

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Over episodes; of the sample, so that one episode has none."""
        return float(np.std(self.returns, ddof=1)) if len(self.returns) > 1 else math.nan

    @property
    def half_interval(self) -> float:
        """Half the width of the 95 % confidence interval of the mean (Student's t)."""
        n = len(self.returns)
        return float(stdtrit(n - 1, 0.975)) * self.std / math.sqrt(n) if n > 1 else math.nan

    def __str__(self) -> str:
        """One episode has neither a spread nor an interval."""
        low, high = self.mean - self.half_interval, self.mean + self.half_interval
        length = f"length {np.mean(self.lengths):.1f}"
        if len(self.returns) == 1:
            return f"return {self.mean:.2f} over 1 episode\n{length}"
        return (
            f"return {self.mean:.2f} +- {self.std:.2f} over {len(self.returns)} episodes\n"
            f"95 % interval of the mean: {low:.2f} to {high:.2f}\n{length}"
        )

    def as_dict(self) -> dict[str, object]:
        interval = [self.mean - self.half_interval, self.mean + self.half_interval]
        return {
            "episodes": len(self.returns),
            "return_mean": self.mean,
            "return_std": _or_none(self.std),
            "return_95": [_or_none(end) for end in interval],
            "length_mean": float(np.mean(self.lengths)),
            "returns": self.returns,
            "lengths": self.lengths,
        }


def _or_none(number: float) -> float | None:
    """JSON has no NaN."""
    return number if math.isfinite(number) else None


def evaluate(policy: TrainedPolicy, episodes: int, seed: int, beat: Callable[[], None] = lambda: None) -> Evaluation:
    """The first episode of each of environments 0, 1, ...: the same episodes however they are batched.

    `beat` is called at every step.
    """

    def choose(observation: np.ndarray) -> np.ndarray:
        beat()
        return policy.choose(observation)

    returns, lengths = [], []
    for start in range(0, episodes, TILE):
        numbers = range(start, min(start + TILE, episodes))
        with LocalEnvs(policy.experiment.env, seed, numbers, Purpose.EVALUATE) as envs:
            part_returns, part_lengths = play(choose, envs)
        returns += part_returns
        lengths += part_lengths
    return Evaluation(returns, lengths)


def play(choose: Callable[[np.ndarray], np.ndarray], envs: LocalEnvs) -> tuple[list[float], list[int]]:
    """One episode of each environment: its return and its length."""
    n, rollout = len(envs), envs.rollout(1)
    observation, step = rollout.observation[0], rollout.step(0)
    envs.start(observation)
    returns, lengths, running = np.zeros(n), np.zeros(n, int), np.ones(n, bool)
    while running.any() and lengths.max() < LONGEST:
        envs.step(choose(observation), rollout, 0)
        observation[:] = step.observation
        returns[running] += step.reward[running]
        lengths[running] += 1
        ended = running & (step.terminated | step.truncated)
        envs.resting |= ended
        running &= ~ended
    return returns.tolist(), lengths.tolist()
