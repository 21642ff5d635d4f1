"""The process as the bits need it: one thread, set before JAX starts, and a compilation cache."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

from lockstep.threads import pin_threads


def start_jax() -> None:
    """Import and set up JAX; every entry point that computes calls this first. Calling it again is fine."""
    for name in pin_threads():
        print(f"lockstep: {name} is set to 1: more threads would change the result", file=sys.stderr)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
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
