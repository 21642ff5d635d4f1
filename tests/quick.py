"""Programs that are compiled in a hurry: for tests that compare numbers, not bits, and run a program a few times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from lockstep.core import Algorithm, Learner, Metrics, Trajectory
from lockstep.parallel.lanes import LaneBlock

Update = Callable[..., tuple[Learner, Metrics]]

HURRY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def quick(function: Callable[..., Any]) -> Any:
    """The same program as by `jax.jit`, as code that runs slower but is there four times as soon."""
    return jax.jit(function, compiler_options=HURRY)


def update_of(algorithm: Algorithm) -> Update:
    """The algorithm's update with all lanes in the process, for (learner, trajectory, number of a key)."""
    program = quick(lambda learner, data, key: algorithm.update(learner, LaneBlock(data), jax.random.key(key)))

    def update(learner: Learner, data: Trajectory, key: int = 1) -> tuple[Learner, Metrics]:
        return program(learner, data, key)

    return update
