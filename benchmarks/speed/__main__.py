"""Speed side by side: `python -m benchmarks.speed --sb3 PYTHON --sbx PYTHON` with Pythons that have these peers.

Contenders take turns, so that a slow minute of the machine meets all of them; ratios are of one round.
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
from statistics import median

HERE = Path(__file__).parent
LAYOUTS = {  # processes, mode and threads of each
    "one process": ("1", "gather", "1"),
    "2 ranks, gather": ("2", "gather", "1"),
    "2 ranks, average": ("2", "average", "1"),
}
THREADED = "one process, two threads"  # as by default on two cores, where MuJoCo steps environments in one call
CHEETAH, HUMANOID = "HalfCheetah-v5", "Humanoid-v5"


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
        command = [sys.executable, "-m", "lockstep", "train", CHEETAH, "--steps", "2048", "--logdir", logdir]
        subprocess.run([*command, "--set", "watch.eval_every=0"], capture_output=True, check=True)
        return time.perf_counter() - began


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sb3", required=True, help="a Python that has stable-baselines3")
    options.add_argument("--sbx", help="a Python that has sbx-rl; without it that row is left out")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    rounds: dict[str, list[float]] = {}
    profiles: dict[str, list[list[float]]] = {}
    start_up()
    starts = []
    for _ in range(given.rounds):
        for env in (HUMANOID, CHEETAH):
            for layout, how in (LAYOUTS | ({THREADED: ("1", "gather", "2")} if env == CHEETAH else {})).items():
                profile, rate = measure(sys.executable, "ours.py", "ppo", env, *how)
                profiles.setdefault(f"{env}, {layout}", []).append([float(number) for number in profile.split()[:4]])
                rounds.setdefault(f"{env}, {layout}", []).append(float(rate))
        rounds.setdefault("raw", []).append(float(measure(sys.executable, "raw.py")[-1]))
        rounds.setdefault("sb3", []).append(float(measure(given.sb3, "sb3.py")[-1]))
        if given.sbx:
            rounds.setdefault("sbx", []).append(float(measure(given.sbx, "sbx_ppo.py")[-1]))
        starts.append(start_up())
    table = report(rounds, starts, profiles)
    print(table)
    if given.write:
        (HERE.parent / "speed.md").write_text(table)


def report(rounds: dict[str, list[float]], starts: list[float], profiles: dict[str, list[list[float]]]) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "gymnasium", "mujoco", "mpi4py"))
    best = {name: max(values) for name, values in rounds.items()}
    return f"""# Speed, side by side

PPO end to end: 8 environments x 256 steps, minibatch 64, 10 epochs, 64x64 tanh; lockstep with 2 lanes and its
normalisers on. Contenders took turns in one run; a ratio is the median over rounds of two rates of the same round.
{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}.

## {CHEETAH}

| contender | steps/s, every round | best |
|---|---|---|
{rows(rounds, [*(f"{CHEETAH}, {layout}" for layout in (THREADED, *LAYOUTS)), "sbx", "sb3", "raw"])}

{ratios(rounds)}

## Two ranks against one

| | one process | 2 ranks, gather | 2 ranks, average |
|---|---|---|---|
{scaling(rounds)}

Where the time of one update goes, in milliseconds at best: collecting, communicating and waiting, updating, the rest
(digest, reports). Gymnasium's environments alone would take {2048000 / best["raw"]:.0f} ms on {CHEETAH} in one process.

| | collecting | communicating | updating | the rest |
|---|---|---|---|---|
{shares(profiles)}

{chr(10).join(limits(env, profiles) for env in (CHEETAH, HUMANOID))}

What a step costs beside the environments: 35 us for acting (one program acts for the whole rollout and calls Python to
step the environments; a program that Python called at every step took 80) and some for the books of 8 environments.
Half of both is that code and data are no longer in the cache after an environment's step. An exchange of mode `average`
takes 5 us to get from the compiled program to Python and back, and then, through shared memory (twice as long through
MPI), 17 us for HalfCheetah's 44 kB and 50 us for Humanoid's 217 kB: 30 to write what the other core has in its cache,
16 to add up what is there, the rest is waiting. Humanoid's update of one lane with no exchange takes 89 ms: 1.88 x
would be reached if exchanges cost nothing. On a machine that others use, waiting is most of it: ranks in step with each
other meet every delay of either (on a bad day 7 us by the median, 60 to 90 by the mean).

