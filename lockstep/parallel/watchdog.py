"""A rank that hangs is found: by itself while its interpreter runs, and otherwise by the ranks that wait for it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

GRACE_S = 5.0  # by how much the ranks that wait are more patient than the one that hangs with itself
ASKED, HERE = 1, 2  # tags of the roll call


class Watchdog:
    """What this rank does and since when. A thread speaks up where it takes too long."""

    def __init__(self) -> None:
        self.limit_s = 0.0
        self.doing = "starting"
        self._since = time.monotonic()
        self._waiting = 0

    def beat(self, doing: str | None = None) -> None:
        self._since = time.monotonic()
        if doing is not None:
            self.doing = doing

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it this rank does nothing: others do, and are watched."""
        self._waiting += 1
        try:
            yield
        finally:
            self.beat()
            self._waiting -= 1

    @contextlib.contextmanager
    def watching(self, limit_s: float, stuck: Callable[[str], None]) -> Iterator[None]:
        """Within it, `stuck` is called with what was found if a beat fails to come for `limit_s`; 0: never."""
        self.limit_s = limit_s
        over = threading.Event()
        watched = threading.get_ident()

        def watch() -> None:
            while not over.wait(min(limit_s / 4, 1.0)):
                silent_s = time.monotonic() - self._since
                if not self._waiting and silent_s > limit_s:
                    stuck(self._found(silent_s, watched))
                    return

        self.beat()
        if limit_s:
            threading.Thread(target=watch, name="lockstep watchdog", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            self.limit_s = 0.0

    def _found(self, silent_s: float, thread: int) -> str:
        stack = "".join(traceback.format_stack(sys._current_frames()[thread]))
        return (
            f"hangs: {silent_s:.0f} s without a step while {self.doing}. The other ranks are ended with it."
            f" If it only needs longer, raise layout.watchdog_s. It is at:\n{stack}"
        )


class RollCall:
    """Ranks that wait ask all others whether they wait too: one that doesn't answer is stuck or gone."""

    def __init__(self, news: Any) -> None:
        self._news = news
        self._others = set(range(news.size)) - {news.rank}
        self._asked_at: float | None = None
        self._here: set[int] = set()
        self._sent: list[Any] = []  # on their way, so still needed

    def attend(self, is_overdue: bool) -> str | None:
        """Answer who asks, and ask if this rank's wait `is_overdue`. The verdict, when there is one."""
        for rank in self._heard(ASKED):
            self._send(rank, HERE)
        self._here |= self._heard(HERE)
        if not is_overdue:
            self._asked_at, self._here = None, set()
        elif self._asked_at is None:
            self._asked_at = time.monotonic()
            for rank in self._others:
                self._send(rank, ASKED)
        elif time.monotonic() - self._asked_at > GRACE_S:
            return self._verdict()
        return None

    def _verdict(self) -> str:
        missing = sorted(self._others - self._here)
        if not missing:
            return "all ranks wait for each other. This must not happen."
        names = ", ".join(map(str, missing))
        return f"rank {names} does not answer: its process is stuck or stopped, or its host is gone."

    def _send(self, rank: int, tag: int) -> None:
        self._sent.append(self._news.isend(None, rank, tag))

    def _heard(self, tag: int) -> set[int]:
        from mpi4py import MPI

        senders, state = set(), MPI.Status()
        while self._news.iprobe(tag=tag, status=state):
            self._news.recv(source=state.source, tag=tag)
            senders.add(state.source)
        return senders
