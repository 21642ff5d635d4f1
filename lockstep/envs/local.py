"""The environments of a process's lanes, stepped inside the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np

from lockstep.address import Purpose
from lockstep.core import ArraySpec, Discrete, Spec
from lockstep.envs.episodes import Blame, Episodes, OpenEpisode, Rollout, Step
from lockstep.envs.make import (
    MUJOCO_WARNINGS,
    Env,
    TimeLimited,
    check_finite,
    check_mujoco,
    commands,
    is_finite,
    make,
    spec_of,
    without_wrappers,
    write_observation,
)
from lockstep.envs.native import native
from lockstep.errors import EnvironmentFault


class Simulations(Protocol):
    """N environments to reset and to step. Their episodes' books are kept by others."""

    def reset(self, i: int, seed: int) -> Any:
        """The first observation."""

    def step(self, which: Sequence[int], actions: Any, into: Step) -> None:
        """One step of some, with those of all N's actions. What is written of the others means nothing."""

    def close(self) -> None: ...


class OneByOne:
    """Any environments of Gymnasium."""

    def __init__(self, envs: Sequence[gymnasium.Env | TimeLimited], seen: ArraySpec, blame: Blame) -> None:
        self._envs, self._seen, self._blame = envs, seen, blame

    def reset(self, i: int, seed: int) -> Any:
        return self._envs[i].reset(seed=seed)[0]

    def step(self, which: Sequence[int], actions: Any, into: Step) -> None:
        rows, rewards, envs = into.observation, into.reward, self._envs
        shape, real = self._seen.shape, self._seen.dtype == "float32"
        into.terminated[:], into.truncated[:] = False, False
        i = 0
        try:
            for i in which:
                observation, reward, terminated, truncated, _ = envs[i].step(actions[i])
                if (
                    real
                    and type(observation) is np.ndarray
                    and observation.shape == shape
                    and observation.dtype.kind == "f"
                ):
                    rows[i] = observation
                else:
                    write_observation(self._seen, rows[i, ...], observation)
                rewards[i] = float(reward)
                if terminated or truncated:
                    into.terminated[i], into.truncated[i] = terminated, truncated
                if MUJOCO_WARNINGS:
                    check_mujoco()
        except Exception as error:
            raise self._blame(i, error) from error

    def close(self) -> None:
        for environment in self._envs:
            environment.close()
        self._envs = []


class LocalEnvs:
    """`numbers` are the environments' numbers in the experiment: with `seed` they fix every episode's seed.

    `threads` of MuJoCo may step them, where it can.
    """

    def __init__(
        self, env: Env, seed: int, numbers: Sequence[int], purpose: Purpose = Purpose.RESET, threads: int = 1
    ) -> None:
        first = without_wrappers(make(env))
        self.spec: Spec = spec_of(first, env.id)
        self.strangers: list[int] = []
        self._fit = commands(self.spec.action, env.action)
        self._episodes = Episodes(env, seed, numbers, purpose, self.spec.action)
        self._everyone, self.resting = range(len(numbers)), np.zeros(len(numbers), bool)
        self._simulations: Simulations = native(first, len(numbers), threads, self._episodes.broken) or OneByOne(
            [first, *(without_wrappers(make(env)) for _ in numbers[1:])], self.spec.observation, self._episodes.broken
        )

    def __len__(self) -> int:
        return len(self.resting)

    def rollout(self, steps: int) -> Rollout:
        n, spec = len(self), self.spec.observation
        terminated, truncated = np.empty((2, steps, n), bool)
        observation = np.empty((steps + 1, n, *spec.shape), spec.dtype)
        return Rollout(np.empty((steps, n)), terminated, truncated, np.empty_like(observation[1:]), observation)

    def start(self, observation: np.ndarray) -> None:
        for i in self._everyone:
            self._reset(i, 0, observation[i, ...])

    def step(self, actions: np.ndarray, rollout: Rollout, t: int) -> None:
        into, resting = rollout.step(t), self.resting if np.count_nonzero(self.resting) else None
        self._advance(self._everyone if resting is None else np.flatnonzero(~resting).tolist(), actions, into)
        if resting is not None:
            into.observation[resting], into.reward[resting] = rollout.observation[t, resting], 0.0
            into.terminated[resting], into.truncated[resting] = False, False
        if not (is_finite(into.reward) and (self.spec.observation.dtype != "float32" or is_finite(into.observation))):
            self._refuse(into)
        if np.count_nonzero(into.terminated) or np.count_nonzero(into.truncated):
            for i in np.flatnonzero(into.terminated | into.truncated).tolist():
                into.final[i] = into.observation[i]
                self._reset(i, self._episodes.number[i] + 1, into.observation[i, ...])

    def _advance(self, which: Sequence[int], actions: np.ndarray, into: Step) -> None:
        taken = self._episodes.actions
        for i in which:
            taken[i].append(actions[i])
        chosen = self._fit(actions)  # plain ints are what environments take that choose
        self._simulations.step(which, chosen.tolist() if isinstance(self.spec.action, Discrete) else chosen, into)

    def _refuse(self, into: Step) -> None:
        """Name the first environment whose numbers are not finite."""
        for i in self._everyone:
            try:
                check_finite(into.observation[i, ...], "observation")
                check_finite(into.reward[i, ...], "reward")
            except EnvironmentFault as fault:
                raise self._episodes.broken(i, fault) from fault

    def _reset(self, i: int, episode: int, into: np.ndarray) -> None:
        self._episodes.begin(i, episode)
        try:
            write_observation(self.spec.observation, into, self._simulations.reset(i, self._episodes.seed(i)))
            check_finite(into, "observation")
        except Exception as error:
            raise self._episodes.broken(i, error) from error

    def running(self, i: int) -> tuple[int, np.ndarray]:
        return self._episodes.number[i], self._episodes.stacked(i)

    def restore(self, i: int, episode: OpenEpisode) -> bool:
        into = self.rollout(1).step(0)
        self._reset(i, episode.number, into.observation[i, ...])
        for action in episode.actions:
            self._advance([i], np.broadcast_to(action, (len(self), *action.shape)), into)
        repeated = into.observation[i].tobytes() == episode.observation.tobytes()
        if not repeated:
            self.strangers.append(self._episodes.numbers[i])
        return repeated

    def close(self) -> None:
        self._simulations.close()

    def __enter__(self) -> LocalEnvs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
