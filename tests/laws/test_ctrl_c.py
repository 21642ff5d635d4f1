"""Ctrl-C at any moment ends a command as a shell expects it: 130, in words, without a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.laws.process import command

PYTHONS_OWN_S = 0.06  # in which Python itself starts, and answers as it does
MOMENTS_S = 5.0


def pressed(logdir: Path, after_s: float, cache: Path | None) -> tuple[int, str]:
    """A run that is stopped after so long: its status as a shell sees it, and what it said."""
    env = {**os.environ, **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    process = subprocess.Popen(
        command("train", "pendulum", "--logdir", str(logdir)),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    status = process.returncode
    return (128 - status if status < 0 else status), told


def press(tmp_path: Path, presses: int) -> None:
    """Half of them with programs still to be compiled."""
    rng = random.Random(5)
    failed = []
    for number in range(presses):
        after_s = PYTHONS_OWN_S + rng.uniform(0, MOMENTS_S) * (number + 1) / presses
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
