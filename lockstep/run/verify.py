"""Re-run a slice of a run, on this or another layout, and compare it digest by digest with what the run left behind.

Nothing is written to the run directory and its lock is not asked for: a run can be verified while it goes on.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from lockstep import names, tree
from lockstep.errors import Differs, FileFault, UsageError
from lockstep.experiment import Config, Layout, Watch, checked
from lockstep.parallel.comm import Comm
from lockstep.run import checkpoint, directory, machine
from lockstep.run.checkpoint import Checkpoint, Damaged, refuse_another_experiment
from lockstep.run.interrupt import stopped_by_exception
from lockstep.run.metrics import Metrics, describe, read_metrics
from lockstep.run.report import Screen, Update
from lockstep.run.train import Start, had_another_schedule, rerun

UNWATCHED = Watch(eval_every=0, checkpoint_every=10**15)


class Slice(NamedTuple):
    """Updates to re-run, both ends included. None: as far as the run's checkpoints and receipts go."""

    first: int | None = None
    last: int | None = None


class Receipt(NamedTuple):
    """A row of metrics.csv."""

    steps: int
    digest: str


class Evidence(NamedTuple):
    """What a run left behind of a slice, read and checked."""

    config: Config
    first: int
    last: int
    receipts: dict[int, Receipt]  # by update
    kept: list[tuple[Path, Checkpoint]]  # oldest first, from the newest before the first update
    newest: list[Checkpoint]  # the run's newest, if it has one
    notes: list[str]  # on its metrics.csv


class Noted(NamedTuple):
    """A digest that the run left behind."""

    where: str
    digest: str


class Work(NamedTuple):
    """What is re-run and what it must give."""

    config: Config
    start: Start
    first: int
    last: int
    checkpoints: int  # that were read and are whole
    noted: dict[int, list[Noted]]  # by update
    doubts: str  # why bits may differ without anything being wrong
    notes: list[str]


def verify(run: Path, layout: Layout, wanted: Slice, comm: Comm, trust: bool = False) -> str:
    """What was found equal, in words; Differs names the first update that is not."""
    for name in comm.on_root(lambda: directory.modules(run, trust)):
        names.load(name)
    work = comm.on_root(lambda: _work(evidence(run, layout, wanted)))
    comparison = Comparison(work, comm.rank == 0)
    comparison.begin()
    with stopped_by_exception(), tempfile.TemporaryDirectory() as scratch:
        rerun(Path(scratch), work.config, work.start, lambda *_: comparison, comm)
    count = work.last - work.first + 1
    return f"updates {work.first} to {work.last}: {count} digests equal, {work.checkpoints} checkpoints intact"


def evidence(run: Path, layout: Layout, wanted: Slice) -> Evidence:
    """Everything that is needed of the run; what is wrong with it is named."""
    config = checked(dataclasses.replace(directory.read_config(run), layout=layout, watch=UNWATCHED))
    listed = checkpoint.listed(run)  # before the receipts, which a run writes first
    metrics = read_metrics(run)
    receipts = _receipts(run, metrics)
    updates = {0: 0} | {receipt.steps: update for update, receipt in receipts.items()}
    end = sys.maxsize if wanted.last is None else wanted.last + 1
    _refuse_damage(run, metrics, range(max(receipts) + 1, end))
    strangers = [path.name for path in listed if _steps(path) not in updates]
    last = _last(run, wanted, metrics, strangers)
    at = {path: updates[_steps(path)] for path in listed if updates.get(_steps(path), last + 1) <= last}
    oldest = min((update for update in at.values() if update < last), default=0)
    first = oldest + 1 if wanted.first is None else max(wanted.first, 1)
    begin = max((update for update in at.values() if update < first), default=0)
    _refuse_damage(run, metrics, range(first, last + 1))
    _refuse_gaps(run, receipts, range(first, last + 1))
    kept = []
    for path, update in at.items():
        if update >= begin:
            try:
                kept.append((path, checkpoint.read(path)))
            except Damaged as error:
                if not path.exists():  # the run went on, and keeps newer ones
                    return evidence(run, layout, wanted)
                raise Damaged(f"update {update}, {_steps(path):,} steps: {error}") from error
            refuse_another_experiment(run, config, *kept[-1])
    return Evidence(config, first, last, receipts, kept, _newest(run), metrics.notes(run))


def _newest(run: Path) -> list[Checkpoint]:
    try:
        return [checkpoint.newest(run)[1]]
    except FileFault:
        return []


