"""Steps per second of lockstep: `python ours.py WORK ENV NPROCS MODE`. Networks are 64x64.

ppo: 8 environments x 256 steps, minibatch 64, 10 epochs. trpo: sb3-contrib's defaults, 1 environment x 2048 steps.
The normalisers are on, which the peers' are not; evaluation is off on both sides. Prints the milliseconds of an update
at best (collecting, communicating and waiting, updating, the rest), then the rate.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

UPDATES, BATCH = 12, 2048
WORK = {
    "ppo": {"lanes": 2, "envs_per_lane": 4, "collect.steps": 256, "algo.minibatch": 64, "algo.epochs": 10},
    "trpo": {
        "lanes": 1,
        "envs_per_lane": 1,
        "collect.steps": 2048,
        "algo.max_kl": 0.01,
        "algo.cg_iterations": 15,
        "algo.backtracks": 10,
        "algo.value_epochs": 10,
        "algo.value_minibatch": 128,
    },
}


def command(algo: str, env: str, nprocs: str, mode: str, logdir: str) -> list[str]:
    settings = WORK[algo] | {"watch.eval_every": 0}
    chosen = [option for key, value in settings.items() for option in ("--set", f"{key}={value}")]
    where = ["--logdir", logdir, "--name", "run", "--steps", str(BATCH * UPDATES)]
    ranks = ["--nprocs", nprocs, "--mode", mode]
    return [sys.executable, "-m", "lockstep", "train", env, "--algo", algo, *chosen, *where, *ranks]


algo, env, nprocs, mode = (*sys.argv[1:], *("ppo", "HalfCheetah-v5", "1", "gather")[len(sys.argv) - 1 :])
with tempfile.TemporaryDirectory() as logdir:
    subprocess.run(command(algo, env, nprocs, mode, logdir), capture_output=True, check=True)
    rows = list(csv.DictReader((Path(logdir) / "run" / "metrics.csv").open()))
seconds = [float(row["seconds"]) for row in rows]
parts = [[float(row[f"time_{name}"]) for row in rows[1:]] for name in ("collect", "communicate", "update")]
rest = [seconds[i + 1] - seconds[i] - sum(part[i] for part in parts) for i in range(UPDATES - 1)]
print(*(f"{1000 * min(part):.1f}" for part in (*parts, rest)))
print(BATCH * (UPDATES - 1) / (seconds[-1] - seconds[0]))
