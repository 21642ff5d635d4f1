"""ACKTR's update against a dense restatement that knows no lanes and no taps, and the properties it promises."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import tree
from lockstep.algorithms.acktr import ACKTR, _best, acktr, acktr_problems
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.core import Algorithm, Learner, Trajectory
from lockstep.networks import MLP, mlp_policy
from lockstep.optim import kfac
from lockstep.parallel.lanes import LaneBlock
from tests import linear
from tests.linear import Weights
from tests.quick import Update, quick, update_of
from tests.unit.test_ppo import LANES, SPECS, E, T, numpy_advantages, trajectories

UNBOUNDED: dict[str, Any] = {
    "cold_updates": 0,
    "momentum": 0.0,
    "kl_clip": 1e9,
    "value_clip": 1e9,
    "schedule": "constant",
    "learning_rate": 0.1,
    "value_rate": 0.01,
    "statistics_every": 1,
}
OFF = Normalize(observation=False, reward=False)


class Made(NamedTuple):
    """ACKTR on a small policy."""

    setup: Setup
    algorithm: Algorithm
    learner: Learner
    update: Update

    def __call__(self, learner: Learner, data: Trajectory, key: int = 1) -> tuple[Learner, dict[str, float]]:
        learner, metrics = self.update(learner, data, key)
        return learner, {name: float(value) for name, value in metrics.items()}


def make(kind: str, hidden: tuple[int, ...] = (5,), rows: int = T * E, **changes: Any) -> Made:
    policy = mlp_policy(MLP(hidden=hidden, last_scale=1.0), SPECS[kind])
    setup = Setup(policy, SPECS[kind], OFF, budget=10_000, lanes=LANES, rows=rows)
    algorithm = acktr(ACKTR(**{**UNBOUNDED, **changes}), setup)
    return Made(setup, algorithm, algorithm.init(jax.random.key(0)), update_of(algorithm))


def wide_trajectories(run: Made, envs: int) -> Trajectory:
    """One step of so many environments per lane, with the policy's own actions and made-up rewards."""
    rng, policy = np.random.default_rng(0), run.setup.policy
    observation = rng.normal(size=(LANES, 1, envs, 3)).astype(np.float32)
    distribution, _ = policy.act(run.learner.params, observation, ())
    noise = policy.distribution.noise(jax.random.key(7), (LANES, 1, envs))
    never = np.zeros((LANES, 1, envs), bool)
    return Trajectory(
        lane=np.arange(LANES, dtype=np.int32),
        observation=observation,
        action=np.asarray(policy.distribution.sample(distribution, noise)),
        reward=rng.normal(size=never.shape).astype(np.float32),
        terminated=~never,
        truncated=never,
        next_observation=observation,
        discounted_return=rng.normal(size=never.shape),
        policy_state=(),
    )


class Dense(NamedTuple):
    """A natural-gradient step, layer by layer, and what it was made of."""

    change: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]
    condition: float  # of the worst damped block


def damped(inputs: np.ndarray, outputs: np.ndarray, damping: float, form: str) -> np.ndarray:
    if form == "added":
        return np.kron(inputs, outputs) + damping * np.eye(len(inputs) * len(outputs))
    pi = np.sqrt(np.trace(inputs) / len(inputs) / (np.trace(outputs) / len(outputs)))
    return np.kron(
        inputs + pi * np.sqrt(damping) * np.eye(len(inputs)), outputs + np.sqrt(damping) / pi * np.eye(len(outputs))
    )


