"""Where a run is kept: its place is its own, and what happens to it is told as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import lockstep
from lockstep.cli import main
from lockstep.run.checkpoint import listed, newest
from lockstep.run.metrics import read_metrics
from tests.laws.process import options
from tests.laws.table import BATCH, settings

Output = pytest.CaptureFixture[str]
OLDER = Path(__file__).parents[1] / "data" / "run-format-1"


def test_a_relative_logdir_stays_where_it_was_when_an_environment_changes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    chosen = options(settings(2, **{"env.kwargs.where": str(elsewhere)}))
    assert main(["train", "tests.environments:Wanderer-v0", *chosen, "--logdir", "runs", "--name", "run"]) == 0
    assert "lockstep visualize runs/run\n" in capsys.readouterr().out, "as it was typed"
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "runs/run", "--steps", str(4 * BATCH)]) == 0
    run = tmp_path / "runs" / "run"
    assert listed(run)[-1].name == f"step_{4 * BATCH:012d}"
    assert len(read_metrics(run).rows) == 4
    assert not list(elsewhere.iterdir())


@pytest.mark.filterwarnings("ignore")  # the writer of pictures
def test_videos_are_kept_where_they_were_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    chosen = settings(1, **{"env.kwargs.where": str(elsewhere), "env.time_limit": 5})
    lockstep.train("tests.environments:Wanderer-v0", logdir="runs", name="run", settings=chosen)
    monkeypatch.chdir(tmp_path)
    assert main(["visualize", "runs/run", "--episodes", "2", "--format", "gif"]) == 0
    assert [path.name for path in sorted((tmp_path / "runs/run/videos").iterdir())] == ["episode0.gif", "episode1.gif"]
    assert not list(elsewhere.iterdir())


def test_a_run_whose_directory_is_removed_says_so(tmp_path: Path, capsys: Output) -> None:
    run = tmp_path / "run"
    chosen = options(settings(40, **{"env.kwargs.what": str(run), "env.kwargs.after": 40}))
    assert main(["train", "tests.environments:Remover-v0", *chosen, "--logdir", str(tmp_path), "--name", "run"]) == 5
    told = capsys.readouterr().err
    assert f"lockstep: '{run}' is gone: it was removed or renamed while the run went on" in told
    assert "as they were" not in told
    assert not run.exists()


@pytest.mark.filterwarnings("ignore")  # TensorBoard's writer leaves a file open that it can't write
@pytest.mark.parametrize("pages", range(8))
def test_resuming_on_a_full_disk_names_the_file_and_leaves_nothing(
    small_disk: Path, capsys: Output, pages: int
) -> None:
    """With room for a few more pages of 4 kB."""
    run = Path(shutil.copytree(OLDER, small_disk / "run"))
    (run / "run.lock").touch()
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(bytes(free - pages * 4096))
    assert main(["resume", str(run), "--steps", "2048"]) == 5
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "a file" not in told
    assert f"{run}" in told.splitlines()[-1]
    assert not list(run.rglob(".*"))
    assert newest(run)[1].progress.steps >= 768
    (small_disk / "ballast").unlink()
    assert main(["resume", str(run), "--steps", "2048"]) == 0
    assert [int(row["update"]) for row in read_metrics(run).rows] == list(range(1, 17))
