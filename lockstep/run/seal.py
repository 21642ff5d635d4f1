"""Whether a run was made here: its configuration is sealed with a key that only this user has.

The seal is the HMAC-SHA256 of config.toml's bytes. It proves who wrote them, which no owner, host name or path does:
those travel with an archive, or are the same on many machines.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import stat
from pathlib import Path

SEAL = "config.seal"
KEY_BYTES = 32


def sign(content: bytes) -> bytes:
    """The seal of these bytes; an OSError where this user can't keep a key."""
    return hmac.digest(_key(make=True), content, "sha256").hex().encode()


def holds(content: bytes, seal: bytes) -> bool:
    """Whether the seal was made here for these bytes."""
    try:
        return hmac.compare_digest(hmac.digest(_key(make=False), content, "sha256").hex().encode(), seal.strip())
    except OSError:
        return False


def _key(make: bool) -> bytes:
    """This user's key, made where it is missing if `make`."""
    file = _directory() / "key"
    if make and not file.exists():
        _make(file)
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it must be a file that only its owner can read (chmod 600)", str(file))
        key = opened.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise OSError(errno.EINVAL, f"it must have {KEY_BYTES} bytes", str(file))
    return key


def _make(file: Path) -> None:
    """Written to the side and linked into place: of several processes at once, one makes the key of all."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    side = file.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(secrets.token_bytes(KEY_BYTES))
        opened.flush()
        os.fsync(opened.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(side, file)
    finally:
        side.unlink()


def _directory() -> Path:
    """Where this user's programs keep what must outlive them."""
    try:
        home = Path(os.environ.get("XDG_STATE_HOME", ""))
        return (home if home.is_absolute() else Path.home() / ".local" / "state") / "lockstep"
    except RuntimeError as error:  # there is no home
        raise FileNotFoundError(errno.ENOENT, "this user has no home directory") from error
