"""What the bits depend on besides the experiment: package versions, and how this CPU computes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core import ArraySpec, Box, Spec
from lockstep.envs.make import Env, make, one_command, spec_of
from lockstep.errors import UsageError
from lockstep.experiment import Experiment
from lockstep.run.directory import write_file
from lockstep.runtime import cache_directory, own_settings

COPIES = 4  # of an update's data: collected, by lane, as the networks see it, shuffled
REHEARSED = 50  # steps of the episode that a fingerprint is made of
IMAGE = 1000  # numbers from which an observation with pixels or axes looks like an image
MASK = "action_mask"  # the key of an environment's `info` that says which actions are possible
PACKAGES = ("lockstep-rl", "jax", "jaxlib", "optax", "numpy", "gymnasium", "mujoco", "box2d")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class Machine(NamedTuple):
    """What the bits of a run depend on here, and what is worth knowing of its environment."""

    stored: dict[str, Any]  # versions and fingerprints, as every checkpoint has them
    doubt: str = ""  # why the environment is no function of its seed and actions, where it was seen not to be
    notes: tuple[str, ...] = ()  # what lockstep does not do for such an environment


def describe(env: Env) -> Machine:
    """Versions and fingerprints, and what the episode of the fingerprint showed."""
    seen = rehearse(env)
    stored = {"versions": versions(), "kernels": _kernels(), "simulation": seen.fingerprint}
    return Machine(stored, _doubt(env, seen), tuple(_notes(seen)))


def _doubt(env: Env, seen: Rehearsal) -> str:
    if seen.differs_at is None:
        return ""
    told = unrepeatable(env.id, "played again from the same seed", seen.differs_at)
    return f"{told} Another run has other bits. Look closer with: lockstep check {env.id}"


def unrepeatable(name: str, how: str, step: int) -> str:
    """What is told of an environment that did not repeat itself."""
    where = f"at step {step}" if step else "at step 0, the reset"
    return (
        f"'{name}' is not a function of its seed and actions: {how}, it differs {where}."
        " Runs on it can't be resumed or moved bit for bit."
    )


def _notes(seen: Rehearsal) -> Iterator[str]:
    shape, dtype = seen.observation
    inputs = int(np.prod(shape))
    if inputs >= IMAGE and (dtype == "uint8" or len(shape) > 1):
        by = " x ".join(map(str, shape))
        yield f"observations look like images ({by}, {dtype}): they are flattened to {inputs:,} inputs of an MLP."
    if seen.masks:
        yield "the environment offers action masks, which are ignored: actions that it forbids may be chosen."


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed between two descriptions, in words."""
    old, new = then.get("versions", {}), now["versions"]
    changed = [
        f"{package} {old.get(package, 'none')} -> {new.get(package, 'none')}"
        for package in sorted(old.keys() | new.keys())
        if old.get(package) != new.get(package)
    ]
    for part, name in (("kernels", "arithmetic of this CPU"), ("simulation", "simulation of the environment")):
        if then.get(part) != now[part]:
            changed.append(name)
    return changed


def compared(ranks: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """How ranks differ from rank 0: what can't go together, and what only makes other bits likely."""
    refused, doubtful = [], []
    for rank, theirs in enumerate(ranks[1:], 1):
        names = differences(ranks[0], theirs)
        packages = [name for name in names if "->" in name]
        if packages:
            refused.append(f"rank {rank} has other versions than rank 0: {', '.join(packages)}. Install the same.")
        elif names:
            doubtful.append(f"rank {rank} differs from rank 0 in the {' and the '.join(names)}.")
    return refused, doubtful


def _kernels() -> str:
    """A hash of small programs whose last bits differ between kinds of CPU; kept with the compiled programs."""
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_"))}
    key = json.dumps([versions(), flags], sort_keys=True)
    file = cache_directory() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch("[0-9a-f]{64}", kept := file.read_text()):
            return kept

    def kernels(x: jax.Array) -> tuple[jax.Array, ...]:
        wave = jnp.tanh(x @ x.T)
        slope = jax.grad(lambda y: jnp.log1p(y * y).mean())(wave)
        return jnp.exp(-x).sum(), jnp.linalg.qr(wave)[1], slope, jnp.cumsum(x)

    x = np.sin(np.arange(37 * 37, dtype=np.float32)).reshape(37, 37)
    sha = hashlib.sha256()
    with own_settings():
        for result in jax.jit(kernels)(x):
            sha.update(np.asarray(result).tobytes())
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, sha.hexdigest().encode())
    return sha.hexdigest()


class Rehearsal(NamedTuple):
    """What a short episode under fixed actions showed, played twice in one environment."""

    fingerprint: str  # a hash of it, or "failed"
    observation: ArraySpec
    differs_at: int | None = None  # the first step that was another the second time; 0: the reset
    masks: bool = False  # whether the environment says which actions are possible


def rehearse(env: Env) -> Rehearsal:
    environment = make(env)
    try:
        spec = spec_of(environment, env.id)
        first = _play(env, environment, spec)
        again = _play(env, environment, spec) if first else []
        masks = environment.has_wrapper_attr("action_masks") or any(moment.masked for moment in first)
    finally:
        environment.close()
    if not first:
        return Rehearsal("failed", spec.observation)
    pairs = enumerate(zip(first, again, strict=False))
    differs_at = next(((i + 1) // 2 for i, (one, other) in pairs if one != other), None)
    sha = hashlib.sha256(b"".join(moment.seen for moment in first))
    return Rehearsal(sha.hexdigest(), spec.observation, differs_at, masks)


class Moment(NamedTuple):
    """An observation, or the reward that followed it."""

    seen: bytes
    ended: bool
    masked: bool  # whether an action mask came with it


def _has_mask(info: Any) -> bool:
    return isinstance(info, dict) and MASK in info


def _play(env: Env, environment: gymnasium.Env, spec: Spec) -> list[Moment]:
    """Observation and reward in turn; none where the environment fails, which training will meet too, and tell."""
    rng, moments, action = np.random.default_rng(0), [], spec.action
    try:
        observation, info = environment.reset(seed=0)
        for _ in range(REHEARSED):
            moments.append(Moment(np.asarray(observation).tobytes(), False, _has_mask(info)))
            chosen = rng.uniform(-1, 1, action.low.shape) if isinstance(action, Box) else rng.integers(action.n)
            command = one_command(action, env.action, chosen)
            observation, reward, terminated, truncated, info = environment.step(command)
            ended = bool(terminated or truncated)
            moments.append(Moment(np.float64(reward).tobytes(), ended, _has_mask(info)))
            if ended:
                observation, info = environment.reset(seed=1)
    except Exception:
        return []
    return moments


def check_memory(experiment: Experiment, spec: Spec) -> None:
    """Refuse an update whose data can't fit, with the arithmetic, before anything is started."""
    action = spec.action.low.nbytes if isinstance(spec.action, Box) else 4
    seen = int(np.prod(spec.observation.shape)) * np.dtype(spec.observation.dtype).itemsize
    row = 2 * seen + action + 30  # an observation and the next, an action, rewards and flags
    needed, free = COPIES * experiment.batch * row, _free_memory()
    if free is not None and needed > free:
        raise UsageError(
            f"an update of {experiment.batch:,} steps ({experiment.lanes} lanes x {experiment.envs_per_lane} envs"
            f" x {experiment.length:,} steps) of {row:,} bytes needs about {needed / 2**30:.1f} GiB, and"
            f" {free / 2**30:.1f} GiB are free. Lower what is collected, envs_per_lane or lanes."
        )


def _free_memory() -> int | None:
    """In bytes, where the system tells."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    return None