Tried and not kept: the actor's weights as one vector instead of 10 arrays (the program cuts it up at every step); the
actor in NumPy (every trained policy would be another one); huge pages for malloc (1 % to 2 %). For Humanoid's exchange,
none with a difference that shows: a condition instead of the loop that fences a mean, which copies it; lanes' results
handed over with their padding instead of cut; 4, 8 and 16 places in shared memory used in turn instead of 2; ranks
pinned to cores.

`lockstep train` of one update from a cold process with a warm compilation cache, start to exit:
{", ".join(f"{seconds:.1f} s" for seconds in starts)}.

Made by `python -m benchmarks.speed --sb3 PYTHON --sbx PYTHON --write`, where the Pythons have stable-baselines3 and
sbx-rl installed.
"""


NAMES = {
    "sb3": "Stable-Baselines3 (DummyVecEnv, one thread)",
    "sbx": "SBX (DummyVecEnv)",
    "raw": "Gymnasium's environments alone in one process, no learning",
}


def rows(rounds: dict[str, list[float]], order: list[str]) -> str:
    lines = []
    for name in order:
        if name in rounds:
            every = ", ".join(f"{value:,.0f}" for value in rounds[name])
            called = NAMES.get(name, f"lockstep, {name.split(', ', 1)[-1]}")
            lines.append(f"| {called} | {every} | **{max(rounds[name]):,.0f}** |")
    return "\n".join(lines)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds of one contender's number against another's in the same round."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def ratios(rounds: dict[str, list[float]]) -> str:
    """Ours against each peer: one process, and the better of the two modes on two ranks."""
    one, *two = (f"{CHEETAH}, {layout}" for layout in (THREADED, *list(LAYOUTS)[1:]))
    told = [
        f"{NAMES[peer].split(' (')[0]}: {ratio(rounds[one], rounds[peer]):.1f} x with one process,"
        f" **{max(ratio(rounds[layout], rounds[peer]) for layout in two):.1f} x** on two"
        for peer in ("sb3", "sbx")
        if peer in rounds
    ]
    share = ratio(rounds[f"{CHEETAH}, one process"], rounds["raw"])
    return (
        f"lockstep against {'; against '.join(told)}. One process with one thread has {share:.0%} of the throughput of"
        " the environments alone."
    )


def scaling(rounds: dict[str, list[float]]) -> str:
    lines = []
    for env in (CHEETAH, HUMANOID):
        one, *two = (f"{env}, {layout}" for layout in LAYOUTS)
        cells = [f"{max(rounds[name]):,.0f} (**{ratio(rounds[name], rounds[one]):.2f} x**)" for name in two]
        lines.append(f"| {env} | {max(rounds[one]):,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def limits(env: str, profiles: dict[str, list[list[float]]]) -> str:
    """What two ranks can't share, from the parts at best."""
    one, *several = ([min(part) for part in zip(*profiles[f"{env}, {layout}"], strict=True)] for layout in LAYOUTS)
    layout, two = min(zip(list(LAYOUTS)[1:], several, strict=True), key=lambda pair: sum(pair[1]))
    collecting = max(2 * two[0] - one[0], 0)
    updating = max(2 * (two[1] + two[2]) - one[2], 0)
    return (
        f"- {env}: {sum(one):.0f} ms in one process and {sum(two):.0f} ms on {layout}, {sum(one) / sum(two):.2f} x at"
        f" best. Not shared: {collecting:.0f} ms of collecting (a step costs something, with however few environments)"
        f" and {updating:.0f} ms of updating."
    )


def shares(profiles: dict[str, list[list[float]]]) -> str:
    lines = []
    for name, rounds in profiles.items():
        least = [f"{min(part):.1f}" for part in zip(*rounds, strict=True)]
        lines.append(f"| {name} | {' | '.join(least)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
