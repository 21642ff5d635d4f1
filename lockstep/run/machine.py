"""What the bits depend on besides the experiment: package versions, and how this CPU computes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core import Box, Spec
from lockstep.envs.make import Env, make, one_command, spec_of
from lockstep.errors import UsageError
from lockstep.experiment import Experiment
from lockstep.run.directory import write_file
from lockstep.runtime import cache_directory, own_settings

COPIES = 4  # of an update's data: collected, by lane, as the networks see it, shuffled
PACKAGES = ("lockstep-rl", "jax", "jaxlib", "optax", "numpy", "gymnasium", "mujoco", "box2d")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe(env: Env) -> dict[str, Any]:
    """Versions and fingerprints, as stored in every checkpoint."""
    return {"versions": versions(), "kernels": _kernels(), "simulation": simulation(env)}


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


def simulation(env: Env, steps: int = 50) -> str:
    """A hash of a short episode of the environment under fixed actions."""
    environment = make(env)
    action = spec_of(environment, env.id).action
    rng = np.random.default_rng(0)
    sha = hashlib.sha256()
    try:
        observation, _ = environment.reset(seed=0)
        for _ in range(steps):
            sha.update(np.asarray(observation).tobytes())
            chosen = rng.uniform(-1, 1, action.low.shape) if isinstance(action, Box) else rng.integers(action.n)
            command = one_command(action, env.action, chosen)
            observation, reward, terminated, truncated, _ = environment.step(command)
            sha.update(np.float64(reward).tobytes())
            if terminated or truncated:
                observation, _ = environment.reset(seed=1)
    except Exception:  # training will meet it too, and tell it with the episode
        return "failed"
    finally:
        environment.close()
    return sha.hexdigest()


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
