"""A2C's steps against the same written in NumPy, their gradient by finite differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from lockstep import tree
from lockstep.algorithms import REGISTRY
from lockstep.algorithms.a2c import A2C, a2c
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.core import Trajectory
from tests.linear import (
    SPEC,
    Adam,
    Weights,
    advantages,
    clipped,
    distance,
    divergence,
    entropy,
    explained,
    gradient,
    linear_policy,
    log_prob,
    named,
    norm,
    normalised,
    trajectory,
    value,
)
from tests.quick import update_of

SHAPE = LANES, STEPS, ENVS = 2, 5, 3
BUDGET = 4 * LANES * STEPS * ENVS


def outcome(weights: Weights, data: Trajectory, config: A2C) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and value targets."""
    advantage = advantages(weights, data, config.discount, config.trace)
    return advantage, advantage + value(weights, data.observation)


class Told(NamedTuple):
    """Of the joint step."""

    policy_loss: float
    value_loss: float
    slope: Weights  # as it is, before it is scaled down


def joint_step(weights: Weights, data: Trajectory, config: A2C) -> Told:
    advantage, target = outcome(weights, data, config)
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    def policy_loss(weights: Weights) -> float:
        return -(log_prob(weights, data.observation, data.action) * advantage).mean()

    def value_loss(weights: Weights) -> float:
        return 0.5 * ((value(weights, data.observation) - target) ** 2).mean()

    def loss(weights: Weights) -> float:
        parts = policy_loss(weights) + config.value_coefficient * value_loss(weights)
        return parts - config.entropy * entropy(weights)

    return Told(policy_loss(weights), value_loss(weights), gradient(loss, weights))


def value_slope(weights: Weights, data: Trajectory, target: np.ndarray, config: A2C) -> Weights:
    """The value function's own, clipped."""
    found = gradient(lambda weights: 0.5 * ((value(weights, data.observation) - target) ** 2).mean(), weights)
    return clipped({name: found[name] for name in "vc"}, config.max_gradient)


class RMSProp(NamedTuple):
    """The optimizer's memory; the squares begin at one."""

    decay: float
    square: Mapping[str, np.ndarray] = {}

    def step(self, weights: Weights, slope: Weights, rate: float, epsilon: float) -> tuple[Weights, RMSProp]:
        square = {n: self.decay * self.square.get(n, 1.0) + (1 - self.decay) * g**2 for n, g in slope.items()}
        moved = {n: weights[n] - rate * g / np.sqrt(square[n] + epsilon) for n, g in slope.items()}
        return {**weights, **moved}, RMSProp(self.decay, square)


@pytest.mark.parametrize(
    "config",
    [
        A2C(schedule="constant", learning_rate=0.1),
        A2C(learning_rate=0.1, trace=0.9, entropy=0.3, value_coefficient=0.7, decay=0.8, epsilon=0.1),
        A2C(learning_rate=0.1, normalize_advantage=True, max_gradient=100.0, discount=0.8),
        A2C(learning_rate=0.1, optimizer="adam", epsilon=0.1),
        A2C(learning_rate=0.1, value_steps=3, decay=0.8, max_gradient=0.3),
        A2C(learning_rate=0.1, value_steps=2, optimizer="adam", epsilon=0.1, value_coefficient=0.7, max_gradient=100.0),
    ],
    ids=["n-step", "traces", "normalised", "adam", "value steps", "value steps, adam"],
)
def test_steps_are_those_that_numpy_makes(config: A2C) -> None:
    """Two of them: the second has the optimizers' and the normalisers' memory of the first."""
    algorithm = a2c(config, Setup(linear_policy(), SPEC, Normalize(), BUDGET, lanes=LANES, rows=STEPS * ENVS))
    update = update_of(algorithm)
    learner, history = algorithm.init(jax.random.key(0)), list[Trajectory]()
    joint = further = Adam() if config.optimizer == "adam" else RMSProp(config.decay)
    weights = named(learner.params)
    for number in range(2):
        before, rate = weights, 0.1 * (1.0 if config.schedule == "constant" else 1 - number / 4)
        history.append(trajectory(SHAPE, [(0, 2, 1)], [(1, 1, 0), (0, 4, 2)], seed=number))
        learner, metrics = update(learner, history[-1])
        data = normalised(history)
        told, (_, target) = joint_step(weights, data, config), outcome(before, data, config)
        weights, joint = joint.step(weights, clipped(told.slope, config.max_gradient), rate, config.epsilon)
        moved = distance(before, weights)
        for _ in range(config.value_steps - 1):
            step = value_slope(weights, data, target, config)
            weights, further = further.step(weights, step, rate, config.epsilon)
        for name, array in named(learner.params).items():
            np.testing.assert_allclose(array, weights[name], atol=2e-5, err_msg=name)
            assert not np.allclose(array, before[name], atol=1e-3), name
        expected = {
            "policy_loss": told.policy_loss,
            "value_loss": told.value_loss,
            "gradient_norm": norm(told.slope),
            "step_size": moved,
            "learning_rate": rate,
            "kl": divergence(before, weights, data.observation).mean(),
            "entropy": entropy(weights),
            "explained_variance": explained(target, value(before, data.observation)),
            "explained_variance_after": explained(target, value(weights, data.observation)),
        }
        assert {name: float(number) for name, number in metrics.items()} == pytest.approx(expected, rel=2e-3)
    assert int(learner.steps) == 2 * LANES * STEPS * ENVS


@pytest.mark.parametrize("changes", [{}, {"value_coefficient": 0.0}, {"value_coefficient": 0.0, "value_steps": 2}])
def test_a_value_network_that_nothing_trains_is_named(changes: dict[str, Any]) -> None:
    config = A2C(**changes)
    algorithm = a2c(config, Setup(linear_policy(), SPEC, Normalize(), BUDGET, lanes=LANES, rows=STEPS * ENVS))
    learner = algorithm.init(jax.random.key(0))
    new, _ = update_of(algorithm)(learner, trajectory(SHAPE, [], []))
    stays = tree.digest(new.params["value"]) == tree.digest(learner.params["value"])
    assert REGISTRY["a2c"].idle(config) == ("value" if stays else "")
    assert stays == (changes == {"value_coefficient": 0.0})
