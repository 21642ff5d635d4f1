"""The environments of a process's lanes, stepped inside the process, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from lockstep.address import Purpose
from lockstep.core import Discrete, Spec
from lockstep.envs.episodes import Episodes, OpenEpisode, Rollout
from lockstep.envs.make import (
    MUJOCO_WARNINGS,
    Env,
    check_finite,
    check_mujoco,
    commands,
    is_finite,
    make,
    spec_of,
    without_wrappers,
    write_observation,
)


class LocalEnvs:
    """`numbers` are the environments' numbers in the experiment: with `seed` they fix every episode's seed."""

    def __init__(self, env: Env, seed: int, numbers: Sequence[int], purpose: Purpose = Purpose.RESET) -> None:
        self._envs = [without_wrappers(make(env)) for _ in numbers]
        self.spec: Spec = spec_of(self._envs[0], env.id)
        self.strangers: list[int] = []
        self._fit = commands(self.spec.action, env.action)
        self._episodes = Episodes(env, seed, numbers, purpose, self.spec.action)
        self._everyone, self.resting = range(len(self._envs)), np.zeros(len(self._envs), bool)

    def __len__(self) -> int:
        return len(self._envs)

    def rollout(self, steps: int) -> Rollout:
        n, spec = len(self._envs), self.spec.observation
        terminated, truncated = np.empty((2, steps, n), bool)
        observation = np.empty((steps + 1, n, *spec.shape), spec.dtype)
        return Rollout(np.empty((steps, n)), terminated, truncated, np.empty_like(observation[1:]), observation)

    def start(self, observation: np.ndarray) -> None:
        for i in range(len(self._envs)):
            self._reset(i, 0, observation[i, ...])

    def step(self, actions: np.ndarray, rollout: Rollout, t: int) -> None:
        taken, rows, rewards = self._taken(actions), rollout.observation[t + 1], rollout.reward[t]
        shape, real = self.spec.observation.shape, self.spec.observation.dtype == "float32"
        active: Sequence[int] = self._everyone
        if np.count_nonzero(self.resting):
            active = np.flatnonzero(~self.resting).tolist()
            rows[self.resting], rewards[self.resting] = rollout.observation[t, self.resting], 0.0
        rollout.terminated[t], rollout.truncated[t] = False, False
        ended, finite = [], True
        envs, taken_since = self._envs, self._episodes.actions
        i = 0
        try:
            for i in active:
                taken_since[i].append(actions[i])
                observation, reward, terminated, truncated, _ = envs[i].step(taken[i])
                if (
                    real
                    and type(observation) is np.ndarray
                    and observation.shape == shape
                    and observation.dtype.kind == "f"
                ):
                    rows[i] = observation
                else:
                    write_observation(self.spec.observation, rows[i, ...], observation)
                rewards[i] = reward = float(reward)
                finite &= isfinite(reward)
                if terminated or truncated:
                    rollout.terminated[t, i], rollout.truncated[t, i] = terminated, truncated
                    ended.append(i)
                if MUJOCO_WARNINGS:
                    check_mujoco()
            if not finite or (real and not is_finite(rows)):
                for i in range(len(self._envs)):
                    check_finite(rows[i, ...], "observation")
                    check_finite(rewards[i, ...], "reward")
        except Exception as error:
            raise self._episodes.broken(i, error) from error
        for i in ended:
            rollout.final[t, i] = rows[i]
            self._reset(i, self._episodes.number[i] + 1, rows[i, ...])

    def _reset(self, i: int, episode: int, into: np.ndarray) -> None:
        self._episodes.begin(i, episode)
        try:
            observation, _ = self._envs[i].reset(seed=self._episodes.seed(i))
            write_observation(self.spec.observation, into, observation)
            check_finite(into, "observation")
        except Exception as error:
            raise self._episodes.broken(i, error) from error

    def running(self, i: int) -> tuple[int, np.ndarray]:
        return self._episodes.number[i], self._episodes.stacked(i)

    def restore(self, i: int, episode: OpenEpisode) -> bool:
        latest = np.empty_like(episode.observation)
        self._reset(i, episode.number, latest)
        for action, command in zip(episode.actions, self._taken(episode.actions), strict=True):
            self._episodes.actions[i].append(action)
            try:
                observation, *_ = self._envs[i].step(command)
                write_observation(self.spec.observation, latest, observation)
            except Exception as error:
                raise self._episodes.broken(i, error) from error
        repeated = latest.tobytes() == episode.observation.tobytes()
        if not repeated:
            self.strangers.append(self._episodes.numbers[i])
        return repeated

    def _taken(self, actions: np.ndarray) -> Sequence[int] | np.ndarray:
        """The policy's actions [N, ...] as the environments take them: plain ints, or arrays."""
        chosen = self._fit(actions)
        return chosen.tolist() if isinstance(self.spec.action, Discrete) else chosen

    def close(self) -> None:
        for environment in self._envs:
            environment.close()
        self._envs = []

    def __enter__(self) -> LocalEnvs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
