"""The environments of a process's lanes, stepped inside the process, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.address import Purpose, integer
from lockstep.core import Box, Discrete, Spec
from lockstep.envs.make import (
    MUJOCO_WARNINGS,
    Env,
    check_finite,
    check_mujoco,
    commands,
    make,
    spec_of,
    without_wrappers,
    write_observation,
)
from lockstep.errors import EnvironmentFault


class Step(NamedTuple):
    """Where one step of N environments is written."""

    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    truncated: np.ndarray  # [N]
    next_observation: np.ndarray  # [N, ...] the true final one where an episode ended
    observation: np.ndarray  # [N, ...] what the policy sees next: after a reset where an episode ended


class OpenEpisode(NamedTuple):
    """An episode that is going on: enough to rebuild it anywhere."""

    number: int
    actions: np.ndarray  # [n, ...] the policy's, since the reset
    observation: np.ndarray  # the newest, to compare with


class BrokenEpisode(EnvironmentFault):
    """An environment broke its contract in an episode that can be replayed."""

    def __init__(self, why: str, env: Env, number: int, seed: int, actions: np.ndarray) -> None:
        after = f", after action {actions[-1]}" if len(actions) else ""
        super().__init__(
            f"environment {number} ('{env.id}') broke its contract: {why},"
            f" at step {len(actions)} of the episode with seed {seed}{after}."
        )
        self.why, self.env, self.number, self.seed, self.actions = why, env, number, seed, actions


class LocalEnvs:
    """`numbers` are the environments' numbers in the experiment: with `seed` they fix every episode's seed."""

    def __init__(self, env: Env, seed: int, numbers: Sequence[int], purpose: Purpose = Purpose.RESET) -> None:
        self._env, self._seed, self._numbers, self._purpose = env, seed, list(numbers), purpose
        self._envs = [without_wrappers(make(env)) for _ in self._numbers]
        self.spec: Spec = spec_of(self._envs[0], env.id)
        self._fit = commands(self.spec.action, env.action)
        self._episode = [0] * len(self._envs)  # the number of each one's running episode
        self._actions: list[list[np.ndarray]] = [[] for _ in self._envs]  # since its reset
        self._active = list(range(len(self._envs)))

    def __len__(self) -> int:
        return len(self._envs)

    def start(self, observation: np.ndarray) -> None:
        """Reset every environment to its first episode."""
        for i in range(len(self._envs)):
            self._reset(i, observation[i, ...])

    def retire(self, i: int) -> None:
        """Step this environment no more."""
        self._active.remove(i)

    def wake(self) -> None:
        """Step all environments again."""
        self._active = list(range(len(self._envs)))

    def step(self, actions: np.ndarray, out: Step) -> None:
        """Step every environment; one whose episode ended is reset at once."""
        taken = self._taken(actions)
        shape, rows, real = self.spec.observation.shape, out.next_observation, self.spec.observation.dtype == "float32"
        out.terminated[:], out.truncated[:] = False, False
        ended = []
        i = 0
        try:
            for i in self._active:
                self._actions[i].append(actions[i])
                observation, reward, terminated, truncated, _ = self._envs[i].step(taken[i])
                if (
                    real
                    and type(observation) is np.ndarray
                    and observation.shape == shape
                    and observation.dtype.kind == "f"
                ):
                    rows[i] = observation
                else:
                    write_observation(self.spec.observation, rows[i, ...], observation)
                out.reward[i] = float(reward)
                if terminated or truncated:
                    out.terminated[i], out.truncated[i] = terminated, truncated
                    ended.append(i)
                if MUJOCO_WARNINGS:
                    check_mujoco()
            if not (np.isfinite(rows).all() and np.isfinite(out.reward).all()):
                for i in range(len(self._envs)):
                    check_finite(rows[i, ...], "observation")
                    check_finite(out.reward[i, ...], "reward")
        except Exception as error:
            raise self._broken(i, error) from error
        out.observation[:] = rows
        for i in ended:
            self._episode[i] += 1
            self._reset(i, out.observation[i, ...])

    def _reset(self, i: int, into: np.ndarray) -> None:
        self._actions[i].clear()
        try:
            observation, _ = self._envs[i].reset(seed=self._episode_seed(i))
            write_observation(self.spec.observation, into, observation)
            check_finite(into, "observation")
        except Exception as error:
            raise self._broken(i, error) from error

    def running(self, i: int) -> tuple[int, np.ndarray]:
        """Number and actions [n, ...] of an environment's running episode."""
        return self._episode[i], self._stacked(i)

    def restore(self, i: int, episode: OpenEpisode) -> bool:
        """Rebuild an episode by reset and replay. False where the environment did not repeat itself."""
        self._episode[i] = episode.number
        latest = np.empty_like(episode.observation)
        self._reset(i, latest)
        for action, command in zip(episode.actions, self._taken(episode.actions), strict=True):
            self._actions[i].append(action)
            try:
                observation, *_ = self._envs[i].step(command)
                write_observation(self.spec.observation, latest, observation)
            except Exception as error:
                raise self._broken(i, error) from error
        return latest.tobytes() == episode.observation.tobytes()

    def _taken(self, actions: np.ndarray) -> Sequence[int] | np.ndarray:
        """The policy's actions [N, ...] as the environments take them: plain ints, or arrays."""
        chosen = self._fit(actions)
        return chosen.tolist() if isinstance(self.spec.action, Discrete) else chosen

    def _episode_seed(self, i: int) -> int:
        return integer(self._seed, self._purpose, self._numbers[i], self._episode[i])

    def _stacked(self, i: int) -> np.ndarray:
        action = self.spec.action
        shape, dtype = ((action.low.size,), "float32") if isinstance(action, Box) else ((), "int32")
        return np.stack(self._actions[i]) if self._actions[i] else np.empty((0, *shape), dtype)

    def _broken(self, i: int, error: Exception) -> BrokenEpisode:
        told = isinstance(error, EnvironmentFault)
        why = str(error) if told else f"it raised {type(error).__name__}: {error}"
        return BrokenEpisode(why, self._env, self._numbers[i], self._episode_seed(i), self._stacked(i))

    def close(self) -> None:
        for environment in self._envs:
            environment.close()
        self._envs = []

    def __enter__(self) -> LocalEnvs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
