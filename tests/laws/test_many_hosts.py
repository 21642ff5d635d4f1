"""Two hosts, as network namespaces of this machine, have the bits of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from tests.laws.process import digest_in, options
from tests.laws.table import settings

RECIPE = Path(__file__).parents[2] / "scripts" / "two-hosts.sh"


def forbidden() -> str:
    """Why namespaces can't be made here, or nothing."""
    name = f"lockstep-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except OSError as error:
        return f"no `ip`: {error.strerror}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.stderr.strip() if made.returncode else ""


@pytest.mark.parametrize("mode", ["gather", "average"])
def test_two_hosts_equal_one_process(tmp_path: Path, mode: str) -> None:
    if why := forbidden():
        pytest.skip(f"network namespaces are not permitted here: {why}")
    one = lockstep.train("Pendulum-v1", logdir=tmp_path, name="one", settings=settings(2))
    arguments = ["train", "Pendulum-v1", *options(settings(2)), "--logdir", str(tmp_path), "--name", "two"]
    command = ["sh", str(RECIPE), sys.executable, *arguments, "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert digest_in(done.stdout) == one.digest
    crossed = re.search(r"over the cable: (\d+) bytes", done.stderr)
    assert crossed is not None
    assert int(crossed[1]) > 10_000
