"""One experiment on several layouts: how fast, where the time goes, and whether all digests agree."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from lockstep.errors import FileFault, LockstepError, UsageError
from lockstep.experiment import Config, Layout, Mode, Watch, algorithm_name, checked, replace_experiment, to_toml
from lockstep.parallel.launch import end_with_parent, ourselves
from lockstep.run.interrupt import stopped_by_exception
from lockstep.run.metrics import read_metrics
from lockstep.run.plot import save_picture
from lockstep.run.timeline import FILE

WARM_UP = 3  # updates that are made but not measured: the first ones compile, and fill caches
UPDATES = 20  # that are measured, unless the user says how many steps
SHARES = ("collect", "communicate", "update", "other")

Receipts = list[str]  # digests, update by update


class Timing(NamedTuple):
    """What one run showed after its warm-up."""

    steps_per_second: float
    shares: dict[str, float]  # of the time between two updates, as rank 0 saw it
    receipts: Receipts


class Measured(NamedTuple):
    """A layout and its runs."""

    layout: Layout
    runs: list[Timing]

    @property
    def best(self) -> Timing:
        """What else goes on in a machine only slows a run down."""
        return max(self.runs, key=lambda run: run.steps_per_second)


class Bench(NamedTuple):
    config: Config
    measured: list[Measured]

    @property
    def base(self) -> Measured:
        """What speed-up is counted from: the first layout of the fewest processes."""
        return min(self.measured, key=lambda entry: entry.layout.nprocs)

    def speed_up(self, entry: Measured) -> float:
        return entry.best.steps_per_second / self.base.best.steps_per_second

    def efficiency(self, entry: Measured) -> float:
        return self.speed_up(entry) * self.base.layout.nprocs / entry.layout.nprocs

    @property
    def difference(self) -> str | None:
        """The first update whose digest is not that of the base, in words."""
        expected = self.base.runs[0].receipts
        found = [
            (update, str(entry.layout), theirs)
            for entry in self.measured
            for run in entry.runs
            for update, (ours, theirs) in enumerate(zip(expected, run.receipts, strict=True), start=1)
            if ours != theirs
        ]
        if not found:
            return None
        update, layout, digest = min(found)
        return f"update {update} differs: {self.base.layout} has digest {expected[update - 1]}, {layout} has {digest}."


VARIED = ("nprocs", "mode", "workers")  # what of a layout is compared


def layouts(nprocs: Sequence[int], modes: Sequence[Mode], workers: Sequence[int] = (0,)) -> list[Layout]:
    """All combinations; one process alone has nothing to send, so no mode."""
    found = [Layout(n, mode if n > 1 else "gather", k) for n in nprocs for mode in modes for k in workers]
    return list(dict.fromkeys(found))


def budgeted(config: Config, steps: int | None) -> Config:
    """With a budget that leaves something to measure after the warm-up, and nothing else done meanwhile."""
    batch = config.experiment.batch
    steps = (WARM_UP + UPDATES) * batch if steps is None else steps
    if steps <= WARM_UP * batch:
        raise UsageError(
            f"--steps {steps}: the first {WARM_UP} updates of {batch:,} steps are not measured."
            f" Give more than {WARM_UP * batch}."
        )
    watch = Watch(eval_every=0, checkpoint_every=2 * steps)
    return dataclasses.replace(replace_experiment(config, steps=steps), watch=watch)


def bench(config: Config, chosen: list[Layout], repeats: int, trace: Path | None) -> Bench:
    """Run every layout `repeats` times, taking turns. Timelines of the last turn are left in the directory `trace`."""
    watch = dataclasses.replace(config.watch, trace=trace is not None)
    configs = [checked(dataclasses.replace(config, layout=layout, watch=watch)) for layout in chosen]
    measured = [Measured(layout, []) for layout in chosen]
    with _scratch() as folder:
        for turn in range(repeats):
            for number, (settings, entry) in enumerate(zip(configs, measured, strict=True)):
                run = _train(settings, folder, f"{turn}-{number}")
                entry.runs.append(timing(read_metrics(run).rows))
                print(f"{entry.layout}: {entry.runs[-1].steps_per_second:,.0f} steps/s", file=sys.stderr)
                if trace is not None:
                    _keep(run / FILE, trace / trace_name(entry.layout))
    return Bench(config, measured)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A directory that is removed in the end, also when that is a signal."""
    with (
        stopped_by_exception(),
        tempfile.TemporaryDirectory(prefix="lockstep-bench-", ignore_cleanup_errors=True) as folder,
    ):
        yield Path(folder)


