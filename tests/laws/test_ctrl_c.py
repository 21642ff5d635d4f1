"""Ctrl-C at any moment ends a command as a shell expects it: 130, in words, without a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.laws.process import command, hearing_ctrl_c

MOMENTS_S = 5.0


def pythons_own_s() -> float:
    """How long Python itself takes to start and to find lockstep, here and now: until then it answers as it does."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import lockstep"], check=True)
        took.append(time.perf_counter() - began)
    return 1.5 * max(took)


def pressed(logdir: Path, after_s: float, cache: Path | None) -> tuple[int, str]:
    """A run that is stopped after so long: its status as a shell sees it, and what it said."""
    words = hearing_ctrl_c(command("train", "pendulum", "--logdir", str(logdir)))
    env = {**os.environ, **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    status = process.returncode
    return (128 - status if status < 0 else status), told


def press(tmp_path: Path, presses: int) -> None:
    """Half of them with programs still to be compiled."""
    rng, own_s = random.Random(5), pythons_own_s()
    failed = []
    for number in range(presses):
        after_s = own_s + rng.uniform(0, MOMENTS_S)
        cache = tmp_path / f"cache{number}" if number % 2 else None
        status, told = pressed(tmp_path / "runs", after_s, cache)
        if status != 130 or "Traceback" in told or "Exception ignored" in told or "lockstep: stop" not in told:
            failed.append((after_s, status, told))
    assert not failed


def test_ctrl_c_at_random_moments_is_status_130_without_a_traceback(tmp_path: Path) -> None:
    press(tmp_path, 6)


@pytest.mark.slow
def test_a_hundred_times_ctrl_c(tmp_path: Path) -> None:
    press(tmp_path, 100)
