"""A process's lanes: a function per lane, then one fixed order of addition over all lanes of the experiment.

Why the bits don't depend on how many lanes a process holds (see also docs/determinism.md):
every lane goes through the same program on the same shapes (a loop, never `vmap`); the lane axis is
padded to at least two and the trip count is hidden from the compiler, which would otherwise treat a
single lane differently; what follows a mean is fenced from what precedes it, by a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import foreign, tree
from lockstep.core import Tree
from lockstep.foreign import Bind, Buffers
from lockstep.parallel.comm import Comm
from lockstep.tracing import traced_once, zeros

ALLGATHER, MEAN = "lockstep_allgather", "lockstep_mean"  # as compiled programs name them
_met_over: list[Comm] = []


class Exchange(NamedTuple):
    """What processes make of the lanes that they hold, inside a compiled program; each gives its values stacked."""

    all: Callable[[Tree], Tree]  # the values of all processes, in rank order
    mean: Callable[[Tree], Tree]  # over all lanes, added up in the fixed order; fenced from what follows


# of a process that holds all lanes
alone = Exchange(all=lambda stacked: stacked, mean=lambda stacked: _mean(stacked))


def exchange_over(comm: Comm) -> Exchange:
    """The exchange between ranks: calls on the program's own buffers, with a message for each leaf.

    Every rank runs the same program, which is one sequence of calls: they meet in the same order everywhere. They meet
    over the newest `comm`: a process takes part in one job at a time.
    """
    if comm.size == 1:
        return alone
    if not _met_over:
        foreign.register(ALLGATHER, _meeting(_gatherings))
        foreign.register(MEAN, _meeting(_averagings))
    _met_over[:] = [comm]
    return _exchange_among(comm.size)


@functools.cache
def _exchange_among(ranks: int) -> Exchange:
    def gathered(stacked: Tree) -> Tree:
        def everyones(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((ranks * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)

        leaves, structure = jax.tree.flatten(stacked)
        call = jax.ffi.ffi_call(ALLGATHER, [everyones(leaf) for leaf in leaves], has_side_effect=True)
        return jax.tree.unflatten(structure, call(*leaves))

    def averaged(stacked: Tree) -> Tree:
        if not _is_subtree(stacked):
            return _mean(gathered(stacked))
        leaves, structure = jax.tree.flatten(_added(stacked))
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        call = jax.ffi.ffi_call(MEAN, shapes, has_side_effect=True)  # nothing is fused across it
        return jax.tree.unflatten(structure, call(*leaves, jnp.asarray(ranks * _width(stacked), jnp.int32)))

    return Exchange(gathered, averaged)


Meet = Callable[[], None]


def _meeting(bind: Callable[[Comm, Buffers, Buffers], list[Meet]]) -> Bind:
    """What a program's call does: it is bound to the buffers once, and to every new comm."""

    def bound(given: Buffers, wanted: Buffers) -> Meet:
        over: Comm | None = None
        meetings: list[Meet] = []

        def meet() -> None:
            nonlocal over, meetings
            (comm,) = _met_over
            if over is not comm:
                meetings, over = bind(comm, given, wanted), comm
            for meeting in meetings:
                meeting()

        return meet

    return bound


def _gatherings(comm: Comm, mine: Buffers, everyones: Buffers) -> list[Meet]:
    return [comm.gathering(leaf, rows) for leaf, rows in zip(mine, everyones, strict=True)]


def _averagings(comm: Comm, given: Buffers, means: Buffers) -> list[Meet]:
    """Sums of this process's lanes, and how many lanes there are in all. NumPy rounds as compiled programs do."""
    *mine, count = given
    return [
        meet
        for leaf, mean in zip(mine, means, strict=True)
        for meet in (comm.adding(leaf, mean), partial(np.multiply, mean, _share(count.item(), mean.dtype), out=mean))
    ]


class LaneBlock:
    """Some of the experiment's lanes, one block per process. `data` has the lanes along its first axis."""

    def __init__(self, data: Tree, exchange: Exchange = alone) -> None:
        self._count = _width(data)
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
            return tree.unpack(self._exchange.mean(self.map(packed).held()), like)

        def weighted(lane: Any) -> tuple[Tree, Any]:
            share = jnp.asarray(weight(lane), jnp.float64)
            return jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), packed(lane)), share

        mine = self.map(weighted).held()
        if _is_subtree(mine):  # only its sum travels
            mine = jax.tree.map(lambda leaf: leaf[None], _added(mine))
        parts = self._exchange.all(mine)
        return tree.unpack(_fenced(lambda: _divided(*_added(parts))), like)

    def all(self) -> Tree:
        return _fenced(lambda: self._exchange.all(self.held()))

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


def _width(stacked: Tree) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def _is_subtree(stacked: Tree) -> bool:
    """Whether a process's lanes are a whole subtree of the fixed order of addition."""
    return _width(stacked) & (_width(stacked) - 1) == 0


def _added(parts: Tree) -> Tree:
    return jax.tree.map(tree.pairwise_sum, parts)


def _divided(sums: Tree, weights: Any) -> Tree:
    return jax.tree.map(lambda leaf: leaf / weights.astype(leaf.dtype), sums)


def _mean(stacked: Tree) -> Tree:
    return _fenced(lambda: jax.tree.map(lambda leaf: leaf * _share(_width(stacked), leaf.dtype), _added(stacked)))


def _share(count: int, dtype: Any) -> np.generic:
    """What a sum of so many is multiplied by. Compilers make that of a division too, and NumPy would not."""
    return np.dtype(dtype).type(1) / np.dtype(dtype).type(count)


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
