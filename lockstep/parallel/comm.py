"""Processes that work together, as equals with a root. `Solo` is one of them alone; it needs no MPI."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from lockstep import errors
from lockstep.core import Tree
from lockstep.errors import LockstepError, ProcessLost, UsageError
from lockstep.parallel.board import Board
from lockstep.parallel.launch import STATUS_FILE
from lockstep.parallel.watchdog import GRACE_S, RollCall, Watchdog

T = TypeVar("T")

PIECE = 2**30  # bytes of one message: MPI before version 4 counts no further than 2**31
ALIGNED = 64  # where arrays start inside a packed message, as compiled programs like it
PATIENCE_S = 0.0005  # how long a message may take before the wait for it leaves the core to others
PAUSE_S = 0.0002
LARGE = 2**18  # bytes from which a message goes straight from memory to memory, when both sides are there
TOGETHER_S = 1.0  # how long a rank that failed waits for others that fail of the same cause
FAILED = 3  # the tag of such news
HEARD_S = 0.2  # what a rank says last takes so long to pass through the launcher, which is silent once ranks are ended


class Comm(Protocol):
    """What the rest of lockstep needs of the processes it runs in."""

    rank: int
    size: int

    @property
    def seconds(self) -> float:
        """Spent communicating so far."""

    def gathering(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        """What fills `out` with every rank's array as it then is, in rank order, whenever all ranks call it.

        Both must be contiguous.
        """

    def adding(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        """What fills `out` with the sum of every rank's array as it then is, in the order of `tree.pairwise_sum`.

        As `gathering`.
        """

    def gather(self, tree: Tree) -> list[Tree] | None:
        """Every rank's tree of arrays (all of the same shapes), in rank order; on the root."""

    def broadcast(self, tree: Tree) -> Tree:
        """The root's tree of arrays, on every rank; theirs must have its shapes."""

    def share(self, value: T) -> list[T]:
        """Every rank's small value, in rank order, on every rank."""

    def on_root(self, work: Callable[[], T]) -> T:
        """`work` is done by the root; its result, or its LockstepError, is everybody's."""

    def fail(self, status: int, message: str) -> None:
        """This rank has failed: end every rank and say why, once. Returns only where all ranks have failed."""

    def beat(self, doing: str | None = None) -> None:
        """This rank gets on, with what it did before or with `doing`."""

    def watched(self, limit_s: float) -> AbstractContextManager[None]:
        """Within it, a rank that does not get on for so long ends the job; 0: never."""


class Peers(Comm, Protocol):
    """What somebody else's algorithm needs besides: pieces that are sent by hand."""

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """The root's bytes into everybody's arrays, which have the sizes of the root's."""

    def send(self, arrays: Sequence[np.ndarray], to: int, tag: int) -> None:
        """The arrays' bytes to another rank; returns when they may be changed."""

    def receive(self, arrays: Sequence[np.ndarray], source: int, tag: int) -> None:
        """Bytes that another rank sent under this tag, into arrays of the sizes that it sent."""


