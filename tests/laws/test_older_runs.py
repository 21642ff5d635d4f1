"""A run that an older version made is of use to every later one: it is evaluated, resumed and verified."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.cli import main
from lockstep.run import machine
from lockstep.run.checkpoint import listed, newest
from lockstep.run.metrics import read_metrics
from tests.laws.process import cut_back, digest_in
from tests.laws.table import settings

Output = pytest.CaptureFixture[str]
RUNS = sorted((Path(__file__).parents[1] / "data").glob("run-format-*"))
FINAL = {"run-format-1": "718c27de5517739a258446b82ae1063f7a2992f41c93bc02c6d3af80a9124de8"}


@pytest.fixture(params=RUNS, ids=[run.name for run in RUNS])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, to be worked in."""
    return Path(shutil.copytree(request.param, tmp_path / request.param.name))


def differences(run: Path) -> list[str]:
    """Why this machine may compute other bits than the one that made the run: another kind of CPU, other packages."""
    here = lockstep.train("Pendulum-v1", logdir=run.parent, name="here", settings=settings(1))
    found = machine.differences(newest(run)[1].machine, newest(here.path)[1].machine)
    return [change for change in found if not change.startswith("lockstep-rl ")]


def test_there_is_a_run_of_the_first_format() -> None:
    assert [run.name for run in RUNS] == list(FINAL)


def test_an_older_run_is_evaluated(older: Path) -> None:
    assert main(["evaluate", str(older), "--episodes", "2"]) == 0
    assert lockstep.load(older, "best").act(np.zeros(3, np.float32)).shape == (1,)


def test_an_older_run_has_its_digest(older: Path, capsys: Output) -> None:
    assert main(["digest", str(older)]) == 0
    assert capsys.readouterr().out.split() == [
        *f"{older}: update 6, 768 steps; as in metrics.csv".split(),
        FINAL[older.name],
    ]


def test_an_older_run_is_verified(older: Path, capsys: Output) -> None:
    changes = differences(older)
    capsys.readouterr()
    status = main(["verify", str(older), "--updates", "0:"])
    output = capsys.readouterr()
    assert status in ((0, 4) if changes else (0,)), output.err
    assert "updates 1 to 6: 6 digests equal, 3 checkpoints intact" in output.out or status == 4
    assert all(change in output.err for change in changes)
    assert "rows without a seal, up to update 6" in output.err


def test_an_older_run_is_resumed_from_any_of_its_checkpoints(older: Path, capsys: Output) -> None:
    changes, before = differences(older), read_metrics(older).rows
    capsys.readouterr()
    cut_back(older)
    assert [path.name for path in listed(older)] == ["step_000000000384"]
    assert main(["resume", str(older)]) == 0
    output = capsys.readouterr()
    assert "rows without a seal, up to update 3" in output.err
    if not changes:
        assert digest_in(output.out) == FINAL[older.name]
    rows = read_metrics(older).rows
    assert [row["update"] for row in rows] == [row["update"] for row in before]
    assert [bool(row["seal"]) for row in rows] == [False] * 3 + [True] * 3
    assert main(["verify", str(older), "--updates", "4:"]) == 0
