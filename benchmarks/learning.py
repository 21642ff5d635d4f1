"""How well the presets learn: `python -m benchmarks.learning [PRESET ...] --algo ppo,trpo --seeds 0,1,2 --write`.

Trains every preset with every algorithm and seed through the command line and evaluates the final policy without noise.
With --write, benchmarks/learning.json keeps what was found and the tables of benchmarks/learning.md are made from it;
what stands there under "What was tried" is written by hand. Runs that are there already are not made again.

--check N makes N rows again that are picked at random, each with the code of the commit that made it, and compares
digests. A row of another kind of CPU is not checkable here: that it was tried never counts as that it holds.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from lockstep.experiment import Experiment, resolve
from lockstep.run.checkpoint import newest

HERE = Path(__file__).parent
RESULTS, TABLES = HERE / "learning.json", HERE / "learning.md"
TRIED = "## What was tried"
EPISODES = 100
FIRST = "first"  # kind of CPU: that of the rows that were measured before it was kept
CLASSIC: dict[str, float] = {"cartpole": 490, "pendulum": -250}  # which every algorithm should solve
BARS: dict[str, dict[str, float]] = {  # algorithm -> preset -> the return to reach
    "ppo": {
        "cartpole": 500,
        "pendulum": -180,
        "acrobot": -85,
        "lunarlander": 220,
        "inverted-pendulum": 1000,
        "inverted-double-pendulum": 9000,
        "reacher": -5,
        "hopper": 2600,
        "walker": 3500,
        "halfcheetah": 4500,
    },
    "trpo": {
        **{"halfcheetah": 4400, "hopper": 3300, "walker": 4000, "inverted-double-pendulum": 8500, "reacher": -4.8},
        **CLASSIC,
    },
    "acktr": {
        **{"halfcheetah": 3900, "hopper": 2550, "walker": 2300, "inverted-double-pendulum": 9000, "reacher": -4.5},
        **CLASSIC,
    },
    "ppo-kl": {
        **{"halfcheetah": 2200, "hopper": 2300, "walker": 2500, "inverted-double-pendulum": 7500, "reacher": -6},
        **CLASSIC,
    },
    "a2c": {
        **{"halfcheetah": 1800, "hopper": 1250, "walker": 1100, "inverted-double-pendulum": 9200, "reacher": -6.5},
        **CLASSIC,
    },
    "reinforce": {
        **{"halfcheetah": 880, "hopper": 400, "walker": 410, "inverted-double-pendulum": 1060, "reacher": -10},
        **CLASSIC,
    },
    "npg": {"halfcheetah": 3485, "hopper": 1915, "walker": 2503, **CLASSIC},
}

Found = dict[str, dict[str, dict[str, dict[str, Any]]]]  # algorithm -> preset -> seed -> what was found


def lockstep(*arguments: str, code: Path = HERE.parent) -> str:
    """What a command prints, of the code in this folder."""
    command, env = [sys.executable, "-m", "lockstep", *arguments], {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=code)
    if done.returncode:
        raise SystemExit(f"lockstep {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """Of the code that is here, which must be one."""
    if changed := git("status", "--porcelain", "--", "../lockstep"):
        raise SystemExit(
            f"rows are kept with the commit that made them, and the code has changes of its own:\n{changed}"
        )
    return git("rev-parse", "--short", "HEAD")


def trained(job: tuple[str, str, int], logdir: Path, sets: list[str]) -> Path:
    """The run of a preset, algorithm and seed, made or brought to its end where need be."""
    preset, algo, seed = job
    run = logdir.absolute() / f"{preset}-{algo}-s{seed}"
    options = [option for setting in sets for option in ("--set", setting)]
    if run.exists():
        lockstep("resume", str(run))
    else:
        chosen = ["--algo", algo, "--seed", str(seed), "--logdir", str(logdir), "--name", run.name]
        lockstep("train", preset, *chosen, *options)
    return run


def measured(job: tuple[str, str, int], logdir: Path, sets: list[str], found: Found, made_by: str) -> dict[str, Any]:
    """The evaluation and digest of a run; what was found before, if the learner is the same."""
    preset, algo, seed = job
    run = trained(job, logdir, sets)
    experiment = resolve(str(run / "config.toml")).experiment
    *_, digest = lockstep("digest", str(run)).split()
    before = found.get(algo, {}).get(preset, {}).get(str(seed))
    if before and before["digest"] == digest[:12] and is_of(before, experiment):
        return before
    evaluation = json.loads(lockstep("evaluate", str(run), "--episodes", str(EPISODES), "--json"))
    *_, last = csv.DictReader((run / "metrics.csv").open())
    print(f"{run.name}: {evaluation['return_mean']:.1f} {digest[:12]}", file=sys.stderr, flush=True)
    return {
        "return": round(evaluation["return_mean"], 2),
        "steps": int(last["steps"]),
        "digest": digest[:12],
        "experiment": experiment.digest[:12],
        "budget": experiment.steps,
        "cpu": kind_of_cpu(run),
        "commit": made_by,
    }


def kind_of_cpu(run: Path) -> str:
    return str(newest(run)[1].machine["kernels"])[:8]


def kept() -> Found:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def is_of(result: dict[str, Any], experiment: Experiment) -> bool:
    """Whether a kept result is of this very experiment."""
    return (result["experiment"], result["budget"]) == (experiment.digest[:12], experiment.steps)


def row(algo: str, preset: str, seeds: dict[str, dict[str, Any]]) -> str:
    results = [seeds[seed] for seed in sorted(seeds, key=int)]
    returns = [result["return"] for result in results]
    bar = BARS.get(algo, {}).get(preset)
    verdict = "-" if bar is None else ("met" if mean(returns) >= bar else "**missed**")
    spread = f"{stdev(returns):.1f}" if len(returns) > 1 else "?"
    steps = sorted({result["steps"] for result in results})
    cells = [
        preset,
        resolve(preset, algo).experiment.env.id,
        " to ".join(f"{count:,}" for count in (steps if len(steps) == 1 else (steps[0], steps[-1]))),
        f"**{mean(returns):.1f} ± {spread}**",
        "-" if bar is None else f"{bar}",
        verdict,
        ", ".join(f"{value:.1f}" for value in returns),
        ", ".join(f"`{result['digest']}`" for result in results),
        ", ".join(sorted({result.get("cpu", FIRST) for result in results})),
        ", ".join(sorted({result["commit"] for result in results})),
    ]
    return f"| {' | '.join(cells)} |"


def tables(found: Found) -> str:
    parts = [
        f"""# How well the presets learn

