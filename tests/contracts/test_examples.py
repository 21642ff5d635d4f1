"""The examples run, are short, and end with a digest or a return."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    assert len(example.read_text().splitlines()) <= 48
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "return" in done.stdout


def test_an_environment_of_ones_own_from_the_command_line(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES[0].parent)}
    command = [sys.executable, "-m", "lockstep", "check", "own_environment:Target-v0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bit for bit the same") == 2
