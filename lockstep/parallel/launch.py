"""Start this command on several ranks of this machine, with MPI's runtime from PyPI."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.parallel.comm import Comm

STATUS_FILE = "LOCKSTEP_STATUS_FILE"  # where the root leaves its exit status

# Set by launchers for every process they start: MPICH and Intel MPI, Open MPI, Slurm with PMIx.
MARKS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")


def is_launched() -> bool:
    """Whether an MPI launcher started this process as one of several."""
    return any(name in os.environ for name in MARKS)


def join() -> Comm:
    """The processes this one was started with: MPI's world, or itself alone."""
    from lockstep.parallel.comm import Mpi, Solo

    return Mpi() if is_launched() else Solo()


def leave(comm: Comm, status: int, message: str | None = None) -> int:
    """The root tells how the run ended; the exit status for this process."""
    from lockstep.parallel.comm import write_status

    if comm.rank == 0 and message:
        print(message, file=sys.stderr)
    if comm.rank == 0 and write_status(status):
        return 0  # MPI's launcher makes a fuss about any other
    return 0 if STATUS_FILE in os.environ else status


def launch(nprocs: int, arguments: Sequence[str]) -> int:
    """`python -m lockstep ARGUMENTS` on `nprocs` ranks; the exit status of the whole."""
    ended = run_ranks(nprocs, [sys.executable, "-m", "lockstep", *arguments])
    if ended.told is not None:
        return ended.told
    print("lockstep: a rank was lost; continue with `lockstep resume RUN`.", file=sys.stderr)
    return 6 if ended.launcher else 1


class Ended(NamedTuple):
    """How ranks ended: the exit status that one of them left, if any did, and that of MPI's launcher."""

    told: int | None
    launcher: int


def run_ranks(nprocs: int, command: Sequence[str]) -> Ended:
    """Any command on `nprocs` ranks, to its end. Signals are passed on."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "status"
        job = subprocess.Popen(
            [_mpiexec(), "-n", str(nprocs), *command],
            env={**os.environ, STATUS_FILE: str(file)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

        def forward(number: int, frame: FrameType | None) -> None:
            job.send_signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ended = job.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return Ended(int(file.read_text()) if file.exists() else None, ended)


def _mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError("more than one process needs MPI's runtime: `pip install lockstep-rl[mpi]`.")
    return found


def end_with_parent() -> None:
    """Called in a new process: it is ended when the one that started it is gone. A launcher takes its ranks along."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
