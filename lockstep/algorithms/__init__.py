"""Algorithms, one file each: a frozen Config and a factory that returns `Algorithm(init, update)`.

They know no environment, no process and no file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lockstep.algorithms.acktr import ACKTR, acktr, acktr_problems
from lockstep.algorithms.actor_critic import Setup
from lockstep.algorithms.ppo import PPO, ppo, ppo_problems
from lockstep.core import Algorithm


class Entry(NamedTuple):
    config: type
    make: Callable[[Any, Setup], Algorithm]
    problems: Callable[[Any, int, int], list[str]]  # config, lanes, steps of a lane in one update


REGISTRY: dict[str, Entry] = {
    "ppo": Entry(PPO, ppo, ppo_problems),
    "acktr": Entry(ACKTR, acktr, acktr_problems),
}
