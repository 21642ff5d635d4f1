"""Types of settings that say which values make sense."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """From `low` to `high`, both included, unless `above` leaves `low` itself out."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int | float)
        return self.low <= number <= self.high and not (self.above and number == self.low)

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        return f"above {self.low:g}" if self.above else f"at least {self.low:g}"


Count = Annotated[int, Range(low=1)]
Natural = Annotated[int, Range(low=0)]
Seed = Annotated[int, Range(0, 2**128 - 1)]
Positive = Annotated[float, Range(low=0, above=True)]
Seconds = Annotated[float, Range(0, 1e9, above=True)]  # 30 years; system calls take little more
NonNegative = Annotated[float, Range(low=0)]
Share = Annotated[float, Range(0, 1)]
