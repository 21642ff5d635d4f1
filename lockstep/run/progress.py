"""How far a run is: the counters that are not the learner's."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lockstep.collect import Episode

LARGEST = 2**63  # no count is as large
RECENT = 100  # episodes that the reported return is a mean of


@dataclass(frozen=True)
class Progress:
    updates: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0  # since the run began, over all the times it was resumed
    recent: tuple[tuple[float, int], ...] = ()  # return and length of the newest episodes
    best: float | None = None  # the best evaluation so far
    best_steps: int | None = None  # and when it was

    def after(self, steps: int, episodes: list[Episode], seconds: float) -> Progress:
        """One update later, `seconds` after the run began."""
        recent = (*self.recent, *((episode.total, episode.steps) for episode in episodes))
        return dataclasses.replace(
            self,
            updates=self.updates + 1,
            steps=self.steps + steps,
            episodes=self.episodes + len(episodes),
            seconds=seconds,
            recent=recent[-RECENT:],
        )

    def crossed(self, every: int, batch: int) -> bool:
        """Whether the newest update reached or passed a multiple of `every` steps; never for 0."""
        return every > 0 and self.steps // every > (self.steps - batch) // every

    def evaluation_due(self, every: int, batch: int, budget: int) -> bool:
        """After a multiple of `every` steps and at the end of the budget; never for 0."""
        return every > 0 and (self.crossed(every, batch) or self.steps >= budget)

    def scored(self, score: float | None) -> tuple[Progress, bool]:
        """With an evaluation, if there was one; whether it is the best so far."""
        if score is None or (self.best is not None and score <= self.best):
            return self, False
        return dataclasses.replace(self, best=score, best_steps=self.steps), True

    @property
    def returns(self) -> tuple[float, float, float]:
        """Mean and standard deviation of the recent returns, and the mean length; NaN before the first episode."""
        return _statistics(self.recent)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Progress:
        """What `to_json` gave; a ValueError or KeyError for anything else."""
        seconds = _number(data, "seconds")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"'seconds' must be 0 or more, not {seconds}")
        return Progress(
            updates=natural(data, "updates"),
            steps=natural(data, "steps"),
            episodes=natural(data, "episodes"),
            seconds=seconds,
            recent=_recent(data["recent"]),
            best=None if data["best"] is None else _number(data, "best"),
            best_steps=None if data["best_steps"] is None else natural(data, "best_steps"),
        )


def natural(data: dict[str, Any], name: str) -> int:
    """A count out of JSON, which has other numbers too."""
    value = data[name]
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"'{name}' must be a whole number, 0 or more, not {reprlib.repr(value)}")
    return value


def _number(data: dict[str, Any], name: str) -> float:
    """Returns may be infinite or NaN: they are shown and compared, and nothing is counted by them."""
    value = data[name]
    if type(value) is not float and not (type(value) is int and abs(value) < LARGEST):
        raise ValueError(f"'{name}' must be a number, not {reprlib.repr(value)}")
    return float(value)


def _recent(data: Any) -> tuple[tuple[float, int], ...]:
    """Return and length of episodes."""
    if not isinstance(data, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in data):
        raise ValueError("'recent' must be a list of pairs of a return and a length")
    pairs = [{"return": pair[0], "length": pair[1]} for pair in data]
    return tuple((_number(pair, "return"), natural(pair, "length")) for pair in pairs)


@lru_cache(1)
def _statistics(recent: tuple[tuple[float, int], ...]) -> tuple[float, float, float]:
    """Kept, because most small updates end no episode."""
    if not recent:
        return math.nan, math.nan, math.nan
    totals, lengths = np.asarray(recent).T
    return float(totals.mean()), float(totals.std()), float(lengths.mean())