def _train(config: Config, folder: Path, name: str) -> Path:
    """A run in processes of its own, that end with this one."""
    file = folder / f"{name}.toml"
    file.write_text(to_toml(config))
    command = [*ourselves(), "train", str(file), "--logdir", str(folder), "--name", name, "--trust"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=end_with_parent)
    if done.returncode:
        failure = LockstepError(f"{config.layout}: the run ended with status {done.returncode}:\n{done.stderr.strip()}")
        failure.status = done.returncode if done.returncode > 0 else 1
        raise failure
    return folder / name


def timing(rows: list[dict[str, str]]) -> Timing:
    """From metrics.csv: the time from one update's row to the next, and what of it went where."""
    before, measured = rows[WARM_UP - 1], rows[WARM_UP:]
    seconds = float(rows[-1]["seconds"]) - float(before["seconds"])
    steps = int(rows[-1]["steps"]) - int(before["steps"])
    shares = {name: sum(float(row[f"time_{name}"]) for row in measured) / seconds for name in SHARES[:-1]}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    return Timing(steps / seconds, shares, [row["digest"] for row in rows])


def trace_name(layout: Layout) -> str:
    workers = [f"{layout.workers}-workers"] if layout.workers else []
    return "-".join([str(layout.nprocs), layout.mode, *workers]) + ".json"


def _keep(file: Path, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    except OSError as error:
        raise FileFault(f"'{place}' can't be written: {error.strerror or error}.") from error


def as_dict(result: Bench) -> dict[str, Any]:
    experiment = result.config.experiment
    entries = [
        {
            **{name: getattr(entry.layout, name) for name in VARIED},
            "steps_per_second": entry.best.steps_per_second,
            "runs": [run.steps_per_second for run in entry.runs],
            "speed_up": result.speed_up(entry),
            "efficiency": result.efficiency(entry),
            **entry.best.shares,
            "digest": entry.best.receipts[-1],
        }
        for entry in result.measured
    ]
    return {
        "env": experiment.env.id,
        "algo": algorithm_name(experiment.algo),
        "seed": experiment.seed,
        "steps": experiment.steps,
        "warm_up_updates": WARM_UP,
        "measured_updates": len(result.base.best.receipts) - WARM_UP,
        "cores": len(os.sched_getaffinity(0)),
        "layouts": entries,
        "difference": result.difference,
    }


def table(result: Bench) -> str:
    """For the screen; `as_dict` has the same numbers."""
    told = as_dict(result)
    head = [*VARIED, "steps/s", "speed-up", "efficiency", *SHARES, "digest"]
    lines = [head]
    for entry in told["layouts"]:
        numbers = [f"{entry['steps_per_second']:,.0f}", f"{entry['speed_up']:.2f}", f"{entry['efficiency']:.0%}"]
        shares = [f"{entry[share]:.0%}" for share in SHARES]
        lines.append([*(str(entry[name]) for name in VARIED), *numbers, *shares, entry["digest"][:12]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    turns = len(result.base.runs)
    best = f", the best of {turns} turns" if turns > 1 else ""
    return (
        f"{told['env']} with {told['algo']}, seed {told['seed']}, {told['steps']:,} steps, on {told['cores']} cores:"
        f" {told['measured_updates']} updates after {WARM_UP} of warm-up{best}\n\n{body}\n"
    )


def draw(result: Bench, out: Path) -> None:
    """Steps per second by layout, and where the time of a step goes."""
    labels = [str(entry.layout).replace(", ", "\n") for entry in result.measured]
    figure = Figure(figsize=(10, 2 + 0.6 * len(labels)), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [entry.best.steps_per_second for entry in result.measured]
    bars = left.barh(labels, rates, color="tab:gray")
    ratios = [result.speed_up(entry) for entry in result.measured]
    left.bar_label(bars, [f" {rate:,.0f} ({ratio:.2f} x)" for rate, ratio in zip(rates, ratios, strict=True)])
    left.set(xlabel="steps/s", title=result.config.experiment.env.id, xlim=(0, 1.5 * max(rates)))
    before = [0.0] * len(labels)
    for share in SHARES:
        cost = [1e6 * entry.best.shares[share] / entry.best.steps_per_second for entry in result.measured]
        right.barh(labels, cost, left=before, label=share)
        before = [start + width for start, width in zip(before, cost, strict=True)]
    right.set(xlabel="microseconds per step, on rank 0", title="where the time goes")
    figure.legend(loc="outside lower right", ncols=len(SHARES), frameon=False)
    for axes in (left, right):
        axes.invert_yaxis()
    save_picture(figure, out)
