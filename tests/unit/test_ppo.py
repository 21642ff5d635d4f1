"""PPO's update against a restatement that knows no lanes, and the properties it promises."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from lockstep import tree
from lockstep.algorithms import REGISTRY
from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.algorithms.ppo import PPO, ppo, ppo_problems
from lockstep.core import ArraySpec, Box, Discrete, Learner, Spec, Trajectory
from lockstep.networks import MLP, mlp_policy
from lockstep.parallel.lanes import LaneBlock
from tests.quick import quick, update_of

LANES, T, E = 4, 8, 2
SPECS = {
    "gaussian": Spec(ArraySpec((3,), "float32"), Box(-np.ones(2, np.float32), np.ones(2, np.float32), "float32")),
    "categorical": Spec(ArraySpec((3,), "float32"), Discrete(4, 0, "int64")),
}


def make(kind: str, normalize: Normalize | None = None, **settings: Any) -> tuple[Setup, Any, Learner]:
    spec = SPECS[kind]
    policy = mlp_policy(MLP(hidden=(5,), last_scale=1.0), spec)
    off = Normalize(observation=False, reward=False)
    setup = Setup(policy, spec, normalize or off, budget=10_000, lanes=LANES, rows=T * E)
    algorithm = ppo(PPO(minibatch=LANES * T * E, epochs=1, **settings), setup)
    return setup, algorithm, algorithm.init(jax.random.key(0))


def trajectories(kind: str, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    shape = (LANES, T, E)
    gaussian = rng.normal(size=(*shape, 2)).astype(np.float32)
    terminated = rng.random(shape) < 0.1
    observation = rng.normal(size=(LANES, T + 1, E, 3)).astype(np.float32)
    next_observation = observation[:, 1:].copy()
    truncated = (rng.random(shape) < 0.15) & ~terminated
    next_observation[truncated | terminated] = rng.normal(size=3)
    return Trajectory(
        lane=np.arange(LANES, dtype=np.int32),
        observation=observation[:, :-1],
        action=gaussian if kind == "gaussian" else rng.integers(4, size=shape).astype(np.int32),
        reward=rng.normal(size=shape).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        next_observation=next_observation,
        discounted_return=rng.normal(size=shape) * 5,
        policy_state=(),
    )


def numpy_network(layers: dict[str, Any], x: np.ndarray) -> np.ndarray:
    hidden = np.tanh(x @ np.asarray(layers["layer0"]["kernel"], float) + np.asarray(layers["layer0"]["bias"], float))
    return hidden @ np.asarray(layers["layer1"]["kernel"], float) + np.asarray(layers["layer1"]["bias"], float)


def numpy_log_prob(kind: str, params: Any, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    out = numpy_network(params["policy"], observation)
    if kind == "categorical":
        return np.take_along_axis(scipy.special.log_softmax(out, -1), action[..., None].astype(int), -1)[..., 0]
    log_std = np.asarray(params["policy"]["log_std"], float)
    z = (action - out) / np.exp(log_std)
    return (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)


def numpy_advantages(params: Any, data: Trajectory, discount: float, trace: float) -> tuple[np.ndarray, np.ndarray]:
    value = numpy_network(params["value"], np.asarray(data.observation, float))[..., 0]
    next_value = numpy_network(params["value"], np.asarray(data.next_observation, float))[..., 0]
    advantage = np.zeros_like(value)
    for lane in range(LANES):
        for e in range(E):
            following = 0.0
            for t in reversed(range(T)):
                ended = data.terminated[lane, t, e] or data.truncated[lane, t, e]
                future = 0.0 if data.terminated[lane, t, e] else next_value[lane, t, e]
                delta = data.reward[lane, t, e] + discount * future - value[lane, t, e]
                following = delta + (0.0 if ended else discount * trace * following)
                advantage[lane, t, e] = following
    return advantage, advantage + value


def numpy_loss(kind: str, params: Any, old: Any, data: Trajectory, config: PPO) -> float:
    """The clipped objective over the whole batch at once, in float64."""
    advantage, target = numpy_advantages(old, data, config.discount, config.trace)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    observation = np.asarray(data.observation, float)
    new_log_prob = numpy_log_prob(kind, params, observation, data.action)
    ratio = np.exp(new_log_prob - numpy_log_prob(kind, old, observation, data.action))
    policy = -np.minimum(ratio * advantage, np.clip(ratio, 1 - config.clip, 1 + config.clip) * advantage).mean()
    value = numpy_network(params["value"], observation)[..., 0]
    return float(policy + config.value_coefficient * 0.5 * ((value - target) ** 2).mean())


@pytest.mark.parametrize("kind", SPECS)
def test_first_step_is_adam_on_the_gradient_of_the_restated_loss(kind: str) -> None:
    """Adam's first step moves every weight by the learning rate times g / (|g| + epsilon)."""
    config = PPO(minibatch=LANES * T * E, epochs=1, schedule="constant", learning_rate=1e-3, max_gradient=1e9)
    _, algorithm, learner = make(kind, schedule="constant", learning_rate=1e-3, max_gradient=1e9)
    data = trajectories(kind)
    new, metrics = update_of(algorithm)(learner, data)
    old = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), learner.params)
    gradient_square = 0.0
    for name, leaf in tree.paths(old).items():
        gradient = np.zeros_like(leaf)
        for index in np.ndindex(leaf.shape):
            sides = []
            for shift in (1e-5, -1e-5):
                moved = jax.tree.map(np.copy, old)
                tree.paths(moved)[name][index] += shift
                sides.append(numpy_loss(kind, moved, old, data, config))
            gradient[index] = (sides[0] - sides[1]) / 2e-5
        gradient_square += (gradient**2).sum()
        expected = leaf - 1e-3 * gradient / (np.abs(gradient) + 1e-5)
        np.testing.assert_allclose(tree.paths(new.params)[name], expected, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(metrics["gradient_norm"], np.sqrt(gradient_square), rtol=1e-3)


@pytest.mark.parametrize("kind", SPECS)
def test_the_first_ratio_of_an_update_is_exactly_one(kind: str) -> None:
    """At the presets' sizes; the compiler may fuse tinier networks differently, by a unit in the last place."""
    spec = SPECS[kind]
    setup = Setup(mlp_policy(MLP(), spec), spec, Normalize(), budget=10_000, lanes=LANES, rows=T * E)
    algorithm = ppo(PPO(minibatch=32, epochs=2), setup)
    learner = algorithm.init(jax.random.key(0))
    _, metrics = jax.jit(lambda le, data: algorithm.update(le, LaneBlock(data), jax.random.key(1)))(
        learner, trajectories(kind)
    )
    assert float(metrics["first_ratio_error"]) == 0.0


def test_reported_kl_and_explained_variance_are_those_of_the_restatement() -> None:
    _, algorithm, learner = make("categorical", learning_rate=1e-2)
    data = trajectories("categorical")
    new, metrics = update_of(algorithm)(learner, data)
    observation = np.asarray(data.observation, float)
    before, after = (
        scipy.special.log_softmax(numpy_network(params["policy"], observation), -1)
        for params in (learner.params, new.params)
    )
    np.testing.assert_allclose(metrics["kl"], (np.exp(before) * (before - after)).sum(-1).mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["entropy"], -(np.exp(after) * after).sum(-1).mean(), rtol=1e-4)
    advantage, target = numpy_advantages(learner.params, data, 0.99, 0.95)
    np.testing.assert_allclose(metrics["explained_variance"], 1 - advantage.var() / target.var(), rtol=1e-3)


def test_early_stop_makes_no_further_epoch() -> None:
    setup, _, learner = make("gaussian")
    epochs = {}
    for target in (0.0, 1e-9, 1e9):
        algorithm = ppo(PPO(minibatch=64, epochs=5, learning_rate=1e-2, target_kl=target), setup)
        _, metrics = update_of(algorithm)(learner, trajectories("gaussian"))
        epochs[target] = int(metrics["epochs"])
    assert epochs == {0.0: 5, 1e-9: 2, 1e9: 5}, "one minibatch an epoch: the first epoch's ratio is one, its KL zero"


def test_rewards_are_scaled_by_the_spread_of_discounted_returns() -> None:
    setup, _, learner = make("gaussian", Normalize(observation=False, reward=True, reward_clip=0.3))
    data = trajectories("gaussian")
    seen, batches = ac.prepare(setup, learner, LaneBlock(data))
    expected = np.clip(data.reward / data.discounted_return.std(), -0.3, 0.3)
    np.testing.assert_allclose(batches.all().reward, expected, rtol=1e-5)
    assert int(seen.reward.count) == LANES * T * E


def test_observations_are_seen_as_the_acting_policy_saw_them() -> None:
    """The normaliser sees a batch only after the update that learns from it."""
    setup, algorithm, learner = make("gaussian", Normalize(observation=True, reward=False))
    data = trajectories("gaussian")
    _, batches = ac.prepare(setup, learner, LaneBlock(data))
    np.testing.assert_array_equal(batches.all().observation, np.clip(data.observation, -10, 10))
    new, _ = update_of(algorithm)(learner, data)
    np.testing.assert_allclose(new.observation.mean, data.observation.reshape(-1, 3).mean(0, dtype=float), atol=1e-12)
    _, batches = ac.prepare(setup, new, LaneBlock(data))
    flat = np.asarray(batches.all().observation).reshape(-1, 3)
    np.testing.assert_allclose(flat.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(flat.std(0), 1, atol=1e-4)


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_learning_rate_schedule(schedule: str) -> None:
    rates = [float(ac.rate(0.1, schedule, jnp.asarray(steps), 100)) for steps in (0, 25, 100, 150)]
    np.testing.assert_allclose(rates, [0.1, 0.075, 0.0, 0.0] if schedule == "linear" else [0.1] * 4, rtol=1e-6)


def test_value_clipping_bounds_what_an_update_can_gain() -> None:
    """With clipping, rows whose value moved beyond the bound give no gradient: a later epoch moves values less."""
    setup, _, learner = make("gaussian")
    moved = []
    for clip in (0.0, 1e-3):
        algorithm = ppo(PPO(minibatch=64, epochs=20, learning_rate=1e-2, value_clip=clip), setup)
        new, _ = update_of(algorithm)(learner, trajectories("gaussian"))
        old_value, new_value = (
            numpy_network(params["value"], np.asarray(trajectories("gaussian").observation, float))
            for params in (learner.params, new.params)
        )
        moved.append(np.abs(new_value - old_value).mean())
    assert moved[1] < 0.5 * moved[0]


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_a_value_network_that_nothing_trains_is_named(coefficient: float) -> None:
    _, algorithm, learner = make("gaussian", value_coefficient=coefficient)
    new, _ = update_of(algorithm)(learner, trajectories("gaussian"))
    stays = tree.digest(new.params["value"]) == tree.digest(learner.params["value"])
    assert stays == (coefficient == 0)
    assert REGISTRY["ppo"].idle(PPO(value_coefficient=coefficient)) == ("value" if stays else "")


def test_a_minibatch_that_does_not_fit_is_told_what_does() -> None:
    assert ppo_problems(PPO(minibatch=64), lanes=4, rows=512) == []
    (problem,) = ppo_problems(PPO(minibatch=100), lanes=4, rows=512)
    assert problem == "algo.minibatch (100) must be drawn evenly from 4 lanes of 512 steps. Try 64 or 128."
    (problem,) = ppo_problems(PPO(minibatch=5000), lanes=4, rows=512)
    assert "Try 2048." in problem


def test_an_update_compiles_once() -> None:
    _, algorithm, learner = make("gaussian")
    traces = 0

    def update(learner: Learner, data: Trajectory, key: Any) -> Any:
        nonlocal traces
        traces += 1
        return algorithm.update(learner, LaneBlock(data), key)

    compiled = quick(update)
    for i in range(3):
        learner, _ = compiled(learner, trajectories("gaussian", i), jax.random.key(i))
    assert traces == 1
