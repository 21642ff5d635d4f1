"""When every rank did what: spans in Chrome's trace format, which ui.perfetto.dev opens."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from lockstep.errors import FileFault
from lockstep.parallel.comm import Comm, Solo
from lockstep.run.directory import write_file

FILE = "trace.json"
F = TypeVar("F", bound=Callable[..., Any])


class Span(NamedTuple):
    """Something that was done, in nanoseconds of CLOCK_MONOTONIC, which all processes of a host share."""

    name: str
    began: int
    ended: int


class Timeline:
    """The spans of one rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def around(self, name: str, work: F) -> F:
        """`work`, each call of it a span."""

        @functools.wraps(work)
        def timed(*arguments: Any) -> Any:
            began = time.monotonic_ns()
            try:
                return work(*arguments)
            finally:
                self.spans.append(Span(name, began, time.monotonic_ns()))

        return cast(F, timed)

    def over(self, comm: Comm) -> Comm:
        """`comm`, each message of it a span. One process alone sends none."""
        return comm if isinstance(comm, Solo) else Timed(comm, self)

    def write(self, run: Path, comm: Comm) -> None:
        """All ranks' spans, by the root, in one file."""
        ranks = comm.share(self.spans)
        comm.on_root(lambda: _write(run / FILE, trace(ranks)))


class Untimed:
    """The timeline of a run that keeps none: everything stays what it is."""

    def around(self, name: str, work: F) -> F:
        return work

    def over(self, comm: Comm) -> Comm:
        return comm

    def write(self, run: Path, comm: Comm) -> None:
        pass


class Timed:
    """A `Comm` whose messages are spans. The root's work is inside its span of `on_root`; the others wait in theirs."""

    def __init__(self, comm: Comm, timeline: Timeline) -> None:
        self.rank, self.size, self._comm, self._timeline = comm.rank, comm.size, comm, timeline
        self.gather = timeline.around("gather", comm.gather)
        self.broadcast = timeline.around("broadcast", comm.broadcast)
        self.share = timeline.around("share", comm.share)
        self.on_root = timeline.around("on_root", comm.on_root)
        self.fail, self.beat, self.watched = comm.fail, comm.beat, comm.watched

    @property
    def seconds(self) -> float:
        return self._comm.seconds

    def gathering(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        return self._timeline.around("allgather", self._comm.gathering(array, out))

    def adding(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        return self._timeline.around("add", self._comm.adding(array, out))


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        write_file(file, json.dumps(content).encode())
    except OSError as error:
        raise FileFault(f"'{file}' can't be written: {error.strerror or error}. The run itself is whole.") from error


def trace(ranks: list[list[Span]]) -> dict[str, Any]:
    """Chrome's format: a process per rank, complete events, microseconds since the first of them."""
    origin = min((span.began for spans in ranks for span in spans), default=0)
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in range(len(ranks))
    ]
    for rank, spans in enumerate(ranks):
        for span in sorted(spans, key=lambda span: (span.began, -span.ended)):
            times = {"ts": (span.began - origin) / 1000, "dur": (span.ended - span.began) / 1000}
            events.append({"name": span.name, "ph": "X", "pid": rank, "tid": 0, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
