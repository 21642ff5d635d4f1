"""Natural-gradient steps: the Fisher matrix as a product, conjugate gradients, a backtracking line search.

Vectors are flat arrays and products are functions, so whoever calls decides what a product is a mean over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.core import Array, Tree

Product = Callable[[Array], Array]  # v -> A v
TINY = 1e-5  # conjugate gradients stop at this share of the right-hand side: float32 gives no more


def fisher_product(
    outputs: Callable[[Array], Tree], fisher: Callable[[Tree, Tree], Tree], weights: Array, vector: Array
) -> Array:
    """F v = 1/N sum over rows of J^T M J v: J is d outputs / d weights, M the Fisher matrix of the outputs' family.

    One pass through the network's linearisation and one back (Schraudolph 2002); F is never made, and nothing is
    differentiated twice. `outputs` gives N rows along the first axis of every leaf.
    """
    rows, forwards = jax.linearize(outputs, weights)
    count = jax.tree.leaves(rows)[0].shape[0]
    moved = jax.tree.map(lambda leaf: leaf / count, fisher(rows, forwards(vector)))
    (product,) = jax.linear_transpose(forwards, weights)(moved)
    return product


def conjugate_gradients(product: Product, target: Array, iterations: int) -> Array:
    """x with A x = target, nearly: A is symmetric and positive definite, known by its product (Hestenes, Stiefel 1952).

    A target of zeros is answered with zeros.
    """
    enough = TINY**2 * jnp.vdot(target, target)

    def going_on(state: tuple) -> Array:
        *_, square, done = state
        return (done < iterations) & (square > enough)

    def step(state: tuple) -> tuple:
        x, residual, direction, square, done = state
        image = product(direction)
        bend = jnp.vdot(direction, image)
        length = jnp.where(bend > 0, square / jnp.where(bend > 0, bend, 1.0), 0.0)  # rounding may flatten a direction
        x, residual = x + length * direction, residual - length * image
        new_square = jnp.vdot(residual, residual)
        return x, residual, residual + (new_square / square) * direction, new_square, done + 1

    zeros, none = jnp.zeros_like(target), jnp.zeros((), jnp.int32)
    x, *_ = jax.lax.while_loop(going_on, step, (zeros, target, target, jnp.vdot(target, target), none))
    return x


class Direction(NamedTuple):
    """Where to go, at most so far that the KL divergence would be the one asked for if it were quadratic."""

    step: Array
    size: Array  # step = size times the natural gradient
    residual: Array  # |(F + damping) x - gradient| / |gradient| of the natural gradient x


def natural_direction(fisher: Product, gradient: Array, damping: float, iterations: int, kl: Array) -> Direction:
    """sqrt(2 kl / x^T (F + damping) x) x with (F + damping) x = gradient.

    The damping shortens the step too. By the length of F alone a step explodes where F is far below the damping, as
    under a policy that is nearly deterministic.
    """
    x = conjugate_gradients(lambda v: fisher(v) + damping * v, gradient, iterations)
    image = fisher(x) + damping * x
    curvature, norm = jnp.vdot(x, image), jnp.linalg.norm(gradient)
    size = jnp.where(curvature > 0, jnp.sqrt(2 * kl / jnp.where(curvature > 0, curvature, 1.0)), 0.0)
    missing = jnp.linalg.norm(image - gradient)
    return Direction(size * x, size, jnp.where(norm == 0, 0.0, missing / jnp.where(norm == 0, 1.0, norm)))


class Trial(NamedTuple):
    """What a step would do."""

    gain: Array  # of the surrogate
    kl: Array  # mean KL(old || new)


class Search(NamedTuple):
    fraction: Array  # of the step to take; 0: none was good
    trials: Array  # how many were tried


def line_search(attempt: Callable[[Array], Trial], max_kl: Array, shrink: float, trials: int) -> Search:
    """The first of the fractions 1, shrink, shrink^2, ... that gains something within the trust region.

    What is not a number gains nothing, so a step that leads there is never taken.
    """

    def going_on(state: tuple) -> Array:
        _, tried, accepted = state
        return ~accepted & (tried < trials)

    def attempt_next(state: tuple) -> tuple:
        fraction, tried, _ = state
        fraction = jnp.where(tried == 0, fraction, fraction * shrink)
        gain, kl = attempt(fraction)
        return fraction, tried + 1, jnp.isfinite(gain) & (gain > 0) & (kl <= max_kl)

    start = (jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    fraction, tried, accepted = jax.lax.while_loop(going_on, attempt_next, start)
    return Search(jnp.where(accepted, fraction, 0.0), tried)
