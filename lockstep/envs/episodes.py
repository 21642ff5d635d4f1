"""What a process's environments are to the rest of lockstep, and what is known of their running episodes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np

from lockstep.address import Purpose, integer
from lockstep.core import Box, Discrete, Spec
from lockstep.envs.make import Env
from lockstep.errors import EnvironmentFault


class Step(NamedTuple):
    """Where one step of N environments is written."""

    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    truncated: np.ndarray  # [N]
    final: np.ndarray  # [N, ...] the last observation of an episode, where one ended; nothing elsewhere
    observation: np.ndarray  # [N, ...] what the policy sees next: after a reset where an episode ended


class Rollout(NamedTuple):
    """Where T steps of N environments are written; `observation[t]` is what the policy saw before step t."""

    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    final: np.ndarray  # [T, N, ...]
    observation: np.ndarray  # [T + 1, N, ...]

    def step(self, t: int) -> Step:
        return Step(self.reward[t], self.terminated[t], self.truncated[t], self.final[t], self.observation[t + 1])

    def block(self, envs: slice) -> Rollout:
        """The same memory, of some of the environments."""
        return Rollout(*(array[:, envs] for array in self))


class OpenEpisode(NamedTuple):
    """An episode that is going on: enough to rebuild it anywhere."""

    number: int
    actions: np.ndarray  # [n, ...] the policy's, since the reset
    observation: np.ndarray  # the newest, to compare with


class Envs(Protocol):
    """The environments of a process's lanes. Where they are stepped is nobody's business."""

    spec: Spec
    strangers: list[int]  # the numbers of those that did not repeat themselves when an episode was rebuilt

    @property
    def resting(self) -> np.ndarray:
        """[N] Those that are not stepped: they keep their observation, and get no reward."""

    def __len__(self) -> int: ...

    def rollout(self, steps: int) -> Rollout:
        """Memory for so many steps. What an earlier one holds may be overwritten."""

    def start(self, observation: np.ndarray) -> None:
        """Reset every environment to its first episode."""

    def step(self, actions: np.ndarray, rollout: Rollout, t: int) -> None:
        """Step every environment, written as step `t`; one whose episode ended is reset at once."""

    def running(self, i: int) -> tuple[int, np.ndarray]:
        """Number and actions [n, ...] of an environment's running episode."""

    def restore(self, i: int, episode: OpenEpisode) -> bool:
        """Rebuild an episode by reset and replay. False where the environment did not repeat itself."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class BrokenEpisode(EnvironmentFault):
    """An environment broke its contract in an episode that can be replayed."""

    def __init__(self, why: str, env: Env, number: int, seed: int, actions: np.ndarray, trace: str = "") -> None:
        after = f", after action {actions[-1]}" if len(actions) else ""
        super().__init__(
            f"environment {number} ('{env.id}') broke its contract: {why},"
            f" at step {len(actions)} of the episode with seed {seed}{after}."
        )
        self.why, self.env, self.number, self.seed, self.actions = why, env, number, seed, actions
        self.trace = trace  # the environment's own traceback, where it raised something


# which of a block of environments, and what it did -> what to raise
Blame = Callable[[int, Exception], BrokenEpisode]


class Episodes:
    """The running episodes of some environments: the number and the actions of each."""

    def __init__(self, env: Env, seed: int, numbers: Sequence[int], purpose: Purpose, action: Box | Discrete) -> None:
        self._env, self._seed, self._purpose = env, seed, purpose
        self._shape, self._dtype = action_row(action)
        self.numbers = list(numbers)  # of the environments in the experiment
        self.number = [0] * len(self.numbers)  # of each one's running episode
        self.actions: list[list[np.ndarray]] = [[] for _ in self.numbers]  # since its reset

    def begin(self, i: int, number: int) -> None:
        self.number[i] = number
        self.actions[i].clear()

    def seed(self, i: int) -> int:
        return integer(self._seed, self._purpose, self.numbers[i], self.number[i])

    def stacked(self, i: int, steps: int | None = None) -> np.ndarray:
        """The first `steps` actions of an episode, or all: [n, ...]."""
        taken = self.actions[i][:steps]
        return np.stack(taken) if taken else np.empty((0, *self._shape), self._dtype)

    def broken(self, i: int, error: Exception) -> BrokenEpisode:
        """An environment's exception, with the episode it happened in."""
        if isinstance(error, EnvironmentFault):
            return BrokenEpisode(str(error), self._env, self.numbers[i], self.seed(i), self.stacked(i))
        why, trace = f"it raised {type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        return BrokenEpisode(why, self._env, self.numbers[i], self.seed(i), self.stacked(i), trace)


def action_row(action: Box | Discrete) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of one of the policy's actions."""
    return ((action.low.size,), "float32") if isinstance(action, Box) else ((), "int32")