def _steps(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _receipts(run: Path, metrics: Metrics) -> dict[int, Receipt]:
    if metrics.damage and not metrics.rows:
        raise FileFault(metrics.notes(run)[0])
    if not metrics.rows:
        raise UsageError(f"'{run}' has no receipts to verify yet.")
    return {int(row["update"]): Receipt(int(row["steps"]), row["digest"]) for row in metrics.rows}


def _refuse_damage(run: Path, metrics: Metrics, updates: range) -> None:
    """Rows that were changed are no receipts. What stands before or after them can be verified."""
    if damage := [place for place in metrics.damage if place.update in updates]:
        first, last = damage[0].update, damage[-1].update
        rest = f":{first - 1}" if str(first - 1) in {row["update"] for row in metrics.rows} else f"{last + 1}:"
        told = f"'{run / directory.METRICS}' is damaged in {describe(damage)}."
        raise FileFault(f"{told} Verify other rows with --updates {rest}")


def _last(run: Path, wanted: Slice, metrics: Metrics, strangers: list[str]) -> int:
    """The update to end with. That some checkpoints have no receipt is not passed over in silence."""
    known = [int(row["update"]) for row in metrics.rows]
    newest = max(known)
    if wanted.last is None and strangers:
        raise FileFault(
            f"'{run / directory.METRICS}' has no receipt of checkpoint {strangers[0]}: it was cut off or altered."
            f"{f' It is damaged in {describe(metrics.damage)}.' if metrics.damage else ''}"
            f" Verify what is there with --updates :{newest}."
        )
    last = newest if wanted.last is None else wanted.last
    if not max(wanted.first or 0, 1) <= last <= newest:
        raise UsageError(f"--updates: '{run}' has receipts of updates {min(known)} to {newest}.")
    return last


def _refuse_gaps(run: Path, receipts: dict[int, Receipt], updates: range) -> None:
    missing = next((update for update in updates if update not in receipts), None)
    if missing is not None:
        raise FileFault(f"'{run / directory.METRICS}' has no receipt of update {missing}.")


def _work(found: Evidence) -> Work:
    start = Start(end=found.receipts[found.last].steps)
    if found.kept and found.kept[0][1].progress.updates < found.first:
        start = start._replace(progress=found.kept[0][1].progress, saved=found.kept[0])
    noted: dict[int, list[Noted]] = {}
    for update in (start.progress.updates, *range(found.first, found.last + 1)):
        if update in found.receipts:
            noted[update] = [Noted("its receipt in metrics.csv", found.receipts[update].digest)]
    for path, saved in found.kept:
        held = Noted(f"checkpoint {path.name}", tree.digest_of_paths(saved.learner))
        noted.setdefault(saved.progress.updates, []).append(held)
    return Work(found.config, start, found.first, found.last, len(found.kept), noted, _doubts(found), found.notes)


def _doubts(found: Evidence) -> str:
    here = machine.describe(found.config.experiment.env).stored
    witnesses = [*(saved for _, saved in found.kept), *found.newest]
    changes = {change: None for saved in witnesses for change in machine.differences(saved.machine, here)}
    doubts = [f"bits may differ from the run's: {', '.join(changes)}."] if changes else []
    if any(not saved.exact or had_another_schedule(saved, found.config.experiment) for saved in witnesses):
        doubts.append("the run was once continued where bits may differ: on another machine or with another budget.")
    return " ".join(doubts)


class Comparison:
    """The observer that holds every digest against those of the run. All ranks have the same, and stop together."""

    def __init__(self, work: Work, is_root: bool) -> None:
        self._work = work
        self._screen = Screen(work.start.end or 0, None if is_root else io.StringIO())

    def begin(self) -> None:
        """What can be compared before anything is computed."""
        start, layout = self._work.start, self._work.config.layout
        origin = "the beginning" if start.saved is None else f"checkpoint {start.saved[0].name}"
        self.say(f"re-running updates {start.progress.updates + 1} to {self._work.last} from {origin}, on {layout}")
        if self._work.doubts:
            self.say(f"lockstep: {self._work.doubts}")
        for note in self._work.notes:
            self.say(f"lockstep: {note}")
        for held in self._work.noted.get(start.progress.updates, [])[-1:]:
            self._compare(start.progress.updates, f"{held.where} holds", held.digest)

    def say(self, message: str) -> None:
        self._screen.say(message)

    def report(self, update: Update) -> None:
        self._compare(update.progress.updates, "computed was", update.digest)
        self._screen.show(update.progress, update.steps_per_second)

    def _compare(self, update: int, how: str, digest: str) -> None:
        for noted in self._work.noted.get(update, []):
            if noted.digest != digest:
                doubts = f"\n{self._work.doubts}" if self._work.doubts else ""
                raise Differs(f"update {update} differs: {noted.where} is {noted.digest}, {how} {digest}.{doubts}")

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.close()
