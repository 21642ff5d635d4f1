from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lockstep.run import seal

CONTENT = b"experiment.steps = 3\n"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's key is kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "lockstep" / "key"


def test_a_seal_holds_for_its_bytes_alone(key: Path) -> None:
    sealed = seal.sign(CONTENT)
    assert seal.holds(CONTENT, sealed)
    assert not seal.holds(CONTENT + b" ", sealed)
    for wrong in (b"", b"\xff" * 64, sealed[:-1], sealed.upper()):
        assert not seal.holds(CONTENT, wrong)


def test_the_key_is_made_once_and_for_its_owner_alone(key: Path) -> None:
    sealed = seal.sign(CONTENT)
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert (len(key.read_bytes()), os.listdir(key.parent)) == (32, ["key"])
    assert seal.sign(CONTENT) == sealed
    key.unlink()
    assert not seal.holds(CONTENT, sealed)
    assert not key.exists(), "looking makes no key"
    assert seal.sign(CONTENT) != sealed


def test_processes_that_make_the_key_at_once_have_one(key: Path) -> None:
    seals: list[bytes] = []
    threads = [threading.Thread(target=lambda: seals.append(seal.sign(CONTENT))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(seals), len(set(seals))) == (8, 1)


@pytest.mark.parametrize("what", ["readable by others", "short", "long", "a link", "a pipe", "a directory"])
def test_a_key_that_may_be_somebody_elses_is_not_used(key: Path, what: str) -> None:
    sealed = seal.sign(CONTENT)
    kept = key.rename(key.with_name("kept"))
    if what == "readable by others":
        kept.rename(key).chmod(0o640)
    elif what in ("short", "long"):
        key.write_bytes(kept.read_bytes()[: 31 if what == "short" else None] + b"x" * (what == "long"))
        key.chmod(0o600)
    elif what == "a link":
        key.symlink_to(kept)
    elif what == "a pipe":
        os.mkfifo(key, 0o600)
    else:
        key.mkdir(0o700)
    assert not seal.holds(CONTENT, sealed)
    with pytest.raises(OSError, match=r"key|directory"):
        seal.sign(CONTENT)


def test_a_relative_place_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification has it: else the key would lie wherever the program is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    seal.sign(CONTENT)
    assert (tmp_path / "home" / ".local" / "state" / "lockstep" / "key").exists()
