"""Start this command on several ranks of this machine, with MPI's runtime from PyPI."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NamedTuple, TextIO

from lockstep.errors import LockstepError, UsageError
from lockstep.launched import is_launched
from lockstep.parallel.watchdog import GRACE_S

if TYPE_CHECKING:
    from lockstep.parallel.comm import Comm, Mpi, Solo

INSTALL = "pip install 'mpi4py>=4.1,<5' 'mpich>=5.0,<6'"  # the extra `mpi` of pyproject.toml
BY_HAND = "stopped by Ctrl-C."
STATUS_FILE = "LOCKSTEP_STATUS_FILE"  # where the root leaves its exit status


@functools.cache
def join() -> Mpi | Solo:
    """The processes this one was started with: MPI's world, or itself alone."""
    from lockstep.parallel.comm import Mpi, Solo

    if not is_launched():
        return Solo()
    try:
        comm = Mpi()
    except ImportError as error:
        raise UsageError(f"ranks need mpi4py: `{INSTALL}`. ({error})") from error
    sys.excepthook = functools.partial(_uncaught, comm)
    return comm


def _uncaught(comm: Mpi, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A script that ends with an exception on one rank ends on all: MPI would wait for it for ever."""
    sys.stdout.flush()
    status = error.status if isinstance(error, LockstepError) else 1
    told = f"failed:\n{''.join(traceback.format_exception(kind, error, trace))}"
    if isinstance(error, KeyboardInterrupt):
        status, told = 130, str(error) or BY_HAND
    comm.fail(status, told)
    if comm.rank:
        time.sleep(GRACE_S)  # all have failed: the root tells, and ends this rank too
    comm.end(status, told)


@contextlib.contextmanager
def together(comm: Comm) -> Iterator[None]:
    """An error inside that not every rank has ends the job; one that all have is raised on all."""
    try:
        yield
    except LockstepError as error:
        comm.fail(error.status, str(error))
        raise
    except KeyboardInterrupt as stopped:
        comm.fail(130, str(stopped) or BY_HAND)
        raise
    except BaseException:
        comm.fail(1, f"failed:\n{traceback.format_exc()}")
        raise


def speak(verbose: bool) -> None:
    """Only the root is heard; with `verbose` every rank, each line after the rank's number."""
    if not is_launched():
        return
    rank = join().rank
    if verbose:
        sys.stdout, sys.stderr = Prefixed(f"[rank {rank}] ", sys.stdout), Prefixed(f"[rank {rank}] ", sys.stderr)
        print(f"process {os.getpid()} on {os.uname().nodename}, cores {sorted(os.sched_getaffinity(0))}")
    elif rank:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  (for as long as the process lives)


class Prefixed(io.TextIOBase):
    """Text with something before every line; a line is written whole, so that ranks don't meet in it."""

    def __init__(self, prefix: str, out: TextIO) -> None:
        self._prefix, self._out, self._line = prefix, out, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        self._out.write("".join(f"{self._prefix}{line}\n" for line in lines))
        self._out.flush()
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()

    def isatty(self) -> bool:
        return False


def leave(comm: Comm, status: int, message: str | None = None) -> int:
    """The root tells how the run ended; the exit status for this process."""
    from lockstep.parallel.comm import write_status

    if comm.rank == 0 and message:
        print(message, file=sys.stderr)
    if comm.rank == 0 and write_status(status):
        return 0  # MPI's launcher makes a fuss about any other
    return 0 if STATUS_FILE in os.environ else status


def ourselves() -> list[str]:
    """The command `lockstep` for a new process, found where this one found it.

    `python -m lockstep` would search the working directory first: what lies there may have a name of Python's own.
    """
    place = str(Path(__file__).parents[2])
    boot = f"import sys; sys.path.insert(0, {place!r}); from lockstep.__main__ import main; raise SystemExit(main())"
    return [sys.executable, "-P", "-c", boot]


def launch(nprocs: int, arguments: Sequence[str], when_lost: str) -> int:
    """`lockstep ARGUMENTS` on `nprocs` ranks; the exit status of the whole."""
    ended = run_ranks(nprocs, [*ourselves(), *arguments])
    if ended.told is not None:
        return ended.told
    print(f"lockstep: a rank was lost; {when_lost}", file=sys.stderr)
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
        raise UsageError(f"more than one process needs MPI's runtime: `{INSTALL}`.")
    return found


def end_with_parent() -> None:
    """Called in a new process: it is ended when the one that started it is gone. A launcher takes its ranks along."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
