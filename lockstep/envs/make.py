"""From a name to an environment, its spec, and the actions that fit it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import error, spaces, wrappers

from lockstep import names
from lockstep.core import ArraySpec, Box, Discrete, Spec
from lockstep.errors import EnvironmentFault, UsageError, nearest
from lockstep.ranges import Natural, NonNegative


@dataclass(frozen=True)
class Env:
    """Which environment, and how actions are fitted to it."""

    id: str = "Pendulum-v1"  # as Gymnasium knows it; 'module:Name-v0' imports the module first
    # Box actions: the policy's [-1, 1] to the box (rescale), or the box as it is (clip)
    action: Literal["rescale", "clip"] = "rescale"
    time_limit: Natural = 0  # steps after which an episode is cut; 0: the environment's own limit
    time_feature: NonNegative = 0.0  # appended to observations: steps since the reset, times this; 0: nothing is
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the environment


def check_id(env_id: str, more: Sequence[str] = ()) -> None:
    """Refuse an id that Gymnasium doesn't know, naming the nearest that it does, or of `more` names."""
    try:
        gymnasium.spec(_registered(env_id))
    except error.Error as cause:
        hint = nearest(env_id, [*gymnasium.registry, *more]) or f" {cause}."
        raise UsageError(
            f"unknown environment '{env_id}'.{hint} `lockstep presets` lists presets; any Gymnasium id works too."
        ) from cause


def _registered(env_id: str) -> str:
    """The id as Gymnasium's registry has it: what stands behind the module, which is imported by now."""
    if ":" in env_id:
        names.imported(env_id)
    return env_id.rpartition(":")[2]


def make(env: Env, render_mode: str | None = None) -> gymnasium.Env:
    """The environment, or a UsageError that says why not."""
    check_id(env.id)
    _listen_to_mujoco()
    options: dict[str, Any] = {"max_episode_steps": env.time_limit} if env.time_limit else {}
    if render_mode is not None:
        options["render_mode"] = render_mode
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is out of date.*")
            # Box2D's import does not survive these where warnings are errors
            warnings.filterwarnings("ignore", message="builtin type .* has no __module__ attribute")
            made = gymnasium.make(_registered(env.id), disable_env_checker=True, **options, **env.kwargs)
            return TimeFeature(made, env.time_feature) if env.time_feature else made
    except UsageError:
        raise
    except (error.DependencyNotInstalled, ImportError) as cause:
        raise UsageError(f"'{env.id}' needs a package that is not installed: {cause}") from cause
    except TypeError as cause:
        raise UsageError(f"'{env.id}' does not take env.kwargs {env.kwargs}: {cause}") from cause
    except Exception as cause:
        why = f"{type(cause).__name__}: {cause}"
        raise UsageError(f"'{env.id}' can't be made with env.kwargs {env.kwargs}: {why}") from cause


