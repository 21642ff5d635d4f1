"""Reading files whole. A file may be anybody's: its kind and its size are checked before a byte of it is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lockstep.errors import FileFault

TEXT = 1 << 20  # bytes of a configuration or a manifest, at most
TABLE = 1 << 30  # of metrics.csv
ARRAYS = 4 << 30  # of a checkpoint's arrays

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read(path: Path, limit: int) -> bytearray:
    """The content of a regular file of at most `limit` bytes, read once into one buffer; a FileFault otherwise."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
        with open(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise FileFault(f"'{path}' can't be read: it has {size:,} bytes, and {limit:,} at most are expected.")
            content, filled = bytearray(size), 0
            with memoryview(content) as view:
                while count := file.readinto(view[filled:]):  # a system call reads 2 GB at most
                    filled += count
            del content[filled:]
            return content
    except OSError as error:
        raise FileFault(f"'{path}' can't be read: {error.strerror or error}.") from error


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file, which its path names without a link. Nothing is waited for."""
    try:
        _check_kind(path, os.lstat(path).st_mode)  # before it is opened, which a device might answer to
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)  # of what was opened, which may be another by now
    except FileFault:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise FileFault(f"'{path}' can't be used: it is {kind}, not a regular file.")