def dense_step(rows: Any, layers: Any, weight: np.ndarray, damping: float, form: str, x: np.ndarray) -> Dense:
    """Down the mean of weight * what `rows` are the row gradients of, by dense solves in float64."""
    hidden = np.tanh(x @ np.asarray(layers["layer0"]["kernel"], float) + np.asarray(layers["layer0"]["bias"], float))
    inputs = {"layer0": x, "layer1": hidden, "log_std": x[:, :0]}
    made, slope, conditions = {}, {}, []
    for name, layer in rows.items():
        a = np.concatenate([inputs[name], np.ones((len(x), 1))], 1)
        score = np.asarray(layer["bias"] if isinstance(layer, dict) else layer, float)
        per_row = np.asarray(jax.vmap(kfac.matrix)(layer), float)
        outputs = score.T @ score / len(x) if name != "log_std" else 2 * np.eye(score.shape[1])
        block = damped(a.T @ a / len(x), outputs, damping, form)
        slope[name] = (weight[:, None, None] * per_row).mean(0)
        made[name] = np.linalg.solve(block, slope[name].ravel()).reshape(slope[name].shape)
        conditions.append(np.linalg.cond(block))
    return Dense(made, slope, max(conditions))


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"damping": 0.5, "value_damping": 0.02}, {"damping_form": "factored"}],
    ids=["policy worse", "value worse", "factored"],
)
def test_an_update_is_the_dense_natural_gradient_step(kind: str, changes: dict[str, Any]) -> None:
    """For the value function, the same with the Gauss-Newton matrix: row gradients of the value itself."""
    config, run, data = ACKTR(**UNBOUNDED, **changes), make(kind, **changes), trajectories(kind)
    policy, learner = run.setup.policy, run.learner
    new, metrics = run(learner, data)
    x = np.asarray(data.observation, float).reshape(-1, 3)
    action = data.action.reshape(len(x), *data.action.shape[3:])
    advantage, target = (part.ravel() for part in numpy_advantages(learner.params, data, config.discount, config.trace))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    def heads(params: Any) -> dict[str, Any]:
        output = policy.evaluate(params, jnp.asarray(x), ())
        return {"policy": policy.distribution.log_prob(output.distribution, action), "value": output.value}

    rows, error = jax.jacrev(heads)(learner.params), np.asarray(heads(learner.params)["value"]) - target
    steps = {
        part: dense_step(rows[part][part], learner.params[part], weight, damping, config.damping_form, x)
        for part, weight, damping in (
            ("policy", -advantage, config.damping),
            ("value", error, config.value_damping),
        )
    }
    for part, rate in (("policy", 0.1), ("value", 0.01)):
        for name, layer in learner.params[part].items():
            expected = np.asarray(kfac.matrix(layer), float) - rate * steps[part].change[name]
            np.testing.assert_allclose(kfac.matrix(new.params[part][name]), expected, rtol=1e-4, atol=1e-5)
    slope = np.concatenate([layer.ravel() for layer in steps["policy"].gradient.values()])
    assert metrics["gradient_norm"] == pytest.approx(np.linalg.norm(slope), rel=1e-4)
    assert metrics["factor_condition"] == pytest.approx(max(step.condition for step in steps.values()), rel=1e-3)
    assert metrics["step_size"] == pytest.approx(0.1)
    assert metrics["skipped"] == 0
    assert metrics["value_loss"] == pytest.approx(0.5 * np.mean(error**2), rel=1e-4)


class Curved(NamedTuple):
    """The restated optimizer's memory of one part: running means of each layer's factors and of its gradient."""

    layers: dict[str, str]  # names of a layer's kernel and bias, or of a vector alone
    factors: dict[str, tuple[np.ndarray, np.ndarray]]
    momentum: dict[str, np.ndarray]
    batches: int = 0

    def seen(self, factors: dict[str, tuple[np.ndarray, np.ndarray]], decay: float) -> Curved:
        keep = min(1 - 1 / (self.batches + 1), decay)
        old = self.factors or factors
        pairs = {n: (zip(old[n], factors[n], strict=True)) for n in factors}
        blended = {n: tuple(keep * a + (1 - keep) * b for a, b in pair) for n, pair in pairs.items()}
        return self._replace(factors=blended, batches=self.batches + 1)

    def step(self, slope: Weights, keep: float, damping: float, clip: float, rate: float) -> tuple[Weights, Curved]:
        """The change of the weights: by dense solves, no longer than the bound by its own factors."""
        matrices = {n: np.vstack([slope[name] for name in names]) for n, names in self.layers.items()}
        momentum = {n: keep * self.momentum.get(n, 0.0) + (1 - keep) * g for n, g in matrices.items()}
        blocks = {n: np.kron(*self.factors[n]) for n in momentum}
        made = {n: np.linalg.solve(b + damping * np.eye(len(b)), momentum[n].ravel()) for n, b in blocks.items()}
        size = min(rate, np.sqrt(2 * clip / sum(made[n] @ b @ made[n] for n, b in blocks.items())))
        change = {}
        for n, names in self.layers.items():
            whole = -size * made[n].reshape(momentum[n].shape)
            change[names[0]] = whole[:-1] if names[1:] else whole[0]
            change |= dict.fromkeys(names[1:], whole[-1])
        return change, self._replace(momentum=momentum)


