"""Programs as JAX traces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex

from lockstep.core import Tree


def traced_once(fn: Callable[..., Any], *like: Tree) -> tuple[Callable[..., Any], Tree]:
    """`fn` for arguments of these shapes, and the shapes of what it returns.

    Python goes through `fn` here and never again: loops that must know the shapes before they begin, one within the
    other, would go through it twice each.
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*like)
    run, structure = jex.jaxpr_as_fun(program), jax.tree.structure(shapes)
    return lambda *arguments: jax.tree.unflatten(structure, run(*jax.tree.leaves(arguments))), shapes


def zeros(shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)
