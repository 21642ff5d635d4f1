"""Whether an MPI launcher started this process. That is asked first of all, so this module imports next to nothing."""

from __future__ import annotations

import os

# Set by launchers for every process they start: MPICH and Intel MPI, Open MPI, Slurm with PMIx.
MARKS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")


def is_launched() -> bool:
    """Whether an MPI launcher started this process as one of several."""
    return any(name in os.environ for name in MARKS)
