"""Learning curves: runs that differ only in seed are one curve, with an interval for their mean."""

from __future__ import annotations

import sys
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lockstep.errors import FileFault, UsageError
from lockstep.experiment import algorithm_name, to_dict
from lockstep.run import directory
from lockstep.run.metrics import read_metrics

Curve = tuple[np.ndarray, np.ndarray]  # steps, values
NOT_DRAWN = ("digest", "seal")
POINTS = 200  # of a drawn curve
RESAMPLES = 2000  # of the bootstrap


def plot(runs: list[Path], out: Path, column: str, trust: bool = False) -> None:
    """Draw `column` of every run against steps into a PNG or SVG file."""
    check_picture(out)
    figure = Figure(figsize=(8, 5), layout="constrained")  # not pyplot's: a notebook's own pictures stay as they are
    axes = figure.subplots()
    for label, curves in _groups(runs, column, trust).items():
        steps, mean, low, high = summarize(curves)
        (line,) = axes.plot(steps, mean, label=f"{label} ({len(curves)} seed{'s' * (len(curves) > 1)})")
        if len(curves) > 1:
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="environment steps", ylabel=column)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_picture(figure, out)


def check_picture(out: Path) -> None:
    if out.suffix not in (".png", ".svg"):
        raise UsageError(f"--out {out}: a picture is .png or .svg. Use: --out {out.with_suffix('.png')}")


def save_picture(figure: Figure, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise FileFault(f"'{out}' can't be written: {error.strerror}.") from error


def summarize(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, the mean over curves, and a bootstrapped 95 % interval of it, where all curves have values."""
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    steps = np.linspace(first, max(first, last), POINTS)
    values = np.stack([np.interp(steps, *curve) for curve in curves])
    drawn = np.random.default_rng(0).integers(len(curves), size=(RESAMPLES, len(curves)))
    low, high = np.percentile(values[drawn].mean(1), [2.5, 97.5], axis=0)
    return steps, values.mean(0), low, high


def _groups(runs: list[Path], column: str, trust: bool = False) -> dict[str, list[Curve]]:
    """Curves by experiment, seed aside. A label is environment and algorithm, and a run's name where two share it."""
    found: dict[str, tuple[str, list[Curve]]] = {}
    for run in runs:
        experiment = directory.read_config(run, trust, played=False).experiment
        what = repr({name: value for name, value in to_dict(experiment).items() if name != "seed"})
        label = f"{experiment.env.id} {algorithm_name(experiment.algo)}"
        if what not in found and any(label == other for other, _ in found.values()):
            label = f"{label}, {run.name}"
        found.setdefault(what, (label, []))[1].append(_curve(run, column))
    return dict(found.values())


def _curve(run: Path, column: str) -> Curve:
    found = read_metrics(run)
    rows = found.rows
    if found.damage:
        print(f"lockstep: {found.notes(run)[0]} Its other rows are drawn.", file=sys.stderr)
    if not rows:
        raise UsageError(f"'{run}' has no metrics to draw yet.")
    if column not in rows[0]:
        known = [name for name in rows[0] if name not in NOT_DRAWN]
        near = sorted(known, key=lambda name: (column not in name, -SequenceMatcher(None, column, name).ratio()))
        raise UsageError(
            f"'{run}' has no column '{column}'. It has: {', '.join(near)}. Use: lockstep plot {run} --column {near[0]}"
        )
    try:
        points = [(int(row["steps"]), float(row[column])) for row in rows if row[column]]
    except ValueError as error:
        raise UsageError(f"column '{column}' of '{run}' does not hold numbers.") from error
    if not points:
        raise UsageError(f"'{run}' has no value of '{column}' yet.")
    steps, values = zip(*points, strict=True)
    return np.asarray(steps, float), np.asarray(values, float)
