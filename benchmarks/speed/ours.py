"""Steps per second of lockstep's PPO: 8 environments x 256 steps, minibatch 64, 10 epochs, 64x64.

    python ours.py ENV NPROCS MODE

The normalisers are on, which the peers' are not; evaluation is off on both sides. Prints the milliseconds of an update
at best (collecting, communicating and waiting, updating, the rest), then the rate.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

UPDATES, LANES, BATCH = 12, 2, 2048
SETTINGS = {
    "lanes": LANES,
    "envs_per_lane": 8 // LANES,
    "collect.steps": 256,
    "algo.minibatch": 64,
    "algo.epochs": 10,
    "watch.eval_every": 0,
}


def command(env: str, nprocs: str, mode: str, logdir: str) -> list[str]:
    chosen = [option for key, value in SETTINGS.items() for option in ("--set", f"{key}={value}")]
    where = ["--logdir", logdir, "--name", "run", "--steps", str(BATCH * UPDATES)]
    return [sys.executable, "-m", "lockstep", "train", env, *chosen, *where, "--nprocs", nprocs, "--mode", mode]


env, nprocs, mode = (*sys.argv[1:], *("HalfCheetah-v5", "1", "gather")[len(sys.argv) - 1 :])
with tempfile.TemporaryDirectory() as logdir:
    subprocess.run(command(env, nprocs, mode, logdir), capture_output=True, check=True)
    rows = list(csv.DictReader((Path(logdir) / "run" / "metrics.csv").open()))
seconds = [float(row["seconds"]) for row in rows]
parts = [[float(row[f"time_{name}"]) for row in rows[1:]] for name in ("collect", "communicate", "update")]
rest = [seconds[i + 1] - seconds[i] - sum(part[i] for part in parts) for i in range(UPDATES - 1)]
print(*(f"{1000 * min(part):.1f}" for part in (*parts, rest)))
print(BATCH * (UPDATES - 1) / (seconds[-1] - seconds[0]))
