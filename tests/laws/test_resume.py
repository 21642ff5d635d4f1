"""Stopped, killed or damaged, and resumed: the digest is that of the run that was never disturbed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.algorithms import REGISTRY, Entry
from lockstep.algorithms.a2c import A2C, a2c
from lockstep.cli import main
from lockstep.errors import FileFault, UsageError
from lockstep.run.checkpoint import listed, newest, remove, write
from lockstep.run.directory import read_config
from lockstep.run.metrics import read_metrics
from lockstep.run.train import resume
from tests.laws.process import cut_back, digest_in, options, rows, run, start_and_wait, timeless
from tests.laws.table import BATCH, SMALL, every_algorithm, settings

Output = pytest.CaptureFixture[str]
UPDATES = 40


@every_algorithm
def test_two_halves_equal_the_whole(tmp_path: Path, env: str, algo: str) -> None:
    """Also the rows of metrics.csv, but for the time they took."""
    constant = {"algo.schedule": "constant"}
    whole = lockstep.train(env, algo=algo, logdir=tmp_path, name="whole", settings=settings(6, algo, **constant))
    half = lockstep.train(env, algo=algo, logdir=tmp_path, name="half", settings=settings(3, algo, **constant))
    assert resume(half.path, steps=6 * BATCH).digest == whole.digest
    assert timeless(half.path) == timeless(whole.path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    logdir = tmp_path_factory.mktemp("undisturbed")
    return lockstep.train("Hopper-v5", logdir=logdir, settings=settings(UPDATES)).digest


def train_arguments(logdir: Path) -> list[str]:
    watched = {"watch.eval_every": 256, "watch.eval_episodes": 1, "watch.checkpoint_every": 256}
    return ["train", "Hopper-v5", *options(settings(UPDATES, **watched)), "--logdir", str(logdir), "--name", "run"]


def test_killed_at_random_moments_and_resumed(tmp_path: Path, undisturbed: str) -> None:
    """kill -9 in the middle of whatever is going on: starting, collecting, updating, evaluating, saving."""
    rng = random.Random(11)
    path = tmp_path / "run"
    arguments = train_arguments(tmp_path)
    reached = []
    for more in (1, 2, 0, 2):
        process = start_and_wait(arguments, path, rows(path) + more)
        time.sleep(rng.uniform(0.0, 0.05 if more else 1.0))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        reached.append(rows(path))
        arguments = ["resume", str(path)]
    assert reached[0] >= 1
    assert reached[-1] > reached[0]
    finished = run("resume", str(path))
    assert finished.returncode == 0, finished.stderr
    assert digest_in(finished.stdout) == undisturbed
    assert rows(path) == UPDATES
    assert not list((path / "checkpoints").glob(".tmp*"))
    assert lockstep.load(path, "best") is not None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_and_resumed(tmp_path: Path, undisturbed: str, number: int, status: int) -> None:
    path = tmp_path / "run"
    process = start_and_wait(train_arguments(tmp_path), path, 2)
    process.send_signal(number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == status, messages
    assert f"lockstep resume {path}" in messages
    assert "Traceback" not in messages
    stopped_at = rows(path)
    assert stopped_at < UPDATES
    finished = run("resume", str(path))
    assert digest_in(finished.stdout) == undisturbed
    assert rows(path) == UPDATES


def test_a_damaged_checkpoint_is_named_and_an_older_one_used(tmp_path: Path, undisturbed: str) -> None:
    path = tmp_path / "run"
    lockstep.train("Hopper-v5", logdir=tmp_path, name="run", settings=settings(UPDATES))
    newest = sorted((path / "checkpoints").glob("step_*"))[-1]
    file = newest / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    finished = run("resume", str(path))
    assert finished.returncode == 0
    assert f"{newest}' is damaged" in finished.stderr
    assert digest_in(finished.stdout) == undisturbed
    assert newest.with_suffix(".corrupt").is_dir()


def test_no_valid_checkpoint_is_a_file_fault(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(1))
    for checkpoint in (path / "checkpoints").glob("step_*"):
        (checkpoint / "manifest.json").write_text("{")
    failed = run("resume", str(path))
    assert failed.returncode == 5
    assert "no valid checkpoint is left" in failed.stderr


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(2))
    shutil.rmtree(done.path / "checkpoints")
    assert resume(done.path).digest == done.digest
    assert rows(done.path) == 2


def test_rows_of_a_run_without_checkpoints_are_kept_beside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(2))
    before = (done.path / "metrics.csv").read_bytes()
    shutil.rmtree(done.path / "checkpoints")
    resume(done.path, steps=BATCH)
    assert rows(done.path) == 1
    assert (done.path / "metrics.csv.damaged").read_bytes() == before
    assert "is kept in" in capfd.readouterr().err


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(2))
    assert resume(done.path).digest == done.digest


def test_an_environment_that_does_not_repeat_itself_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # the random observation is the newest when two updates are made
    chance = {"env.kwargs": {"what": "random", "at": 64}, "algo.schedule": "constant"}
    lockstep.train("lockstep.envs.testing:Scripted-v0", logdir=tmp_path, name="run", settings=settings(2, **chance))
    assert main(["resume", str(tmp_path / "run"), "--steps", str(4 * BATCH), "--strict"]) == 3
    assert main(["resume", str(tmp_path / "run"), "--steps", str(4 * BATCH)]) == 0
    told = capfd.readouterr().err
    assert told.count("did not repeat itself") == 2
    assert not newest(tmp_path / "run")[1].exact
    assert main(["resume", str(tmp_path / "run"), "--strict"]) == 5
    assert "--strict: the run has been continued before" in capfd.readouterr().err


def test_a_changed_experiment_is_refused(tmp_path: Path, capsys: Output) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(2))
    file = done.path / "config.toml"
    file.write_text(file.read_text().replace("clip = 0.2", "clip = 0.3"))
    for command in ("resume", "evaluate", "visualize", "digest", "verify"):
        assert main([command, str(done.path)]) == 5
        assert f"'{file}' is not the experiment of" in capsys.readouterr().err
    with pytest.raises(FileFault, match="it was changed"):
        lockstep.load(done.path)


def test_a_damaged_row_of_the_metrics_is_named_and_no_other_is_lost(tmp_path: Path, capsys: Output) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(8))
    file = done.path / "metrics.csv"
    file.write_bytes(file.read_bytes().replace(b"\r\n5,1280,", b"\r\n5,128x,"))
    found = file.read_bytes()
    assert main(["resume", str(done.path), "--steps", str(9 * BATCH)]) == 0
    told = capsys.readouterr().err
    assert f"'{file}' is damaged in line 6 (where update 5 belongs)." in told
    assert "has no rows of these updates, which the run made: 5." in told
    assert f"kept in '{file}.damaged'" in told
    assert Path(f"{file}.damaged").read_bytes() == found
    assert [int(row["update"]) for row in read_metrics(done.path).rows] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_another_budget_is_told_by_what_was_trained_not_by_what_was_typed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that was killed between its new config.toml and its next checkpoint leaves what is written here by hand."""
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(2))
    assert main(["resume", str(done.path), "--steps", str(2 * BATCH), "--strict"]) == 0
    assert "another budget" not in capfd.readouterr().err
    file = done.path / "config.toml"
    file.write_text(file.read_text().replace(f"steps = {2 * BATCH}", f"steps = {3 * BATCH}"))
    assert main(["verify", str(done.path)]) == 4
    assert "with another budget" in capfd.readouterr().err
    assert main(["resume", str(done.path), "--strict"]) == 5
    assert "--strict: another budget is another learning-rate schedule" in capfd.readouterr().err
    assert main(["resume", str(done.path)]) == 0
    assert "another budget is another learning-rate schedule" in capfd.readouterr().err
    assert not newest(done.path)[1].exact


