"""TRPO's and NPG's update against a dense restatement that knows no lanes, and the properties they promise."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import scipy.special
from jax.flatten_util import ravel_pytree

from lockstep import tree
from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.npg import NPG, Natural, _some, natural_problems, npg
from lockstep.algorithms.trpo import TRPO, trpo, trpo_problems
from lockstep.core import Algorithm, Learner, Metrics, Trajectory
from lockstep.parallel.lanes import LaneBlock
from tests import linear
from tests.quick import quick, update_of
from tests.unit.test_ppo import LANES, SPECS, E, T, make, numpy_advantages, numpy_log_prob, numpy_network, trajectories

WHOLE = LANES * T * E
MAKERS = {"trpo": (TRPO, trpo), "npg": (NPG, npg)}


def algorithm(kind: str, name: str = "trpo", **settings: Any) -> tuple[Natural, Algorithm, Learner]:
    config_type, factory = MAKERS[name]
    config = config_type(**{"value_minibatch": WHOLE, "value_epochs": 1, "schedule": "constant", **settings})
    made = factory(config, make(kind)[0])
    return config, made, made.init(jax.random.key(0))


@functools.cache
def updated(kind: str, name: str = "trpo", **settings: Any) -> tuple[Natural, Learner, Learner, Metrics]:
    config, made, learner = algorithm(kind, name, **settings)
    new, metrics = update_of(made)(learner, trajectories(kind))
    return config, learner, new, metrics


class Restated(NamedTuple):
    weights: np.ndarray
    trials: int
    size: float
    gain: float
    kl: float
    gradient_norm: float


def restated(kind: str, params: Any, data: Trajectory, config: TRPO) -> Restated:
    """One step in float64 over all rows at once: dense Fisher matrix by differences, dense solve, line search."""
    named = tree.paths(params["policy"])
    ends = np.cumsum([leaf.size for leaf in named.values()])
    old = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in named.values()])
    observation = np.asarray(data.observation, float).reshape(-1, 3)
    action = data.action.reshape(WHOLE, *data.action.shape[3:])
    advantage, _ = numpy_advantages(params, data, config.discount, config.trace)
    advantage = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).reshape(-1)

    def unravel(weights: np.ndarray) -> Any:
        parts = zip(named.values(), np.split(weights, ends[:-1]), strict=True)
        return jax.tree.unflatten(
            jax.tree.structure(params["policy"]), [part.reshape(leaf.shape) for leaf, part in parts]
        )

    def outputs(weights: np.ndarray) -> np.ndarray:
        layers = unravel(weights)
        out = numpy_network(layers, observation)
        if kind == "categorical":
            return out
        return np.concatenate([out, np.broadcast_to(np.asarray(layers["log_std"]), out.shape)], 1)

    def log_prob(weights: np.ndarray) -> np.ndarray:
        return numpy_log_prob(kind, {"policy": unravel(weights)}, observation, action)

    def gain(weights: np.ndarray) -> float:
        return float(((np.exp(log_prob(weights) - log_prob(old)) - 1) * advantage).mean())

    def kl(weights: np.ndarray) -> float:
        before, after = outputs(old), outputs(weights)
        if kind == "categorical":
            p, q = scipy.special.log_softmax(before, -1), scipy.special.log_softmax(after, -1)
            return float((np.exp(p) * (p - q)).sum(-1).mean())
        (m, s), (n, r) = np.split(before, 2, 1), np.split(after, 2, 1)
        return float((r - s + (np.exp(2 * s) + (m - n) ** 2) / (2 * np.exp(2 * r)) - 0.5).sum(-1).mean())

    shifts = 1e-5 * np.eye(old.size)
    jacobian = np.stack([(outputs(old + h) - outputs(old - h)) / 2e-5 for h in shifts], -1)  # row, output, weight
    gradient = np.array([(gain(old + h) - gain(old - h)) / 2e-5 for h in shifts])
    fisher = np.einsum("rai,rab,rbj->ij", jacobian, output_fisher(kind, outputs(old)), jacobian) / WHOLE
    x = np.linalg.solve(fisher + config.damping * np.eye(old.size), gradient)
    size = np.sqrt(2 * config.max_kl / (x @ gradient))
    for trials in range(1, config.backtracks + 1):
        fraction = config.shrink ** (trials - 1)
        new = old + fraction * size * x
        if gain(new) > 0 and kl(new) <= config.max_kl:
            norm = float(np.linalg.norm(gradient))
            return Restated(new, trials, fraction * size, gain(new), kl(new), norm)
    raise AssertionError("no step")


def output_fisher(kind: str, said: np.ndarray) -> np.ndarray:
    if kind == "categorical":
        p = scipy.special.softmax(said, -1)
        return np.stack([np.diag(row) - np.outer(row, row) for row in p])
    precision = np.exp(-2 * said[:, 2:])
    return np.stack([np.diag([*row, 2, 2]) for row in precision])


@pytest.mark.parametrize("max_kl", [1e-3, 0.3])
@pytest.mark.parametrize("kind", SPECS)
def test_the_step_is_that_of_the_dense_restatement(kind: str, max_kl: float) -> None:
    config, learner, new, metrics = updated(kind, max_kl=max_kl, cg_iterations=80)
    assert isinstance(config, TRPO)
    expected = restated(kind, learner.params, trajectories(kind), config)
    weights, _ = ravel_pytree(new.params["policy"])
    before, _ = ravel_pytree(learner.params["policy"])
    longest = np.abs(expected.weights - before).max()
    np.testing.assert_allclose(weights, expected.weights, atol=2e-3 * longest)
    assert int(metrics["line_search_steps"]) == expected.trials
    for name, value in (
        ("step_size", expected.size),
        ("surrogate", expected.gain),
        ("kl", expected.kl),
        ("gradient_norm", expected.gradient_norm),
    ):
        np.testing.assert_allclose(metrics[name], value, rtol=5e-3, err_msg=name)
    assert float(metrics["cg_residual"]) < 1e-3


@pytest.mark.parametrize("kind", SPECS)
def test_npg_is_the_same_step_but_never_shortened(kind: str) -> None:
    *_, told = updated(kind, max_kl=1e-3, cg_iterations=80)
    *_, alike = updated(kind, "npg", max_kl=1e-3, cg_iterations=80)
    share = float(told["step_size"] / alike["step_size"])
    assert share == pytest.approx(0.8 ** (int(told["line_search_steps"]) - 1), rel=1e-3)
    *_, bold = updated(kind, "npg", max_kl=0.3, cg_iterations=80)
    *_, checked = updated(kind, max_kl=0.3, cg_iterations=80)
    np.testing.assert_allclose(bold["step_size"], alike["step_size"] * np.sqrt(300), rtol=1e-3)
    assert float(checked["kl"]) <= 0.3
    assert float(bold["step_size"]) >= float(checked["step_size"])


def test_where_no_step_is_good_the_policy_stays_and_the_value_function_learns() -> None:
    _, learner, new, metrics = updated("gaussian", max_kl=50.0, backtracks=1)
    assert tree.digest(new.params["policy"]) == tree.digest(learner.params["policy"])
    assert tree.digest(new.params["value"]) != tree.digest(learner.params["value"])
    assert (float(metrics["step_size"]), int(metrics["line_search_steps"])) == (0.0, 1)
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)


def test_equal_rewards_and_values_make_no_step_and_no_fault() -> None:
    """Advantages that are all the same say nothing: their gradient is zero."""
    _, made, learner = algorithm("gaussian", discount=0.0)
    learner = learner._replace(params={**learner.params, "value": jax.tree.map(np.zeros_like, learner.params["value"])})
    data = trajectories("gaussian")._replace(reward=np.zeros((LANES, T, E), np.float32))
    new, metrics = update_of(made)(learner, data)
    assert tree.digest(new.params["policy"]) == tree.digest(learner.params["policy"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
    assert float(metrics["step_size"]) == 0


def test_the_log_std_takes_part_in_the_step() -> None:
    _, learner, new, _ = updated("gaussian")
    assert (np.asarray(new.params["policy"]["log_std"]) != np.asarray(learner.params["policy"]["log_std"])).all()


@pytest.mark.parametrize("kind", SPECS)
def test_the_value_function_makes_adam_steps_on_its_own_squared_error(kind: str) -> None:
    """Adam's first step moves every weight by the learning rate times g / (|g| + epsilon)."""
    config, learner, new, metrics = updated(kind, learning_rate=1e-3)
    data = trajectories(kind)
    old = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), learner.params)
    _, target = numpy_advantages(old, data, config.discount, config.trace)

    def loss(value: Any) -> float:
        found = numpy_network(value, np.asarray(data.observation, float))[..., 0]
        return float(0.5 * ((found - target) ** 2).mean())

    for name, leaf in tree.paths(old["value"]).items():
        gradient = np.zeros_like(leaf)
        for index in np.ndindex(leaf.shape):
            moved = [jax.tree.map(np.copy, old["value"]) for _ in range(2)]
            for side, shift in zip(moved, (1e-5, -1e-5), strict=True):
                tree.paths(side)[name][index] += shift
            gradient[index] = (loss(moved[0]) - loss(moved[1])) / 2e-5
        expected = leaf - 1e-3 * gradient / (np.abs(gradient) + 1e-5)
        np.testing.assert_allclose(tree.paths(new.params["value"])[name], expected, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(metrics["value_loss"], loss(old["value"]), rtol=1e-4)


def test_explained_variance_is_told_before_and_after_the_fit() -> None:
    config, learner, new, metrics = updated("gaussian", value_epochs=200, learning_rate=1e-2)
    data = trajectories("gaussian")
    _, target = numpy_advantages(learner.params, data, config.discount, config.trace)
    for name, params in (("explained_variance", learner.params), ("explained_variance_after", new.params)):
        value = numpy_network(params["value"], np.asarray(data.observation, float))[..., 0]
        np.testing.assert_allclose(metrics[name], 1 - (target - value).var() / target.var(), rtol=1e-3, err_msg=name)
    assert metrics["explained_variance_after"] > metrics["explained_variance"] + 0.1


def test_the_step_and_the_learning_rate_follow_the_schedule() -> None:
    _, made, learner = algorithm("gaussian", "npg", schedule="linear")
    half = learner._replace(steps=learner.steps + 5_000)  # of 10 000
    update, data = update_of(made), trajectories("gaussian")
    (_, full), (_, less) = update(learner, data), update(half, data)
    np.testing.assert_allclose(less["step_size"], full["step_size"] * np.sqrt(0.5), rtol=1e-5)
    np.testing.assert_allclose(less["learning_rate"], full["learning_rate"] / 2, rtol=1e-6)


def test_a_share_of_the_rows_makes_the_fisher_matrix_drawn_anew_for_every_lane_and_update() -> None:
    rows = np.arange(50)[:, None]
    drawn = [np.asarray(_some(rows, 3, jax.random.key(key), lane))[:, 0] for key, lane in ((0, 0), (0, 1), (1, 0))]
    for some in drawn:
        assert some.size == 16
        assert np.unique(some).size == 16
    assert len({tuple(sorted(some)) for some in drawn}) == 3
    assert _some(rows, 1, jax.random.key(0), 0) is rows
    *_, all_rows = updated("gaussian")
    *_, some_rows = updated("gaussian", fisher_every=4)
    np.testing.assert_allclose(all_rows["gradient_norm"], some_rows["gradient_norm"], rtol=1e-6)
    assert all_rows["step_size"] != some_rows["step_size"]


def test_numbers_that_do_not_fit_are_told_what_does() -> None:
    assert natural_problems(TRPO(value_minibatch=64), lanes=4, rows=512) == []
    (problem,) = natural_problems(TRPO(value_minibatch=100), lanes=4, rows=512)
    assert problem == "algo.value_minibatch (100) must be drawn evenly from 4 lanes of 512 steps. Try 64 or 128."
    (problem,) = natural_problems(NPG(value_minibatch=64, fisher_every=17), lanes=4, rows=16)
    assert problem == "algo.fisher_every (17) leaves none of a lane's 16 steps."
    for same in (0.0, 1.0):
        (problem,) = trpo_problems(TRPO(shrink=same), lanes=4, rows=512)
        assert problem.startswith(f"algo.shrink ({same:g}) must lie between 0 and 1")
    assert len(trpo_problems(TRPO(value_minibatch=100, shrink=1.0), lanes=4, rows=512)) == 2


def test_an_update_compiles_once() -> None:
    _, made, learner = algorithm("gaussian")
    traces = 0

    def update(learner: Learner, data: Trajectory, key: Any) -> Any:
        nonlocal traces
        traces += 1
        return made.update(learner, LaneBlock(data), key)

    compiled = quick(update)
    for i in range(3):
        learner, _ = compiled(learner, trajectories("gaussian", i), jax.random.key(i))
    assert traces == 1


def test_rewards_are_scaled_and_observations_counted_as_for_every_actor_critic() -> None:
    setup = make("gaussian", ac.Normalize())[0]
    made = trpo(TRPO(value_minibatch=WHOLE, value_epochs=1), setup)
    new, _ = update_of(made)(made.init(jax.random.key(0)), trajectories("gaussian"))
    assert (int(new.observation.count), int(new.reward.count), int(new.steps), int(new.updates)) == (WHOLE,) * 3 + (1,)


def test_every_epoch_of_the_value_function_draws_its_minibatches_anew() -> None:
    """Against NumPy: every lane has an order of its own in each epoch; the loss told is the last epoch's."""
    config = NPG(value_minibatch=10, value_epochs=2, schedule="constant", learning_rate=0.1, discount=0.9, trace=0.8)
    made = npg(config, ac.Setup(linear.linear_policy(), linear.SPEC, linear.OFF, budget=10_000, lanes=2, rows=15))
    learner, data = made.init(jax.random.key(0)), linear.trajectory((2, 5, 3), [(0, 2, 1)], [(1, 1, 0), (0, 4, 2)])
    new, metrics = update_of(made)(learner, data, 1)
    weights = linear.named(learner.params)
    target = linear.value(weights, data.observation) + linear.advantages(weights, data, config.discount, config.trace)
    x, target = data.observation.reshape(2, 15, -1), target.reshape(2, 15)
    part, adam, losses = {name: weights[name] for name in "vc"}, linear.Adam(), [0.0]
    for epoch in range(2):
        key, losses = jax.random.fold_in(jax.random.split(jax.random.key(1))[1], epoch), []
        orders = [jax.random.permutation(jax.random.fold_in(key, lane), 15) for lane in range(2)]
        for rows in np.split(np.stack(orders), 3, axis=1):
            some, wanted = (np.take_along_axis(a, r, 1) for a, r in ((x, rows[..., None]), (target, rows)))

            def loss(part: linear.Weights, some: Any = some, wanted: Any = wanted) -> float:
                return 0.5 * ((linear.value(part, some) - wanted) ** 2).mean()

            losses.append(loss(part))
            part, adam = adam.step(part, linear.gradient(loss, part), config.learning_rate, 1e-5)
    for name, array in part.items():
        np.testing.assert_allclose(linear.named(new.params)[name], array, atol=1e-4, err_msg=name)
    assert float(metrics["value_loss"]) == pytest.approx(np.mean(losses), rel=1e-3)
