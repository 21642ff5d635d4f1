"""Steps per second of lockstep, one process, 64x64: `ours.py [ppo|trpo] [LANES]`.

ppo: 8 environments x 256 steps, minibatch 64, 10 epochs. trpo: sb3-contrib's defaults, 1 environment x 2048 steps.
The normalisers are on, which the peers' are not; evaluation is off on both sides.
"""

import csv
import sys
import tempfile
from pathlib import Path

import lockstep

ALGO = sys.argv[1] if len(sys.argv) > 1 else "ppo"
UPDATES, ENVS, LANES = 12, {"ppo": 8, "trpo": 1}[ALGO], int(sys.argv[2]) if len(sys.argv) > 2 else None
WORK = {
    "ppo": {"algo.minibatch": 64, "algo.epochs": 10},
    "trpo": {
        "algo.max_kl": 0.01,
        "algo.cg_iterations": 15,
        "algo.backtracks": 10,
        "algo.value_epochs": 10,
        "algo.value_minibatch": 128,
    },
}

with tempfile.TemporaryDirectory() as logdir:
    lanes = LANES or min(2, ENVS)
    settings = WORK[ALGO] | {
        "steps": 2048 * UPDATES,
        "lanes": lanes,
        "envs_per_lane": ENVS // lanes,
        "collect.steps": 2048 // ENVS,
        "watch.eval_every": 0,
    }
    run = lockstep.train("HalfCheetah-v5", algo=ALGO, logdir=logdir, settings=settings)
    rows = list(csv.DictReader((Path(run.path) / "metrics.csv").open()))
seconds = [float(row["seconds"]) for row in rows]
collect, update = ([float(row[name]) for row in rows] for name in ("time_collect", "time_update"))
rest = [seconds[i] - seconds[i - 1] - collect[i] - update[i] for i in range(1, UPDATES)]
print(*(f"{1000 * min(part):.1f}" for part in (collect[1:], update[1:], rest)))
print(2048 * (UPDATES - 1) / (seconds[-1] - seconds[0]))
