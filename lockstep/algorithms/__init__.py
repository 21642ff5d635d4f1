"""Algorithms, one file each: a frozen Config and a factory that returns `Algorithm(init, update)`.

They know no environment, no process and no file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lockstep import names
from lockstep.algorithms.a2c import A2C, a2c, a2c_idle, a2c_unread
from lockstep.algorithms.acktr import ACKTR, acktr, acktr_problems, acktr_unread
from lockstep.algorithms.actor_critic import Setup
from lockstep.algorithms.npg import NPG, natural_problems, npg
from lockstep.algorithms.ppo import PPO, ppo, ppo_idle, ppo_problems, ppo_unread
from lockstep.algorithms.ppo_kl import PPOKL, ppo_kl, ppo_kl_problems, ppo_kl_unread
from lockstep.algorithms.reinforce import Reinforce, reinforce, reinforce_idle, reinforce_unread
from lockstep.algorithms.trpo import TRPO, trpo, trpo_problems, trpo_unread
from lockstep.config import brief
from lockstep.core import Algorithm
from lockstep.errors import UsageError, nearest


class Entry(NamedTuple):
    config: type
    make: Callable[[Any, Setup], Algorithm]
    problems: Callable[[Any, int, int], list[str]] = lambda config, lanes, rows: []  # rows: of a lane in one update
    collects: tuple[str, ...] = ("steps",)  # what it can learn from: steps, episodes, or both
    defaults: Mapping[str, Any] = {}  # settings of an experiment with it, under those of a preset or a user
    idle: Callable[[Any], str] = lambda config: ""  # the parameters that no gradient reaches: "value", or none
    unread: Callable[[Any], dict[str, str]] = lambda config: {}  # settings that others make meaningless -> which


OFF_POLICY = ("sac", "td3", "ddpg", "dqn", "ddqn", "qrdqn", "qr-dqn", "c51", "rainbow", "crossq", "tqc", "redq", "droq")
WITHOUT = {  # in an algorithm's name -> why there is none of the kind
    **dict.fromkeys(("lstm", "gru", "rnn", "recurrent"), "policies have no memory"),
    "mask": "action masks are not used",
}


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


def entry(name: str) -> Entry:
    """What `REGISTRY` has under the name, or a user's own: `module:name`, where that module is imported by now."""
    if name in REGISTRY:
        found = REGISTRY[name]
    elif ":" in name:
        found = _entry_in(name)
    else:
        raise UsageError(unknown(name))
    if problem := _unusable(name, found.config):
        raise UsageError(f"algorithm '{name}': its settings, {found.config.__qualname__}, {problem}")
    return found


def unknown(name: str) -> str:
    """What is told of an algorithm that there isn't, and why some are not meant to be."""
    there_is = f"There is: {', '.join(REGISTRY)}; or module:name, your own."
    if name.lower() in OFF_POLICY:
        return f"'{name}' learns off-policy, lockstep is on-policy only. {there_is}"
    if why := next((why for part, why in WITHOUT.items() if part in name.lower()), None):
        return f"unknown algorithm '{brief(name)}': {why}. {there_is}"
    return f"unknown algorithm '{brief(name)}'.{nearest(name, REGISTRY)} {there_is}"


def algorithm_name(config: object) -> str:
    """The name of the algorithm whose settings these are, under which `entry` finds it."""
    return _name_of(type(config))


def _name_of(config: type) -> str:
    ours = [name for name, found in REGISTRY.items() if found.config is config]
    module = config.__module__
    own = [f"{module}:{name}" for name, found in _entries(module).items() if found.config is config]
    return [*ours, *own, ""][0]


def _entries(module: str) -> dict[str, Entry]:
    """Those that stand in an imported module."""
    inside = vars(sys.modules[module]) if module in sys.modules else {}
    return {name: found for name, found in inside.items() if isinstance(found, Entry)}


def _entry_in(name: str) -> Entry:
    module = names.imported(name).__name__
    entries, wanted = _entries(module), name.rpartition(":")[2]
    if wanted not in entries:
        there = (
            f" There is: {', '.join(entries)}." if entries else " There is none; docs/write-an-algorithm.md shows one."
        )
        raise UsageError(
            f"'{wanted}' is no algorithm (a lockstep.algorithms.Entry) of the module '{module}'."
            f"{nearest(wanted, entries)}{there}"
        )
    return entries[wanted]


def _unusable(name: str, config: type) -> str:
    """Why these can't be an algorithm's settings, if they can't."""
    if not (dataclasses.is_dataclass(config) and config.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        return "must be a frozen dataclass: `@dataclass(frozen=True)`."
    fields = {field.name: field for field in dataclasses.fields(config)}
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    if bare := [name for name, field in fields.items() if (field.default, field.default_factory) == missing]:
        return f"need a default for '{bare[0]}'."
    if "discount" not in fields:
        return "need a 'discount', which the scale of rewards depends on: `discount: float = 0.99`."
    if _name_of(config) != name:
        return (
            f"are those of '{_name_of(config) or config.__module__}': say that name, or give it settings of its own in"
            f" its own module, by which it is known. `class Mine({config.__name__}): pass` is enough."
        )
    return ""
