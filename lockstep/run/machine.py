"""What the bits depend on besides the experiment: package versions, and how this CPU computes."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core import Box
from lockstep.envs.make import Env, make, one_command, spec_of
from lockstep.runtime import cache_directory

PACKAGES = ("lockstep-rl", "jax", "jaxlib", "optax", "numpy", "gymnasium", "mujoco", "box2d")


def versions() -> dict[str, str]:
    found = {}
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


def _kernels() -> str:
    """A hash of small programs whose last bits differ between kinds of CPU; kept with the compiled programs."""
    file = cache_directory() / f"kernels-{hashlib.sha256(json.dumps(versions()).encode()).hexdigest()[:12]}"
    try:
        return file.read_text()
    except OSError:
        pass

    def kernels(x: jax.Array) -> tuple[jax.Array, ...]:
        wave = jnp.tanh(x @ x.T)
        return (
            jnp.exp(-x).sum(),
            jnp.linalg.qr(wave)[1],
            jax.grad(lambda y: jnp.log1p(y * y).mean())(wave),
            jnp.cumsum(x),
        )

    x = np.sin(np.arange(37 * 37, dtype=np.float32)).reshape(37, 37)
    sha = hashlib.sha256()
    for result in jax.jit(kernels)(x):
        sha.update(np.asarray(result).tobytes())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(sha.hexdigest())
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
