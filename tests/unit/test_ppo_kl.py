"""PPO with adaptive KL: whole updates against NumPy, the servos' rules, and the value function's minibatches."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import tree
from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.algorithms.ppo_kl import PPOKL, Replay, _order, _window, ppo_kl, ppo_kl_problems, servo, slope
from lockstep.core import Learner, Trajectory
from lockstep.experiment import resolve
from lockstep.networks import MLP, from_dimensions, mlp_policy
from tests import linear
from tests.linear import Adam, Weights
from tests.quick import update_of

COADY: Any = resolve("coady").experiment.algo
BATCH_PPO: Any = resolve("batch-ppo").experiment.algo


def moved(config: PPOKL, kl: float, penalty: float, multiplier: float = 1.0) -> tuple[float, float]:
    found = servo(config, jnp.float32(kl), jnp.float32(penalty), jnp.float32(multiplier))
    return float(found[0]), float(found[1])


def coady_rule(kl: float, beta: float, rate: float, target: float) -> tuple[float, float]:
    """The published rule, restated."""
    if kl > 2 * target:
        beta = min(35.0, 1.5 * beta)
        rate = rate / 1.5 if beta > 30 and rate > 0.1 else rate
    elif kl < target / 2:
        beta = max(1 / 35, beta / 1.5)
        rate = rate * 1.5 if beta < 1 / 30 and rate < 10 else rate
    return beta, rate


@pytest.mark.parametrize("times", [0.1, 0.49, 0.51, 1.0, 1.99, 2.01, 9.0])
@pytest.mark.parametrize("penalty", [1 / 35, 0.031, 1 / 21, 1 / 19, 1.0, 19.0, 21.0, 25.0, 35.0])
@pytest.mark.parametrize("multiplier", [0.05, 1.0, 11.0])
def test_coady_moves_penalty_and_rate(times: float, penalty: float, multiplier: float) -> None:
    expected = coady_rule(times * 0.003, penalty, multiplier, 0.003)
    np.testing.assert_allclose(moved(COADY, times * 0.003, penalty, multiplier), expected, rtol=1e-5)


@pytest.mark.parametrize(("times", "factor"), [(0.6, 1 / 1.5), (0.8, 1.0), (1.2, 1.0), (1.4, 1.5)])
def test_batch_ppo_moves_the_penalty_alone(times: float, factor: float) -> None:
    np.testing.assert_allclose(moved(BATCH_PPO, times * 0.01, 2.0, 3.0), (2.0 * factor, 3.0), rtol=1e-6)


@pytest.mark.parametrize(("times", "factor"), [(0.6, 0.5), (1.0, 1.0), (1.6, 2.0)])
def test_the_paper_halves_and_doubles(times: float, factor: float) -> None:
    np.testing.assert_allclose(moved(PPOKL(), times * 0.01, 1.0), (factor, 1.0), rtol=1e-6)


def test_the_slope_is_the_derivative_of_penalty_and_hinge() -> None:
    config = PPOKL(target_kl=0.01, cutoff=2.0, cutoff_coefficient=50.0)

    def cost(kl: Any) -> Any:
        return 3.0 * kl + 50.0 * jnp.square(jnp.maximum(kl - 0.02, 0.0))

    for kl in (0.0, 0.019, 0.021, 0.5):
        np.testing.assert_allclose(slope(config, jnp.float64(3.0), jnp.float64(kl)), jax.grad(cost)(kl), rtol=1e-9)


def test_an_epoch_of_the_value_function_sees_every_real_row_once_and_no_other() -> None:
    rng = np.random.default_rng(0)
    real = np.stack([rng.random(40) < share for share in (0.1, 0.5, 1.0)])
    rows = 8
    minibatches = jnp.asarray(-(-real.sum(-1).max() // rows))
    for lane in range(3):
        data = Replay(jnp.arange(40.0)[:, None], jnp.arange(40.0), jnp.asarray(real[lane]))
        order = _order(jax.random.key(0), (jnp.int32(lane), data))
        parts = [_window(data, order, jnp.asarray(k), minibatches, rows) for k in range(int(minibatches))]
        seen = np.concatenate([np.asarray(part.target)[np.asarray(part.real)] for part in parts])
        np.testing.assert_array_equal(np.sort(seen), np.flatnonzero(real[lane]))
        counts = [int(part.real.sum()) for part in parts]
        assert max(counts) - min(counts) <= 1, "spread evenly"


@pytest.mark.parametrize("count", [1, 255, 256, 257, 700])
def test_a_mean_by_chunks_is_the_mean_of_the_rows_that_count(count: int) -> None:
    x = np.random.default_rng(1).normal(size=700)
    found = ac.chunk_mean(lambda part, real: (ac.average(part, real),), jnp.asarray(x), jnp.asarray(count))
    np.testing.assert_allclose(found[0], x[:count].mean(), rtol=1e-10)


def test_widths_from_dimensions() -> None:
    assert from_dimensions(18, 60) == (180, 103, 60)
    assert from_dimensions(18, 5) == (180, 30, 5)


def test_settings_that_do_not_go_together_are_named() -> None:
    assert ppo_kl_problems(PPOKL(minibatch=0), 4, 500) == []
    (problem,) = ppo_kl_problems(PPOKL(value_replay=True), 4, 512)
    assert "algo.value_coefficient=0" in problem
    (problem,) = ppo_kl_problems(PPOKL(value_coefficient=0.0, value_minibatch=10), 4, 512)
    assert "multiple of the 4 lanes" in problem
    senseless = PPOKL(servo_factor=0.5, servo_low=3.0, penalty=40.0)
    told = [problem.split()[0] for problem in ppo_kl_problems(senseless, 4, 512)]
    assert told == ["algo.servo_factor", "algo.servo_low", "algo.penalty"]
    (problem,) = ppo_kl_problems(PPOKL(rate_by_width=True), 4, 512)
    assert "algo.value_coefficient=0" in problem
    (problem,) = ppo_kl_problems(PPOKL(penalty_max=0.5), 4, 512)
    assert "algo.penalty_max (0.5)" in problem


class Memory(NamedTuple):
    """What the restated algorithm keeps between updates."""

    penalty: float
    multiplier: float = 1.0
    adam: Adam = Adam()
    fitted: Adam = Adam()
    before: tuple[np.ndarray, ...] = ()  # the value function's data of the update before, as of `lane_rows`


class Rows(NamedTuple):
    """The rows of one gradient step, from all lanes."""

    observation: np.ndarray
    action: np.ndarray
    advantage: np.ndarray
    target: np.ndarray


class Told(NamedTuple):
    """What the restated algorithm says of an update."""

    kl: float
    epochs: int
    surrogate: float  # this and the others: the mean over the last epoch's steps
    value_loss: float
    gradient_norm: float


def by_lane(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """[lanes, T, E, ...] -> [lanes, T E, ...]"""
    return tuple(array.reshape(len(array), -1, *array.shape[3:]) for array in arrays)


def estimates(config: PPOKL, weights: Weights, data: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Advantages, normalised over the steps made, and value targets."""
    advantage = linear.advantages(weights, data, config.discount, config.trace)
    target = linear.value(weights, data.observation)
    target = target + linear.advantages(weights, data, config.discount, config.value_trace)
    if config.normalize_advantage:
        made = advantage[data.real]
        advantage = (advantage - made.mean()) / (made.std() + 1e-8)
    return advantage, target


