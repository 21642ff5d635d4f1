"""Where `average` beats `gather`: `python -m benchmarks.layouts [--write]` trains both on two ranks, in turns.

Three experiments: small networks and observations, networks of two layers of 2048 units, observations of a megabyte.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

UPDATES = 5
SMALL = {"lanes": 2, "envs_per_lane": 2, "watch.eval_every": 0}
EXPERIMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "HalfCheetah-v5, 64 x 64": (
        "HalfCheetah-v5",
        SMALL | {"collect.steps": 256, "algo.minibatch": 64, "algo.epochs": 10},
    ),
    "HalfCheetah-v5, 2048 x 2048": (
        "HalfCheetah-v5",
        SMALL | {"collect.steps": 256, "algo.minibatch": 512, "algo.epochs": 4, "policy.hidden": [2048, 2048]},
    ),
    "observations of 1 MB, 64 x 64": (
        "benchmarks.layouts:Wide-v0",
        SMALL
        | {"collect.steps": 16, "algo.minibatch": 32, "algo.epochs": 2, "policy.hidden": [64], "envs_per_lane": 1},
    ),
}


class Wide(gymnasium.Env):
    """A megabyte to look at and little to simulate."""

    observation_space = spaces.Box(-1.0, 1.0, (262_144,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self._view = np.zeros(262_144, np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        self._view = self.np_random.random(262_144, np.float32)
        return self._view.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._view = np.roll(self._view, 1)
        return self._view.copy(), -float(np.abs(action).sum()), False, self._steps >= 100, {}


gymnasium.register("Wide-v0", "benchmarks.layouts:Wide")


def measure(env: str, settings: dict[str, Any], mode: str) -> tuple[list[float], str]:
    """Milliseconds of an update at best (in all, collecting, communicating, updating), and the digest."""
    chosen = [option for key, value in settings.items() for option in ("--set", f"{key}={value}")]
    steps = settings["lanes"] * settings["envs_per_lane"] * settings["collect.steps"] * UPDATES
    with tempfile.TemporaryDirectory() as logdir:
        where = ["--logdir", logdir, "--name", "run", "--steps", str(steps), "--nprocs", "2", "--mode", mode]
        command = [sys.executable, "-m", "lockstep", "train", env, *chosen, *where]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = list(csv.DictReader((Path(logdir) / "run" / "metrics.csv").open()))
    seconds = [float(row["seconds"]) for row in rows]
    whole = min(after - before for before, after in itertools.pairwise(seconds))
    parts = [min(float(row[f"time_{name}"]) for row in rows[1:]) for name in ("collect", "communicate", "update")]
    return [1000 * value for value in (whole, *parts)], done.stdout.split()[-1]


def line(name: str, rounds: dict[str, list[list[float]]]) -> str:
    gather, average = ([min(part) for part in zip(*rounds[mode], strict=True)] for mode in ("gather", "average"))
    cells = [f"**{mode[0]:,.0f}** ({', '.join(f'{part:,.0f}' for part in mode[1:])})" for mode in (gather, average)]
    return f"| {name} | {cells[0]} | {cells[1]} | {gather[0] / average[0]:.2f} x |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    lines = []
    for name, (env, settings) in EXPERIMENTS.items():
        rounds: dict[str, list[list[float]]] = {"gather": [], "average": []}
        digests = set()
        for _ in range(given.rounds):
            for mode, found in rounds.items():
                times, digest = measure(env, settings, mode)
                found.append(times)
                digests.add(digest)
        if len(digests) > 1:
            raise SystemExit(f"{name}: the digests differ: {digests}")
        lines.append(line(name, rounds))
    table = f"""# `gather` against `average`

Two ranks, milliseconds of one update at best: in all, and of it (collecting, communicating and waiting, updating) as
rank 0 sees it. The modes took turns and ended in the same digest. {platform.machine()}, {os.cpu_count()} cores.

| experiment | gather | average | average is |
|---|---|---|---|
{chr(10).join(lines)}

Made by `python -m benchmarks.layouts --write`.
"""
    print(table)
    if given.write:
        (Path(__file__).parent / "layouts.md").write_text(table)


if __name__ == "__main__":
    main()
