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
    if "import torch" in example.read_text():
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "return" in done.stdout


def test_five_marked_edits_make_a_plain_script_parallel() -> None:
    """Every line of the parallel script is one of the plain script's, in their order, or is marked as an edit."""
    plain, parallel = (
        (EXAMPLES[0].parent / name).read_text().split('"""\n', 1)[1].splitlines()
        for name in ("policy_gradient_torch.py", "policy_gradient_torch_parallel.py")
    )
    edited = [line for line in parallel if "# edit " in line]
    assert {line.split("# edit ")[1][0] for line in edited} == set("12345")
    kept = [line for line in parallel if line and "# edit " not in line and line != "import lockstep.ranks"]
    rest = iter(line for line in plain if line)
    assert all(line in rest for line in kept)
    assert len([line for line in plain if line]) - len(kept) == 3  # those that edits replace


def test_an_environment_of_ones_own_from_the_command_line(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES[0].parent)}
    command = [sys.executable, "-m", "lockstep", "check", "own_environment:Target-v0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bit for bit the same") == 2
