"""A run's directory: one name, one owner, and nothing left of what failed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import FileFault, InUse, UsageError
from lockstep.experiment import resolve
from lockstep.run import directory
from lockstep.run.directory import check_name, check_not_gone, check_writable, create, locked, write_file

FORKS = """
import os, sys, time
from pathlib import Path
from lockstep.run.directory import locked

with locked(Path(sys.argv[1])):
    if os.fork() == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()
os._exit(0)
"""


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's directory, with a child that outlives it."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("killed", [True, False])
def test_a_child_that_was_forked_does_not_keep_the_lock(
    tmp_path: Path, forked: subprocess.Popen[str], killed: bool
) -> None:
    with pytest.raises(InUse, match=f"is in use by process {forked.pid} on"), locked(tmp_path):
        pass
    if killed:
        forked.kill()
    else:
        assert forked.stdin
        forked.stdin.write("\n")
        forked.stdin.flush()
    forked.wait()
    os.killpg(forked.pid, 0)  # its child is alive
    with locked(tmp_path):
        pass


def test_a_lock_is_given_back_and_its_descriptor_too(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with locked(tmp_path):
            with pytest.raises(InUse), locked(tmp_path):
                pass
            assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b", "/tmp/x", "x\0y"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="a run's name is one directory inside --logdir"):
        check_name(name)
    with pytest.raises(UsageError, match="a run's name is one directory inside --logdir"):
        create(tmp_path / "runs", name, resolve("Pendulum-v1"))
    assert not list(tmp_path.iterdir())


def test_of_many_that_create_one_name_one_wins_and_the_others_leave_nothing(tmp_path: Path) -> None:
    config = resolve("Pendulum-v1")

    def attempt(_: int) -> str:
        try:
            return str(create(tmp_path, "run", config))
        except UsageError as error:
            return str(error)

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(attempt, range(8)))
        assert told.count(str(tmp_path / "run")) == 1
        assert sum("exists already. Continue it with `lockstep resume" in message for message in told) == 7
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        shutil.rmtree(tmp_path / "run")


def test_a_name_that_is_a_file_or_a_link_exists_already(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="exists already"):
            create(tmp_path, name, resolve("Pendulum-v1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_full_disk_is_told_with_the_files_name_and_nothing_is_left(small_disk: Path) -> None:
    file = small_disk / "config.toml"
    write_file(file, b"before")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_file(file, b"x" * 400_000)
    assert caught.value.filename == str(file)
    assert file.read_bytes() == b"before"
    assert [path.name for path in small_disk.iterdir()] == ["config.toml"]


def test_a_run_that_can_not_be_created_leaves_nothing(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (256 << 10))
    with pytest.raises(FileFault, match=r"run' can't be created: No space left on device"):
        create(small_disk, "run", resolve("Pendulum-v1"))
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_a_full_disk_does_not_keep_a_run_from_being_locked(small_disk: Path) -> None:
    (small_disk / "run.lock").touch()
    (small_disk / "ballast").write_bytes(b"x" * (256 << 10))
    with locked(small_disk), pytest.raises(InUse, match="is in use by another process"), locked(small_disk):
        pass


def test_whether_a_place_is_writable_is_tried_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between writing and removing, it must not leave a file."""
    seen: list[list[str]] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append(os.listdir(tmp_path)), fsync(descriptor)))
    check_writable(tmp_path / "runs")
    assert seen == [[]]


def test_a_directory_that_is_gone_is_told_as_gone(tmp_path: Path) -> None:
    check_not_gone(tmp_path)
    with pytest.raises(FileFault, match="is gone: it was removed or renamed while the run went on"):
        check_not_gone(tmp_path / "run")


def test_every_error_of_writing_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(directory.os, "fsync", full)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_file(tmp_path / "file", b"x")
    assert caught.value.filename == str(tmp_path / "file")
    assert not list(tmp_path.iterdir())
