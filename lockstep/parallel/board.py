"""Memory that all ranks share where they are on one machine: small messages go through it, and not through MPI."""

from __future__ import annotations

from typing import Any

import numpy as np

ROOM = 2**18  # bytes of one message, if there are not very many ranks
ALL = 2**23  # bytes for all ranks: containers have little memory to share
LINE = 64  # bytes that a core takes from memory at once: ranks' own numbers lie so far apart


class Board:
    """Every rank writes to it, then everybody reads what the others wrote; messages of less than `room` bytes.

    There are two sides, used in turn: who writes to a side again knows that all have written to the other one since,
    and so have read this one. There is no room where ranks are on several machines, or can't share memory.
    """

    def __init__(self, world: Any) -> None:
        from mpi4py import MPI

        here = world.Split_type(MPI.COMM_TYPE_SHARED)
        self.room = min(ROOM, ALL // (2 * world.size) // LINE * LINE) if here.size == world.size else 0
        here.Free()
        if self.room:
            self._attach(MPI, world)

    def _attach(self, mpi: Any, world: Any) -> None:
        rank, size, numbers = world.rank, world.size, LINE * world.size
        try:
            self._window = mpi.Win.Allocate_shared(numbers + 2 * size * self.room if rank == 0 else 0, comm=world)
            memory: Any = self._window.Shared_query(0)[0]
            self._written = memoryview(memory)[:numbers].cast("q")[:: LINE // 8]  # how often each rank wrote
            self._sides = np.frombuffer(memory, np.uint8)[numbers:].reshape(2, size, self.room)
            self._window.Lock_all()
            self._written[rank] = 0
            self._window.Sync()
        except mpi.Exception:
            self.room = 0
        self.room = world.allreduce(self.room, mpi.MIN)
        self._rank, self._times = rank, 0
        self._others = [other for other in range(size) if other != rank]

    def write(self, message: np.ndarray) -> None:
        self._times += 1
        self._sides[self._times % 2, self._rank, : message.size] = message
        self._window.Sync()  # the message is in memory before the number says so
        self._written[self._rank] = self._times

    def is_full(self) -> bool:
        """Whether all have written."""
        written, times = self._written, self._times
        return all(written[other] >= times for other in self._others)

    def side(self) -> int:
        """The side to read from, once all have written."""
        self._window.Sync()
        return self._times % 2

    def read(self, into: np.ndarray) -> None:
        """The others' messages, each into its rank's row."""
        side = self.side()
        for other in self._others:
            into[other] = self._sides[side, other, : into.shape[1]]

    def places(self, array: np.ndarray) -> list[list[np.ndarray]]:
        """Every rank's message like `array`, for each side: this rank's is `array`, the others' are on the board."""
        rows = self._sides[:, :, : array.nbytes].view(array.dtype)
        return [
            [array if rank == self._rank else row.reshape(array.shape) for rank, row in enumerate(side)]
            for side in rows
        ]
