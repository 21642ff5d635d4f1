"""What a run tells: metrics.csv, TensorBoard events, and a line on the screen. Observers never change a run."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from lockstep import tree
from lockstep.core import Learner, Trajectory
from lockstep.errors import FileFault
from lockstep.experiment import Experiment, algorithm_name
from lockstep.run import directory
from lockstep.run.metrics import MetricsFile, Row
from lockstep.run.progress import Progress

HISTOGRAM_BINS = 64
POINTS = 1000  # of a curve, at most: TensorBoard shows no more; metrics.csv has every update
FLUSH_S = 2.0


class Events:
    """TensorBoard: a scalar for each number of a row, histograms of weights, actions and returns.

    Written in this thread, so that a full disk is an error here and not a writer that never answers.
    """

    def __init__(self, run: Path, budget: int, resumed_at: int | None) -> None:
        self._writer = EventsWriter(str(run / "events"))
        self._spacing = max(budget // POINTS, 1)
        self._newest, self._flushed = 0, -math.inf  # the last point's place, in spacings; when all was on disk
        if resumed_at is not None:  # points after the checkpoint are hidden
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=resumed_at + 1, session_log=start, wall_time=time.time()))

    def scalars(self, row: Row) -> None:
        """A point of every curve, unless the one before is very near; an evaluation is never left out."""
        place = int(row["steps"]) // self._spacing
        if place == self._newest and math.isnan(float(row["eval_return"])):
            return
        self._newest = place
        together = Summary()
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value) and name not in ("update", "steps"):
                together.value.add(tag=_tag(name), simple_value=value)
        self._add(together, int(row["steps"]))
        if time.monotonic() - self._flushed > FLUSH_S:  # it waits for the disk
            self._writer.flush()
            self._flushed = time.monotonic()

    def histograms(self, steps: int, learner: Learner, trajectory: Trajectory, progress: Progress) -> None:
        named = {f"weights/{name}": np.asarray(leaf) for name, leaf in tree.paths(learner.params).items()}
        actions = trajectory.action
        columns = actions.reshape(-1, actions.shape[-1]).T if actions.ndim > 3 else [actions.reshape(-1)]
        named |= {f"actions/{i}": column for i, column in enumerate(columns)}
        if progress.recent:
            named["returns"] = np.asarray([total for total, _ in progress.recent])
        for name, values in named.items():
            self._add(summary.histogram(name, values.ravel(), bins=HISTOGRAM_BINS), steps)

    def _add(self, what: Any, steps: int) -> None:
        self._writer.write_event(Event(step=steps, summary=what, wall_time=time.time()))

    def close(self) -> None:
        self._writer.close()


def _tag(name: str) -> str:
    """Groups as TensorBoard shows them."""
    if name.startswith("time_") or name in ("seconds", "steps_per_second"):
        return f"time/{name.removeprefix('time_')}"
    if name.startswith(("return_", "length_", "eval_")) or name == "episodes":
        return f"episode/{name}"
    return f"learn/{name}"


def _fitted(parts: dict[str, str], columns: int) -> str:
    """The parts in one line of so many columns at most; what matters least is left out first."""
    line = "  ".join(filter(None, parts.values()))
    if len(line) <= columns:
        return line
    kept = {name: " ".join(part.split()) for name, part in parts.items() if part}
    for name in ("episodes", "pace", "left", "return"):
        if len("  ".join(kept.values())) > columns:
            kept.pop(name, None)
    return "  ".join(kept.values())[:columns]


class Screen:
    """One live line on a terminal; a plain line now and then elsewhere."""

    def __init__(self, budget: int, out: TextIO | None = None) -> None:
        self._budget, self._out = budget, out or sys.stderr
        self._live = self._out.isatty()
        self._shown = 0.0
        self._first: tuple[float, int] | None = None  # when the first update was done, and the steps by then

    def show(self, progress: Progress, steps_per_second: float) -> None:
        now = time.monotonic()
        self._first = self._first or (now, progress.steps)
        done = progress.steps >= self._budget
        if self._shown and not done and now - self._shown < (0.2 if self._live else 10.0):
            return
        self._shown = now
        text = self._line(progress, steps_per_second, self._left(now, progress.steps))
        self._out.write(f"\r\x1b[2K{text}" if self._live else f"{text}\n")
        self._out.flush()

    def _line(self, progress: Progress, steps_per_second: float, left: str) -> str:
        mean = progress.returns[0]
        parts = {
            "steps": f"{progress.steps:>10,} / {self._budget:,} steps",
            "pace": f"{steps_per_second:>7,.0f} steps/s",
            "return": f"return {'-':>9}" if math.isnan(mean) else f"return {mean:>9.2f}",
            "episodes": f"{progress.episodes} episodes",
            "left": f"ETA {left}" if left else "",
        }
        return _fitted(parts, self._columns() - 1 if self._live else sys.maxsize)

    def _columns(self) -> int:
        """Of the terminal that is written to; a line that it must wrap would not be written over by the next."""
        with contextlib.suppress(OSError):
            if columns := os.get_terminal_size(self._out.fileno()).columns:
                return columns
        return shutil.get_terminal_size().columns

    def _left(self, now: float, steps: int) -> str:
        """Time to the end at the pace since the first update, which took longer: it compiled the program."""
        assert self._first is not None
        since, already = self._first
        if steps == already:
            return "" if steps < self._budget else "0:00:00"
        whole = int(max(self._budget - steps, 0) * (now - since) / (steps - already))
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"

    def say(self, message: str) -> None:
        """A message on a line of its own."""
        self._out.write(f"\r\x1b[2K{message}\n" if self._live else f"{message}\n")
        self._out.flush()

    def close(self) -> None:
        if self._live and self._shown:
            self._out.write("\n")
            self._out.flush()


class Update(NamedTuple):
    """What there is to tell of an update."""

    progress: Progress  # after it
    steps: int  # that were made for it
    metrics: dict[str, float]  # the algorithm's, and the times
    digest: str
    score: float | None  # of the evaluation, where one was due
    learner: Learner
    trajectory: Trajectory  # of this rank's lanes

    @property
    def steps_per_second(self) -> float:
        return self.steps / sum(self.metrics[f"time_{name}"] for name in ("collect", "communicate", "update"))


class Observer(Protocol):
    """What the loop tells of a run, once per update on every rank."""

    def say(self, message: str) -> None:
        """A message to the user."""

    def report(self, update: Update) -> None:
        """An update was made."""

    def __enter__(self) -> Observer: ...

    def __exit__(self, *_: object) -> None: ...


class Reporter:
    """All of a run's observers, told once per update."""

    def __init__(self, path: Path, experiment: Experiment, start: Progress, resumed: bool) -> None:
        self._path = path
        self._screen = Screen(experiment.steps)
        try:
            self._file = MetricsFile(path, start.updates, self.warn)
            self._events = Events(path, experiment.steps, start.steps if resumed else None)
        except OSError as error:
            raise FileFault(f"nothing can be reported in '{path}': {error.strerror or error}.") from error
        doing = f"resuming at {start.steps:,} steps" if start.steps else "training"
        algorithm = algorithm_name(experiment.algo)
        self.say(f"{doing}: {experiment.env.id} with {algorithm}, seed {experiment.seed}, in {path}")

    @staticmethod
    def warn(message: str) -> None:
        print(f"lockstep: {message}", file=sys.stderr)

    def say(self, message: str) -> None:
        self._screen.say(message)

    def report(self, update: Update) -> None:
        progress, score = update.progress, update.score
        mean, std, length = progress.returns
        row: Row = {
            "update": progress.updates,
            "steps": progress.steps,
            "seconds": progress.seconds,
            "steps_per_second": update.steps_per_second,
            "episodes": progress.episodes,
            "return_mean": mean,
            "return_std": std,
            "length_mean": length,
            "eval_return": math.nan if score is None else score,
            "digest": update.digest,
            **update.metrics,
        }
        try:
            self._file.write(row)
            self._events.scalars(row)
            if score is not None:
                self._events.histograms(progress.steps, update.learner, update.trajectory, progress)
        except OSError as error:
            directory.check_not_gone(self._path)
            raise FileFault(
                f"update {progress.updates} could not be reported in '{self._path}': {error.strerror or error}."
                " The run's checkpoints are as they were; resume it when there is room."
            ) from error
        if score is not None:
            self.say(f"{progress.steps:>10,} steps  evaluation {score:.2f}")
        self._screen.show(progress, update.steps_per_second)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        for observer in (self._screen, self._events, self._file):
            with contextlib.suppress(OSError):  # what could not be written was told when it happened
                observer.close()


class Silent:
    """The reporter of a rank that leaves the talking to the root."""

    def __init__(self, path: Path, experiment: Experiment, start: Progress, resumed: bool) -> None:
        pass

    def say(self, message: str) -> None:
        pass

    def report(self, update: Update) -> None:
        pass

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass
