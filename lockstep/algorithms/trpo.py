"""Trust region policy optimisation (Schulman et al. 2015): a natural-gradient step, checked before it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.algorithms.actor_critic import Setup
from lockstep.algorithms.npg import Natural, natural_gradient, natural_problems
from lockstep.core import Algorithm
from lockstep.optim.natural import line_search
from lockstep.ranges import Count, Share


@dataclass(frozen=True)
class TRPO(Natural):
    """One natural-gradient step per update, shortened until it improves the surrogate within `max_kl`."""

    backtracks: Count = 10  # lengths that are tried; when none is good, the policy stays
    shrink: Share = 0.8  # each length is this share of the one before


def trpo_problems(config: TRPO, lanes: int, rows: int) -> list[str]:
    """What is wrong with these numbers for so many lanes of `rows` steps."""
    problems = natural_problems(config, lanes, rows)
    if config.shrink in (0, 1):
        problems.append(
            f"algo.shrink ({config.shrink:g}) must lie between 0 and 1: every length is shorter than the last."
        )
    return problems


def trpo_unread(config: TRPO) -> dict[str, str]:
    return {"shrink": "algo.backtracks=1"} if config.backtracks == 1 else {}


def trpo(config: TRPO, setup: Setup) -> Algorithm:
    return natural_gradient(
        config, setup, lambda attempt, max_kl: line_search(attempt, max_kl, config.shrink, config.backtracks)
    )
