"""Memory that all ranks share where they are on one machine: small messages go through it, and not through MPI."""

from __future__ import annotations

from typing import Any

import numpy as np

LINE = 8  # as many 8-byte numbers lie in what a core takes from memory at once: ranks must not share that


class Board:
    """Every rank writes to it, then everybody reads what all wrote.

    There are two sides, used in turn: who writes to a side again knows that all have written to the other one since,
    and so have read this one.
    """

    def __init__(self, world: Any, room: int) -> None:
        from mpi4py import MPI

        rank, size, numbers = world.rank, world.size, 8 * LINE * world.size
        self._window = MPI.Win.Allocate_shared(numbers + 2 * size * room if rank == 0 else 0, comm=world)
        memory: Any = self._window.Shared_query(0)[0]
        self._written = memoryview(memory)[:numbers].cast("q")[::LINE]  # how often each rank wrote
        self._sides = np.frombuffer(memory, np.uint8)[numbers:].reshape(2, size, room)
        self._rank, self._times = rank, 0
        self._others = [other for other in range(size) if other != rank]
        self._window.Lock_all()
        self._written[rank] = 0
        self._window.Sync()
        world.Barrier()

    @classmethod
    def among(cls, world: Any, room: int) -> Board | None:
        """A board for messages up to so many bytes; none where ranks are on several machines."""
        from mpi4py import MPI

        here = world.Split_type(MPI.COMM_TYPE_SHARED)
        together = here.size == world.size
        here.Free()
        return cls(world, room) if together else None

    def write(self, message: np.ndarray) -> None:
        self._times += 1
        self._sides[self._times % 2, self._rank, : message.size] = message
        self._window.Sync()  # the message is in memory before the number says so
        self._written[self._rank] = self._times

    def is_full(self) -> bool:
        """Whether all have written."""
        written, times = self._written, self._times
        return all(written[other] >= times for other in self._others)

    def read(self, into: np.ndarray) -> None:
        """The messages, in rank order."""
        self._window.Sync()
        into[...] = self._sides[self._times % 2, :, : into.shape[1]]
