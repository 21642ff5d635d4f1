"""REINFORCE against an exact gradient and against NumPy, and what it does with whole episodes that are padded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import moments, tree
from lockstep.algorithms import REGISTRY
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.algorithms.reinforce import Reinforce, outcome, reinforce
from lockstep.core import ArraySpec, Discrete, Spec, Trajectory
from lockstep.networks import MLP, mlp_policy
from tests import linear
from tests.linear import Adam, Weights
from tests.quick import update_of

HORIZON = 3
SPEC = Spec(ArraySpec((3,), "float32"), Discrete(2, 0, "int64"))
OFF = Normalize(observation=False, reward=False)
REWARD = {0: (1.0, -2.0), 1: (0.5, 3.0), 2: (-1.0, 4.0)}  # by time and action; action 1 at time 0 ends the episode


def chain() -> list[list[int]]:
    """Every course an episode of the chain can take, as its actions; each as likely as the others of its length."""
    return [[1, 0, 0], *([0, *rest] for rest in itertools.product((0, 1), repeat=2))]


def length(actions: list[int]) -> int:
    return 1 if actions[0] == 1 else HORIZON


def episodes() -> Trajectory:
    """Under the uniform policy: the short episode is four times as likely as each of the four long ones."""
    courses = [*[chain()[0]] * 4, *chain()[1:]]
    lanes, envs = 4, 2
    shape = (lanes, HORIZON, envs)
    observation = np.zeros((*shape, 3), np.float32)
    action, reward = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    terminated, real = np.zeros((2, *shape), bool)
    for number, course in enumerate(courses):
        lane, env = divmod(number, envs)
        for t in range(length(course)):
            observation[lane, t, env, t] = 1.0
            action[lane, t, env], reward[lane, t, env] = course[t], REWARD[t][course[t]]
            real[lane, t, env] = True
        terminated[lane, length(course) - 1, env] = True
    return Trajectory(
        lane=np.arange(lanes, dtype=np.int32),
        observation=observation,
        action=action,
        reward=reward,
        terminated=terminated,
        truncated=np.zeros_like(terminated),
        next_observation=observation,
        discounted_return=reward.astype(np.float64),
        policy_state=(),
        real=real,
    )


def expected_return(logits: np.ndarray) -> float:
    """Of the chain, by enumeration. `logits[t]` are those of the policy's two actions at time t."""
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    total = 0.0
    for course in chain():
        chance = np.prod([probability[t, course[t]] for t in range(length(course))])
        total += chance * sum(REWARD[t][course[t]] for t in range(length(course)))
    return float(total)


def uniform(config: Reinforce) -> tuple[Any, Any]:
    """An algorithm whose policy is one table of logits, all zero."""
    policy = mlp_policy(MLP(hidden=(), value_hidden=(4,)), SPEC)
    setup = Setup(policy, SPEC, OFF, budget=10_000, lanes=4, rows=HORIZON * 2, padded=True)
    algorithm = reinforce(config, setup)
    learner = algorithm.init(jax.random.key(0))
    return algorithm, learner._replace(
        params={**learner.params, "policy": jax.tree.map(jnp.zeros_like, learner.params["policy"])}
    )


# Adam with an epsilon far above the gradient makes its first step along the gradient itself
PLAIN = {"learning_rate": 1e4, "adam_epsilon": 1e4, "schedule": "constant", "max_gradient": 1e9, "discount": 1.0}


@pytest.mark.parametrize("baseline", ["none", "mean"])
def test_the_gradient_is_that_of_the_expected_return(baseline: Any) -> None:
    """Also with a baseline: it changes single episodes' shares, not their mean over all courses."""
    algorithm, learner = uniform(Reinforce(baseline=baseline, **PLAIN))
    remembered = moments.measure(jnp.asarray([3.0, 5.0]), (0,))
    learner = learner._replace(optimizer=learner.optimizer._replace(returns=remembered))
    new, _ = update_of(algorithm)(learner, episodes())
    step = np.asarray(new.params["policy"]["layer0"]["kernel"], float)
    exact = np.zeros((HORIZON, 2))
    for index in np.ndindex(exact.shape):
        sides = [np.zeros((HORIZON, 2)), np.zeros((HORIZON, 2))]
        sides[0][index], sides[1][index] = 1e-5, -1e-5
        exact[index] = (expected_return(sides[0]) - expected_return(sides[1])) / 2e-5
    steps_per_episode = (4 * 1 + 4 * HORIZON) / 8
    np.testing.assert_allclose(step * steps_per_episode, exact, atol=2e-3)


class Memory(NamedTuple):
    """What the restated algorithm keeps between updates."""

    policy: Adam = Adam()
    value: Adam = Adam()
    returns: tuple[float, ...] = ()  # all so far


