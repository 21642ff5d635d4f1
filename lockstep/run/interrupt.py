"""Ctrl-C and SIGTERM stop a run after its update; a second Ctrl-C stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from lockstep import foreign


class Interrupted(Exception):
    """A run was stopped by a signal, with its checkpoint written."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Interrupt:
    """While it is entered, `number` is the signal that asked to stop, or None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._asked) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            foreign.raise_from_signal(KeyboardInterrupt(), frame)
            return
        self.number = number
        os.write(2, b"\nlockstep: stopping after this update; Ctrl-C again stops at once\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
