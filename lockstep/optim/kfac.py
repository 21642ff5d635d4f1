"""K-FAC (Martens & Grosse 2015): the Fisher matrix as one Kronecker product per layer.

A layer with inputs x and output gradients g (of the log-probability, per row) has, with a = (x, 1), the block

    F = E[a a^T (x) g g^T]  ~  A (x) S,   A = E[a a^T],   S = E[g g^T]

and its weights and bias are one matrix [n + 1, m], the bias being the last row. Layers go by name in dictionaries; a
vector of parameters is a layer without inputs: one row, A = 1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lockstep.core import Array, Tree

LARGEST_RATE = 1.0  # that a servo comes to
Layers = dict[str, Array]  # a matrix [n + 1, m] per layer: weights, gradients, steps


class Factors(NamedTuple):
    """The two factors of a layer's Fisher block."""

    inputs: Float[Array, "n+1 n+1"]  # A
    outputs: Float[Array, "m m"]  # S


class Basis(NamedTuple):
    """The eigenvalues and eigenvectors (in columns) of a layer's factors."""

    input_values: Array
    input_vectors: Array
    output_values: Array
    output_vectors: Array


class State(NamedTuple):
    factors: dict[str, Factors]
    basis: dict[str, Basis]  # of the factors when they were last decomposed
    momentum: Layers  # running mean of the gradient
    batches: Array  # how many the factors have seen


class Rule(NamedTuple):
    """How a step is made of a gradient."""

    damping: float
    damping_form: Literal["added", "factored"]
    momentum: float
    clip: float  # no step changes the model by more than this: step^T F step / 2
    cold_rate: float
    cold_gradient: float  # a cold step's gradient is scaled down to this norm


class Step(NamedTuple):
    """What became of a gradient."""

    change: Layers  # to be added to the weights
    size: Array  # the change is so many times the direction
    condition: Array  # the worst of any layer: largest eigenvalue of the damped block over the smallest


def matrix(layer: Tree) -> Array:
    """A layer's parameters as one matrix."""
    if isinstance(layer, dict):
        return jnp.concatenate([layer["kernel"], layer["bias"][None]])
    return layer[None]


def moved(params: dict[str, Tree], change: Layers) -> dict[str, Tree]:
    """The parameters with the change added."""

    def add(layer: Tree, by: Array) -> Tree:
        if isinstance(layer, dict):
            return {"kernel": layer["kernel"] + by[:-1], "bias": layer["bias"] + by[-1]}
        return layer + by[0]

    return {name: add(layer, change[name]) for name, layer in params.items()}


def no_shifts(params: dict[str, Tree], rows: int) -> Layers:
    """The zeros whose gradients are the layers' output gradients, row by row."""
    return {name: jnp.zeros((rows, matrix(layer).shape[1]), jnp.float32) for name, layer in params.items()}


def gradient_of(inputs: Layers, outputs: Layers) -> Layers:
    """The mean over rows of a g^T: the gradient of the mean of what `outputs` are the row gradients of."""
    return {
        name: jnp.concatenate([x.T @ outputs[name], outputs[name].sum(0)[None]]) / x.shape[0]
        for name, x in inputs.items()
    }


def factors_of(inputs: Layers, outputs: Layers) -> dict[str, Factors]:
    """A and S over the rows of one lane."""
    return {name: Factors(_second_moment(x), outputs[name].T @ outputs[name] / len(x)) for name, x in inputs.items()}


def _second_moment(x: Array) -> Array:
    """E[a a^T] for a = (x, 1), without making the rows of a."""
    mean = x.mean(0)[:, None]
    return jnp.concatenate(
        [jnp.concatenate([x.T @ x / len(x), mean], 1), jnp.concatenate([mean.T, jnp.ones((1, 1), x.dtype)], 1)]
    )


def new(params: dict[str, Tree]) -> State:
    shapes = {name: matrix(layer).shape for name, layer in params.items()}
    zeros = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
    factors = {
        name: Factors(jnp.zeros((n, n), jnp.float32), jnp.zeros((m, m), jnp.float32)) for name, (n, m) in shapes.items()
    }
    basis = {
        name: Basis(*(part for size in shape for part in (jnp.ones(size, jnp.float32), jnp.eye(size))))
        for name, shape in shapes.items()
    }
    basis = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), basis)
    return State(factors, basis, zeros, jnp.zeros((), jnp.int64))


