"""Steps per second of lockstep's PPO: 8 environments x 256 steps, minibatch 64, 10 epochs, 64x64, one process.

The normalisers are on, which the peers' are not; evaluation is off on both sides.
"""

import csv
import sys
import tempfile
from pathlib import Path

import lockstep

UPDATES, LANES = 12, int(sys.argv[1]) if len(sys.argv) > 1 else 2

with tempfile.TemporaryDirectory() as logdir:
    settings = {
        "steps": 2048 * UPDATES,
        "lanes": LANES,
        "envs_per_lane": 8 // LANES,
        "collect.steps": 256,
        "algo.minibatch": 64,
        "algo.epochs": 10,
        "watch.eval_every": 0,
    }
    run = lockstep.train("HalfCheetah-v5", logdir=logdir, settings=settings)
    rows = list(csv.DictReader((Path(run.path) / "metrics.csv").open()))
seconds = [float(row["seconds"]) for row in rows]
collect, update = ([float(row[name]) for row in rows] for name in ("time_collect", "time_update"))
rest = [seconds[i] - seconds[i - 1] - collect[i] - update[i] for i in range(1, UPDATES)]
print(*(f"{1000 * min(part):.1f}" for part in (collect[1:], update[1:], rest)))
print(2048 * (UPDATES - 1) / (seconds[-1] - seconds[0]))
