"""Steps per second of lockstep: `python ours.py WORK ENV NPROCS MODE THREADS`. Networks are 64x64.

The normalisers are on, which the peers' are not; evaluation is off on both sides. Prints the milliseconds of an update
at best (collecting, communicating and waiting, updating, the rest) and of updating by the mean, then the rate.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Work(NamedTuple):
    algo: str
    settings: dict[str, Any]
    updates: int = 12  # of the run


TRPO = {  # sb3-contrib's defaults
    "algo.max_kl": 0.01,
    "algo.cg_iterations": 15,
    "algo.backtracks": 10,
    "algo.value_epochs": 10,
    "algo.value_minibatch": 128,
}
EIGHT = {"lanes": 2, "envs_per_lane": 4}
WORK = {
    "ppo": Work("ppo", {**EIGHT, "collect.steps": 256, "algo.minibatch": 64, "algo.epochs": 10}),
    "trpo-1x2048": Work("trpo", {**TRPO, "lanes": 1, "envs_per_lane": 1, "collect.steps": 2048}),
    "trpo-8x256": Work("trpo", {**TRPO, **EIGHT, "collect.steps": 256}),
    "a2c-8x5": Work("a2c", {**EIGHT, "collect.steps": 5}, 5000),  # TensorBoard is not told of every one then
    "a2c-8x256": Work("a2c", {**EIGHT, "collect.steps": 256}, 60),
    "acktr-8x256": Work("acktr", {**EIGHT, "collect.steps": 256}, 60),  # first it decomposes every time
}


def command(work: str, env: str, nprocs: str, mode: str, threads: str, logdir: str) -> tuple[list[str], int, int]:
    """The command, the steps of an update, and the updates before the clock starts."""
    algo, settings, updates = WORK[work]
    batch = settings["lanes"] * settings["envs_per_lane"] * settings["collect.steps"]
    warm_up = max(2048 // batch, 1)
    quiet = {"watch.eval_every": 0, "layout.threads": threads}
    chosen = [f"--set={key}={value}" for key, value in {**settings, **quiet}.items()]
    where = ["--logdir", logdir, "--name", "run", "--steps", str(batch * updates)]
    ranks = ["--nprocs", nprocs, "--mode", mode]
    line = [sys.executable, "-m", "lockstep", "train", env, "--algo", algo, *chosen, *where, *ranks]
    return line, batch, warm_up


work, env, nprocs, mode, threads = (*sys.argv[1:], *("ppo", "HalfCheetah-v5", "1", "gather", "0")[len(sys.argv) - 1 :])
with tempfile.TemporaryDirectory() as logdir:
    line, batch, warm_up = command(work, env, nprocs, mode, threads, logdir)
    subprocess.run(line, capture_output=True, check=True)
    rows = list(csv.DictReader((Path(logdir) / "run" / "metrics.csv").open()))[warm_up - 1 :]
seconds = [float(row["seconds"]) for row in rows]
parts = [[float(row[f"time_{name}"]) for row in rows[1:]] for name in ("collect", "communicate", "update")]
rest = [seconds[i + 1] - seconds[i] - sum(part[i] for part in parts) for i in range(len(rows) - 1)]
updating = parts[-1]
print(*(f"{1000 * ms:.2f}" for ms in (*map(min, parts), min(rest), sum(updating) / len(updating))))
print(batch * (len(rows) - 1) / (seconds[-1] - seconds[0]))
