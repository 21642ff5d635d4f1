"""What is no ordinary file is refused before a byte of it is read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import files
from lockstep.errors import FileFault


def bound(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.close()


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
    "a socket": bound,
    "a symbolic link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    SPECIAL[kind](path)
    with pytest.raises(FileFault, match=f"'{path}' can't be used: it is {kind}, not a regular file"):
        files.read(path, files.TEXT)


def test_a_device_is_named() -> None:
    with pytest.raises(FileFault, match="'/dev/zero' can't be used: it is a device"):
        files.read(Path("/dev/zero"), files.TEXT)


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert files.read(path, 100) == b"x" * 100
    with pytest.raises(FileFault, match="it has 100 bytes, and 99 at most are expected"):
        files.read(path, 99)
    os.truncate(path, 8 << 30)
    with pytest.raises(FileFault, match="it has 8,589,934,592 bytes"):
        files.read(path, files.ARRAYS)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileFault, match=r"nothing' can't be read: No such file or directory\."):
        files.read(tmp_path / "nothing", 9)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        files.read(tmp_path / "file", 1)
        for name, limit in (("file", 0), ("folder", 1)):
            with pytest.raises(FileFault):
                files.read(tmp_path / name, limit)
    assert len(os.listdir("/proc/self/fd")) == before
