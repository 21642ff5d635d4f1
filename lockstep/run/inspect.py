"""What an environment is, and whether it keeps its contract."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

from lockstep import files, names
from lockstep.address import Purpose, integer
from lockstep.config import LARGEST, brief, build, check_depth
from lockstep.core import Box, Discrete
from lockstep.envs.make import (
    Env,
    check_finite,
    check_mujoco,
    make,
    one_command,
    spec_for,
    spec_of,
    time_limit,
    write_observation,
)
from lockstep.errors import EnvironmentFault, FileFault, LockstepError, UsageError
from lockstep.run.machine import unrepeatable

RESETS = 20  # to measure the reset noise over
EPISODE = 300  # steps of an episode that is replayed


@contextlib.contextmanager
def _told(env: Env) -> Iterator[None]:
    """Whatever an environment raises is its fault, in one message."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise EnvironmentFault(f"'{env.id}' raised {type(error).__name__}: {error}") from error


def info(env: Env, steps: int) -> str:
    """Spaces and limits as declared; rewards and reset noise as measured."""
    environment = make(env)
    spec = spec_of(environment, env.id)
    with _told(env):
        rewards, lengths = _random_rewards(environment, steps)
        firsts = np.stack([np.asarray(environment.reset(seed=seed)[0], float) for seed in range(RESETS)])
    noise = firsts.std(0)
    limit = time_limit(environment)
    lines = {
        "environment": env.id,
        "observations": str(environment.observation_space),
        "actions": str(environment.action_space),
        "policy output": f"{spec.action.low.size} Gaussian"
        if isinstance(spec.action, Box)
        else f"one of {spec.action.n}",
        "time limit": f"{limit} steps" if limit else "none",
        "rewards": f"{min(rewards):.4g} to {max(rewards):.4g}, mean {np.mean(rewards):.4g} ({steps} random steps)",
        "episode length": f"{np.mean(lengths):.0f} steps with random actions"
        if lengths
        else f"over {steps} steps with random actions",
        "reset noise": f"std {noise.min():.3g} to {noise.max():.3g} over components ({RESETS} resets)",
        "render modes": ", ".join(environment.metadata.get("render_modes", [])) or "none",
    }
    environment.close()
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _random_rewards(environment: gymnasium.Env, steps: int) -> tuple[list[float], list[int]]:
    environment.action_space.seed(0)
    environment.reset(seed=0)
    rewards: list[float] = []
    lengths: list[int] = []
    start = 0
    for _ in range(steps):
        _, reward, terminated, truncated, _ = environment.step(environment.action_space.sample())
        rewards.append(float(reward))
        if terminated or truncated:
            lengths.append(len(rewards) - start)
            start = len(rewards)
            environment.reset()
    return rewards, lengths


def check(env: Env, seed: int) -> str:
    """Gymnasium's own checker, then determinism and replay as lockstep needs them. Raises where one fails."""
    report = [f"checking {env.id}"]
    environment = make(env)
    spec_of(environment, env.id)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            check_env(environment.unwrapped, skip_render_check=True)
        except Exception as error:
            raise EnvironmentFault(f"Gymnasium's checker refuses '{env.id}': {error}") from error
        finally:
            environment.close()
    notes = [re.sub(r"\x1b\[\d+m|WARN: ", "", str(warning.message)).strip() for warning in warned]
    report += [f"note: {note}" for note in notes if "out of date" not in note]
    report.append("Gymnasium's checker: passed")
    chosen = _random_actions(env, np.random.default_rng(seed))
    first = _record(env, seed, chosen, dirty=False)
    for dirty, name in ((False, "a fresh environment"), (True, "an environment that played another episode before")):
        again = _record(env, seed, chosen, dirty)
        _same(env, first, again, name)
        report.append(f"replay of {len(first) - 1} steps in {name}: bit for bit the same")
    if np.array_equal(first[0][0], _record(env, seed + 1, chosen[:1], dirty=False)[0][0]):
        report.append("note: another seed starts in the same state")
    report.append("it can be resumed, replayed and moved between processes exactly")
    return "\n".join(report)


Moment = tuple[np.ndarray, float, bool]  # observation, reward, whether the episode ended


def _random_actions(env: Env, rng: np.random.Generator) -> np.ndarray:
    action = spec_for(env).action
    if isinstance(action, Box):
        return rng.uniform(-1, 1, (EPISODE, action.low.size)).astype(np.float32)
    return rng.integers(action.n, size=EPISODE)