def test_a_checkpoint_from_before_budgets_were_kept_followed_that_of_its_configuration(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(2))
    write(done.path, newest(done.path)[1]._replace(budget=None), keep=3)
    assert main(["resume", str(done.path), "--steps", str(3 * BATCH), "--strict"]) == 5
    assert "--strict: another budget is another learning-rate schedule" in capfd.readouterr().err
    assert main(["resume", str(done.path), "--strict"]) == 0


@dataclass(frozen=True)
class Own:
    discount: float = 0.98


def test_an_algorithm_of_ones_own_resumes_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whose settings are not those of ours: nobody knows whether its updates follow the budget."""
    made_of = Entry(Own, lambda config, setup: a2c(A2C(discount=config.discount), setup))
    monkeypatch.setitem(REGISTRY, "own", made_of)
    done = lockstep.train("Pendulum-v1", "own", logdir=tmp_path, name="run", settings={**SMALL, "steps": 4 * BATCH})
    cut_back(done.path)
    assert resume(done.path).digest == done.digest
    assert main(["verify", str(done.path)]) == 0
    assert resume(done.path, steps=5 * BATCH).digest != done.digest
    assert "another budget is another learning-rate schedule" in capfd.readouterr().err


def test_a_finished_run_is_of_use_whatever_is_refused_by_now(tmp_path: Path) -> None:
    """As an older version wrote it, which took settings that make no sense."""
    done = lockstep.train("Pendulum-v1", "trpo", logdir=tmp_path, name="run", settings=settings(2, "trpo"))
    file = done.path / "config.toml"
    file.write_text(file.read_text().replace("shrink = 0.8", "shrink = 1.0"))
    path, saved, _ = newest(done.path)
    remove(path)
    write(done.path, saved._replace(experiment=read_config(done.path).experiment.digest), keep=3)
    assert lockstep.load(done.path).act(np.zeros(3, np.float32)).shape == (1,)
    with pytest.raises(UsageError, match=r"algo\.shrink \(1\) must lie between 0 and 1"):
        lockstep.resume(done.path)


def test_another_budget_from_the_very_start_is_just_that(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(2))
    for later in listed(done.path)[1:]:
        shutil.rmtree(later)
    assert main(["resume", str(done.path), "--steps", str(BATCH), "--strict"]) == 0
    whole = lockstep.train("Pendulum-v1", logdir=tmp_path, name="whole", settings=settings(1))
    assert newest(done.path)[1].exact
    assert whole.digest in capfd.readouterr().out


def test_the_best_checkpoint_survives_whatever_was_kept(tmp_path: Path) -> None:
    """It is remembered in every later checkpoint, so no kill between two files can lose it."""
    watched = {"watch.eval_every": 256, "watch.eval_episodes": 1, "watch.keep": 1, "watch.checkpoint_every": 256}
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(6, **watched))
    saved = newest(done.path)[1]
    assert saved.progress.best == done.eval_return
    kept = [int(path.name.removeprefix("step_")) for path in listed(done.path)]
    assert kept == sorted({saved.progress.best_steps, saved.progress.steps})