def added(weights: Weights, change: Weights, share: float = 1.0) -> Weights:
    return {**weights, **{name: weights[name] + share * by.reshape(weights[name].shape) for name, by in change.items()}}


def restated(
    config: ACKTR, start: Weights, actor: Curved, critic: Curved, data: Trajectory, share: float
) -> tuple[Weights, Curved, Curved]:
    """One update on a linear policy and value function; `share` of the policy's step."""
    advantage = linear.advantages(start, data, config.discount, config.trace)
    target = advantage + linear.value(start, data.observation)
    x, z = data.observation, (data.action - data.observation @ start["w"] - start["b"]) / np.exp(start["s"])
    inputs, scores = (
        np.concatenate([x, np.ones((*x.shape[:-1], 1))], -1).reshape(-1, linear.INPUTS + 1),
        z / np.exp(start["s"]),
    )
    scores, rows = scores.reshape(len(inputs), -1), len(inputs)
    square = inputs.T @ inputs / rows
    actor = actor.seen({"line": (square, scores.T @ scores / rows), "spread": (np.eye(1), 2 * np.eye(2))}, config.decay)
    critic = critic.seen({"line": (square, np.eye(1))}, config.value_decay)

    def loss(weights: Weights) -> float:
        gain = (linear.log_prob(weights, x, data.action) * advantage).mean()
        return -gain - config.entropy * linear.entropy(weights)

    def value_loss(weights: Weights) -> float:
        return 0.5 * ((linear.value(weights, x) - target) ** 2).mean()

    bounds = config.momentum, config.damping, config.kl_clip, config.learning_rate
    change, actor = actor.step(linear.gradient(loss, start), *bounds)
    kl = linear.divergence(start, added(start, change), x).mean()
    weights = added(start, change, share * min(1.0, np.sqrt(config.kl_clip / kl)))
    bounds = config.momentum, config.value_damping, config.value_clip, config.value_rate
    for _ in range(config.value_steps):
        slope = linear.gradient(value_loss, weights)
        change, critic = critic.step({"v": slope["v"][:, None], "c": slope["c"]}, *bounds)
        old = linear.value(weights, x)
        by = linear.value(added(weights, change), x) - old
        weights = added(weights, change, np.clip((by * (target - old)).mean() / (by**2).mean(), 0, 1))
    return weights, actor, critic


BOUNDED: dict[str, Any] = {
    **{"cold_updates": 0, "statistics_every": 1, "decompose_every": 1, "normalize_advantage": False, "entropy": 0.1},
    **{"discount": 0.9, "trace": 0.8, "momentum": 0.5, "decay": 0.2, "value_decay": 0.6, "value_damping": 0.03},
}