class TimeFeature(gymnasium.Wrapper):
    """Observations with the time since the reset as one more number, so that a value function can know of the limit."""

    def __init__(self, environment: gymnasium.Env, scale: float) -> None:
        super().__init__(environment)
        seen = environment.observation_space
        if not isinstance(seen, spaces.Box) or len(seen.shape) != 1:
            raise UsageError("env.time_feature needs observations that are a vector.")
        low, high = np.append(seen.low, 0.0), np.append(seen.high, np.inf)
        self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
        self._scale, self._steps = scale, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        observation, info = self.env.reset(seed=seed, options=options)
        return self._timed(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._steps += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._timed(observation), reward, terminated, truncated, info

    def _timed(self, observation: np.ndarray) -> np.ndarray:
        return np.append(observation, self._scale * self._steps).astype(np.float32)


class TimeLimited:
    """An environment and its time limit, without the cost of Gymnasium's wrappers around each step."""

    def __init__(self, bare: gymnasium.Env, limit: int | None) -> None:
        self.bare, self.limit, self._steps = bare, limit, 0
        self.observation_space, self.action_space = bare.observation_space, bare.action_space

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self.bare.reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._steps += 1
        observation, reward, terminated, truncated, info = self.bare.step(action)
        return observation, reward, terminated, truncated or self._steps == self.limit, info

    def close(self) -> None:
        self.bare.close()


def without_wrappers(environment: gymnasium.Env) -> gymnasium.Env | TimeLimited:
    """The same environment, cheaper to step where its only wrappers are the two that every one has."""
    inner, limit = environment, None
    if type(inner) is wrappers.TimeLimit:
        limit, inner = inner._max_episode_steps, inner.env
    if type(inner) is wrappers.OrderEnforcing:
        inner = inner.env
    return TimeLimited(inner, limit) if inner is environment.unwrapped else environment


MUJOCO_WARNINGS: list[str] = []  # what MuJoCo warned of since this was last emptied


def _listen_to_mujoco() -> None:
    """MuJoCo's warnings are kept, instead of printed and written to a file in the working directory.

    It resets a simulation by itself when numbers blow up, and says so only in a warning.
    """
    try:
        import mujoco
    except ImportError:
        return
    mujoco.set_mju_user_warning(MUJOCO_WARNINGS.append)


def check_mujoco() -> None:
    """Refuse a step in which MuJoCo gave up on the simulation."""
    heard = [message for message in MUJOCO_WARNINGS if "unstable" in message]
    MUJOCO_WARNINGS.clear()
    if heard:
        raise unstable(heard[0])


def unstable(warning: str) -> EnvironmentFault:
    return EnvironmentFault(f"MuJoCo reset the simulation by itself: {warning}")


def spec_of(environment: gymnasium.Env | TimeLimited, name: str) -> Spec:
    """The spec, or a UsageError where a space is of a kind that lockstep can't learn on."""
    observation, action = environment.observation_space, environment.action_space
    if not isinstance(observation, spaces.Box):
        raise UsageError(
            f"'{name}' has {type(observation).__name__} observations; only Box is supported. Register an environment"
            " of your own that returns it inside gymnasium.wrappers.FlattenObservation."
        )
    dtype = "float32" if np.issubdtype(observation.dtype, np.floating) else str(observation.dtype)
    seen = ArraySpec(observation.shape, dtype)
    if isinstance(action, spaces.Box):
        return Spec(seen, Box(action.low, action.high, str(action.dtype)))
    if isinstance(action, spaces.Discrete):
        return Spec(seen, Discrete(int(action.n), int(action.start), str(action.dtype)))
    raise UsageError(f"'{name}' has {type(action).__name__} actions; only Box and Discrete are supported.")


def spec_for(env: Env) -> Spec:
    """The spec of an environment that is made only to look at it."""
    environment = make(env)
    spec = spec_of(environment, env.id)
    environment.close()
    return spec


def commands(action: Box | Discrete, fit: str) -> Callable[[np.ndarray], np.ndarray]:
    """How a policy's actions [N, ...] become what the environment takes. NumPy's exact arithmetic, so it replays."""
    if isinstance(action, Discrete):
        return lambda chosen: chosen.astype(action.dtype) + action.start
    low, high, shape, dtype = action.low, action.high, (-1, *action.low.shape), np.dtype(action.dtype)

    def clipped(chosen: np.ndarray) -> np.ndarray:
        inside: np.ndarray = np.minimum(np.maximum(chosen.reshape(shape), low), high)
        return inside if inside.dtype == dtype else inside.astype(dtype)

    if fit == "clip" or not (np.isfinite(low).all() and np.isfinite(high).all()):
        return clipped
    if (low == -1).all() and (high == 1).all():
        return clipped  # there is nothing to rescale
    real = np.result_type(low, np.float32)  # an integer box is halved as real numbers
    upper, lower = high.astype(real) / 2, low.astype(real) / 2
    middle, half = upper + lower, upper - lower

    def rescaled(chosen: np.ndarray) -> np.ndarray:
        inside = np.minimum(np.maximum(chosen.reshape(shape), -1), 1)
        return clipped(middle + half * inside)

    return rescaled


def one_command(action: Box | Discrete, fit: str, chosen: Any) -> Any:
    """One action as one environment takes it: a plain int, or an array."""
    command = commands(action, fit)(np.asarray(chosen)[None])[0]
    return int(command) if isinstance(action, Discrete) else command


def write_observation(spec: ArraySpec, into: np.ndarray, observation: Any) -> None:
    """Copy one observation into its row, refusing another shape or a dtype that doesn't convert."""
    array = np.asarray(observation)
    if array.shape != spec.shape:
        raise EnvironmentFault(f"the observation has shape {array.shape}, its space says {spec.shape}")
    if array.dtype.kind not in "fiub" or not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise EnvironmentFault(f"the observation has dtype {array.dtype}, its space says {spec.dtype}")
    into[...] = array


def is_finite(array: np.ndarray) -> bool:
    """Whether no number is infinite or NaN. A sum of squares tells sooner, unless numbers are very large."""
    return isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def check_finite(array: np.ndarray, what: str) -> None:
    """Refuse NaN and infinity, naming the component."""
    if not is_finite(array):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        at = f" at index {where[0] if len(where) == 1 else where}" if where else ""
        raise EnvironmentFault(f"the {what} is {array[where]}{at}")


def time_limit(environment: gymnasium.Env) -> int | None:
    return environment.spec.max_episode_steps if environment.spec else None


def longest_episode(env: Env) -> int:
    """In steps; a UsageError where there is no limit."""
    if env.time_limit:
        return env.time_limit
    check_id(env.id)
    registered = gymnasium.spec(_registered(env.id)).max_episode_steps
    limit = env.kwargs.get("max_episode_steps", registered)  # Gymnasium takes it beside the environment's own; -1: none
    if not isinstance(limit, int) or limit < 0:
        raise UsageError(
            f"'{env.id}' has no time limit, so a whole episode may be of any length. Set env.time_limit to the longest"
            " that is waited for, or collect steps: collect.episodes=0."
        )
    return limit
