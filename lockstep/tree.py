"""Nests of arrays: readable paths, the fixed order of addition, the digest."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core import Array, Tree


def paths(tree: Tree) -> dict[str, Array]:
    """The leaves by readable path, such as `policy/layer0/kernel`, in the tree's own order."""
    leaves, structure = jax.tree.flatten(tree)
    return dict(zip(_names(structure), leaves, strict=True))


@functools.lru_cache(64)
def _names(structure: Any) -> list[str]:
    places, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in places]


def from_paths(template: Tree, leaves: dict[str, Array]) -> Tree:
    """The tree shaped like `template` with the leaves of `leaves`; their shapes and dtypes must agree."""
    expected = paths(template)
    if missing := sorted(expected.keys() - leaves.keys()):
        raise ValueError(f"array '{missing[0]}' is missing")
    if unknown := sorted(leaves.keys() - expected.keys()):
        raise ValueError(f"array '{unknown[0]}' is not expected")
    for name, leaf in expected.items():
        wanted, got = (leaf.shape, str(leaf.dtype)), (leaves[name].shape, str(leaves[name].dtype))
        if wanted != got:
            raise ValueError(f"array '{name}' should have shape and dtype {wanted}, not {got}")
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in expected])


def pairwise_sum(stack: Array) -> Array:
    """Sum over the first axis by pairs of neighbours: ((0+1)+(2+3))+4. One order for every layout."""
    if stack.shape[0] > UNROLLED:
        return _sum_of_many(stack)
    parts = [stack[i] for i in range(stack.shape[0])]
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


UNROLLED = 64  # terms that a program names one by one; with many more it would take minutes to compile


def _sum_of_many(stack: Array) -> Array:
    """The same additions, all pairs at once."""
    while (count := stack.shape[0]) > 1:
        pairs = stack[0 : count - 1 : 2] + stack[1:count:2]
        stack = jnp.concatenate([pairs, stack[count - 1 :]]) if count % 2 else pairs
    return stack[0]


def pack(tree: Tree) -> dict[str, Array]:
    """One vector per dtype with all the leaves end to end: cheap to add up, one message to send."""
    leaves = jax.tree.leaves(tree)
    dtypes = sorted({str(jnp.result_type(leaf)) for leaf in leaves})
    return {
        dtype: jnp.concatenate([jnp.ravel(leaf) for leaf in leaves if str(jnp.result_type(leaf)) == dtype])
        for dtype in dtypes
    }


def unpack(vectors: dict[str, Array], like: Tree) -> Tree:
    """The tree shaped like `like` whose leaves `pack` put end to end."""
    start = dict.fromkeys(vectors, 0)
    leaves = []
    for leaf in jax.tree.leaves(like):
        dtype, size = str(leaf.dtype), math.prod(leaf.shape)
        leaves.append(vectors[dtype][start[dtype] : start[dtype] + size].reshape(leaf.shape))
        start[dtype] += size
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def digest(tree: Tree) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all leaves: the receipt of an update."""
    return digest_of_paths(paths(tree))


def digest_of_paths(leaves: Mapping[str, Array]) -> str:
    """The digest of the tree whose leaves these are, as a checkpoint has them."""
    sha = hashlib.sha256()
    for name in sorted(leaves):
        array = np.asarray(leaves[name])
        sha.update(_label(name, array.dtype, array.shape))
        sha.update(array.tobytes())  # a copy, but sooner there than a view of each of many small arrays
    return sha.hexdigest()


@functools.lru_cache(4096)
def _label(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{name}:{dtype.str}:{shape};".encode()


def count_weights(params: Tree, scope: str | None = None, exclude: str | None = None) -> int:
    """The number of weights under the path prefix `scope`, less those whose path matches `exclude`.

    `exclude` is a regular expression that must match from the start of the path.
    """
    prefix = f"{scope.rstrip('/')}/" if scope else ""
    return sum(
        int(np.size(leaf))
        for name, leaf in paths(params).items()
        if name.startswith(prefix) and not (exclude and re.match(exclude, name))
    )
