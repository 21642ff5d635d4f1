"""A process's lanes: a function per lane, then one fixed order of addition over all lanes of the experiment.

Why the bits don't depend on how many lanes a process holds (see also docs/determinism.md):
every lane goes through the same program on the same shapes (a loop, never `vmap`); the lane axis is
padded to at least two and the trip count is hidden from the compiler, which would otherwise treat a
single lane differently; what follows a mean is fenced from what precedes it, by a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lockstep import foreign, tree
from lockstep.core import Tree
from lockstep.foreign import Buffers
from lockstep.parallel.comm import Comm, Solo
from lockstep.tracing import traced_once, zeros

ALLGATHER = "lockstep_allgather"  # as compiled programs name it
_met_over: list[Comm] = []

Exchange = Callable[[Tree], Tree]  # this process's stacked values -> those of all processes, in rank order


def alone(stacked: Tree) -> Tree:
    """The exchange of a process that holds all lanes."""
    return stacked


def exchange_over(comm: Comm) -> Exchange:
    """The exchange inside a compiled program: a call on its own buffers, with a message for each leaf.

    Every rank runs the same program, which is one sequence of calls: they meet in the same order everywhere. They meet
    over the newest `comm`: a process takes part in one job at a time.
    """
    if isinstance(comm, Solo):
        return alone
    if not _met_over:
        foreign.register(ALLGATHER, _allgather)
    _met_over[:] = [comm]
    return _exchange_among(comm.size)


@functools.cache
def _exchange_among(ranks: int) -> Exchange:
    def exchange(stacked: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(stacked)
        shapes = [jax.ShapeDtypeStruct((ranks * leaf.shape[0], *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        return jax.tree.unflatten(structure, jax.ffi.ffi_call(ALLGATHER, shapes, has_side_effect=True)(*leaves))

    return exchange


def _allgather(mine: Buffers, everyones: Buffers) -> Callable[[], None]:
    over: Comm | None = None
    gatherings: list[Callable[[], None]] = []

    def gather() -> None:
        nonlocal over, gatherings
        (comm,) = _met_over
        if over is not comm:
            gatherings = [comm.gathering(leaf, rows) for leaf, rows in zip(mine, everyones, strict=True)]
            over = comm
        for gathering in gatherings:
            gathering()

    return gather


class LaneBlock:
    """Some of the experiment's lanes, one block per process. `data` has the lanes along its first axis."""

    def __init__(self, data: Tree, exchange: Exchange = alone) -> None:
        self._count = jax.tree.leaves(data)[0].shape[0]
        self._padded = jax.tree.map(_at_least_two, data)
        self._exchange = exchange

    def map(self, fn: Callable[[Any], Any]) -> LaneBlock:
        lanes = object.__new__(LaneBlock)
        lanes._count, lanes._padded, lanes._exchange = self._count, self._loop(fn), self._exchange
        return lanes

    def mean(self, fn: Callable[[Any], Any], weight: Callable[[Any], Any] | None = None) -> Any:
        """Sums are of lanes in one order, whoever holds them; with `weight`, those of the weights travel too."""
        like: Tree = None

        def packed(lane: Any) -> Tree:
            nonlocal like
            values = fn(lane)
            like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), values)
            return tree.pack(values)

        if weight is None:
            parts, count = self._sums(packed)
            return tree.unpack(_fenced(lambda: _divided(_added(parts), count)), like)

        def weighted(lane: Any) -> tuple[Tree, Any]:
            share = jnp.asarray(weight(lane), jnp.float64)
            return jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), packed(lane)), share

        parts, _ = self._sums(weighted)
        return tree.unpack(_fenced(lambda: _divided(*_added(parts))), like)

    def _sums(self, fn: Callable[[Any], Any]) -> tuple[Tree, int]:
        """What is still to be added up over all lanes of the experiment, and how many lanes they are.

        Where a block is a whole subtree of the addition, only its sum travels.
        """
        mine = self.map(fn).held()
        subtree = self._count & (self._count - 1) == 0
        if subtree:
            mine = jax.tree.map(lambda leaf: leaf[None], _added(mine))
        parts = self._exchange(mine)
        width = jax.tree.leaves(parts)[0].shape[0]
        return parts, self._count * width if subtree else width

    def all(self) -> Tree:
        return _fenced(lambda: self._exchange(self.held()))

    def held(self) -> Tree:
        """The data of the lanes that this process holds, stacked. For the end of a program: nothing fences it."""
        return jax.tree.map(lambda leaf: leaf[: self._count], self._padded)

    def _pick(self, i: Any) -> Tree:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 0, False), self._padded)

    def _loop(self, fn: Callable[[Any], Any]) -> Tree:
        lane = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self._padded)
        traced, shapes = traced_once(fn, lane)

        def body(i: Any, out: Tree) -> Tree:
            return jax.tree.map(
                lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, i, 0), out, traced(self._pick(i))
            )

        width = max(self._count, 2)
        out = jax.tree.map(lambda leaf: jnp.zeros((width, *leaf.shape), leaf.dtype), shapes)
        trips = jax.lax.optimization_barrier(jnp.asarray(self._count, jnp.int32))
        return jax.lax.fori_loop(jnp.asarray(0, jnp.int32), trips, body, out)


def _added(parts: Tree) -> Tree:
    return jax.tree.map(tree.pairwise_sum, parts)


def _divided(sums: Tree, by: Any) -> Tree:
    return jax.tree.map(lambda leaf: leaf / jnp.asarray(by, leaf.dtype), sums)


def _fenced(values: Callable[[], Tree]) -> Tree:
    """`values()`, computed in a loop of one turn.

    The compiler drops `optimization_barrier` before it fuses: a sum would become part of whatever follows it, and its
    rounding that of a program that differs between layouts. Nothing is fused across a loop.
    """
    traced, shapes = traced_once(values)
    nothing = zeros(shapes)
    once = jax.lax.optimization_barrier(jnp.asarray(1, jnp.int32))
    return jax.lax.fori_loop(jnp.asarray(0, jnp.int32), once, lambda _, __: traced(), nothing)


def _at_least_two(leaf: Any) -> Any:
    return jnp.concatenate([leaf, jnp.zeros_like(leaf)]) if leaf.shape[0] == 1 else leaf
