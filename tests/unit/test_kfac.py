"""K-FAC against explicit Fisher matrices and dense Kronecker products on small networks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core import ArraySpec, Box, Discrete, Spec
from lockstep.distributions import Gaussian, gaussian
from lockstep.networks import MLP, mlp_policy
from lockstep.optim import kfac
from lockstep.optim.kfac import Basis, Factors, Rule, State
from tests.quick import quick

SPECS = {
    "gaussian": Spec(ArraySpec((3,), "float32"), Box(-np.ones(2, np.float32), np.ones(2, np.float32), "float32")),
    "categorical": Spec(ArraySpec((3,), "float32"), Discrete(4, 0, "int64")),
}
RULE = Rule(damping=0.1, damping_form="added", momentum=0.0, clip=1e9, cold_rate=0.5, cold_gradient=1e9)
WARM, COLD = jnp.asarray(False), jnp.asarray(True)


def positive(rng: np.random.Generator, size: int) -> np.ndarray:
    rows = rng.normal(size=(size + 2, size))
    return rows.T @ rows / len(rows)


def state_of(seed: int = 0) -> tuple[State, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two layers with random factors, decomposed; their dense Fisher blocks; a gradient."""
    rng = np.random.default_rng(seed)
    shapes = {"layer0": (4, 3), "log_std": (1, 2)}
    factors = {name: (positive(rng, n), positive(rng, m)) for name, (n, m) in shapes.items()}
    gradient = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    params = {"layer0": {"kernel": jnp.zeros((3, 3)), "bias": jnp.zeros(3)}, "log_std": jnp.zeros(2)}
    state = kfac.new(params)
    state = kfac.observe(state, {k: Factors(*(jnp.asarray(f) for f in v)) for k, v in factors.items()}, 0.9)
    return kfac.refresh(state, jnp.asarray(True)), {k: np.kron(*v) for k, v in factors.items()}, gradient


