"""A run is a directory; one process works in it at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from lockstep import files, names
from lockstep.config import read as read_toml
from lockstep.errors import FileFault, InUse, Untrusted, UsageError
from lockstep.experiment import Config, algorithm_name, check_environment, from_dict, named_in, to_toml
from lockstep.run import seal

CONFIG, METRICS, LOCK = "config.toml", "metrics.csv", "run.lock"
WHO = 200  # bytes of the lock that say who holds it, at most
_locks: set[int] = set()  # descriptors of the locks that this process holds


def new_name(preset: str, algo: str, seed: int) -> str:
    """Time, what is trained, and a random part: two runs started in one second don't meet."""
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", preset)
    return f"{datetime.now():%Y%m%d-%H%M%S}-{label}-{algo}-s{seed}-{secrets.token_hex(2)}"


def check_name(name: str) -> None:
    """Refuse a name that is no single directory's, before anything is started."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UsageError(
            f"--name {name!r}: a run's name is one directory inside --logdir, such as --name first-try --logdir runs."
        )


def check_writable(logdir: Path) -> None:
    """Refuse a place where a run can't be kept, before anything is started."""
    try:
        existing = next(path for path in [logdir, *logdir.absolute().parents] if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(20, "is a file, not a directory", str(existing))
        with tempfile.TemporaryFile(dir=existing) as file:  # without a name: nothing can be left of it
            file.write(b"lockstep")
            os.fsync(file.fileno())
    except OSError as error:
        raise FileFault(
            f"the run can't be kept in '{logdir}': {error.strerror or error}. Choose another place with --logdir."
        ) from error


def create(logdir: Path, name: str, config: Config) -> Path:
    """A new run directory with its configuration."""
    check_name(name)
    path = logdir / name
    side = logdir / f".{name}.{secrets.token_hex(4)}"  # so that a run is never without its configuration
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "exists already")
        side.mkdir(parents=True)
        write_config(side, config)
        side.rename(path)
        sync_directory(logdir)
    except OSError as error:
        shutil.rmtree(side, ignore_errors=True)
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(path):
            command = f"lockstep resume {shlex.quote(str(path))}"
            raise UsageError(
                f"'{path}' exists already. Continue it with `{command}`, or choose another --name."
            ) from error
        raise FileFault(f"'{path}' can't be created: {error.strerror or error}.") from error
    return path


def check_not_gone(path: Path) -> None:
    """Tell, where a run's directory can't be written to, whether that is because there is none any more."""
    if not path.is_dir():
        raise FileFault(f"'{path}' is gone: it was removed or renamed while the run went on, so the run was ended.")


def write_config(path: Path, config: Config) -> None:
    """With its seal: the modules that it names are imported by this user without a question."""
    content = to_toml(config).encode()
    write_file(path / CONFIG, content)
    try:
        sealed = seal.sign(content)
    except OSError as error:
        if ":" in config.experiment.env.id + algorithm_name(config.experiment.algo):
            why = f"{error.filename or 'its key'}: {error.strerror or error}"
            print(f"lockstep: the run gets no seal, so that it is resumed with --trust. {why}", file=sys.stderr)
        return
    write_file(path / seal.SEAL, sealed)


def read_config(path: Path, trust: bool = False, played: bool = True) -> Config:
    """A run's configuration, or an error that says what isn't there.

    The modules that it names are imported, with `trust` or if the run was made here; the environment's if it is
    `played`.
    """
    file = path / CONFIG
    if not os.path.lexists(file):
        raise UsageError(f"'{path}' is not a run: there is no {CONFIG} in it.")
    content = bytes(files.read(file, files.TEXT))
    try:
        data = read_toml(content)
        for key, name in named_in(data).items():
            if key == "algo.name" or played:
                names.load_from(f"'{file}'", name, trust or _made_here(path, content))
        found = from_dict(data)
        check_environment(data, str(file))
        return found
    except Untrusted:
        raise
    except UsageError as error:
        raise FileFault(f"'{file}': {error}") from error


def modules(path: Path, trust: bool) -> list[str]:
    """What other ranks must import before they are told of the run: the names in its configuration."""
    experiment = read_config(path, trust).experiment
    return [experiment.env.id, algorithm_name(experiment.algo)]


def _made_here(path: Path, content: bytes) -> bool:
    try:
        return seal.holds(content, bytes(files.read(path / seal.SEAL, 1 << 10)))
    except FileFault:
        return False


def write_file(path: Path, content: bytes | bytearray) -> None:
    """All of it or nothing: written to the side, synced and renamed. An OSError names the file, and leaves nothing."""
    side = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with side.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        side.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            side.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run directory, or say who does. The lock goes with the process, however that ends."""
    lock = files.open_regular(path / LOCK, os.O_RDWR | os.O_CREAT)
    _locks.add(lock)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, WHO, 0).decode(errors="replace").strip()
            raise InUse(f"'{path}' is in use by {holder or 'another process'}.") from error
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        _release(lock)


def _release(lock: int) -> None:
    if lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def _release_all() -> None:
    for lock in [*_locks]:
        _release(lock)


os.register_at_fork(after_in_child=_release_all)  # a child of an environment's must not hold what outlives the run
