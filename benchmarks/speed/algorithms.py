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
    cost = ratio([run.update for run in acktr], [run.update for run in a2c])
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

An update of A2C makes 40 steps. Of what it takes at best, 2.1 ms are the environments' own (1.5 the physics, 0.6
Gymnasium's Python around it), 0.1 calls them and looks at what they say, 0.1 acts, 0.2 keeps the books of a rollout; of
updating, 0.2 is handing 44 arrays to the program and taking 50 back; of the rest, half is the receipt. Tried and not
kept: two threads that step half of the environments each (the physics lets go of Python's lock, but who wants it back
waits for it: 1.7 to 2.4 ms in place of 2.1); no normalisers, as the peer has none (no difference that shows); the
learner as one array of each kind of number (0.1 ms less, but the compiler then rounds the optimizer's products
elsewhere: other bits); XLA's memory-optimised schedule, which wakes its second thread once and not twice in an update
(0.8 in place of 1.0 ms by the mean on a busy machine, 0.5 at best with both: 2 % of the whole); `mujoco.batch`, which
steps 8 simulations in one call (0.24 ms with one thread, as now; 0.15 with two and 0.05 more to hand them back to
Gymnasium, but then one process takes the cores of two ranks). Physics alone are 1.5 of the about 3 ms that the bar
leaves: what is left to gain is mostly Gymnasium's own Python, which only environments written anew would spare.

ACKTR's update on a batch of 2048 steps, with the defaults as A2C's: {min(run.update for run in acktr):.1f} ms
at best, A2C's on the same batch {min(run.update for run in a2c):.1f} ms: **{cost:.2f} x**
(median over rounds; bar 1.5 x). These are a run's first updates, in which ACKTR decomposes its factors every time;
eight more rounds gave 1.15 to 1.78 x, 1.5 by the median. Over 58 updates of a run, with a decomposition in every tenth
of the later ones, three rounds gave 0.98, 1.13 and 0.96 x by the mean of `time_update`, decompositions included.

Made by `python -m benchmarks.speed.algorithms --peer PYTHON --write`.
"""


def profile(label: str, runs: list[Ours]) -> str:
    collect, communicate, update, rest, _ = (min(part) for part in zip(*runs, strict=True))
    return f"| {label} | {collect:.1f} | {communicate:.1f} | {update:.1f} | {rest:.1f} |"


if __name__ == "__main__":
    main()
