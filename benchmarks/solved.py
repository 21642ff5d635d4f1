"""How many steps algorithms need to solve the classic tasks: `python -m benchmarks.solved [--algo acktr,a2c] --write`.

Trains the presets as they are, with an evaluation every so many steps, which changes no result. A task is solved at the
first evaluation that reaches its bar. With --write the table goes to benchmarks/solved.md.
"""

from __future__ import annotations

import argparse
import csv
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.learning import CLASSIC, HERE, trained

EVERY, EPISODES = 5_000, 20


def steps_needed(job: tuple[str, str, int], logdir: Path) -> int | None:
    """Environment steps at the first evaluation that reaches the bar, if one does."""
    run = trained(job, logdir, [f"watch.eval_every={EVERY}", f"watch.eval_episodes={EPISODES}"])
    rows = csv.DictReader((run / "metrics.csv").open())
    scores = [(int(row["steps"]), float(row["eval_return"])) for row in rows if row["eval_return"]]
    return next((steps for steps, score in scores if score >= CLASSIC[job[0]]), None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--algo", default="acktr,a2c")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--logdir", type=Path, default=Path("runs/solved"))
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    algorithms, seeds = given.algo.split(","), [int(seed) for seed in given.seeds.split(",")]
    rows = [(preset, algo) for preset in CLASSIC for algo in algorithms]
    work = [(*row, seed) for row in rows for seed in seeds]
    with ThreadPoolExecutor(given.jobs) as pool:
        found = dict(zip(work, pool.map(lambda job: steps_needed(job, given.logdir), work), strict=True))
    lines = []
    for preset, algo in rows:
        needed = [found[preset, algo, seed] for seed in seeds]
        every = ", ".join("never" if steps is None else f"{steps:,}" for steps in needed)
        middle = median(float("inf") if steps is None else steps for steps in needed)
        lines.append(f"| {preset} | {CLASSIC[preset]:g} | {algo} | **{middle:,.0f}** | {every} |")
    table = f"""# Steps until a classic task is solved

Presets as they are, evaluated every {EVERY:,} steps on {EPISODES} episodes without noise: environment steps at the
first evaluation that reaches the return; the median over seeds, and every seed. The
episodes are always the same, and not those of learning.md.

| preset | return | algorithm | steps | each seed |
|---|---|---|---|---|
{chr(10).join(lines)}

Made by `python -m benchmarks.solved --write`.
"""
    print(table)
    if given.write:
        (HERE / "solved.md").write_text(table)


if __name__ == "__main__":
    main()
