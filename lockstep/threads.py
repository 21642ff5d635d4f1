"""One thread per process for all that computes: parallelism comes from processes, and more threads change the bits.

Only whole simulations may be shared by threads (`layout.threads`).
"""

from __future__ import annotations

import os

PINNED = {"PJRT_NPROC": "1", "NPROC": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def pin_threads() -> list[str]:
    """One thread per process. Returns the names of the user's own settings that were overridden."""
    overridden = [name for name, value in PINNED.items() if os.environ.get(name, value) != value]
    os.environ.update(PINNED)
    return overridden
