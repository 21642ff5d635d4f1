"""Steps per second of lockstep: `python ours.py WORK ENV NPROCS MODE`. Networks are 64x64.

The normalisers are on, which the peers' are not; evaluation is off on both sides. Prints the milliseconds of an update
at best (collecting, communicating and waiting, updating, the rest), then the rate.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRPO = {  # sb3-contrib's defaults
    "algo.max_kl": 0.01,
    "algo.cg_iterations": 15,
    "algo.backtracks": 10,
    "algo.value_epochs": 10,
    "algo.value_minibatch": 128,
}
EIGHT = {"lanes": 2, "envs_per_lane": 4}
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {**EIGHT, "collect.steps": 256, "algo.minibatch": 64, "algo.epochs": 10}),
    "trpo-1x2048": ("trpo", {**TRPO, "lanes": 1, "envs_per_lane": 1, "collect.steps": 2048}),
    "trpo-8x256": ("trpo", {**TRPO, **EIGHT, "collect.steps": 256}),
    "a2c-8x5": ("a2c", {**EIGHT, "collect.steps": 5}),
    "a2c-8x256": ("a2c", {**EIGHT, "collect.steps": 256}),
    "acktr-8x256": ("acktr", {**EIGHT, "collect.steps": 256}),
}


def command(work: str, env: str, nprocs: str, mode: str, logdir: str) -> tuple[list[str], int, int]:
    """The command, the steps of an update, and the updates before the clock starts."""
    algo, settings = WORK[work]
    batch = settings["lanes"] * settings["envs_per_lane"] * settings["collect.steps"]
    warm_up = max(2048 // batch, 1)
    chosen = [f"--set={key}={value}" for key, value in {**settings, "watch.eval_every": 0}.items()]
    # not every small update is told to TensorBoard in a run of some length
    updates = 12 if warm_up == 1 else 100 * warm_up
    where = ["--logdir", logdir, "--name", "run", "--steps", str(batch * updates)]
    ranks = ["--nprocs", nprocs, "--mode", mode]
    line = [sys.executable, "-m", "lockstep", "train", env, "--algo", algo, *chosen, *where, *ranks]
    return line, batch, warm_up


work, env, nprocs, mode = (*sys.argv[1:], *("ppo", "HalfCheetah-v5", "1", "gather")[len(sys.argv) - 1 :])
with tempfile.TemporaryDirectory() as logdir:
    line, batch, warm_up = command(work, env, nprocs, mode, logdir)
    subprocess.run(line, capture_output=True, check=True)
    rows = list(csv.DictReader((Path(logdir) / "run" / "metrics.csv").open()))[warm_up - 1 :]
seconds = [float(row["seconds"]) for row in rows]
parts = [[float(row[f"time_{name}"]) for row in rows[1:]] for name in ("collect", "communicate", "update")]
rest = [seconds[i + 1] - seconds[i] - sum(part[i] for part in parts) for i in range(len(rows) - 1)]
print(*(f"{1000 * min(part):.2f}" for part in (*parts, rest)))
print(batch * (len(rows) - 1) / (seconds[-1] - seconds[0]))
