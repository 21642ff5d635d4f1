"""What compiled programs need: one thread, JAX's settings while they are traced and called, a compilation cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.threads import pin_threads

if TYPE_CHECKING:
    import jax

# JAX's settings under which lockstep's programs are traced and called, whatever the rest of the process has.
SETTINGS = {
    "enable_x64": True,  # normalisers are float64; networks say float32 themselves
    "default_prng_impl": "threefry2x32",
    "threefry_partitionable": True,
    "numpy_dtype_promotion": "standard",
    "default_matmul_precision": None,
    "disable_jit": False,
    "debug_nans": False,
    "debug_infs": False,
    "mesh": None,
}

# Options of the compiler that are the whole process's, and what they must be for bits to be promised.
COMPILED_WITH = {
    "disable_most_optimizations": False,
    "optimization_level": "UNKNOWN",
    "exec_time_optimization_effort": 0.0,
}

# A rank's number among those of its machine, as launchers tell it: MPICH and Intel MPI, Open MPI, MVAPICH2, Slurm.
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def start_jax() -> None:
    """Import and set up JAX; every entry point that computes calls this first. Calling it again is fine.

    What a user's own programs compute is left alone: `own_settings` are entered where ours are traced and called.
    """
    for name in pin_threads():
        print(f"lockstep: {name} is set to 1: more threads would change the result", file=sys.stderr)
    os.environ["JAX_PLATFORMS"] = with_cpu(os.environ.get("JAX_PLATFORMS", "cpu"))
    os.environ.update(shared_devices(os.environ, len(list(Path("/dev").glob("nvidia[0-9]*")))))
    import jax
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)  # for a BLAS that was loaded before its variable was set
    own_cpu()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@functools.cache
def _client() -> tuple[jax.Device | None, str]:
    """A CPU of lockstep's own, where JAX was used before lockstep, or why there is none. Asked when JAX is started.

    How many threads a CPU has, and whether programs run in the thread that calls them, is settled when JAX first uses
    it, by what the process had said until then. Another client of the same CPU is settled anew.
    """
    from jax._src.xla_bridge import backends_are_initialized
    from jaxlib.xla_client import make_cpu_client

    if not backends_are_initialized():
        return None, ""
    try:
        client: Any = make_cpu_client(asynchronous=False)
        return client.devices()[0], ""
    except Exception as error:
        return None, (
            "JAX was used in this process before lockstep, with threads of its own choice, and a CPU client with one"
            f" thread can't be made beside it ({error}): the bits may not be those of the command line. Call lockstep"
            " first in a fresh process."
        )


def own_cpu() -> jax.Device | None:
    """Where programs run instead of on JAX's own CPU; None where that is as they need it, or no other can be had."""
    return _client()[0]


def doubts() -> list[str]:
    """Why what is computed in this process may have other bits than on the command line; empty where nothing is."""
    import jax

    states = {name: getattr(jax.config, f"jax_{name}", None) for name in COMPILED_WITH}
    states["disable_most_optimizations"] = jax.config.read("jax_disable_most_optimizations")
    changed = [f"jax_{name} is {value}" for name, value in states.items() if value != COMPILED_WITH[name]]
    told = f"{' and '.join(changed)} in this process: programs are compiled otherwise, and may have other bits."
    return [*filter(None, [_client()[1]]), *([told] if changed else [])]


def cpu() -> jax.Device:
    """Where policies act: beside the environments."""
    import jax

    return own_cpu() or jax.local_devices(backend="cpu")[0]


def _setting(name: str) -> Any:
    import jax

    if name == "mesh":
        return None if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh()
    return getattr(jax.config, f"jax_{name}")


def _with_setting(name: str, value: Any) -> AbstractContextManager[Any]:
    import jax

    setting: AbstractContextManager[Any] = jax.set_mesh(value) if name == "mesh" else getattr(jax, name)(value)
    return setting


class JaxSettings(contextlib.ContextDecorator):
    """JAX with these settings, in this thread. Entered, it gives those that they replace."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self._wanted = wanted
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> dict[str, Any]:
        wanted = self._wanted
        replaced = {name: value for name in wanted if (value := _setting(name)) != wanted[name]}
        self._entered = [_with_setting(name, wanted[name]) for name in replaced]
        for setting in self._entered:
            setting.__enter__()
        return replaced

    def __exit__(self, *error: Any) -> None:
        for setting in reversed(self._entered):
            setting.__exit__(*error)

    def _recreate_cm(self) -> JaxSettings:
        return JaxSettings(self._wanted)


def own_settings() -> JaxSettings:
    """JAX as our programs need it; what they replace brings a user's own settings back within them."""
    return JaxSettings(_needed())


@functools.cache
def _needed() -> dict[str, Any]:
    import jax

    return {**SETTINGS, "default_device": own_cpu() if jax.default_backend() == "cpu" else None}


def with_cpu(platforms: str) -> str:
    """JAX's platforms as the user named them, and the CPU: a policy acts where the environments are."""
    named = platforms.split(",")
    return platforms if not platforms or "cpu" in named else ",".join([*named, "cpu"])


def shared_devices(environ: Mapping[str, str], devices: int) -> dict[str, str]:
    """Settings with which several ranks of a machine share its accelerators; the user's own are left alone."""
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    rank = next((environ[name] for name in LOCAL_RANK if name in environ), None)
    if devices > 1 and rank is not None:
        chosen["CUDA_VISIBLE_DEVICES"] = str(int(rank) % devices)
    return {name: value for name, value in chosen.items() if name not in environ}


def cache_directory() -> Path:
    """Where compiled programs are kept; never shared between kinds of CPU."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    return root / hashlib.sha256(cpu_name().encode()).hexdigest()[:12]


def cpu_name() -> str:
    """The CPU's model and instruction set, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    return f"{wanted.get('model name', platform.machine())} {wanted.get('flags', '')}"
