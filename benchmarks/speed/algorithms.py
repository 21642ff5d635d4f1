"""The other algorithms' speed: `python -m benchmarks.speed.algorithms --peer PYTHON`, one that has sb3-contrib.

Contenders take turns; ratios are of one round, and their median counts. With --write the tables go to
benchmarks/speed-algorithms.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import NamedTuple

from benchmarks.speed.__main__ import CHEETAH, HERE, measure, ratio


class Pair(NamedTuple):
    """What is measured beside what."""

    label: str
    work: str  # of ours.py
    layout: tuple[str, str]  # processes and mode
    peer: tuple[str, ...]  # arguments of sb3.py
    bar: float


PAIRS = (
    Pair("TRPO, 1 x 2048, one process", "trpo-1x2048", ("1", "gather"), ("trpo", "1", "2048"), 3.5),
    Pair("TRPO, 8 x 256, 2 ranks, gather", "trpo-8x256", ("2", "gather"), ("trpo", "8", "256"), 3.0),
    Pair("A2C, 8 x 5, one process", "a2c-8x5", ("1", "gather"), ("a2c", "8", "5"), 2.0),
)
SAME_BATCH = ("a2c-8x256", "acktr-8x256")


class Ours(NamedTuple):
    """One run: milliseconds of an update at best, and steps/s."""

    collect: float
    communicate: float
    update: float
    rest: float
    mean_update: float  # not at best
    rate: float


def ours(work: str, nprocs: str, mode: str) -> Ours:
    profile, rate = measure(sys.executable, "ours.py", work, CHEETAH, nprocs, mode)
    return Ours(*(float(number) for number in [*profile.split(), rate]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peer", required=True, help="a Python that has sb3-contrib")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    runs: dict[str, list[Ours]] = {}
    peers: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for pair in PAIRS:
            runs.setdefault(pair.label, []).append(ours(pair.work, *pair.layout))
            peers.setdefault(pair.label, []).append(float(measure(given.peer, "sb3.py", *pair.peer)[-1]))
        for work in SAME_BATCH:
            runs.setdefault(work, []).append(ours(work, "1", "gather"))
    table = report(runs, peers)
    print(table)
    if given.write:
        (HERE.parent / "speed-algorithms.md").write_text(table)


def report(runs: dict[str, list[Ours]], peers: dict[str, list[float]]) -> str:
    rows, profiles = [], []
    for pair in PAIRS:
        mine, theirs = [run.rate for run in runs[pair.label]], peers[pair.label]
        times = ratio(mine, theirs)
        every = [", ".join(f"{value:,.0f}" for value in values) for values in (mine, theirs)]
        verdict = "met" if times >= pair.bar else "**missed**"
        rows.append(f"| {pair.label} | {every[0]} | {every[1]} | **{times:.1f} x** | {pair.bar} x | {verdict} |")
        profiles.append(profile(pair.label, runs[pair.label]))
    a2c, acktr = (runs[work] for work in SAME_BATCH)
    cost = ratio([run.mean_update for run in acktr], [run.mean_update for run in a2c])
    means = [", ".join(f"{run.mean_update:.1f}" for run in mine) for mine in (acktr, a2c)]
    return f"""# The other algorithms' speed, side by side

End to end on {CHEETAH}, 64x64 tanh, beside sb3-contrib's TRPO and Stable-Baselines3's A2C at their defaults
(DummyVecEnv, one thread). Contenders took turns in one run; steps/s of every round; the ratio is the median over rounds
of ours against theirs in the same round. {platform.machine()}, {os.cpu_count()} cores.

| work | lockstep | the peer | ratio | bar | |
|---|---|---|---|---|---|
{chr(10).join(rows)}

Where the time of one update goes, in milliseconds at best:

| work | collecting | communicating | updating | the rest |
|---|---|---|---|---|
{chr(10).join(profiles)}

An update of A2C makes 40 steps: five calls of MuJoCo for all eight environments, shared by two threads as by default
in one process. (With one thread, `layout.threads=1`, collecting takes 2.1 ms at best; environments one by one, with
Gymnasium's Python around each, took 2.6.) Of updating, 0.2 is handing 44 arrays to the program and taking 50 back; of
the rest, half is the receipt. Tried and not kept: two threads of Python that step half of the environments each (who
wants Python's lock back waits for it); no normalisers, as the peer has none (no difference that shows); the learner as
one array of each kind of number (0.1 ms less, but the compiler then rounds the optimizer's products elsewhere: other
bits); XLA's memory-optimised schedule (2 % of the whole).

ACKTR's update on a batch of 2048 steps, with the defaults as A2C's, by the mean over a run of 60 updates with its
decompositions: {means[0]} ms, A2C's {means[1]} ms, **{cost:.2f} x** (median over rounds; bar 1.5 x:
{"met" if cost <= 1.5 else "**missed**"}).

Made by `python -m benchmarks.speed.algorithms --peer PYTHON --write`.
"""


def profile(label: str, runs: list[Ours]) -> str:
    collect, communicate, update, rest, *_ = (min(part) for part in zip(*runs, strict=True))
    return f"| {label} | {collect:.1f} | {communicate:.1f} | {update:.1f} | {rest:.1f} |"


if __name__ == "__main__":
    main()