def value_loss(weights: Weights, observation: np.ndarray, target: np.ndarray) -> float:
    return 0.5 * ((linear.value(weights, observation) - target) ** 2).mean()


def surrogate(start: Weights, rows: Rows, weights: Weights) -> float:
    new, old = (linear.log_prob(w, rows.observation, rows.action) for w in (weights, start))
    return (np.exp(new - old) * rows.advantage).mean()


def loss(config: PPOKL, penalty: float, start: Weights, rows: Rows, weights: Weights) -> float:
    kl = linear.divergence(start, weights, rows.observation).mean()
    punished = penalty * kl + config.cutoff_coefficient * max(0.0, kl - config.cutoff * config.target_kl) ** 2
    rest = config.value_coefficient * value_loss(weights, rows.observation, rows.target)
    return rest - surrogate(start, rows, weights) - config.entropy * linear.entropy(weights) + punished


def minibatches(config: PPOKL, real: np.ndarray, key: Any) -> list[np.ndarray]:
    """Which rows that count are in each of an epoch's steps; every lane shares its own out, in an order of its own."""
    if not config.minibatch:
        return [real]
    lanes, rows = real.shape
    orders = [np.asarray(jax.random.permutation(jax.random.fold_in(key, lane), rows)) for lane in range(lanes)]
    counting = [order[real[lane][order]] for lane, order in enumerate(orders)]
    steps = int(np.ceil(max(map(len, counting)) / (config.minibatch // lanes)))
    chosen = np.zeros((steps, lanes, rows), bool)
    for lane, order in enumerate(counting):
        for k in range(steps):
            chosen[k, lane, order[len(order) * k // steps : len(order) * (k + 1) // steps]] = True
    return list(chosen)


def improved(
    config: PPOKL, start: Weights, memory: Memory, data: Trajectory, rate: float, key: Any
) -> tuple[Weights, Memory, Told]:
    """All epochs of gradient steps."""
    weights, adam, told = start, memory.adam, Told(0.0, 0, 0.0, 0.0, 0.0)
    while told.epochs < config.epochs and not told.kl > (config.stop or np.inf) * config.target_kl:
        known = weights if config.recompute_advantages else start
        lanes, steps = by_lane(data.observation, data.action, *estimates(config, known, data)), []
        for chosen in minibatches(config, *by_lane(data.real), jax.random.fold_in(key, told.epochs)):
            rows = Rows(*(array[chosen] for array in lanes))
            step = linear.gradient(partial(loss, config, memory.penalty, start, rows), weights)
            error = value_loss(weights, rows.observation, rows.target)
            steps.append((surrogate(start, rows, weights), error, linear.norm(step)))
            step = linear.clipped(step, config.max_gradient)
            weights, adam = adam.step(weights, step, rate * memory.multiplier, config.adam_epsilon)
        kl = linear.divergence(start, weights, data.observation[data.real]).mean()
        told = Told(float(kl), told.epochs + 1, *np.mean(steps, 0))
    return weights, memory._replace(adam=adam), told


def fitted(
    config: PPOKL, weights: Weights, memory: Memory, now: Replay, rate: float, key: Any
) -> tuple[Weights, Memory, float]:
    """The value function after its own epochs; an epoch's steps share out evenly what counts of every lane."""
    data = Replay(*(np.concatenate(arrays, 1) for arrays in zip(now, *memory.before, strict=True)))
    counts, lanes = data.real.sum(1), range(len(data.real))
    steps = int(np.ceil(counts.max() / (config.value_minibatch // len(lanes))))
    part, adam, losses = {name: weights[name] for name in "vc"}, memory.fitted, [0.0]
    for epoch in range(config.value_epochs):
        epoch_key, losses = jax.random.fold_in(jax.random.fold_in(key, config.epochs), epoch), []
        orders = [np.asarray(_order(epoch_key, (lane, data._replace(real=data.real[lane])))) for lane in lanes]
        for k in range(steps):
            mine = [orders[lane][counts[lane] * k // steps : counts[lane] * (k + 1) // steps] for lane in lanes]
            x, target = (np.concatenate([a[lane][mine[lane]] for lane in lanes]) for a in data[:2])
            losses.append(value_loss(part, x, target))
            step = linear.gradient(partial(value_loss, observation=x, target=target), part)
            part, adam = adam.step(part, step, rate, config.adam_epsilon)
    before = (now,) if config.value_replay else ()
    return {**weights, **part}, memory._replace(fitted=adam, before=before), float(np.mean(losses))


def restated(
    config: PPOKL, start: Weights, memory: Memory, data: Trajectory, share: float, key: Any
) -> tuple[Weights, Memory, Told]:
    """One update; `share` of the learning rates."""
    weights, memory, told = improved(config, start, memory, data, share * config.learning_rate, key)
    if not config.value_coefficient:
        now = Replay(*by_lane(data.observation, estimates(config, start, data)[1], data.real))
        rate = share * config.value_learning_rate
        weights, memory, last = fitted(config, weights, memory, now, rate, key)
        told = told._replace(value_loss=last)
    if told.kl > config.servo_high * config.target_kl:
        penalty = min(config.penalty_max, memory.penalty * config.servo_factor)
        slower = config.rate_servo and penalty > 6 / 7 * config.penalty_max
        return weights, memory._replace(penalty=penalty, multiplier=memory.multiplier / (2 if slower else 1)), told
    if told.kl < config.servo_low * config.target_kl:
        memory = memory._replace(penalty=max(1 / config.penalty_max, memory.penalty / config.servo_factor))
    return weights, memory, told


COMMON: dict[str, Any] = {
    **{"discount": 0.9, "trace": 0.8, "learning_rate": 0.05, "value_learning_rate": 0.1, "adam_epsilon": 0.1},
    **{"entropy": 0.1, "servo_factor": 2.0},
}
FITTED: dict[str, Any] = {**COMMON, "value_coefficient": 0.0, "value_epochs": 2, "value_minibatch": 12, "minibatch": 0}
CASES: dict[str, PPOKL] = {
    "minibatches": PPOKL(epochs=2, minibatch=18, stop=0.0, value_trace=0.8, **COMMON),
    "all rows": PPOKL(
        **{"minibatch": 0, "epochs": 3, "max_gradient": 9.0, "penalty": 20.0, "rate_servo": True, "value_trace": 1.0},
        **{"normalize_advantage": False, "recompute_advantages": False},
        **COMMON,
    ),
    "value fitted": PPOKL(schedule="constant", epochs=2, **FITTED),
    "value fitted with replay": PPOKL(value_replay=True, epochs=6, stop=3.7, recompute_advantages=False, **FITTED),
}
EPISODES = ("minibatches", "value fitted with replay")  # these learn from whole episodes of unequal length


class Problem(NamedTuple):
    """What a case learns from: noise, of whole episodes or of a number of steps."""

    padded: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return (3, 6, 2) if self.padded else (2, 5, 3)

    def data(self, number: int) -> Trajectory:
        if self.padded:
            return linear.whole_episodes(number)
        return linear.trajectory(self.shape, [(0, 2, 1)], [(1, 1, 0), (0, 4, 2)], number)

    def setup(self) -> Setup:
        """The budget is four updates."""
        lanes, steps, envs = self.shape
        budget = 4 * (19 if self.padded else lanes * steps * envs)
        return Setup(linear.linear_policy(), linear.SPEC, Normalize(), budget, lanes, steps * envs, self.padded)

    def nothing(self) -> Replay:
        lanes, rows = self.shape[0], self.shape[1] * self.shape[2]
        none = np.zeros((lanes, rows))
        return Replay(np.zeros((lanes, rows, linear.INPUTS)), none, none > 0)


@cache
def made(case: str) -> tuple[Learner, Any]:
    """A case's first learner and its compiled update."""
    algorithm = ppo_kl(CASES[case], Problem(case in EPISODES).setup())
    return algorithm.init(jax.random.key(0)), update_of(algorithm)


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_that_numpy_makes(case: str) -> None:
    """Three of them: optimizers, penalty, learning rate, normalisers and the data before are remembered."""
    config, problem, (learner, update) = CASES[case], Problem(case in EPISODES), made(case)
    history = list[Trajectory]()
    weights = linear.named(learner.params)
    memory = Memory(config.penalty, before=(problem.nothing(),) if config.value_replay else ())
    for number in range(3):
        key, share = jax.random.key(number), 1.0 if config.schedule == "constant" else 1 - number / 4
        history.append(problem.data(number))
        learner, metrics = update(learner, history[-1], number)
        data, before = linear.normalised(history), memory
        if not problem.padded:
            data = data._replace(real=np.ones(problem.shape, bool))
        start = weights
        weights, memory, told = restated(config, start, memory, data, share, key)
        for name, array in linear.named(learner.params).items():
            np.testing.assert_allclose(array, weights[name], atol=5e-6, err_msg=name)
        seen, target = data.observation[data.real], estimates(config, start, data)[1][data.real]
        expected = {
            **told._asdict(),
            "penalty": before.penalty,
            "learning_rate": share * config.learning_rate * before.multiplier,
            "entropy": linear.entropy(weights),
            "explained_variance": linear.explained(target, linear.value(start, seen)),
            "explained_variance_after": linear.explained(target, linear.value(weights, seen)),
            "first_ratio_error": 0.0,
        }
        assert {name: float(number) for name, number in metrics.items()} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_padding_is_no_gradient_step() -> None:
    """A single step in one lane, which fills less than half of what is padded: an epoch is one step on that row."""
    (learner, update), real = made("minibatches"), np.zeros((3, 6, 2), bool)
    real[1, 0, 0] = True
    data = linear.whole_episodes()._replace(real=real, terminated=real)
    new, metrics = update(learner, data)
    assert int(new.optimizer.adam[1].count) == CASES["minibatches"].epochs
    assert float(metrics["kl"]) > 0
    other, told = update(learner, data, 1)
    assert tree.digest(other) == tree.digest(new), "whichever way rows are drawn, there is one"
    assert told["value_loss"] == metrics["value_loss"] > 0


def test_each_networks_rate_is_divided_by_the_root_of_its_second_layers_width() -> None:
    """Of the policy and of the value function: one step of each, along the gradient."""
    problem = Problem(padded=False)
    policy = mlp_policy(MLP(hidden=(3, 4), value_hidden=(3, 9), last_scale=1.0), linear.SPEC)
    data = problem.data(0)
    data = data._replace(terminated=np.ones_like(data.terminated))
    plain: dict[str, Any] = {"adam_epsilon": 1e4, "schedule": "constant", "normalize_advantage": False, "epochs": 1}
    config = PPOKL(
        **{"minibatch": 0, "value_coefficient": 0.0, "value_epochs": 1, "max_gradient": 1e9, "rate_by_width": True},
        **{"learning_rate": 2e3, "value_learning_rate": 6e3},
        **plain,
    )
    algorithm = ppo_kl(config, problem.setup()._replace(policy=policy, normalize=linear.OFF))
    learner = algorithm.init(jax.random.key(0))
    new, metrics = update_of(algorithm)(learner, data)

    def losses(params: Any) -> Any:
        output = policy.evaluate(params, data.observation, ())
        better = data.reward - policy.value(learner.params, data.observation, ())
        surrogate = (policy.distribution.log_prob(output.distribution, data.action) * better).mean()
        return 0.5 * jnp.square(output.value - data.reward).mean() - surrogate

    step = jax.tree.map(lambda a, b: a - b, learner.params, new.params)
    slope = jax.grad(losses)(learner.params)
    for part, rate in {"policy": 0.1, "value": 0.2}.items():
        expected = jax.tree.map(lambda g, rate=rate: rate * np.asarray(g), slope[part])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-4), step[part], expected)
    assert float(metrics["learning_rate"]) == pytest.approx(1e3)
