"""Blocks of environments of every kind, and how tests step them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.address import Purpose
from lockstep.core import Discrete
from lockstep.envs import testing
from lockstep.envs.episodes import Envs, Rollout
from lockstep.envs.local import LocalEnvs
from lockstep.envs.make import Env
from lockstep.envs.workers import WorkerEnvs

SCRIPTED = f"{testing.__name__}:Scripted-v0"


def local(env: Env, seed: int, numbers: Sequence[int], purpose: Purpose = Purpose.RESET) -> Envs:
    return LocalEnvs(env, seed, numbers, purpose)


def workers(env: Env, seed: int, numbers: Sequence[int], purpose: Purpose = Purpose.RESET) -> Envs:
    return WorkerEnvs(env, seed, numbers, min(2, len(numbers)), purpose=purpose)


KINDS: dict[str, Callable[..., Envs]] = {"local": local, "workers": workers}


def started(envs: Envs) -> np.ndarray:
    spec = envs.spec.observation
    observation = np.full((len(envs), *spec.shape), 77, spec.dtype)
    envs.start(observation)
    return observation


class Seen(NamedTuple):
    """One step, with the observation that followed the action in every environment."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_observation: np.ndarray
    observation: np.ndarray


def stepped(envs: Envs, actions: np.ndarray, before: np.ndarray | None = None) -> Seen:
    """One step, written over what no environment says. `before`: what the policy saw, where memory is not shared."""
    rollout = envs.rollout(1)
    for array in (*rollout[:4], rollout.observation[1:]):
        array[:] = 77
    if before is not None:
        rollout.observation[0] = before
    envs.step(actions, rollout, 0)
    seen = followed(rollout, 0)
    rollout.observation[0] = seen.observation
    return seen


def followed(rollout: Rollout, t: int) -> Seen:
    """Step `t` of a rollout."""
    reward, terminated, truncated, final, observation = (array.copy() for array in rollout.step(t))
    ended = terminated | truncated
    next_observation = observation.copy()
    next_observation[ended] = final[ended]
    return Seen(reward, terminated, truncated, next_observation, observation)


def actions_for(envs: Envs, steps: int, seed: int = 0) -> np.ndarray:
    rng, n, action = np.random.default_rng(seed), len(envs), envs.spec.action
    if isinstance(action, Discrete):
        return rng.integers(action.n, size=(steps, n), dtype=np.int32)
    return rng.normal(size=(steps, n, action.low.size)).astype(np.float32)


class Obedient(gymnasium.Env):
    """Misbehaves when it is told to."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, render_mode: str | None = None, broken_reset: bool = False) -> None:
        self._broken_reset = broken_reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return np.full(2, np.nan if self._broken_reset else 0, np.float32), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        observation = {1: np.zeros(3), 2: np.float32([np.nan, 0])}.get(action, np.zeros(2, np.float32))
        return observation, {3: [1.0, 2.0], 4: np.inf}.get(action, 0.0), False, False, {}


class Careless(gymnasium.Env):
    """Draws from NumPy's global generator."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return np.random.random(2).astype(np.float32), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        return np.random.random(2).astype(np.float32), 0.0, False, False, {}


class FiveActions(gymnasium.Env):
    """Pays for each of five actions that is the right one at its time, which is all that is seen."""

    RIGHT = (2, 0, 3, 1, 2)
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, render_mode: str | None = None) -> None:
        self._time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self._time = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        reward = float(action == self.RIGHT[self._time])
        self._time += 1
        return self._seen(), reward, self._time == len(self.RIGHT), False, {}

    def _seen(self) -> np.ndarray:
        return np.float32([self._time / len(self.RIGHT)])


class Wanderer(Obedient):
    """Changes the working directory."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, where: str, render_mode: str | None = None) -> None:
        super().__init__()
        self._where, self.render_mode = where, render_mode

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        os.chdir(self._where)
        return super().step(0)

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.zeros((16, 16, 3), np.uint8)


class Remover(Obedient):
    """Removes a directory once it has made so many steps since that is there."""

    def __init__(self, what: str, after: int, render_mode: str | None = None) -> None:
        super().__init__()
        self._what, self._left = what, after

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        self._left -= os.path.isdir(self._what)
        if self._left == 0:
            shutil.rmtree(self._what, ignore_errors=True)
        return super().step(0)


gymnasium.register("Obedient-v0", Obedient)
gymnasium.register("FiveActions-v0", FiveActions)
gymnasium.register("Wanderer-v0", Wanderer)
gymnasium.register("Remover-v0", Remover)
gymnasium.register("Careless-v0", Careless)
OBEDIENT, CARELESS, FIVE = (f"{__name__}:{name}-v0" for name in ("Obedient", "Careless", "FiveActions"))


class Wild(gymnasium.Env):
    """Ignores its seed: every reset draws from entropy. With `at`, only that step of an episode does."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, at: int = 0) -> None:
        self._at, self._step = at, 0

    def _seen(self) -> np.ndarray:
        return np.random.default_rng().random(2).astype(np.float32) if self._step == self._at else np.zeros(2, "f")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self._step = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        self._step += 1
        return self._seen(), 1.0, self._step >= 60, False, {}


class Pictures(gymnasium.Env):
    """Observations of any shape and dtype; where `masks` is told, in `info`, that say which actions are possible."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (40, 40, 3), dtype: str = "uint8", masks: bool = False) -> None:
        self.observation_space = spaces.Box(0, 255, tuple(shape), np.dtype(dtype).type)
        self._masks = masks

    def _told(self) -> tuple[np.ndarray, dict]:
        observation = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        return observation, {"action_mask": np.ones(2, np.int8)} if self._masks else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return self._told()

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        observation, info = self._told()
        return observation, 1.0, False, False, info


class Masked(gymnasium.Wrapper):
    """Says which actions are possible as sb3-contrib asks for it; something else is wrapped around it."""

    def action_masks(self) -> np.ndarray:
        return np.ones(2, bool)


def masked() -> gymnasium.Env:
    return gymnasium.wrappers.RecordEpisodeStatistics(Masked(Pictures(shape=(3,), dtype="float32")))


class Promising(Careless):
    """Says that it has a picture, and has none; with `wrong`, one of another kind."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode: str | None = None, wrong: bool = False) -> None:
        self.render_mode, self._wrong = render_mode, wrong

    def render(self) -> Any:
        return np.zeros((8, 8)) if self._wrong else super().render()


class Unprepared(Promising):
    """Is not made with a render_mode."""

    def __init__(self) -> None:
        super().__init__()


gymnasium.register("Promising-v0", Promising)
gymnasium.register("Unprepared-v0", Unprepared)
gymnasium.register("Wild-v0", Wild)
gymnasium.register("Pictures-v0", Pictures)
gymnasium.register("Masked-v0", masked)
WILD, PICTURES, MASKED = (f"{__name__}:{name}-v0" for name in ("Wild", "Pictures", "Masked"))
PROMISING, UNPREPARED = f"{__name__}:Promising-v0", f"{__name__}:Unprepared-v0"
