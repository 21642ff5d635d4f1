"""Lanes held by this process: a function per lane, then one fixed order of addition.

Why the bits don't depend on how many lanes a process holds (docs/determinism.md has the measurements):
every lane goes through the same program on the same shapes (a loop, never `vmap`); the lane axis is
padded to at least two and the trip count is hidden from the compiler, which would otherwise treat a
single lane differently; what follows a mean is fenced from what precedes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lockstep import tree
from lockstep.core import Tree


class LocalLanes:
    """All lanes of the experiment in this process. `data` has the lanes along its first axis."""

    def __init__(self, data: Tree) -> None:
        self._count = jax.tree.leaves(data)[0].shape[0]
        self._padded = jax.tree.map(_at_least_two, data)

    def map(self, fn: Callable[[Any], Any]) -> LocalLanes:
        lanes = object.__new__(LocalLanes)
        lanes._count, lanes._padded = self._count, self._loop(fn)
        return lanes

    def mean(self, fn: Callable[[Any], Any]) -> Any:
        stacked = self.map(lambda lane: tree.pack(fn(lane))).all()
        mean = jax.tree.map(lambda leaf: tree.pairwise_sum(leaf) / self._count, stacked)
        like = jax.eval_shape(lambda: fn(self._pick(0)))
        return tree.unpack(jax.lax.optimization_barrier(mean), like)

    def all(self) -> Tree:
        return jax.lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[: self._count], self._padded))

    def _pick(self, i: Any) -> Tree:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 0, False), self._padded)

    def _loop(self, fn: Callable[[Any], Any]) -> Tree:
        def body(i: Any, out: Tree) -> Tree:
            return jax.tree.map(
                lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, i, 0), out, fn(self._pick(i))
            )

        width = max(self._count, 2)
        shapes = jax.eval_shape(lambda: fn(self._pick(0)))
        out = jax.tree.map(lambda leaf: jnp.zeros((width, *leaf.shape), leaf.dtype), shapes)
        trips = jax.lax.optimization_barrier(jnp.asarray(self._count, jnp.int32))
        return jax.lax.fori_loop(jnp.asarray(0, jnp.int32), trips, body, out)


def _at_least_two(leaf: Any) -> Any:
    return jnp.concatenate([leaf, jnp.zeros_like(leaf)]) if leaf.shape[0] == 1 else leaf