@pytest.mark.parametrize(
    "config",
    [
        ACKTR(kl_clip=0.2, learning_rate=1.0, value_steps=3, value_clip=0.05, value_rate=1.0, **BOUNDED),
        ACKTR(kl_clip=9.0, learning_rate=0.1, value_steps=2, value_clip=9.0, value_rate=0.8, **BOUNDED),
    ],
    ids=["bounded", "free"],
)
def test_updates_are_those_that_numpy_makes(config: ACKTR) -> None:
    """Three of them: factors, momentum and normalisers are remembered, and the schedule shortens the policy's steps."""
    setup = Setup(linear.linear_policy(), linear.SPEC, Normalize(), budget=120, lanes=2, rows=15)
    algorithm = acktr(config, setup)
    run = Made(setup, algorithm, algorithm.init(jax.random.key(0)), update_of(algorithm))
    learner, history = run.learner, list[Trajectory]()
    weights = linear.named(learner.params)
    actor, critic = Curved({"line": "wb", "spread": "s"}, {}, {}), Curved({"line": "vc"}, {}, {})
    for number in range(3):
        history.append(linear.trajectory((2, 5, 3), [(0, 2, 1)], [(1, 1, 0), (0, 4, 2)], number))
        learner, _ = run(learner, history[-1])
        data = linear.normalised(history)
        weights, actor, critic = restated(config, weights, actor, critic, data, 1 - number / 4)
        for name, array in linear.named(learner.params).items():
            np.testing.assert_allclose(array, weights[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("kind", SPECS)
def test_metrics_are_those_of_the_new_policy_on_the_batch(kind: str) -> None:
    run, data = make(kind), trajectories(kind)
    policy, distribution = run.setup.policy, run.setup.policy.distribution
    new, metrics = run(run.learner, data)
    old, now = (policy.evaluate(p, data.observation, ()) for p in (run.learner.params, new.params))
    advantage, target = numpy_advantages(run.learner.params, data, 0.99, 0.97)
    advantage = (advantage - advantage.mean()) / advantage.std()
    ratio = np.exp(
        distribution.log_prob(now.distribution, data.action) - distribution.log_prob(old.distribution, data.action)
    )
    after = 1 - np.var(target - np.asarray(now.value)) / np.var(target)
    assert metrics["kl"] == pytest.approx(float(distribution.kl(old.distribution, now.distribution).mean()), rel=0.01)
    assert metrics["entropy"] == pytest.approx(float(distribution.entropy(now.distribution).mean()), rel=1e-4)
    assert metrics["surrogate"] == pytest.approx(float((ratio * advantage).mean()), rel=1e-3)
    assert metrics["surrogate"] > 0
    assert metrics["explained_variance_after"] == pytest.approx(after, rel=1e-3)
    assert metrics["explained_variance_after"] > metrics["explained_variance"]


def test_a_step_reaches_the_requested_kl_where_the_model_is_exact() -> None:
    """A linear Gaussian policy: its Fisher matrix is a Kronecker product, and its KL in the mean is quadratic."""
    run = make("gaussian", hidden=(), rows=1000, kl_clip=1e-3, learning_rate=1e3, damping=1e-6)
    _, metrics = run(run.learner, wide_trajectories(run, 1000))
    assert 0.9e-3 < metrics["kl"] < 1.01e-3


def test_a_step_that_stale_factors_think_short_is_shortened_by_what_is_measured() -> None:
    """The factors say that hardly anything changes; the measured KL still bounds the step."""
    run = make("gaussian", kl_clip=1e-3, learning_rate=1e3, value_rate=1.0, decompose_every=1000)
    blind = {
        name: basis._replace(input_values=0.1 * basis.input_values, output_values=0.1 * basis.output_values)
        for name, basis in run.learner.optimizer.policy.basis.items()
    }
    state = run.learner.optimizer._replace(policy=run.learner.optimizer.policy._replace(basis=blind))
    _, metrics = run(run.learner._replace(updates=jnp.asarray(1001), optimizer=state), trajectories("gaussian"))
    assert 0.2e-3 < metrics["kl"] < 2e-3


def test_several_value_steps_fit_better_than_one() -> None:
    fits = []
    for steps in (1, 8):
        run = make("gaussian", kl_clip=1e-3, learning_rate=1e3, value_rate=1.0, decompose_every=1000, value_steps=steps)
        fits.append(run(run.learner, trajectories("gaussian"))[1]["explained_variance_after"])
    assert fits[1] > fits[0] + 0.05


def test_the_best_share_of_a_value_step_is_that_of_least_squares() -> None:
    change, error = np.asarray([1.0, 2.0, -1.0]), np.asarray([0.5, 0.2, -0.3])
    share = float(_best(jnp.asarray((change * error).mean()), jnp.asarray((change**2).mean())))
    shares = np.linspace(0, 1, 1001)
    assert share == pytest.approx(shares[np.argmin([((error - s * change) ** 2).sum() for s in shares])], abs=1e-3)
    assert float(_best(jnp.asarray(3.0), jnp.asarray(1.0))) == 1
    assert float(_best(jnp.asarray(-3.0), jnp.asarray(1.0))) == 0


def test_the_sampled_fisher_is_the_models_own_whatever_was_done() -> None:
    """Of the last layer's mean it is 1 / std^2, though the actions taken are far off. Another key, other draws."""
    found = []
    for key in (1, 2):
        run = make("gaussian", rows=1000, fisher="sampled", entropy=0.3)
        data = wide_trajectories(run, 1000)
        new, _ = run(run.learner, data._replace(action=data.action + 3), key)
        found.append(np.asarray(new.optimizer.policy.factors["layer1"].outputs))
        np.testing.assert_allclose(found[-1], np.eye(2), atol=0.15)
    assert (found[0] != found[1]).all()


def test_some_time_steps_of_all_environments_make_the_factors() -> None:
    """Lanes of constant observations: a lane's factor tells which of its time steps were taken."""
    run, data = make("categorical", statistics_every=3, decompose_every=3), trajectories("categorical")
    seen = set()
    for key in range(6):
        time = np.broadcast_to(np.arange(T, dtype=np.float32)[None, :, None, None], data.observation.shape)
        new, _ = run(run.learner, data._replace(observation=time), key)
        total = float(new.optimizer.policy.factors["layer0"].inputs[-1, 0]) * LANES * 2
        assert total == pytest.approx(round(total), abs=1e-4)
        seen.add(round(total))
    assert all(LANES * (0 + 3) <= total <= LANES * (2 + 5) for total in seen)
    assert len(seen) > 1
    assert any((total - 3 * LANES) % (2 * LANES) for total in seen), "every lane has a beginning of its own"


def test_the_log_std_has_its_exact_factor_from_the_first_update() -> None:
    run = make("gaussian")
    new, _ = run(run.learner, trajectories("gaussian"))
    np.testing.assert_array_equal(new.optimizer.policy.factors["log_std"].inputs, [[1]])
    np.testing.assert_array_equal(new.optimizer.policy.factors["log_std"].outputs, 2 * np.eye(2))


def test_the_entropy_bonus_adds_the_gradient_of_the_entropy() -> None:
    data, gradients = trajectories("categorical"), []
    for changes in ({}, {"entropy": 0.3}):
        run = make("categorical", **changes)
        new, _ = run(run.learner, data)
        gradients.append(new.optimizer.policy.momentum)

    def mean_entropy(params: Any) -> Any:
        distribution, _ = run.setup.policy.act(params, jnp.asarray(data.observation), ())
        return run.setup.policy.distribution.entropy(distribution).mean()

    for name, layer in jax.grad(mean_entropy)(run.learner.params)["policy"].items():
        difference = gradients[0][name] - gradients[1][name]
        np.testing.assert_allclose(difference, 0.3 * kfac.matrix(layer), rtol=1e-3, atol=1e-5)


def test_a_step_that_is_not_finite_is_skipped_and_reported() -> None:
    """Also the servo's learning rate stays as it was."""
    run, data = make("gaussian", desired_kl=0.01, cold_updates=1), trajectories("gaussian")
    learner, fine = run(run.learner, data)
    new, metrics = run(learner, data._replace(reward=np.full_like(data.reward, 1e38)))
    assert (fine["skipped"], metrics["skipped"], metrics["step_size"]) == (0, 1, 0)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert tree.digest((new.params, new.optimizer)) == tree.digest((learner.params, learner.optimizer))
    assert int(new.updates) == 2
    assert run(new, data)[1]["skipped"] == 0


def test_cold_steps_then_decompositions_at_every_update_and_then_now_and_then() -> None:
    """And the servo takes the learning rate towards the desired KL, but not while the steps are cold."""
    settings = {"cold_updates": 2, "cold_rate": 0.125, "max_gradient": 1e9, "decompose_every": 3, "desired_kl": 10.0}
    run = make("categorical", **settings)
    learner, sizes, changed = run.learner, [], []
    for i in range(9):
        new, metrics = run(learner, trajectories("categorical", i), i)
        sizes.append(metrics["step_size"])
        changed.append(tree.digest(new.optimizer.policy.basis) != tree.digest(learner.optimizer.policy.basis))
        if i < 2:
            moved = new.params["policy"]["layer0"]["kernel"] - learner.params["policy"]["layer0"]["kernel"]
            expected = -0.125 * new.optimizer.policy.momentum["layer0"][:-1]
            np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)
        learner = new
    np.testing.assert_allclose(sizes[:5], [0.125, 0.125, 0.1, 0.15, 0.225], rtol=1e-5)
    assert changed == [True] * 5 + [False, True, False, False]
    assert int(learner.optimizer.policy.batches) == 9


def test_a_cold_step_is_no_longer_than_the_largest_gradient_says() -> None:
    run = make("categorical", cold_updates=1, cold_rate=0.125, max_gradient=1e-2)
    new, metrics = run(run.learner, trajectories("categorical"))
    moved = jax.tree.map(
        lambda a, b: np.asarray(a - b, float).ravel(), new.params["policy"], run.learner.params["policy"]
    )
    assert np.linalg.norm(np.concatenate(jax.tree.leaves(moved))) == pytest.approx(0.125e-2, rel=1e-3)
    assert metrics["gradient_norm"] > 1e-2


def test_settings_that_do_not_go_together_are_named() -> None:
    assert acktr_problems(ACKTR(learning_rate=5.0), 4, 512) == []
    told = acktr_problems(ACKTR(momentum=1.0, learning_rate=5.0, desired_kl=0.02), 4, 512)
    first = [problem.split()[0] for problem in told]
    assert first == ["algo.momentum", "algo.learning_rate", "algo.desired_kl", "algo.desired_kl"]
    assert "above algo.kl_clip (0.01)" in told[2]
    assert "algo.schedule=constant" in told[3]
    assert acktr_problems(ACKTR(desired_kl=0.01, schedule="constant"), 4, 512) == []


def test_the_schedule_shortens_steps_to_nothing_at_the_end_of_the_budget() -> None:
    run = make("categorical", schedule="linear")
    for steps, share in ((5_000, 0.5), (10_000, 0.0)):
        _, metrics = run(run.learner._replace(steps=jnp.asarray(steps)), trajectories("categorical"))
        assert metrics["step_size"] == pytest.approx(0.1 * share)
        assert metrics["learning_rate"] == pytest.approx(0.1 * share)


def test_an_update_compiles_once_and_keeps_every_dtype() -> None:
    run = make("gaussian")
    update = quick(lambda learner, data, key: run.algorithm.update(learner, LaneBlock(data), key))
    learner = run.learner
    for i in range(3):
        learner, _ = update(learner, trajectories("gaussian", i), jax.random.key(i))
    assert update._cache_size() == 1
    dtypes = [jax.tree.map(lambda leaf: leaf.dtype, which) for which in (learner, run.learner)]
    assert dtypes[0] == dtypes[1]


def test_no_curvature_is_in_any_value_step_of_a_cold_update() -> None:
    """The damping makes no difference: not to the first step, nor to those after it."""
    found = []
    for damping in (0.1, 10.0):
        run = make("gaussian", cold_updates=1, value_steps=3, value_damping=damping)
        found.append(run(run.learner, trajectories("gaussian"))[0].params["value"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *found)
