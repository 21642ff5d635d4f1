"""Processes that work together, as equals with a root. `Solo` is one of them alone; it needs no MPI."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from lockstep.core import Tree
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.launch import STATUS_FILE

T = TypeVar("T")


class Comm(Protocol):
    """What the rest of lockstep needs of the processes it runs in."""

    rank: int
    size: int

    @property
    def seconds(self) -> float:
        """Spent communicating so far."""

    def allgather(self, array: np.ndarray) -> np.ndarray:
        """Every rank's array, stacked in rank order, on every rank."""

    def gather(self, tree: Tree) -> list[Tree] | None:
        """Every rank's tree of arrays (all of the same shapes), in rank order; on the root."""

    def broadcast(self, tree: Tree) -> Tree:
        """The root's tree of arrays, on every rank; theirs must have its shapes."""

    def share(self, value: T) -> list[T]:
        """Every rank's small value, in rank order, on every rank."""

    def on_root(self, work: Callable[[], T]) -> T:
        """`work` is done by the root; its result, or its LockstepError, is everybody's."""

    def abort(self, status: int, message: str) -> None:
        """End every rank at once: this one has failed."""

    def meet(self) -> None:
        """Wait, without using the core, until every rank is here."""

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """The root's bytes into everybody's arrays, which have the sizes of the root's."""

    def send(self, arrays: Sequence[np.ndarray], to: int, tag: int) -> None:
        """The arrays' bytes to another rank; returns when they may be changed."""

    def receive(self, arrays: Sequence[np.ndarray], source: int, tag: int) -> None:
        """Bytes that another rank sent under this tag, into arrays of the sizes that it sent."""


class Solo:
    """One process: rank 0 of 1."""

    rank, size, seconds = 0, 1, 0.0

    def allgather(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array)[None]

    def gather(self, tree: Tree) -> list[Tree] | None:
        return [tree]

    def broadcast(self, tree: Tree) -> Tree:
        return tree

    def share(self, value: T) -> list[T]:
        return [value]

    def on_root(self, work: Callable[[], T]) -> T:
        return work()

    def abort(self, status: int, message: str) -> None:
        print(message, file=sys.stderr)
        raise SystemExit(status)

    def meet(self) -> None:
        pass

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        pass

    def send(self, arrays: Sequence[np.ndarray], to: int, tag: int) -> None:
        raise UsageError(f"one process has no rank {to} to send to.")

    def receive(self, arrays: Sequence[np.ndarray], source: int, tag: int) -> None:
        raise UsageError(f"one process has no rank {source} to receive from.")


class Mpi:
    """The ranks of MPI's world. Arrays travel as buffers; waiting ranks leave the core to those that work."""

    piece_bytes = 2**30  # a longer message travels in pieces: not every MPI library can count beyond 2 GiB

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size, self.seconds = self._world.rank, self._world.size, 0.0

    def allgather(self, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        out = np.empty((self.size, *array.shape), array.dtype)
        began = time.perf_counter()
        self._world.Allgather(_bytes(array), _bytes(out))
        self.seconds += time.perf_counter() - began
        return out

    def gather(self, tree: Tree) -> list[Tree] | None:
        import jax

        leaves, structure = jax.tree.flatten(tree)
        received = [self._gather_leaf(np.ascontiguousarray(leaf)) for leaf in leaves]
        if self.rank:
            return None
        return [jax.tree.unflatten(structure, [leaf[rank] for leaf in received]) for rank in range(self.size)]

    def _gather_leaf(self, leaf: np.ndarray) -> np.ndarray:
        out = np.empty((self.size, *leaf.shape), leaf.dtype) if self.rank == 0 else leaf[:0]
        self._wait(self._world.Igather(_bytes(leaf), _bytes(out) if self.rank == 0 else None))
        return out

    def broadcast(self, tree: Tree) -> Tree:
        import jax

        leaves, structure = jax.tree.flatten(tree)
        sent = []
        for leaf in leaves:
            array = np.array(leaf, order="C")
            self._wait(self._world.Ibcast(_bytes(array)))
            sent.append(array)
        return jax.tree.unflatten(structure, sent)

    def share(self, value: T) -> list[T]:
        began = time.perf_counter()
        values: list[T] = self._world.allgather(value)
        self.seconds += time.perf_counter() - began
        return values

    def on_root(self, work: Callable[[], T]) -> T:
        result: Any = None
        if self.rank == 0:
            try:
                result = work()
            except LockstepError as error:
                error.shared = True
                self._world.bcast((None, error))
                raise
            self._world.bcast((result, None))
            return result
        result, failure = self._world.bcast(None)
        if failure is not None:
            failure.shared = True
            raise failure
        return result

    def abort(self, status: int, message: str) -> None:
        print(message, file=sys.stderr, flush=True)
        write_status(status)
        self._world.Abort(status)

    def _wait(self, request: Any) -> None:
        """Ask often at first, then less: the root's update takes longer than a message."""
        began = time.perf_counter()
        pause = 0.0
        while not request.Test():
            time.sleep(pause)
            if time.perf_counter() - began > 0.0005:
                pause = 0.0002
        self.seconds += time.perf_counter() - began

    def meet(self) -> None:
        self._wait(self._world.Ibarrier())

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        self._wait_for_all([self._world.Ibcast(piece) for piece in self._pieces(arrays)])

    def send(self, arrays: Sequence[np.ndarray], to: int, tag: int) -> None:
        self._wait_for_all([self._world.Isend(piece, to, tag) for piece in self._pieces(arrays)])

    def receive(self, arrays: Sequence[np.ndarray], source: int, tag: int) -> None:
        self._wait_for_all([self._world.Irecv(piece, source, tag) for piece in self._pieces(arrays)])

    def _pieces(self, arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        for memory in map(_bytes, arrays):
            for start in range(0, memory.size, self.piece_bytes):
                yield memory[start : start + self.piece_bytes]

    def _wait_for_all(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._wait(request)


def _bytes(array: np.ndarray) -> np.ndarray:
    """The array's memory, for messages of any dtype."""
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def write_status(status: int) -> bool:
    """Leave the run's exit status where the command that started the ranks looks for it, if there is one."""
    file = os.environ.get(STATUS_FILE)
    if file is None:
        return False
    Path(file).write_text(str(status))
    return True
