"""What each rank has under each path of a tree: checked for agreement, weighted and packed to be added up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.core import Tree
from lockstep.errors import UsageError
from lockstep.parallel import nest
from lockstep.parallel.nest import Slot

Entries = Mapping[str, Slot | None]  # what a rank has under each path


class Disagreement(UsageError):
    """Ranks have or do different things. Every rank finds it at once, so that one of them may tell."""


def of(tree: Tree) -> list[tuple[str, Any]]:
    """The leaves by path, in an order that every rank has. Each is an array, a number or None."""
    found = sorted(nest.leaves(tree).items())
    for path, leaf in found:
        if leaf is not None and not nest.kind_of(leaf):
            raise UsageError(f"{_named(path)} is a {type(leaf).__name__}, not an array or a number: use gather for it.")
    return found


def _named(path: str) -> str:
    return f"'{path}'" if path else "the tree"


def agree(everyone: Sequence[Entries], what: Callable[[Slot], Any]) -> None:
    """The same paths on every rank, and `what` the same under each of them."""
    for rank, theirs in enumerate(everyone):
        if missing := sorted(everyone[0].keys() ^ theirs.keys()):
            has, lacks = (0, rank) if missing[0] in everyone[0] else (rank, 0)
            raise Disagreement(f"trees must be alike: rank {has} has {_named(missing[0])}, rank {lacks} does not.")
    for path in everyone[0]:
        found = [(rank, slot) for rank, slots in enumerate(everyone) if (slot := slots[path]) is not None]
        for rank, slot in found:
            if what(slot) != what(found[0][1]):
                first = f"{found[0][1]} on rank {found[0][0]}"
                raise Disagreement(f"trees must be alike: {_named(path)} is {first}, but {slot} on rank {rank}.")


def batch_like(leaf: Any, array: np.ndarray) -> Any:
    """A batch of what `leaf` is one rank's part of; of numbers, a NumPy array."""
    kind = nest.kind_of(leaf)
    return nest.restore("numpy" if kind == "number" else kind, array)


def number_slot(path: str, leaf: Any) -> Slot:
    """The slot of something that has a mean."""
    kind, array = nest.kind_of(leaf), nest.array_of(path, leaf)
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise UsageError(f"{_named(path)} is of dtype {array.dtype}, which has no mean.")
    return Slot(kind, array.shape, _sum_dtype(array.dtype) if kind == "number" else array.dtype)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """What is added up: at least single precision; double for whole numbers, as in NumPy's mean."""
    return np.result_type(dtype, np.float64 if dtype.kind in "biu" else np.float32)


def weighted(entries: Entries, leaves: Mapping[str, Any], count: float) -> dict[str, np.ndarray]:
    """This rank's entries times its count, end to end: one vector per dtype."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for slot in filter(None, entries.values()):
        sizes[_sum_dtype(slot.dtype).name] += math.prod(slot.shape)
    vectors = {dtype: np.zeros(sizes[dtype], dtype) for dtype in sorted(sizes)}
    for path, part in _parts(entries, vectors).items():
        if leaves[path] is not None and count:
            part[...] = nest.array_of(path, leaves[path])
            part *= count
    return vectors


def cut(entries: Entries, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The entries whose vectors these are, in their own dtypes; of whole numbers, in double precision."""
    own = {path: slot.dtype for path, slot in entries.items() if slot is not None}
    parts = _parts(entries, vectors).items()
    return {path: part.astype(part.dtype if own[path].kind in "biu" else own[path]) for path, part in parts}


def _parts(entries: Entries, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where each entry is in the vectors."""
    start, parts = dict.fromkeys(vectors, 0), {}
    for path, slot in entries.items():
        if slot is not None:
            dtype, size = _sum_dtype(slot.dtype).name, math.prod(slot.shape)
            parts[path] = vectors[dtype][start[dtype] : start[dtype] + size].reshape(slot.shape)
            start[dtype] += size
    return parts


def put_back(slot: Slot | None, array: np.ndarray | None) -> Any:
    """The array as its slot had it; an entry that no rank has stays None."""
    return None if slot is None or array is None else nest.restore(slot.kind, array)