def _episode(env: Env, environment: gymnasium.Env, seed: int, actions: Iterable[Any]) -> Iterator[Moment]:
    """Play `actions` from a reset with `seed`, checking every step, until they or the episode end."""
    spec = spec_of(environment, env.id)
    row = np.zeros(spec.observation.shape, spec.observation.dtype)

    def checked(observation: Any, reward: Any = 0.0, ended: bool = False) -> Moment:
        write_observation(spec.observation, row, observation)
        check_finite(row, "observation")
        check_finite(np.asarray(reward), "reward")
        return np.array(observation), float(reward), ended

    yield checked(environment.reset(seed=seed)[0])
    for action in actions:
        command = one_command(spec.action, env.action, action)
        observation, reward, terminated, truncated, _ = environment.step(command)
        check_mujoco()
        yield checked(observation, reward, bool(terminated or truncated))
        if terminated or truncated:
            return


def _record(env: Env, seed: int, actions: np.ndarray, dirty: bool) -> list[Moment]:
    environment = make(env)
    with _told(env):
        if dirty:
            list(_episode(env, environment, integer(seed, Purpose.CHECK, 1), actions[::-1]))
        moments = list(_episode(env, environment, integer(seed, Purpose.CHECK, 0), actions))
        environment.close()
    return moments


def _same(env: Env, first: list[Moment], again: list[Moment], where: str) -> None:
    for step, (one, other) in enumerate(zip(first, again, strict=False)):
        if one[0].tobytes() != other[0].tobytes() or one[1:] != other[1:]:
            raise EnvironmentFault(unrepeatable(env.id, f"replayed in {where}", step))
    if len(first) != len(again):
        raise EnvironmentFault(f"'{env.id}': replayed in {where}, the episode has another length.")


def replay(env_id: str, file: Path) -> str:
    """Play a recorded episode again, and tell what happens at its last step."""
    env, seed, recorded = _read_episode(env_id, file)
    try:
        environment = make(env)
    except UsageError as error:  # the name was typed, the rest of it stands in the file
        raise FileFault(f"'{file}': {error}") from error
    step = -1
    try:
        actions = _actions(recorded, file, spec_of(environment, env.id).action)
        for step, _ in enumerate(_episode(env, environment, seed, actions)):
            pass
    except FileFault:
        raise
    except EnvironmentFault as fault:
        raise EnvironmentFault(f"replayed: at step {step + 1} {fault}.") from fault
    except Exception as error:
        raise EnvironmentFault(f"replayed: at step {step + 1} it raised {type(error).__name__}: {error}") from error
    finally:
        environment.close()
    return f"{step} steps replayed without a fault: it was not repeated."


def _read_episode(env_id: str, file: Path) -> tuple[Env, int, list[Any]]:
    """What a run recorded of an episode of the environment that was typed, which is imported if it must be."""
    try:
        record = json.loads(files.read(file.resolve() if file.is_symlink() else file, files.TABLE))
        check_depth(record)
        given, seed, actions = (_part(record, *part) for part in (("env", dict), ("seed", int), ("actions", list)))
        if "id" not in given:
            raise ValueError("'env' has no 'id'")
        env = build(Env, given, lambda cls, data: (cls, data))
        if not 0 <= seed <= LARGEST:
            raise ValueError(f"'seed' must be from 0 to {LARGEST}")
    except (ValueError, RecursionError, UsageError) as error:
        raise FileFault(f"'{file}' is not a recorded episode: {brief(str(error))}.") from error
    if env.id != env_id:
        raise UsageError(f"'{file}' is an episode of '{env.id}', not of '{env_id}'.")
    names.load(env_id)
    return env, seed, actions


def _part(record: object, name: str, kind: type) -> Any:
    found = record.get(name) if isinstance(record, dict) else None
    if type(found) is not kind:
        words = {dict: "a table", int: "a whole number", list: "a list"}
        raise ValueError(f"'{name}' must be {words[kind]}")
    return found


def _actions(recorded: list[Any], file: Path, space: Box | Discrete) -> list[np.ndarray]:
    """The policy's actions as it chose them; a FileFault where no policy of this environment can have done so."""
    actions = []
    for step, given in enumerate(recorded, 1):
        action = _action(given, space)
        if action is None:
            size = "a whole number" if isinstance(space, Discrete) else f"{space.low.size} numbers"
            raise FileFault(
                f"'{file}' is not a recorded episode: action {step} must be {size} that the policy can choose."
            )
        actions.append(action)
    return actions


def _action(given: object, space: Box | Discrete) -> np.ndarray | None:
    """One action, if it is one of this space."""
    shape, kinds = ((), "i") if isinstance(space, Discrete) else ((space.low.size,), "if")
    try:
        plain = np.asarray(given)
    except ValueError:  # lists of several lengths
        return None
    if plain.shape != shape or plain.dtype.kind not in kinds:
        return None
    with np.errstate(over="ignore"):
        action = np.asarray(plain, np.float32)
    inside = 0 <= action < space.n if isinstance(space, Discrete) else np.isfinite(action).all()
    return action if inside else None
