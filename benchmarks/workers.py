"""Stepping environments in other processes, side by side: `python -m benchmarks.workers [--write]`.

lockstep's workers, Gymnasium's AsyncVectorEnv with shared memory, and no other process at all. Contenders take turns
in every round, so that a slow minute of the machine meets all of them. With --write the tables go to
benchmarks/workers.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep import names
from lockstep.envs.episodes import Envs
from lockstep.envs.local import LocalEnvs
from lockstep.envs.make import Env
from lockstep.envs.workers import WorkerEnvs

MEGABYTE = "benchmarks.workers:Megabyte-v0"


class Megabyte(gymnasium.Env):
    """Observations of 1 MB: a picture that moves on by one row each step."""

    observation_space = spaces.Box(0, 255, (512, 512, 4), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self._picture = np.zeros((512, 512, 4), np.uint8)
        self._row = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._picture = self.np_random.integers(0, 256, (512, 512, 4), np.uint8)
        self._row = 0
        return self._picture, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._row = (self._row + 1) % 512
        self._picture[self._row] += 1
        return self._picture, 0.0, False, False, {}


if __name__ != "__main__":
    gymnasium.register("Megabyte-v0", Megabyte)


class Task(NamedTuple):
    """What is stepped: `envs` of `id`, `steps` times in a round."""

    name: str
    id: str
    envs: int
    steps: int


TASKS = (
    Task("2 environments, observations of 1 MB", MEGABYTE, 2, 64),
    Task("8 x Pendulum-v1", "Pendulum-v1", 8, 256),
    Task("8 x HalfCheetah-v5", "HalfCheetah-v5", 8, 256),
)

Round = Callable[[np.ndarray], None]


@contextmanager
def ours(envs: Envs) -> Iterator[Round]:
    """Every step into a rollout that is kept whole, as training does it."""
    with envs:
        spec, n = envs.spec.observation, len(envs)
        latest = np.zeros((n, *spec.shape), spec.dtype)
        envs.start(latest)

        def play(actions: np.ndarray) -> None:
            rollout = envs.rollout(len(actions))
            rollout.observation[0] = latest
            for t, action in enumerate(actions):
                envs.step(action, rollout, t)
            latest[:] = rollout.observation[-1]

        yield play


@contextmanager
def gymnasiums(task: Task, copy: bool, keep: bool) -> Iterator[Round]:
    """`copy=False` hands out the shared memory itself; `keep` puts every observation into a rollout."""
    made = [lambda: gymnasium.make(task.id, disable_env_checker=True)] * task.envs
    envs = gymnasium.vector.AsyncVectorEnv(made, shared_memory=True, copy=copy)
    envs.reset(seed=0)
    space = envs.single_observation_space
    kept = np.zeros((task.steps if keep else 0, task.envs, *(space.shape or ())), space.dtype)

    def play(actions: np.ndarray) -> None:
        for t, action in enumerate(actions):
            observation = envs.step(action)[0]
            if keep:
                kept[t] = observation

    yield play
    envs.close()


def contenders(task: Task) -> dict[str, Any]:
    names.load(task.id)
    env, numbers = Env(task.id), range(task.envs)
    return {
        "lockstep, 2 workers": ours(WorkerEnvs(env, 0, numbers, 2)),
        f"Gymnasium's AsyncVectorEnv, {task.envs} processes": gymnasiums(task, copy=True, keep=False),
        "the same, copy=False, every observation kept": gymnasiums(task, copy=False, keep=True),
        "the same, copy=False, none kept": gymnasiums(task, copy=False, keep=False),
        "lockstep, inside the process": ours(LocalEnvs(env, 0, numbers)),
    }


def measure(task: Task, rounds: int) -> dict[str, list[float]]:
    """Environment steps per second of every contender, round by round."""
    rates: dict[str, list[float]] = {}
    actions = np.random.default_rng(0).uniform(-1, 1, (task.steps, task.envs, action_size(task))).astype(np.float32)
    with ExitStack() as stack:
        plays = {name: stack.enter_context(opened) for name, opened in contenders(task).items()}
        for number in range(rounds + 1):  # the first is for warming up
            for name, play in plays.items():
                began = time.perf_counter()
                play(actions)
                rate = task.envs * task.steps / (time.perf_counter() - began)
                if number:
                    rates.setdefault(name, []).append(rate)
    return rates


def action_size(task: Task) -> int:
    with gymnasium.make(task.id) as env:
        assert isinstance(env.action_space, spaces.Box)
        return env.action_space.shape[0]


def table(task: Task, rates: dict[str, list[float]]) -> str:
    first = next(iter(rates))
    lines = [f"## {task.name}\n", "| contender | steps/s, median | best | lockstep's workers are, round by round |"]
    lines.append("|---|---|---|---|")
    for name, found in rates.items():
        ratio = statistics.median(mine / other for mine, other in zip(rates[first], found, strict=True))
        against = "1" if name == first else f"**{ratio:.2f} x**"
        lines.append(f"| {name} | {statistics.median(found):,.0f} | {max(found):,.0f} | {against} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    tables = []
    for task in TASKS:
        tables.append(table(task, measure(task, given.rounds)))
        print(tables[-1], flush=True)
    versions = f"gymnasium {metadata.version('gymnasium')}, mujoco {metadata.version('mujoco')}"
    report = f"""# Stepping environments in other processes

Environment steps per second without learning. Contenders took turns in each of {given.rounds} rounds; the last column
is the median of the ratios of one round. lockstep keeps every observation of a round, as training needs it, and checks
that it is finite; Gymnasium hands out the newest, as a copy or (`copy=False`) as the shared memory itself.
{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}.
Load of the machine when this was made: {os.getloadavg()[1]:.1f}.

{(chr(10) * 2).join(tables)}

Made by `python -m benchmarks.workers --write`.
"""
    if given.write:
        (Path(__file__).parent / "workers.md").write_text(report)


if __name__ == "__main__":
    main()
