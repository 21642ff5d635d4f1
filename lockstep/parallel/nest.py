"""Nests of NumPy, JAX and PyTorch arrays, taken apart and put together without importing the latter two for nothing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.core import Tree
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Slot:
    """Where an array was in a nest, and what it was: numpy, jax, torch, or a Python number."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def empty(self) -> np.ndarray:
        return np.empty(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def walk(fn: Callable[[str, Any], Any], nest: Tree, path: str = "") -> Tree:
    """The nest with `fn(path, leaf)` in place of every leaf. The order depends on names alone.

    Nests are lists, tuples, named tuples, dataclasses and mappings; every mapping comes back as a dict.
    """

    def inside(name: object, value: Tree) -> Tree:
        return walk(fn, value, f"{path}/{name}" if path else str(name))

    if isinstance(nest, Slot):
        return fn(path, nest)
    if isinstance(nest, Mapping):
        done = {key: inside(key, nest[key]) for key in sorted(nest, key=str)}
        return {key: done[key] for key in nest}
    if isinstance(nest, tuple) and (names := getattr(nest, "_fields", None)) is not None:
        return type(nest)(*(inside(name, value) for name, value in zip(names, nest, strict=True)))
    if isinstance(nest, list | tuple):
        return type(nest)(inside(i, value) for i, value in enumerate(nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = [field.name for field in dataclasses.fields(nest)]
        return dataclasses.replace(nest, **{name: inside(name, getattr(nest, name)) for name in fields})
    return fn(path, nest)


def leaves(nest: Tree) -> dict[str, Any]:
    """The leaves by readable path, such as `policy/layer0/kernel`."""
    found: dict[str, Any] = {}
    walk(found.__setitem__, nest)
    return found


def take_apart(nest: Tree) -> tuple[Tree, list[np.ndarray]]:
    """The nest with a slot in place of every array, and the arrays in order. Everything else stays in the nest."""
    arrays: list[np.ndarray] = []

    def replace(path: str, leaf: Any) -> Any:
        kind = kind_of(leaf)
        if kind in ("", "number"):
            return leaf
        arrays.append(array_of(path, leaf))
        return Slot(kind, arrays[-1].shape, arrays[-1].dtype)

    return walk(replace, nest), arrays


def slots(nest: Tree) -> list[Slot]:
    """The slots of a nest that was taken apart, in order."""
    return [leaf for leaf in leaves(nest).values() if isinstance(leaf, Slot)]


def put_together(nest: Tree, arrays: Sequence[np.ndarray]) -> Tree:
    """The reverse of `take_apart`."""
    rest: Iterator[np.ndarray] = iter(arrays)
    return walk(lambda _, leaf: restore(leaf.kind, next(rest)) if isinstance(leaf, Slot) else leaf, nest)


def kind_of(leaf: Any) -> str:
    """Whose array it is; nobody's is ''. A library that is not imported has made none."""
    if isinstance(leaf, np.ndarray | np.generic):
        return "numpy"
    for kind, class_name in (("jax", "Array"), ("torch", "Tensor")):
        if kind in sys.modules and isinstance(leaf, getattr(sys.modules[kind], class_name)):
            return kind
    return "number" if isinstance(leaf, int | float | complex) else ""


def array_of(path: str, leaf: Any) -> np.ndarray:
    """An array of any kind, or a number, as a NumPy array in the order of its indices; not copied where possible."""
    if kind_of(leaf) == "torch":
        leaf = leaf.detach().cpu().contiguous()
        array = _bfloat16_of_torch(leaf) if str(leaf.dtype) == "torch.bfloat16" else leaf.resolve_conj().numpy()
    else:
        array = np.asarray(leaf, order="C")
    if array.dtype.hasobject:
        raise UsageError(f"'{path}' is an array of Python objects: only numbers can travel as a buffer.")
    return array


def restore(kind: str, array: np.ndarray) -> Any:
    """The array as its kind has it, on the CPU."""
    if kind == "torch":
        import torch

        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if kind == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    return array.item() if kind == "number" else array


def _bfloat16_of_torch(tensor: Any) -> np.ndarray:
    import ml_dtypes  # a dependency of JAX that gives NumPy this type

    bits: np.ndarray = tensor.view(sys.modules["torch"].int16).numpy()
    return bits.view(ml_dtypes.bfloat16)
