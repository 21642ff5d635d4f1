"""The process as the bits need it: one thread, set before JAX starts, and a compilation cache."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.threads import pin_threads

# A rank's number among those of its machine, as launchers tell it: MPICH and Intel MPI, Open MPI, MVAPICH2, Slurm.
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def start_jax() -> None:
    """Import and set up JAX; every entry point that computes calls this first. Calling it again is fine."""
    for name in pin_threads():
        print(f"lockstep: {name} is set to 1: more threads would change the result", file=sys.stderr)
    os.environ["JAX_PLATFORMS"] = with_cpu(os.environ.get("JAX_PLATFORMS", "cpu"))
    os.environ.update(shared_devices(os.environ, len(list(Path("/dev").glob("nvidia[0-9]*")))))
    import jax
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)  # for a BLAS that was loaded before its variable was set
    jax.config.update("jax_enable_x64", True)  # normalisers are float64; networks say float32 themselves
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_default_prng_impl", "threefry2x32")
    jax.config.update("jax_threefry_partitionable", True)
    jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
