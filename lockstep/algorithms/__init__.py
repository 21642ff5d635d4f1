"""Algorithms, one file each: a frozen Config and a factory that returns `Algorithm(init, update)`.

They know no environment, no process and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lockstep.algorithms.a2c import A2C, a2c, a2c_idle, a2c_unread
from lockstep.algorithms.acktr import ACKTR, acktr, acktr_problems, acktr_unread
from lockstep.algorithms.actor_critic import Setup
from lockstep.algorithms.npg import NPG, natural_problems, npg
from lockstep.algorithms.ppo import PPO, ppo, ppo_idle, ppo_problems, ppo_unread
from lockstep.algorithms.ppo_kl import PPOKL, ppo_kl, ppo_kl_problems, ppo_kl_unread
from lockstep.algorithms.reinforce import Reinforce, reinforce, reinforce_idle, reinforce_unread
from lockstep.algorithms.trpo import TRPO, trpo, trpo_problems, trpo_unread
from lockstep.core import Algorithm


class Entry(NamedTuple):
    config: type
    make: Callable[[Any, Setup], Algorithm]
    problems: Callable[[Any, int, int], list[str]] = lambda config, lanes, rows: []  # rows: of a lane in one update
    collects: tuple[str, ...] = ("steps",)  # what it can learn from: steps, episodes, or both
    defaults: Mapping[str, Any] = {}  # settings of an experiment with it, under those of a preset or a user
    idle: Callable[[Any], str] = lambda config: ""  # the parameters that no gradient reaches: "value", or none
    unread: Callable[[Any], dict[str, str]] = lambda config: {}  # settings that others make meaningless -> which


def follows_budget(config: Any) -> bool:
    """Whether updates depend on how many are to come, as far as its settings tell."""
    return getattr(config, "schedule", "linear") != "constant"


REGISTRY: dict[str, Entry] = {
    "ppo": Entry(PPO, ppo, ppo_problems, idle=ppo_idle, unread=ppo_unread),
    "ppo-kl": Entry(PPOKL, ppo_kl, ppo_kl_problems, collects=("steps", "episodes"), unread=ppo_kl_unread),
    "trpo": Entry(TRPO, trpo, trpo_problems, unread=trpo_unread),
    "npg": Entry(NPG, npg, natural_problems),
    "acktr": Entry(ACKTR, acktr, acktr_problems, unread=acktr_unread),
    "a2c": Entry(A2C, a2c, defaults={"collect": {"steps": 5}}, idle=a2c_idle, unread=a2c_unread),
    "reinforce": Entry(
        Reinforce,
        reinforce,
        collects=("episodes",),
        defaults={"collect": {"episodes": 1}},
        idle=reinforce_idle,
        unread=reinforce_unread,
    ),
}
