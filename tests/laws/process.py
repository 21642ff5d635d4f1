"""The command line in a process of its own, to be stopped and killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from lockstep.run.checkpoint import listed

MARK = "LOCKSTEP_TEST"  # in the environment of every process a test starts; its value is the test's own


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", *arguments]


def options(settings: Mapping[str, Any]) -> list[str]:
    values = {
        key: tomli_w.dumps({"v": value}).removeprefix("v = ").replace("\n", "") for key, value in settings.items()
    }
    return [option for key, value in values.items() for option in ("--set", f"{key}={value}")]


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    whole = {**os.environ, **(env or {})}
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=whole, timeout=300)


def on_ranks(count: int, *arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Python with these arguments on so many ranks, started by MPI's own launcher."""
    launcher = str(Path(sys.executable).parent / "mpiexec")
    whole = [launcher, "-n", str(count), sys.executable, *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=seconds)


def digest_in(output: str) -> str:
    """The digest that `train` and `resume` print last."""
    word, digest = output.strip().splitlines()[-1].split()
    assert word == "digest"
    return digest


def hearing_ctrl_c(words: list[str]) -> list[str]:
    """The command, also where whoever started the tests ignores Ctrl-C, as a shell's background jobs do."""
    return ["env", "--default-signal=INT", *words]


def family() -> set[int]:
    """The living processes that this test started, and those that they started in turn."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.add(int(process.name))
    return found


def wait_until_gone(seconds: float = 10) -> None:
    """Nothing that this test started may be left."""
    deadline = time.monotonic() + seconds
    while left := family():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def rows(path: Path) -> int:
    """How many updates a run has reported."""
    file = path / "metrics.csv"
    return max(file.read_text().count("\n") - 1, 0) if file.exists() else 0


def timeless(path: Path) -> list[list[str]]:
    """metrics.csv without what differs between any two runs: times, and seals, which cover them."""
    lines = [line.split(",") for line in (path / "metrics.csv").read_text().splitlines()]
    kept = [i for i, column in enumerate(lines[0]) if not column.startswith(("time_", "seconds", "steps_per", "seal"))]
    return [[line[i] for i in kept] for line in lines]


def cut_back(path: Path) -> None:
    """Leave only the oldest checkpoint of a run: as if it had been killed after it."""
    _, *later = listed(path)
    assert later
    for checkpoint in later:
        shutil.rmtree(checkpoint)


def start_and_wait(arguments: Iterable[str], path: Path, updates: int) -> subprocess.Popen[str]:
    """Start a command and return as soon as its run has reported so many updates."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while rows(path) < updates and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)
    return process
