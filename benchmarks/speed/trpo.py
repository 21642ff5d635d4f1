"""TRPO's speed side by side: `python -m benchmarks.speed.trpo --peer PYTHON` with a Python that has sb3-contrib.

Contenders take turns; the best round of each counts. With --write the table goes to benchmarks/speed-trpo.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys

from benchmarks.speed.__main__ import HERE, measure


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peer", required=True, help="a Python that has sb3-contrib")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    ours, peer, profiles = [], [], []
    for _ in range(given.rounds):
        profile, rate = measure(sys.executable, "ours.py", "trpo")
        profiles.append([float(number) for number in profile.split()])
        ours.append(float(rate))
        peer.append(float(measure(given.peer, "sb3.py", "trpo")[-1]))
    table = report(ours, peer, [min(part) for part in zip(*profiles, strict=True)])
    print(table)
    if given.write:
        (HERE.parent / "speed-trpo.md").write_text(table)


def report(ours: list[float], peer: list[float], profile: list[float]) -> str:
    collect, _, update, rest = profile
    every = [", ".join(f"{value:,.0f}" for value in values) for values in (ours, peer)]
    return f"""# TRPO's speed, side by side

End to end on HalfCheetah-v5 at sb3-contrib's defaults, one process: 1 environment x 2048 steps, 15 conjugate-gradient
iterations over all rows, the value function 10 epochs with minibatch 128, 64x64 tanh. Contenders took turns in one run;
steps/s of every round, the best one counts. {platform.machine()}, {os.cpu_count()} cores.

| contender | steps/s, every round | best | against ours |
|---|---|---|---|
| lockstep (1 lane, normalisers on) | {every[0]} | **{max(ours):,.0f}** | 1 |
| sb3-contrib (DummyVecEnv, one thread) | {every[1]} | {max(peer):,.0f} | ours is **{max(ours) / max(peer):.1f} x** |

Where the time of one update of 2048 steps goes, at best: collecting {collect:.0f} ms, the update {update:.0f} ms,
digest and reports {rest:.1f} ms.

Made by `python -m benchmarks.speed.trpo --peer PYTHON --write`.
"""


if __name__ == "__main__":
    main()