Final policies, evaluated without noise on {EPISODES} episodes with fixed seeds; mean ± standard deviation over seeds,
no seed left out. Digests are those that `lockstep digest RUN` prints (first 12 digits): the same command gives the same
digest on the same package versions and kind of CPU. One run is `lockstep train PRESET --algo ALGO --seed SEED` and then
`lockstep evaluate RUN --episodes {EPISODES}`; `python -m benchmarks.learning --write` makes all of it, and
`python -m benchmarks.learning PRESET --algo ALGO --write` one row. An update is whole, so a run makes up to one update
more than its budget. The kind of CPU is told by the fingerprint of its arithmetic (`kernels` in a run's manifests):
`b9160d27` is an AMD EPYC with AVX2, where `lockstep train pendulum --steps 20000 --seed 3` has the digest
`7cb333842cf5`, as on the first kind, of rows made before this was kept; `2879f44c` is an Intel Xeon with AVX-512, where
it has `5885b7c7f01b`; `8ee1c070` is an AMD EPYC with AVX-512. The commit is that of the code that made a row: another
one may give other digests (CHANGELOG.md says which changes do). `python -m benchmarks.learning --check 3` makes three
rows again, each with its own.
"""
    ]
    for algo in BARS:
        if presets := found.get(algo):
            order = [*BARS[algo], *sorted(presets.keys() - BARS[algo].keys())]
            rows = "\n".join(row(algo, preset, presets[preset]) for preset in order if preset in presets)
            parts.append(f"""## {algo}

| preset | environment | steps | return | bar | | each seed | digests | CPU | commit |
|---|---|---|---|---|---|---|---|---|---|
{rows}
""")
    return "\n".join(parts)


class Verdict(NamedTuple):
    row: str
    held: bool | None  # None: made on another kind of CPU, so nothing is known
    why: str


def check(count: int, found: Found) -> int:
    """Make so many rows again that can be checked here; how many are not what they were."""
    rows = [
        (algo, preset, seed, result)
        for algo, presets in found.items()
        for preset, seeds in presets.items()
        for seed, result in seeds.items()
    ]
    random.shuffle(rows)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as scratch:
        while rows and sum(verdict.held is not None for verdict in verdicts) < count:
            verdicts.append(again(*rows.pop(), Path(scratch)))
            print(f"{verdicts[-1].row}: {verdicts[-1].why}", flush=True)
    held, differ = (sum(verdict.held is value for verdict in verdicts) for value in (True, False))
    print(f"{held} rows hold, {differ} do not, {len(verdicts) - held - differ} were not checkable here")
    return differ


def again(algo: str, preset: str, seed: str, kept: dict[str, Any], scratch: Path) -> Verdict:
    """A row made once more by the code that made it, if this is its kind of CPU."""
    name = f"{preset} {algo} seed {seed}"
    made_by, cpu, here = kept["commit"], kept.get("cpu", FIRST), this_cpu(scratch)
    if cpu not in (here, FIRST):
        return Verdict(name, None, f"not checkable here: it was made on CPU {cpu}, this is {here}")
    code = scratch / made_by
    if not code.exists():
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(HERE.parent), str(code)], check=True)
        subprocess.run(["git", "-C", str(code), "checkout", "--quiet", made_by], check=True)
    run = scratch / f"{preset}-{algo}-{seed}"
    where = ["--algo", algo, "--seed", seed, "--logdir", str(scratch), "--name", run.name]
    digest = lockstep("train", preset, *where, code=code).split()[-1][:12]
    if digest == kept["digest"]:
        return Verdict(name, True, f"holds, {digest}")
    if cpu == FIRST:
        return Verdict(name, None, f"not checkable here: its kind of CPU was not kept, and {here} gives {digest}")
    return Verdict(name, False, f"DIFFERS: kept is {kept['digest']}, made was {digest}")


@functools.cache
def this_cpu(scratch: Path) -> str:
    lockstep("train", "pendulum", "--steps", "1", "--logdir", str(scratch), "--name", "cpu")
    return kind_of_cpu(scratch / "cpu")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("presets", nargs="*", help="those that have a bar")
    options.add_argument("--algo", default=",".join(BARS))
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--logdir", type=Path, default=Path("runs/learning"))
    options.add_argument("--set", action="append", default=[], help="for runs that are not there yet")
    options.add_argument("--write", action="store_true")
    options.add_argument("--check", type=int, metavar="N", help="make N rows again, picked at random")
    given = options.parse_args()
    if given.check:
        sys.exit(min(1, check(given.check, kept())))
    work = [
        (preset, algo, int(seed))
        for seed in given.seeds.split(",")
        for algo in given.algo.split(",")
        for preset in given.presets or BARS[algo]
    ]
    found, made_by = kept() if given.write else {}, commit() if given.write else ""
    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(lambda job: measured(job, given.logdir, given.set, found, made_by), work))
    for (preset, algo, seed), result in zip(work, results, strict=True):
        found.setdefault(algo, {}).setdefault(preset, {})[str(seed)] = result
    print(tables(found))
    if given.write:
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        _, tried, by_hand = TABLES.read_text().partition(TRIED)
        TABLES.write_text(f"{tables(found)}\n{tried}{by_hand}")


if __name__ == "__main__":
    main()
