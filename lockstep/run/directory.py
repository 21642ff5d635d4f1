"""A run is a directory; one process works in it at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from lockstep.errors import FileFault, InUse, UsageError
from lockstep.experiment import Config, from_dict, to_toml

CONFIG, METRICS, LOCK = "config.toml", "metrics.csv", "run.lock"


def new_name(preset: str, algo: str, seed: int) -> str:
    """Time, what is trained, and a random part: two runs started in one second don't meet."""
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", preset)
    return f"{datetime.now():%Y%m%d-%H%M%S}-{label}-{algo}-s{seed}-{secrets.token_hex(2)}"


def check_writable(logdir: Path) -> None:
    """Refuse a place where a run can't be kept, before anything is started."""
    try:
        existing = next(path for path in [logdir, *logdir.absolute().parents] if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(20, "is a file, not a directory", str(existing))
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"lockstep")
            os.fsync(file.fileno())
    except OSError as error:
        raise FileFault(
            f"the run can't be kept in '{logdir}': {error.strerror or error}. Choose another place with --logdir."
        ) from error


def create(logdir: Path, name: str, config: Config) -> Path:
    """A new run directory with its configuration."""
    path = logdir / name
    try:
        if path.exists():
            raise UsageError(
                f"'{path}' exists already. Continue it with `lockstep resume {path}`, or choose another --name."
            )
        side = path.with_name(f".{path.name}.{os.getpid()}")  # so that a run is never without its configuration
        side.mkdir(parents=True)
        write_config(side, config)
        side.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise FileFault(f"'{path}' can't be created: {error.strerror or error}.") from error
    return path


def write_config(path: Path, config: Config) -> None:
    write_file(path / CONFIG, to_toml(config).encode())


def read_config(path: Path) -> Config:
    """A run's configuration, or an error that says what isn't there."""
    file = path / CONFIG
    try:
        if not file.is_file():
            raise UsageError(f"'{path}' is not a run: there is no {CONFIG} in it.")
        content = file.read_text()
    except OSError as error:
        raise FileFault(f"'{file}' can't be read: {error.strerror or error}.") from error
    try:
        return from_dict(tomllib.loads(content))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, UsageError) as error:
        raise FileFault(f"{file}: {error}") from error


def write_file(path: Path, content: bytes) -> None:
    """All of it or nothing: written to the side, synced and renamed."""
    side = path.with_name(f".{path.name}.{os.getpid()}")
    with side.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    side.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run directory, or say who does. The lock goes with the process, however that ends."""
    with (path / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InUse(f"'{path}' is in use by {file.read().strip() or 'another process'}.") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield
