"""The experiments that every law is held against: each algorithm on each kind of environment."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.algorithms import REGISTRY

SMALL: dict[str, Any] = {
    "lanes": 4,
    "envs_per_lane": 2,
    "collect.steps": 32,
    "policy.hidden": [16, 16],
    "watch.eval_every": 0,
    "watch.checkpoint_every": 512,
    "seed": 3,
}
EPISODES = {"collect.episodes": 1, "env.time_limit": 32}
CASES: dict[str, dict[str, Any]] = {  # an algorithm, and after a plus another way of it
    "ppo": {"algo.epochs": 2, "algo.minibatch": 64},
    "ppo-kl": {
        **EPISODES,
        **{"algo.epochs": 2, "algo.minibatch": 0},
        **{"algo.value_coefficient": 0, "algo.value_epochs": 1, "algo.value_minibatch": 64, "algo.value_replay": True},
    },
    "trpo": {"algo.value_epochs": 2, "algo.value_minibatch": 64},
    "npg": {"algo.value_epochs": 2, "algo.value_minibatch": 64, "algo.fisher_every": 3},
    "a2c": {"algo.value_steps": 2},
    "reinforce": {**EPISODES, "algo.value_steps": 2},
    "acktr": {"algo.value_steps": 2, "algo.cold_updates": 1, "algo.decompose_every": 2},
    "ppo-kl+minibatches": {"algo.epochs": 2, "algo.minibatch": 64},
    "ppo-kl+windows": {**EPISODES, "algo.epochs": 2, "algo.minibatch": 64},
    "a2c+adam": {"algo.optimizer": "adam", "algo.normalize_advantage": True, "algo.entropy": 0.01},
    "reinforce+mean": {**EPISODES, "algo.baseline": "mean"},
    "reinforce+none": {**EPISODES, "algo.baseline": "none"},
    "acktr+sampled": {
        **{"algo.fisher": "sampled", "algo.damping_form": "factored", "algo.desired_kl": 0.01},
        **{"algo.schedule": "constant"},
        **{"algo.cold_updates": 1, "algo.entropy": 0.01},
    },
}
BATCH = 256  # environment steps of one update of these
ENVIRONMENTS = ("Pendulum-v1", "CartPole-v1", "Hopper-v5", "Ant-v5")

EVERYTHING = [(env, case) for env in ENVIRONMENTS for case in CASES if case in REGISTRY or env == "Hopper-v5"]

# PPO everywhere, each of the others on one of the quicker three in turn: what there is time for at every change.
SOME = [
    (env, algo) for i, algo in enumerate(REGISTRY) for j, env in enumerate(ENVIRONMENTS) if algo == "ppo" or i % 3 == j
]

FEW = [(env, "ppo") for env in ENVIRONMENTS]  # where more processes than cores work on every update

every_algorithm = pytest.mark.parametrize(("env", "algo"), SOME, ids=lambda value: str(value))


def algorithm_of(case: str) -> str:
    return case.partition("+")[0]


def settings(updates: int, case: str = "ppo", **changes: Any) -> dict[str, Any]:
    """The small experiment over so many updates."""
    chosen = {**SMALL, **CASES[case], "steps": BATCH * updates, **changes}
    return {key: value for key, value in chosen.items() if key != "collect.steps" or "collect.episodes" not in chosen}
