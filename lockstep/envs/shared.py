"""Memory that a process and its workers share. It has no name: nothing is left of it when they are gone."""

from __future__ import annotations

import math
import mmap
import os
from typing import NamedTuple

import numpy as np

from lockstep.core import Spec
from lockstep.envs.episodes import Rollout, action_row

LINE = 64  # arrays start at multiples of a cache line


class Shared(NamedTuple):
    """What is known to the parent and to all workers; each writes the columns of its own environments."""

    action: np.ndarray  # [N, ...] the policy's, for the step that is asked for
    resting: np.ndarray  # [N] environments that are not stepped
    rollout: Rollout


def create(spec: Spec, envs: int, steps: int) -> int:
    """A file descriptor of memory for so many environments and steps."""
    file = os.memfd_create("lockstep")
    os.truncate(file, max(_places(spec, envs, steps)[-1], LINE))
    return file


def attach(file: int, spec: Spec, envs: int, steps: int) -> Shared:
    """The memory behind the descriptor, as arrays."""
    memory = mmap.mmap(file, 0)
    places = _places(spec, envs, steps)
    arrays = [
        np.frombuffer(memory, dtype, math.prod(shape), place).reshape(shape)
        for (shape, dtype), place in zip(_arrays(spec, envs, steps), places[:-1], strict=True)
    ]
    return Shared(arrays[0], arrays[1], Rollout(*arrays[2:]))


def _arrays(spec: Spec, envs: int, steps: int) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes, in the order of `Shared`."""
    shape, dtype = action_row(spec.action)
    seen = spec.observation
    return [
        ((envs, *shape), dtype),
        ((envs,), "bool"),
        ((steps, envs), "float64"),
        ((steps, envs), "bool"),
        ((steps, envs), "bool"),
        ((steps, envs, *seen.shape), seen.dtype),
        ((steps + 1, envs, *seen.shape), seen.dtype),
    ]


def _places(spec: Spec, envs: int, steps: int) -> list[int]:
    """Where each array starts, and where all ends."""
    places = [0]
    for shape, dtype in _arrays(spec, envs, steps):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        places.append(places[-1] + -(-size // LINE) * LINE)
    return places


def letter(content: bytes) -> int:
    """A file descriptor to read `content` from, of any length."""
    file = os.memfd_create("lockstep")
    with open(file, "wb", closefd=False) as out:
        out.write(content)
    return file


def read_letter(file: int) -> bytes:
    """What was put into a `letter`, which is closed."""
    with open(file, "rb") as content:
        content.seek(0)
        return content.read()