def tapped(kind: str, rows: int) -> dict[str, Any]:
    """A small policy's inputs and row gradients of log-probability and value, and the same from its weights."""
    policy = mlp_policy(MLP(hidden=(5, 4), last_scale=1.0, log_std=-0.3), SPECS[kind])
    params = policy.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    observation = rng.normal(size=(rows, 3)).astype(np.float32)
    action = rng.normal(size=(rows, 2)).astype(np.float32) if kind == "gaussian" else rng.integers(4, size=rows)

    def heads(output: Any) -> dict[str, Any]:
        return {"policy": policy.distribution.log_prob(output.distribution, action), "value": output.value}

    def by_shifts(shifts: Any) -> tuple[Any, Any]:
        output, inputs = policy.tapped(params, shifts, observation, ())
        return jax.tree.map(jnp.sum, heads(output)), inputs

    shifts = {part: kfac.no_shifts(params[part], rows) for part in params}
    outputs, inputs = quick(jax.jacrev(by_shifts, has_aux=True))(shifts)
    rowwise = quick(jax.jacrev(lambda p: heads(policy.evaluate(p, observation, ()))))(params)
    return {
        part: (
            inputs[part],
            outputs[part][part],
            {name: jax.vmap(kfac.matrix)(layer) for name, layer in rowwise[part][part].items()},
        )
        for part in params
    }


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("part", ["policy", "value"])
def test_inputs_and_output_gradients_make_the_gradient(kind: str, part: str) -> None:
    inputs, outputs, rowwise = tapped(kind, 6)[part]
    made = kfac.gradient_of(inputs, outputs)
    assert made.keys() == rowwise.keys()
    assert ("log_std" in made) == (kind == "gaussian" and part == "policy")
    for name, rows in rowwise.items():
        np.testing.assert_allclose(made[name], rows.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("part", ["policy", "value"])
def test_of_a_single_row_the_factors_are_the_exact_fisher_block(kind: str, part: str) -> None:
    inputs, outputs, rowwise = tapped(kind, 1)[part]
    for name, factors in kfac.factors_of(inputs, outputs).items():
        score = np.asarray(rowwise[name][0], float).ravel()
        np.testing.assert_allclose(np.kron(*factors), np.outer(score, score), rtol=1e-3, atol=1e-6)


def test_of_a_linear_layer_with_errors_that_ignore_its_inputs_the_factors_are_the_exact_fisher() -> None:
    """Every input meets every output gradient, as with independent noise: E[aa^T (x) gg^T] = A (x) S."""
    rng = np.random.default_rng(0)
    x, g = np.repeat(rng.normal(size=(5, 3)), 4, 0), np.tile(rng.normal(size=(4, 2)), (5, 1))
    a = np.concatenate([x, np.ones((20, 1))], 1)
    scores = np.einsum("bn,bm->bnm", a, g).reshape(20, -1)
    factors = kfac.factors_of({"layer0": jnp.asarray(x)}, {"layer0": jnp.asarray(g)})["layer0"]
    np.testing.assert_allclose(np.kron(*factors), scores.T @ scores / 20, rtol=1e-10, atol=1e-12)


def test_factors_are_second_moments_with_a_homogeneous_coordinate() -> None:
    x, g = jnp.asarray([[1.0, 2.0], [3.0, 4.0]]), jnp.asarray([[2.0], [4.0]])
    factors = kfac.factors_of({"layer0": x}, {"layer0": g})["layer0"]
    np.testing.assert_allclose(factors.inputs, [[5, 7, 2], [7, 10, 3], [2, 3, 1]])
    np.testing.assert_allclose(factors.outputs, [[10]])


def test_the_fisher_of_a_log_std_is_two() -> None:
    """By Gauss-Hermite quadrature of E[score score^T], exact for these polynomials."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    weights = weights / weights.sum()
    mean, log_std = jnp.asarray([0.3]), jnp.asarray([-0.7])
    scores = [
        jax.grad(lambda p, z=z: gaussian(1).log_prob(p, mean + jnp.exp(log_std) * z))(Gaussian(mean, log_std))
        for z in nodes
    ]
    rows = np.asarray([[score.mean[0], score.log_std[0]] for score in scores])
    fisher = np.einsum("k,ki,kj->ij", weights, rows, rows)
    np.testing.assert_allclose(fisher, [[np.exp(1.4), 0], [0, 2]], atol=1e-6)


@pytest.mark.parametrize("form", ["added", "factored"])
def test_preconditioning_is_the_dense_solve(form: Any) -> None:
    rng, damping = np.random.default_rng(1), 0.3
    a, s, gradient = positive(rng, 5), 10 * positive(rng, 3), rng.normal(size=(5, 3))
    basis = kfac.decompose({"layer0": Factors(jnp.asarray(a), jnp.asarray(s))})["layer0"]
    if form == "added":
        dense = np.kron(a, s) + damping * np.eye(15)
    else:
        pi = np.sqrt((np.trace(a) / 5) / (np.trace(s) / 3))
        dense = np.kron(a + pi * np.sqrt(damping) * np.eye(5), s + np.sqrt(damping) / pi * np.eye(3))
    expected = np.linalg.solve(dense, gradient.ravel())
    made, length = kfac.precondition(basis, jnp.asarray(gradient), damping, form)
    np.testing.assert_allclose(made, expected.reshape(5, 3), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(length, expected @ np.kron(a, s) @ expected, rtol=1e-4)
    eigenvalues = np.linalg.eigvalsh(dense)
    np.testing.assert_allclose(np.sort(np.ravel(kfac.damped(basis, damping, form))), eigenvalues, rtol=1e-4)


def test_a_singular_factor_has_no_negative_eigenvalue() -> None:
    row = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40)), jnp.float32)
    basis = kfac.decompose({"layer0": Factors(row.T @ row, row.T @ row)})["layer0"]
    assert (basis.input_values >= 0).all()
    assert float(basis.input_values[-1]) == pytest.approx(float(jnp.square(row).sum()), rel=1e-5)


def dense_change(fisher: dict[str, np.ndarray], gradient: dict[str, np.ndarray], damping: float) -> dict:
    return {
        name: np.linalg.solve(fisher[name] + damping * np.eye(g.size), g.ravel()).reshape(g.shape)
        for name, g in gradient.items()
    }


def test_a_step_is_rate_times_the_natural_gradient_where_nothing_bounds_it() -> None:
    state, fisher, gradient = state_of()
    _, made = kfac.step(state, gradient, RULE, jnp.asarray(0.2), WARM)
    for name, u in dense_change(fisher, gradient, RULE.damping).items():
        np.testing.assert_allclose(made.change[name], -0.2 * u, rtol=1e-3, atol=1e-6)
    assert float(made.size) == pytest.approx(0.2)
    conditions = [np.linalg.cond(block + RULE.damping * np.eye(len(block))) for block in fisher.values()]
    assert float(made.condition) == pytest.approx(max(conditions), rel=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_is_bounded_reaches_the_bound(momentum: float) -> None:
    """Half of step^T F step, over all layers together, whatever the momentum brings along."""
    state, fisher, gradient = state_of()
    state = state._replace(momentum={name: 5 * jnp.ones(g.shape) for name, g in gradient.items()})
    rule = RULE._replace(clip=0.01, momentum=momentum)
    _, made = kfac.step(state, gradient, rule, jnp.asarray(100.0), WARM)
    steps = {name: np.asarray(change, float).ravel() for name, change in made.change.items()}
    assert 0.5 * sum(step @ fisher[name] @ step for name, step in steps.items()) == pytest.approx(0.01, rel=1e-3)


def test_momentum_is_a_running_mean_of_gradients() -> None:
    state, fisher, gradient = state_of()
    rule = RULE._replace(momentum=0.75)
    once, _ = kfac.step(state, gradient, rule, jnp.asarray(1.0), WARM)
    twice, made = kfac.step(once, gradient, rule, jnp.asarray(1.0), WARM)
    for name, u in dense_change(fisher, gradient, RULE.damping).items():
        np.testing.assert_allclose(twice.momentum[name], (1 - 0.75**2) * gradient[name], rtol=1e-6)
        np.testing.assert_allclose(made.change[name], -(1 - 0.75**2) * u, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bound", [1e9, 0.1])
def test_a_cold_step_is_gradient_descent(bound: float) -> None:
    state, _, gradient = state_of()
    length = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    _, made = kfac.step(state, gradient, RULE._replace(cold_gradient=bound), jnp.asarray(100.0), COLD)
    for name, g in gradient.items():
        np.testing.assert_allclose(made.change[name], -0.5 * g * min(1, bound / length), rtol=1e-5)


def test_a_cold_step_is_bounded_by_the_length_of_what_it_goes_down() -> None:
    """The running mean, not the newest gradient: the step is as long as the bound says, whatever the momentum."""
    state, _, gradient = state_of()
    rule = RULE._replace(momentum=0.75, cold_gradient=0.1)
    _, made = kfac.step(state, gradient, rule, jnp.asarray(100.0), COLD)
    assert float(kfac.norm(made.change)) == pytest.approx(rule.cold_rate * rule.cold_gradient, rel=1e-5)


def test_factors_are_a_plain_mean_first_and_an_exponential_one_later() -> None:
    state = kfac.new({"layer0": {"kernel": jnp.zeros((1, 1)), "bias": jnp.zeros(1)}})
    seen = []
    for value in (1.0, 2.0, 6.0, 10.0):
        fresh = Factors(jnp.full((2, 2), value), jnp.full((1, 1), 10 * value))
        state = kfac.observe(state, {"layer0": fresh}, decay=0.6)
        seen.append((float(state.factors["layer0"].inputs[0, 1]), float(state.factors["layer0"].outputs[0, 0])))
    np.testing.assert_allclose(seen, [(1, 10), (1.5, 15), (3.3, 33), (5.98, 59.8)], rtol=1e-6)
    assert int(state.batches) == 4


def test_the_decomposition_waits_until_it_is_due() -> None:
    state, _, _ = state_of()
    changed = state._replace(factors=jax.tree.map(lambda leaf: 2 * leaf, state.factors))
    for due, factor in ((False, 1.0), (True, 2.0)):
        basis: dict[str, Basis] = kfac.refresh(changed, jnp.asarray(due)).basis
        for name, layer in basis.items():
            np.testing.assert_allclose(layer.input_values, factor * state.basis[name].input_values, rtol=1e-5)


def test_a_change_moves_kernel_bias_and_vectors() -> None:
    params = {"layer0": {"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1)}, "log_std": jnp.ones(2)}
    change = {"layer0": jnp.asarray([[1.0], [2.0], [3.0]]), "log_std": jnp.asarray([[4.0, 5.0]])}
    new = kfac.moved(params, change)
    np.testing.assert_array_equal(new["layer0"]["kernel"], [[2], [3]])
    np.testing.assert_array_equal(new["layer0"]["bias"], [4])
    np.testing.assert_array_equal(new["log_std"], [5, 6])


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        *[(0.3, 0.021, 0.2), (0.3, 0.019, 0.3), (0.2, 0.01, 0.2), (0.2, 0.0051, 0.2), (0.2, 0.0049, 0.3)],
        *[(0.9, 0.0, 1.0), (1e-8, 1.0, 1e-8)],
    ],
)
def test_the_servo_follows_the_desired_kl_within_its_range(rate: float, kl: float, expected: float) -> None:
    assert float(kfac.toward(jnp.asarray(rate), jnp.asarray(kl), 0.01)) == pytest.approx(expected)
