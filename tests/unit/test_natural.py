"""Fisher product, conjugate gradients and line search against dense and explicit restatements, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from lockstep.core import Array, Distribution, Policy
from lockstep.networks import MLP, mlp_policy
from lockstep.optim.natural import (
    Direction,
    Trial,
    conjugate_gradients,
    fisher_product,
    line_search,
    natural_direction,
)
from tests.quick import quick
from tests.unit.test_ppo import SPECS

RNG = np.random.default_rng(5)
OBSERVATION = jnp.asarray(RNG.normal(size=(20, 3)))


def small(kind: str) -> tuple[Policy, Array, Callable[[Array], Any]]:
    """A policy, its flat weights and its outputs as a function of them."""
    policy = mlp_policy(MLP(hidden=(4,), last_scale=1.0, log_std=-0.3), SPECS[kind])
    params = policy.init(jax.random.key(2))["policy"]
    weights, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params))
    return policy, weights, lambda w: policy.act({"policy": unravel(w)}, OBSERVATION, ())[0]


def explicit_fisher(kind: str, family: Distribution, weights: Array, outputs: Callable[[Array], Any]) -> Array:
    """1/N sum of E[score score^T] over rows: exact, over all actions or by Gauss-Hermite nodes.

    The score of a Gaussian is quadratic in its noise, and three nodes integrate polynomials up to the fifth degree.
    """
    said = outputs(weights)
    if kind == "categorical":
        actions = [np.full(20, a) for a in range(4)]
        chances = list(jax.nn.softmax(said).T)
    else:
        nodes, shares = np.polynomial.hermite_e.hermegauss(3)
        pairs = list(itertools.product(range(3), repeat=2))
        actions = [said.mean + jnp.exp(said.log_std) * nodes[np.array([pair])] for pair in pairs]
        chances = [np.full(20, shares[a] * shares[b] / (2 * np.pi)) for a, b in pairs]
    score_of = quick(jax.jacobian(lambda w, action: family.log_prob(outputs(w), action)))
    total = jnp.zeros((weights.size, weights.size))
    for action, chance in zip(actions, chances, strict=True):
        scores = score_of(weights, action)
        total += jnp.einsum("r,ri,rj->ij", chance, scores, scores) / 20
    return total


def product_matrix(family: Distribution, weights: Array, outputs: Callable[[Array], Any]) -> Array:
    columns = jax.vmap(lambda v: fisher_product(outputs, family.fisher, weights, v))
    return quick(columns)(jnp.eye(weights.size))


@pytest.mark.parametrize("kind", SPECS)
def test_the_fisher_product_is_that_of_the_expected_outer_product_of_scores(kind: str) -> None:
    policy, weights, outputs = small(kind)
    expected = explicit_fisher(kind, policy.distribution, weights, outputs)
    np.testing.assert_allclose(product_matrix(policy.distribution, weights, outputs), expected, atol=1e-12)


@pytest.mark.parametrize("kind", SPECS)
def test_the_fisher_product_is_that_of_the_hessian_of_the_mean_kl(kind: str) -> None:
    policy, weights, outputs = small(kind)
    old = outputs(weights)
    hessian = quick(jax.hessian(lambda w: policy.distribution.kl(old, outputs(w)).mean()))(weights)
    np.testing.assert_allclose(product_matrix(policy.distribution, weights, outputs), hessian, atol=1e-12)


def spd(size: int) -> np.ndarray:
    basis = RNG.normal(size=(size, size))
    return basis @ basis.T / size + 0.1 * np.eye(size)


def test_conjugate_gradients_are_the_dense_solve_after_as_many_iterations_as_unknowns() -> None:
    matrix, target = spd(12), RNG.normal(size=12)
    found = conjugate_gradients(lambda v: matrix @ v, jnp.asarray(target), 12)
    np.testing.assert_allclose(found, np.linalg.solve(matrix, target), rtol=1e-3, atol=1e-4)


def test_every_iteration_comes_closer_in_the_norm_of_the_matrix() -> None:
    matrix, target = spd(12), RNG.normal(size=12)
    exact = np.linalg.solve(matrix, target)
    errors = []
    for iterations in range(1, 9):
        rest = exact - np.asarray(conjugate_gradients(lambda v: matrix @ v, jnp.asarray(target), iterations))
        errors.append(rest @ matrix @ rest)
    assert all(after < before for before, after in itertools.pairwise(errors))


def test_directions_without_curvature_give_no_infinite_answer() -> None:
    found = conjugate_gradients(lambda v: jnp.asarray([2.0, 0.0]) * v, jnp.asarray([1.0, 0.0]), 5)
    np.testing.assert_allclose(found, [0.5, 0.0])
    assert jnp.isfinite(conjugate_gradients(lambda v: 0 * v, jnp.asarray([1.0, 1.0]), 5)).all()


def direction_of(matrix: np.ndarray, gradient: np.ndarray, damping: float, iterations: int) -> Direction:
    return natural_direction(lambda v: matrix @ v, jnp.asarray(gradient), damping, iterations, jnp.asarray(0.01))


def test_the_direction_solves_the_damped_system_and_is_as_long_as_it_says() -> None:
    matrix, gradient = spd(6), RNG.normal(size=6)
    step, size, residual = direction_of(matrix, gradient, 0.3, 20)
    x = np.linalg.solve(matrix + 0.3 * np.eye(6), gradient)
    np.testing.assert_allclose(size, np.sqrt(2 * 0.01 / (x @ gradient)), rtol=1e-4)
    np.testing.assert_allclose(step, size * x, rtol=1e-3)
    assert residual < 1e-4


def test_a_step_along_which_the_matrix_says_next_to_nothing_is_not_long() -> None:
    """A policy that is nearly deterministic has such a Fisher matrix: only the damping is left to bound the step."""
    step, *_ = direction_of(1e-9 * spd(6), RNG.normal(size=6), 0.1, 20)
    assert 0.1 * step @ step <= 2 * 0.01 * 1.001


def test_the_residual_is_what_is_left_of_the_gradient() -> None:
    matrix, gradient = spd(12), RNG.normal(size=12)
    step, size, residual = direction_of(matrix, gradient, 0.1, 3)
    left = (matrix + 0.1 * np.eye(12)) @ (step / size) - gradient
    np.testing.assert_allclose(residual, np.linalg.norm(left) / np.linalg.norm(gradient), rtol=1e-9)
    assert residual > 1e-3, "three iterations do not solve twelve equations"


def test_without_a_gradient_there_is_no_step() -> None:
    step, size, residual = direction_of(spd(4), np.zeros(4), 0.1, 5)
    assert not step.any()
    assert (size, residual) == (0, 0)


def test_a_gradient_that_is_not_a_number_is_told_and_not_followed() -> None:
    step, size, residual = direction_of(spd(4), np.array([1.0, np.nan, 0.0, 2.0]), 0.1, 5)
    np.testing.assert_array_equal(step, np.zeros(4))
    assert size == 0
    assert np.isnan(residual)


@pytest.mark.parametrize(("damping", "least"), [(1e-6, 0.9), (0.1, 0.0)])
@pytest.mark.parametrize("kind", SPECS)
def test_a_small_step_has_the_kl_that_was_asked_for_and_less_with_damping(
    kind: str, damping: float, least: float
) -> None:
    policy, weights, outputs = small(kind)
    action = policy.distribution.sample(outputs(weights), policy.distribution.noise(jax.random.key(3), (20,)))
    advantage = jnp.asarray(RNG.normal(size=20))
    gradient = jax.grad(lambda w: (policy.distribution.log_prob(outputs(w), action) * advantage).mean())(weights)

    def product(vector: Array) -> Array:
        return fisher_product(outputs, policy.distribution.fisher, weights, vector)

    step, *_ = natural_direction(product, gradient, damping, 60, jnp.asarray(1e-6))
    kl = policy.distribution.kl(outputs(weights), outputs(weights + step)).mean()
    assert least * 1e-6 < kl < 1.1e-6


def search(gain: Callable[[Array], Any], kl: Callable[[Array], Any]) -> tuple[float, int]:
    def attempt(fraction: Array) -> Trial:
        return Trial(jnp.asarray(gain(fraction), jnp.float32), jnp.asarray(kl(fraction), jnp.float32))

    fraction, trials = line_search(attempt, jnp.asarray(0.01), 0.5, 6)
    return float(fraction), int(trials)


def test_a_full_step_that_is_good_is_taken() -> None:
    assert search(lambda f: f, lambda f: 0.01 * f**2) == (1.0, 1)


def test_a_step_is_shortened_until_it_is_within_the_trust_region() -> None:
    assert search(lambda f: f, lambda f: 0.1 * f**2) == (0.25, 3)


def test_a_step_that_is_just_beyond_the_trust_region_is_shortened() -> None:
    assert search(lambda f: f, lambda f: 0.0101 * f**2) == (0.5, 2)


def test_a_step_is_shortened_until_it_gains_something() -> None:
    assert search(lambda f: 0.2 - f, lambda f: 0.0 * f) == (0.125, 4)


@pytest.mark.parametrize("gain", [-1.0, 0.0, np.nan, np.inf])
def test_where_no_step_is_good_none_is_taken(gain: float) -> None:
    assert search(lambda f: gain, lambda f: 0.0) == (0.0, 6)


@pytest.mark.parametrize("kl", [0.02, np.nan, np.inf])
def test_no_gain_is_worth_leaving_the_trust_region(kl: float) -> None:
    assert search(lambda f: 1.0, lambda f: kl) == (0.0, 6)
