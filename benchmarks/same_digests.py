"""Whether this code gives the digests of another commit: `python -m benchmarks.same_digests REV [--table everything]`.

Both train the experiments of `tests/laws/table.py`, each with its own code in processes of its own, on this machine and
now: digests differ between kinds of CPU, so none that was written down elsewhere would do. Every row of metrics.csv is
compared. Exit status 1 where one differs or is missing, but for the algorithms named with `--but`.

`--start ROUNDS` measures how long both take from the command to the end of the first update instead, in turns.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
FIRST_UPDATE = ("train", "pendulum", "--steps", "1")


def other(rev: str, folder: Path) -> Path:
    """The other commit's code."""
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(HERE), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", rev], check=True)
    return folder


def python(code: Path, *arguments: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run([sys.executable, *arguments], cwd=code, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{code}: {' '.join(arguments)}: {done.stderr}")


def receipts(code: Path, logdir: Path, table: str) -> dict[str, list[str]]:
    """The digests of every update, by experiment."""
    python(code, "-m", "tests.laws.job", "train", str(logdir), table, "gather-0")
    return {file.parent.name: _digests(file) for file in sorted(logdir.glob("*/*/metrics.csv"))}


def _digests(file: Path) -> list[str]:
    with file.open(newline="") as lines:
        return [row["digest"] for row in csv.DictReader(lines)]


def compare(before: dict[str, list[str]], now: dict[str, list[str]], exempt: list[str]) -> int:
    """Print a line for each experiment; how many differ that should not."""
    unexpected = 0
    for name in sorted(before.keys() | now.keys()):
        one, two = before.get(name, []), now.get(name, [])
        same = one == two
        excused = any(name.endswith(f"-{algo}") for algo in exempt)
        unexpected += not (same or excused)
        last = [digests[-1][:12] if digests else "none" for digests in (one, two)]
        print(f"{name:<36} {last[0]:<12}  {last[1]:<12}  {'equal' if same else 'DIFFERS'}{' (exempt)' * excused}")
    print(f"{len(before.keys() | now.keys())} experiments, {unexpected} differ that should not")
    return unexpected


def start_up(codes: list[Path], folder: Path, rounds: int) -> None:
    """Seconds of both, in turns; the first round fills the caches and does not count."""
    seconds: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for times, code in zip(seconds, codes, strict=True):
            began = time.perf_counter()
            python(code, "-m", "lockstep", *FIRST_UPDATE, "--logdir", str(folder / "start"))
            if turn:
                times.append(time.perf_counter() - began)
    for name, times in zip(("before", "now"), seconds, strict=True):
        print(f"{name:<7} median {statistics.median(times):.2f} s, least {min(times):.2f} s, of {rounds} rounds")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("rev", help="the other commit")
    options.add_argument("--table", default="some", choices=("few", "some", "everything"))
    options.add_argument("--but", default="", help="algorithms whose digests are meant to change: trpo,npg")
    options.add_argument("--start", type=int, metavar="ROUNDS", help="measure starting instead")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-digests-") as scratch:
        folder = Path(scratch)
        before = other(given.rev, folder / "code")
        if given.start:
            start_up([before, HERE], folder, given.start)
            return 0
        found = [receipts(code, folder / name, given.table) for code, name in ((before, "before"), (HERE, "now"))]
        return min(1, compare(*found, [algo for algo in given.but.split(",") if algo]))


if __name__ == "__main__":
    sys.exit(main())
