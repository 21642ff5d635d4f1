"""A2C's step against the same written in NumPy, its gradient by finite differences."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from lockstep.algorithms.a2c import A2C, a2c
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.core import ArraySpec, Box, Spec, Trajectory
from lockstep.networks import MLP, mlp_policy
from lockstep.parallel.lanes import LaneBlock

LANES, STEPS, ENVS, INPUTS, ACTIONS = 2, 5, 3, 4, 2
SPEC = Spec(ArraySpec((INPUTS,), "float32"), Box(-np.ones(ACTIONS), np.ones(ACTIONS), "float32"))
OFF = Normalize(observation=False, reward=False)

Weights = dict[str, np.ndarray]


def trajectory() -> Trajectory:
    draw = np.random.default_rng(5)
    shape = (LANES, STEPS, ENVS)
    terminated, truncated = np.zeros((2, *shape), bool)
    terminated[0, 2, 1] = truncated[1, 1, 0] = truncated[0, 4, 2] = True
    seen = draw.normal(size=(LANES, STEPS + 1, ENVS, INPUTS)).astype(np.float32)
    following = seen[:, 1:].copy()
    following[truncated] = draw.normal(size=(2, INPUTS))
    return Trajectory(
        lane=np.arange(LANES, dtype=np.int32),
        observation=seen[:, :-1],
        action=draw.normal(size=(*shape, ACTIONS)).astype(np.float32),
        reward=draw.normal(size=shape).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        next_observation=following,
        discounted_return=np.zeros(shape),
        policy_state=(),
    )


def value(weights: Weights, observation: np.ndarray) -> np.ndarray:
    return observation.astype(float) @ weights["v"] + weights["c"]


def advantages(weights: Weights, data: Trajectory, discount: float, trace: float) -> np.ndarray:
    now, then = value(weights, data.observation), value(weights, data.next_observation)
    delta = data.reward + discount * then * ~data.terminated - now
    out, following = np.zeros_like(delta), np.zeros((LANES, ENVS))
    for t in reversed(range(STEPS)):
        goes_on = ~(data.terminated | data.truncated)[:, t]
        following = out[:, t] = delta[:, t] + discount * trace * goes_on * following
    return out


def loss(weights: Weights, data: Trajectory, config: A2C, advantage: np.ndarray, target: np.ndarray) -> float:
    mean = data.observation.astype(float) @ weights["w"] + weights["b"]
    deviation = np.exp(weights["s"])
    density = -0.5 * ((data.action - mean) / deviation) ** 2 - weights["s"] - 0.5 * np.log(2 * np.pi)
    entropy = (weights["s"] + 0.5 * np.log(2 * np.pi * np.e)).sum()
    error = (value(weights, data.observation) - target) ** 2
    policy_loss = -(density.sum(-1) * advantage).mean()
    return float(policy_loss + config.value_coefficient * 0.5 * error.mean() - config.entropy * entropy)


def gradient(weights: Weights, *rest: Any) -> Weights:
    found = {}
    for name, array in weights.items():
        found[name] = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + 1e-5
            above = loss(weights, *rest)
            array[index] = kept - 1e-5
            found[name][index] = (above - loss(weights, *rest)) / 2e-5
            array[index] = kept
    return found


def stepped(weights: Weights, data: Trajectory, config: A2C) -> Weights:
    """One step of A2C."""
    advantage = advantages(weights, data, config.discount, config.trace)
    target = advantage + value(weights, data.observation)
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    slope = gradient(weights, data, config, advantage, target)
    norm = np.sqrt(sum((g**2).sum() for g in slope.values()))
    slope = {name: g * min(1.0, config.max_gradient / norm) for name, g in slope.items()}
    if config.optimizer == "rmsprop":
        scale = {n: np.sqrt(config.decay + (1 - config.decay) * g**2 + config.epsilon) for n, g in slope.items()}
    else:  # Adam's first step
        scale = {name: np.abs(g) + config.epsilon for name, g in slope.items()}
    return {name: weights[name] - config.learning_rate * g / scale[name] for name, g in slope.items()}


def named(params: Any) -> Weights:
    policy, values = params["policy"], params["value"]
    arrays = {
        **{"w": policy["layer0"]["kernel"], "b": policy["layer0"]["bias"], "s": policy["log_std"]},
        **{"v": values["layer0"]["kernel"][:, 0], "c": values["layer0"]["bias"]},
    }
    return {name: np.array(array, float) for name, array in arrays.items()}


@pytest.mark.parametrize(
    "config",
    [
        A2C(schedule="constant", learning_rate=0.1),
        A2C(schedule="constant", learning_rate=0.1, trace=0.9, entropy=0.3, value_coefficient=0.7),
        A2C(schedule="constant", learning_rate=0.1, normalize_advantage=True, max_gradient=100.0, discount=0.8),
        A2C(schedule="constant", learning_rate=0.1, optimizer="adam", epsilon=0.1),
    ],
    ids=["n-step", "traces", "normalised", "adam"],
)
def test_a_step_is_the_one_that_numpy_makes(config: A2C) -> None:
    policy = mlp_policy(MLP(hidden=(), log_std=-0.3, last_scale=1.0), SPEC)
    algorithm = a2c(config, Setup(policy, SPEC, OFF, 10_000, lanes=LANES, rows=STEPS * ENVS))
    learner, data = algorithm.init(jax.random.key(0)), trajectory()
    new, metrics = algorithm.update(learner, LaneBlock(data), jax.random.key(1))
    before = named(learner.params)
    expected = stepped(before, data, config)
    for name, array in named(new.params).items():
        np.testing.assert_allclose(array, expected[name], atol=2e-5, err_msg=name)
        assert not np.allclose(array, before[name], atol=1e-3), name
    assert int(new.steps) == LANES * STEPS * ENVS
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)
