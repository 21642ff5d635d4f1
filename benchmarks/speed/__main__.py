"""Speed side by side: `python -m benchmarks.speed --peer PYTHON` with a Python that has Stable-Baselines3.

Contenders take turns, so that a slow minute of the machine meets all of them; the best round of each counts.
Prints a Markdown table and, with --write, puts it into benchmarks/speed.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent


def measure(python: str, script: str, *arguments: str) -> list[str]:
    """One contender's last lines, in a process of its own; the very last is its steps per second."""
    quiet = dict(os.environ, OMP_NUM_THREADS="1", MUJOCO_GL=os.environ.get("MUJOCO_GL", "egl"))
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=True)
    return done.stdout.strip().splitlines()[-2:]


def start_up() -> float:
    """Seconds from the command to the end of a run of one update, everything included."""
    with tempfile.TemporaryDirectory() as logdir:
        began = time.perf_counter()
        command = [sys.executable, "-m", "lockstep", "train", "HalfCheetah-v5", "--steps", "2048", "--logdir", logdir]
        subprocess.run([*command, "--set", "watch.eval_every=0"], capture_output=True, check=True)
        return time.perf_counter() - began


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peer", required=True, help="a Python that has stable-baselines3")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    rounds: dict[str, list[float]] = {"raw": [], "lockstep": [], "sb3": []}
    start_up()
    starts, profiles = [], []
    for _ in range(given.rounds):
        rounds["raw"].append(float(measure(sys.executable, "raw.py")[-1]))
        profile, rate = measure(sys.executable, "ours.py")
        profiles.append([float(number) for number in profile.split()])
        rounds["lockstep"].append(float(rate))
        rounds["sb3"].append(float(measure(given.peer, "sb3.py")[-1]))
        starts.append(start_up())
    table = report(rounds, starts, [min(part) for part in zip(*profiles, strict=True)])
    print(table)
    if given.write:
        (HERE.parent / "speed.md").write_text(table)


def report(rounds: dict[str, list[float]], starts: list[float], profile: list[float]) -> str:
    collect, update, rest = profile
    best = {name: max(values) for name, values in rounds.items()}
    every = {name: ", ".join(f"{value:,.0f}" for value in values) for name, values in rounds.items()}
    ratio, share = best["lockstep"] / best["sb3"], best["lockstep"] / best["raw"]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "gymnasium", "mujoco"))
    return f"""# Speed, side by side

PPO end to end on HalfCheetah-v5, one process: 8 environments x 256 steps, minibatch 64, 10 epochs, 64x64 tanh.
Contenders took turns in one run; steps/s of every round, the best one counts.
{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}.

| contender | steps/s, every round | best | against ours |
|---|---|---|---|
| lockstep (2 lanes, normalisers on) | {every["lockstep"]} | **{best["lockstep"]:,.0f}** | 1 |
| Stable-Baselines3 (DummyVecEnv, one thread) | {every["sb3"]} | {best["sb3"]:,.0f} | ours is **{ratio:.1f} x** |
| the environments alone, no learning | {every["raw"]} | {best["raw"]:,.0f} | ours is **{share:.0%}** of it |

Where the time of one update of 2048 steps goes, at best: collecting {collect:.0f} ms (the environments alone would take
{2048000 / best["raw"]:.0f} ms; the rest of it is 256 calls of the actor and the bookkeeping), the 320 gradient steps
{update:.0f} ms, digest and reports {rest:.1f} ms. The gradient steps are arithmetic, not overhead: 64 rows through both
networks and back, at some 25 GFLOP/s on one core.

`lockstep train` of one update from a cold process with a warm compilation cache, start to exit:
{", ".join(f"{seconds:.1f} s" for seconds in starts)}.

Made by `python -m benchmarks.speed --peer PYTHON --write`, where PYTHON has stable-baselines3 installed.
"""


if __name__ == "__main__":
    main()