def observe(state: State, factors: dict[str, Factors], decay: float) -> State:
    """The state whose factors have seen one more batch: their plain mean at first, then an exponential one.

    factors = w factors + (1 - w) new,  w = min(1 - 1/k, decay) for the k-th batch
    """
    batches = state.batches + 1
    keep = jnp.minimum(1.0 - 1.0 / batches, decay).astype(jnp.float32)
    blended = jax.tree.map(lambda old, fresh: keep * old + (1.0 - keep) * fresh, state.factors, factors)
    return state._replace(factors=blended, batches=batches)


def decompose(factors: dict[str, Factors]) -> dict[str, Basis]:
    """In double precision: a factor of few rows is singular, and its small eigenvalues are noise in single."""
    return {name: Basis(*_eigen(layer.inputs), *_eigen(layer.outputs)) for name, layer in factors.items()}


def _eigen(factor: Array) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(factor.astype(jnp.float64), symmetrize_input=True)
    return jnp.maximum(values, 0.0).astype(jnp.float32), vectors.astype(jnp.float32)


def refresh(state: State, due: Array) -> State:
    """The state with the decomposition of its factors, where that is due."""
    basis = jax.lax.cond(due, decompose, lambda factors: state.basis, state.factors)
    return state._replace(basis=basis)


def damped(basis: Basis, damping: float, form: Literal["added", "factored"]) -> Array:
    """The eigenvalues [n + 1, m] of a layer's damped block.

    added:     A (x) S + damping
    factored:  (A + pi sqrt(damping)) (x) (S + sqrt(damping) / pi),  pi^2 = mean eigenvalue of A / that of S
    """
    a, s = basis.input_values[:, None], basis.output_values[None]
    if form == "added":
        return a * s + damping
    pi = jnp.sqrt(jnp.maximum(a.mean(), 1e-12) / jnp.maximum(s.mean(), 1e-12))
    return (a + pi * damping**0.5) * (s + damping**0.5 / pi)


def precondition(basis: Basis, gradient: Array, damping: float, form: Literal["added", "factored"]) -> tuple:
    """The damped block's inverse times the gradient, and its length u^T F u under the block without damping."""
    left, right = basis.input_vectors, basis.output_vectors
    turned = (left.T @ gradient @ right) / damped(basis, damping, form)
    length = (basis.input_values[:, None] * basis.output_values[None] * jnp.square(turned)).sum()
    return left @ turned @ right.T, length


def step(state: State, gradient: Layers, rule: Rule, rate: Array | float, cold: Array) -> tuple[State, Step]:
    """One step down the gradient.

    u = F^-1 (running mean of the gradient),  size = min(rate, sqrt(2 clip / u^T F u)),  change = -size u

    Momentum is taken before the inverse, so that the bound holds for the step that is made. A cold step is plain
    gradient descent at its own rate.
    """
    momentum = {name: rule.momentum * state.momentum[name] + (1 - rule.momentum) * g for name, g in gradient.items()}
    made = {name: precondition(state.basis[name], g, rule.damping, rule.damping_form) for name, g in momentum.items()}
    length = sum(part for _, part in made.values())
    warm_size = jnp.minimum(rate, jnp.sqrt(2 * rule.clip / jnp.maximum(length, 1e-30)))
    cold_size = rule.cold_rate * jnp.minimum(1.0, rule.cold_gradient / jnp.maximum(norm(momentum), 1e-30))
    size = jnp.where(cold, cold_size, warm_size)
    change = {name: -size * jnp.where(cold, momentum[name], u) for name, (u, _) in made.items()}
    blocks = [damped(basis, rule.damping, rule.damping_form) for basis in state.basis.values()]
    condition = jnp.stack([block.max() / block.min() for block in blocks]).max()
    return state._replace(momentum=momentum), Step(change, size, condition)


def norm(layers: Layers) -> Array:
    return jnp.sqrt(sum(jnp.square(layer).sum() for layer in layers.values()))


def toward(rate: Array, kl: Array, desired: float) -> Array:
    """The servo: half as large again after a step of less than half the desired KL, back after one of twice it."""
    factor = jnp.where(kl > 2 * desired, 1 / 1.5, jnp.where(kl < 0.5 * desired, 1.5, 1.0))
    return jnp.clip(rate * factor, 1e-8, LARGEST_RATE).astype(jnp.float32)
