"""How far a run is: the counters that are not the learner's."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.collect import Episode

RECENT = 100  # episodes that the reported return is a mean of


@dataclass(frozen=True)
class Progress:
    updates: int = 0
    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0  # of training, over all the times it was resumed
    recent: tuple[tuple[float, int], ...] = ()  # return and length of the newest episodes
    best: float | None = None  # the best evaluation so far

    def after(self, steps: int, episodes: list[Episode], seconds: float) -> Progress:
        """One update later."""
        recent = (*self.recent, *((episode.total, episode.steps) for episode in episodes))
        return dataclasses.replace(
            self,
            updates=self.updates + 1,
            steps=self.steps + steps,
            episodes=self.episodes + len(episodes),
            seconds=self.seconds + seconds,
            recent=recent[-RECENT:],
        )

    def crossed(self, every: int, batch: int) -> bool:
        """Whether the newest update reached or passed a multiple of `every` steps; never for 0."""
        return every > 0 and self.steps // every > (self.steps - batch) // every

    @property
    def returns(self) -> tuple[float, float, float]:
        """Mean and standard deviation of the recent returns, and the mean length; NaN before the first episode."""
        if not self.recent:
            return math.nan, math.nan, math.nan
        totals, lengths = zip(*self.recent, strict=True)
        return float(np.mean(totals)), float(np.std(totals)), float(np.mean(lengths))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Progress:
        recent = tuple((float(total), int(length)) for total, length in data["recent"])
        return Progress(**{**data, "recent": recent})
