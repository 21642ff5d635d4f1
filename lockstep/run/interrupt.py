"""Ctrl-C and SIGTERM stop a run after its update; a second Ctrl-C stops it at once."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A run was stopped by a signal, with its checkpoint written."""

    def __init__(self, number: int, run: Path) -> None:
        self.signal, self.status = signal.Signals(number).name, 128 + number
        super().__init__(f"stopped by {self.signal}; continue with: lockstep resume {shlex.quote(str(run))}")


class Interrupt:
    """While it is entered, `number` is the signal that asked to stop, or None.

    One that is entered within another knows what the other was asked. This module imports no JAX, which takes a
    second: signals are in its hands before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._before = _handle({signal.SIGINT: self._asked, signal.SIGTERM: self._asked})
        outer = getattr(self._before.get(signal.SIGINT), "__self__", None)
        self.number = outer.number if isinstance(outer, Interrupt) else None
        return self

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            from lockstep import foreign

            foreign.raise_from_signal(KeyboardInterrupt(), frame)
            return
        self.number = number
        os.write(2, b"\nlockstep: stopping after this update; Ctrl-C again stops at once\n")

    def __exit__(self, *_: object) -> None:
        _handle(self._before)


@contextlib.contextmanager
def as_pythons_own() -> Iterator[None]:
    """Ctrl-C as Python's own exception, in our words: a script that it ends has the status that shells look for."""
    try:
        yield
    except Interrupted as stopped:
        raise (KeyboardInterrupt(str(stopped)) if stopped.signal == "SIGINT" else stopped) from None


@contextlib.contextmanager
def stopped_by_exception() -> Iterator[None]:
    """Within it signals raise exceptions, for work that has something to clean up."""
    before = _handle({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _exit})
    try:
        yield
    finally:
        _handle(before)


def _handle(handlers: Mapping[int, Any]) -> dict[int, Any]:
    """Let these answer to signals; those that they replace. Only the main thread hears any."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