def compared(config: Reinforce, weights: Weights, memory: Memory, data: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """The returns of the steps made, and how much better than the baseline they are."""
    if config.baseline == "value":
        advantage = linear.advantages(weights, data, config.discount, 1.0)
        return (advantage + linear.value(weights, data.observation))[data.real], advantage[data.real]
    nothing = {**weights, "v": np.zeros(linear.INPUTS), "c": np.zeros(1)}
    target = linear.advantages(nothing, data, config.discount, 1.0)[data.real]
    return target, target - (np.mean(memory.returns) if config.baseline == "mean" and memory.returns else 0.0)


def restated(
    config: Reinforce, weights: Weights, memory: Memory, data: Trajectory, share: float
) -> tuple[Weights, Memory, dict[str, float]]:
    """One update of REINFORCE on the steps that were made, each counting alike; `share` of the learning rates.

    The weights, the memory, and the metrics.
    """
    target, advantage = compared(config, weights, memory, data)
    observation, action = data.observation[data.real], data.action[data.real]

    def loss(part: Weights) -> float:
        gain = (linear.log_prob(part, observation, action) * advantage).mean()
        return -gain - config.entropy * linear.entropy(part)

    def value_loss(part: Weights) -> float:
        return 0.5 * ((linear.value(part, observation) - target) ** 2).mean()

    old, value = ({name: weights[name] for name in names} for names in ("wbs", "vc"))
    slope, fitted = linear.gradient(loss, old), memory.value
    clipped, rate = linear.clipped(slope, config.max_gradient), share * config.learning_rate
    policy, made = memory.policy.step(old, clipped, rate, config.adam_epsilon)
    told = {
        "policy_loss": loss(old) + config.entropy * linear.entropy(old),
        "gradient_norm": linear.norm(slope),
        "step_size": linear.distance(old, policy),
        "learning_rate": rate,
        "kl": linear.divergence(old, policy, observation).mean(),
        "entropy": linear.entropy(policy),
    }
    if config.baseline == "value":
        told["explained_variance"] = linear.explained(target, linear.value(value, observation))
        for _ in range(config.value_steps):
            told["value_loss"] = value_loss(value)
            slope, rate = linear.gradient(value_loss, value), share * config.value_learning_rate
            value, fitted = fitted.step(value, slope, rate, config.adam_epsilon)
        told["explained_variance_after"] = linear.explained(target, linear.value(value, observation))
    return {**policy, **value}, Memory(made, fitted, (*memory.returns, *target)), told


@pytest.mark.parametrize(
    "config",
    [
        Reinforce(baseline="value", entropy=0.3, max_gradient=100.0, value_steps=3),
        Reinforce(baseline="mean", schedule="constant"),
        Reinforce(baseline="none", entropy=0.1),
    ],
    ids=["value", "mean", "none"],
)
def test_updates_are_those_that_numpy_makes(config: Reinforce) -> None:
    """Two of them, on whole episodes of unequal length, some cut by a time limit.

    The second has the memory of the first: the optimizers', the normalisers' and the baseline's.
    """
    config = replace(config, discount=0.9, learning_rate=0.1, value_learning_rate=0.05, adam_epsilon=0.1)
    setup = Setup(linear.linear_policy(), linear.SPEC, Normalize(), budget=76, lanes=3, rows=12, padded=True)
    algorithm = reinforce(config, setup)
    update = update_of(algorithm)
    learner, memory, history = algorithm.init(jax.random.key(0)), Memory(), list[Trajectory]()
    weights = linear.named(learner.params)
    for share in (1.0, 1.0 if config.schedule == "constant" else 0.75):
        history.append(linear.whole_episodes(seed=len(history)))
        learner, metrics = update(learner, history[-1])
        before = weights
        weights, memory, told = restated(config, weights, memory, linear.normalised(history), share)
        for name, array in linear.named(learner.params).items():
            np.testing.assert_allclose(array, weights[name], atol=2e-5, err_msg=name)
            moves = name in "wbs" or config.baseline == "value"
            assert np.allclose(array, before[name], atol=1e-3) != moves, name
        assert {name: float(number) for name, number in metrics.items()} == pytest.approx(told, rel=2e-3)


def test_discounted_returns_stop_at_the_end_of_an_episode() -> None:
    policy = mlp_policy(MLP(hidden=(), value_hidden=(4,)), SPEC)
    setup = Setup(policy, SPEC, OFF, 10_000, lanes=4, rows=6, padded=True)
    data = jax.tree.map(lambda leaf: leaf[3], episodes())
    found = outcome(Reinforce(baseline="none", discount=0.5), setup, policy.init(jax.random.key(0)), data)
    for env in range(2):
        rewards = data.reward[:, env]
        expected = [rewards[0] + rewards[1] / 2 + rewards[2] / 4, rewards[1] + rewards[2] / 2, rewards[2]]
        np.testing.assert_allclose(found.value_target[:, env], expected, rtol=1e-6)


def test_padding_is_never_learnt_from() -> None:
    algorithm, learner = uniform(Reinforce(value_steps=2, entropy=0.3))
    biased = jax.tree.map(lambda leaf: jnp.arange(leaf.size).reshape(leaf.shape) / 3.0, learner.params["policy"])
    learner = learner._replace(params={**learner.params, "policy": jax.tree.map(jnp.float32, biased)})
    data = episodes()
    noise = np.random.default_rng(0).normal(size=data.observation.shape).astype(np.float32)
    away = ~data.real
    other = data._replace(
        observation=np.where(away[..., None], noise, data.observation),
        reward=np.where(away, np.float32(7), data.reward),
        action=np.where(away, 1, data.action).astype(np.int32),
    )
    update = update_of(algorithm)
    (one, _), (two, _) = update(learner, data), update(learner, other)
    for name, leaf in tree.paths(one).items():
        np.testing.assert_allclose(leaf, tree.paths(two)[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert int(one.steps) == data.real.sum()


@pytest.mark.parametrize("baseline", ["none", "mean", "value"])
def test_without_a_value_baseline_the_value_network_stays_and_is_named(baseline: Any) -> None:
    config = Reinforce(baseline=baseline)
    algorithm, learner = uniform(config)
    new, metrics = update_of(algorithm)(learner, episodes())
    same = tree.digest(new.params["value"]) == tree.digest(learner.params["value"])
    assert same == (baseline != "value")
    assert REGISTRY["reinforce"].idle(config) == ("value" if same else "")
    assert ("explained_variance" in metrics) == (baseline == "value")