class Solo:
    """One process: rank 0 of 1."""

    rank, size, seconds = 0, 1, 0.0

    def gathering(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        return partial(np.copyto, out.reshape(array.shape), array)

    def adding(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        return partial(np.copyto, out, array)

    def gather(self, tree: Tree) -> list[Tree] | None:
        return [tree]

    def broadcast(self, tree: Tree) -> Tree:
        return tree

    def share(self, value: T) -> list[T]:
        return [value]

    def on_root(self, work: Callable[[], T]) -> T:
        return work()

    def fail(self, status: int, message: str) -> None:
        """All of one rank have failed."""

    def beat(self, doing: str | None = None) -> None:
        """Nobody waits for it."""

    def watched(self, limit_s: float) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        pass

    def send(self, arrays: Sequence[np.ndarray], to: int, tag: int) -> None:
        raise UsageError(f"one process has no rank {to} to send to.")

    def receive(self, arrays: Sequence[np.ndarray], source: int, tag: int) -> None:
        raise UsageError(f"one process has no rank {source} to receive from.")


class Mpi:
    """The ranks of MPI's world. Arrays travel as buffers; waiting ranks leave the core to those that work."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world, self._news = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()
        self.rank, self.size, self.seconds = self._world.rank, self._world.size, 0.0
        self._watchdog = Watchdog()
        self._roll = RollCall(self._news)
        self._board = Board(self._world)
        self._met = False  # whether all ranks are at the message that is waited for

    def gathering(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        mine = _bytes(array)
        rows = _bytes(out).reshape(self.size, mine.size)
        return partial(self._over_board if mine.size < self._board.room else self._over_mpi, mine, rows)

    def adding(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        """Over the board, they are added up where they are."""
        mine = _bytes(array)
        if mine.size < self._board.room:
            return partial(self._add_on_board, mine, self._board.places(array), out)
        rows = np.empty((self.size, *array.shape), array.dtype)
        gather = self.gathering(array, rows)

        def add() -> None:
            gather()
            _added(list(rows), out)

        return add

    def _add_on_board(self, mine: np.ndarray, places: list[list[np.ndarray]], out: np.ndarray) -> None:
        self._met = False
        self._board.write(mine)
        self._until(self._board.is_full)
        _added(places[self._board.side()], out)

    def _over_board(self, mine: np.ndarray, rows: np.ndarray) -> None:
        self._met = False
        self._board.write(mine)
        rows[self.rank] = mine
        self._until(self._board.is_full)
        self._board.read(rows)

    def _over_mpi(self, mine: np.ndarray, rows: np.ndarray) -> None:
        if self._meet(mine.size):
            rows[self.rank] = mine
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._wait([r for other in others for r in self._receive(other, rows[other]) + self._send(other, mine)])
        else:
            self._wait([self._world.Iallgather(mine, rows)])

    def gather(self, tree: Tree) -> list[Tree] | None:
        """All arrays are on their way at once, from where they are to where they are needed."""
        import jax

        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf, order="C") for leaf in leaves]
        self._meet(sum(array.nbytes for array in arrays))
        if self.rank:
            self._wait([request for array in arrays for request in self._send(0, _bytes(array))])
            return None
        theirs = [[np.empty_like(array) for array in arrays] for _ in range(1, self.size)]
        self._wait([r for rank, into in enumerate(theirs, 1) for a in into for r in self._receive(rank, _bytes(a))])
        return [jax.tree.unflatten(structure, received) for received in [arrays, *theirs]]

    def _send(self, rank: int, data: np.ndarray, tag: int = 0) -> list[Any]:
        return [self._world.Isend(data[piece], rank, tag) for piece in _pieces(data.size)]

    def _receive(self, rank: int, into: np.ndarray, tag: int = 0) -> list[Any]:
        return [self._world.Irecv(into[piece], rank, tag) for piece in _pieces(into.size)]

    def broadcast(self, tree: Tree) -> Tree:
        """One message for the whole tree."""
        import jax

        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf) for leaf in leaves]
        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)])
        packed = np.empty(starts[-1], np.uint8)
        if self.rank == 0:
            for array, start in zip(arrays, starts, strict=False):
                packed[start : start + array.nbytes] = _bytes(np.asarray(array, order="C"))
        self._broadcast(packed)
        if self.rank == 0:
            return tree
        parts = [packed[start : start + a.nbytes] for a, start in zip(arrays, starts, strict=False)]
        views = [part.view(a.dtype).reshape(a.shape) for a, part in zip(arrays, parts, strict=True)]
        return jax.tree.unflatten(structure, views)

    def _broadcast(self, buffer: np.ndarray) -> np.ndarray:
        """Large ones go down a tree: rank 6 has them of 4, which has them of 0."""
        if not self._meet(buffer.size):
            self._wait([self._world.Ibcast(buffer)])
            return buffer
        lowest = self.rank & -self.rank or self.size
        if self.rank:
            self._wait(self._receive(self.rank - lowest, buffer))
        steps = [1 << k for k in range(lowest.bit_length()) if 1 << k < lowest]
        below = [self.rank + step for step in steps if self.rank + step < self.size]
        self._wait([request for rank in below for request in self._send(rank, buffer)])
        return buffer

    def share(self, value: T) -> list[T]:
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._allgather(np.asarray(mine.size)).tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: mine.size] = mine
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(self._allgather(padded), sizes, strict=True)]

    def _allgather(self, array: np.ndarray) -> np.ndarray:
        out = np.empty((self.size, *array.shape), array.dtype)
        self.gathering(array, out)()
        return out

    def on_root(self, work: Callable[[], T]) -> T:
        if self.rank == 0:
            try:
                result = work()
            except LockstepError as error:
                self._tell((None, (_public(error).__name__, str(error))))
                raise
            self._tell((result, None))
            return result
        return self._hear()

    def _tell(self, outcome: Any) -> None:
        data = np.frombuffer(pickle.dumps(outcome), np.uint8)
        self._broadcast(np.asarray([data.size]).view(np.uint8))
        self._broadcast(data.copy())

    def _hear(self) -> Any:
        size = int(self._broadcast(np.zeros(8, np.uint8)).view(np.int64)[0])
        result, failure = pickle.loads(self._broadcast(np.empty(size, np.uint8)).tobytes())
        if failure is not None:
            kind, message = failure
            raise getattr(errors, kind)(message)
        return result

    def fail(self, status: int, message: str) -> None:
        """The lowest of the ranks that fail within a moment tells. Those that don't fail are ended."""
        failed = self._who_fails()
        if len(failed) == self.size:
            return
        if self.rank == min(failed):
            self.end(status, message)
        time.sleep(GRACE_S)  # the other one ends this rank too
        self.end(status, message)

    def _who_fails(self) -> set[int]:
        sent = [self._news.isend(None, rank, FAILED) for rank in range(self.size) if rank != self.rank]
        failed, deadline = {self.rank}, time.monotonic() + TOGETHER_S
        state = self._mpi.Status()
        while len(failed) < self.size and time.monotonic() < deadline:
            if self._news.iprobe(tag=FAILED, status=state):
                self._news.recv(source=state.source, tag=FAILED)
                failed.add(state.source)
            else:
                time.sleep(0.01)
        self._mpi.Request.Testall(sent)
        return failed

    def end(self, status: int, message: str) -> None:
        """End every rank at once, whatever they do."""
        who = f"lockstep: rank {self.rank}" + (f" of {self.size}" if self.size > 1 else "")
        print(f"{who}: {message}", file=sys.__stderr__, flush=True)
        write_status(status)
        time.sleep(HEARD_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # all is said: MPI's own line would say less
        self._world.Abort(status)

    def beat(self, doing: str | None = None) -> None:
        self._watchdog.beat(doing)

    @contextlib.contextmanager
    def watched(self, limit_s: float) -> Iterator[None]:
        with self._watchdog.watching(limit_s, lambda message: self.end(ProcessLost.status, message)):
            yield

    def _meet(self, size: int) -> bool:
        """Before a large message all wait until all are there: then nobody sleeps while it travels."""
        self._met = False
        if size >= LARGE:
            self._wait([self._world.Ibarrier()])
            self._met = True
        return self._met

    def _wait(self, requests: list[Any]) -> None:
        self._until(partial(self._mpi.Request.Testall, requests))

    def _until(self, done: Callable[[], bool]) -> None:
        """Ask often at first, then less: the root's update takes longer than a message."""
        began = time.perf_counter()
        while not done():
            os.sched_yield()  # even time.sleep(0) takes 50 us, four times as long as a message
            if time.perf_counter() - began > PATIENCE_S:
                self._wait_long(done, began)
                break
        self._watchdog.beat()
        self.seconds += time.perf_counter() - began

    def _wait_long(self, done: Callable[[], bool], began: float) -> None:
        rest = os.sched_yield if self._met else partial(time.sleep, PAUSE_S)
        attend = began + 1.0
        with self._watchdog.waiting():
            while not done():
                rest()
                now = time.perf_counter()
                if now > attend:
                    attend = now + 1.0
                    self._attend(now - began)

    def _attend(self, waited_s: float) -> None:
        """What a rank does while it waits for long: it answers the roll, or calls it."""
        limit_s = self._watchdog.limit_s
        verdict = self._roll.attend(limit_s > 0 and waited_s > limit_s + GRACE_S)
        if verdict is not None:
            self.end(ProcessLost.status, f"waited {waited_s:.0f} s while {self._watchdog.doing}: {verdict}")

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        for array in arrays:
            self._broadcast(_bytes(array))

    def send(self, arrays: Sequence[np.ndarray], to: int, tag: int) -> None:
        self._met = False
        self._wait([request for array in arrays for request in self._send(to, _bytes(array), tag)])

    def receive(self, arrays: Sequence[np.ndarray], source: int, tag: int) -> None:
        self._met = False
        self._wait([request for array in arrays for request in self._receive(source, _bytes(array), tag)])


def _public(error: LockstepError) -> type[LockstepError]:
    """The nearest class of `lockstep.errors`: those are made from their message alone."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _added(parts: list[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    """The sum in the order of `tree.pairwise_sum`, whose last addition is that of a power of two and the rest."""
    if len(parts) == 1:
        return parts[0] if out is None else np.positive(parts[0], out=out)
    first = 1 << (len(parts) - 1).bit_length() - 1
    return np.add(_added(parts[:first]), _added(parts[first:]), out=out)


def _pieces(size: int) -> list[slice]:
    """A message of `size` bytes in parts that every MPI can send; one for an empty message too."""
    return [slice(start, min(start + PIECE, size)) for start in range(0, max(size, 1), PIECE)]


def _bytes(array: np.ndarray) -> np.ndarray:
    """The array's memory, for messages of any dtype."""
    assert array.flags.c_contiguous, "only contiguous memory can be sent as it is"
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def write_status(status: int) -> bool:
    """Leave the run's exit status where the command that started the ranks looks for it, if there is one."""
    file = os.environ.get(STATUS_FILE)
    if file is None:
        return False
    Path(file).write_text(str(status))
    return True
