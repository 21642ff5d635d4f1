"""However the lanes are spread over processes, the digest is that of one process."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import UsageError
from lockstep.experiment import preset_names
from lockstep.run.checkpoint import newest
from tests.laws.job import experiments, name_of, resume, train
from tests.laws.process import (
    cut_back,
    digest_in,
    family,
    on_ranks,
    options,
    rows,
    run,
    start_and_wait,
    timeless,
    wait_until_gone,
)
from tests.laws.table import settings

LAYOUTS = {1: ["gather-2"], 2: ["gather-0", "average-0", "average-2"], 4: ["gather-0", "average-0"]}  # by processes
LONG = 40  # enough that a run is still going on when it is stopped or killed


def ranks(nprocs: int, mode: str, workers: int = 0) -> list[str]:
    return ["--nprocs", str(nprocs), "--mode", mode, "--workers", str(workers)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The runs of a table in one process. Tests that run beside each other share the work of making them."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @functools.cache
    def trained(table: str) -> Path:
        logdir, made = shared / table, shared / f"{table}-made"
        made.mkdir(exist_ok=True)
        for at_once in (fcntl.LOCK_NB, 0):  # first what nobody makes yet, then wait for what others make
            for env, case in experiments(table):
                with (made / name_of(env, case)).open("a+") as mark, contextlib.suppress(BlockingIOError):
                    fcntl.flock(mark, fcntl.LOCK_EX | at_once)
                    mark.seek(0)
                    if not mark.read():
                        train(logdir, env, case)
                        mark.write("made")
        return logdir

    return trained


@pytest.mark.parametrize(
    ("nprocs", "table", "layouts"),
    [(1, "some", LAYOUTS[1]), (2, "some", LAYOUTS[2]), (4, "some", ["gather-0"]), (4, "few", ["average-0"])],
)
def test_every_layout_has_the_bits_of_one_process(
    tmp_path: Path, one_process: Callable[[str], Path], nprocs: int, table: str, layouts: list[str]
) -> None:
    on_layouts("train", tmp_path, one_process("some"), table, nprocs, layouts)


@pytest.mark.parametrize(
    ("table", "layout"), [("some", "gather-0"), pytest.param("everything", "average-0", marks=pytest.mark.slow)]
)
def test_stopped_on_one_process_and_resumed_on_ranks(
    tmp_path: Path, one_process: Callable[[str], Path], table: str, layout: str
) -> None:
    expected = one_process(table)
    shutil.copytree(expected, tmp_path / layout)
    for env, case in experiments(table):
        cut_back(tmp_path / layout / name_of(env, case))
    on_layouts("resume", tmp_path, expected, table, 2, [layout])


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", LAYOUTS)
def test_every_experiment_has_the_same_bits_on_every_layout(
    tmp_path: Path, one_process: Callable[[str], Path], nprocs: int
) -> None:
    """Trained there, and stopped there and resumed in one process."""
    expected = one_process("everything")
    on_layouts("train", tmp_path, expected, "everything", nprocs, LAYOUTS[nprocs])
    for env, case in experiments("everything"):
        for layout in LAYOUTS[nprocs]:
            cut_back(tmp_path / layout / name_of(env, case))
            resume(tmp_path / layout, env, case)
    compare(tmp_path, expected, "everything", LAYOUTS[nprocs])


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", LAYOUTS)
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_has_the_same_bits_on_every_layout_with_every_algorithm(
    tmp_path: Path, one_process: Callable[[str], Path], preset: str, nprocs: int
) -> None:
    on_layouts("train", tmp_path, one_process(preset), preset, nprocs, LAYOUTS[nprocs])


def on_layouts(verb: str, logdir: Path, expected: Path, table: str, nprocs: int, layouts: list[str]) -> None:
    """All experiments of a table in one job, against the same in one process."""
    done = on_ranks(nprocs, "-m", "tests.laws.job", verb, str(logdir), table, *layouts, seconds=1500)
    assert done.returncode == 0, done.stderr
    compare(logdir, expected, table, layouts)


def compare(logdir: Path, expected: Path, table: str, layouts: list[str]) -> None:
    for layout in layouts:
        for env, case in experiments(table):
            name = name_of(env, case)
            assert timeless(logdir / layout / name) == timeless(expected / name), (layout, name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    logdir = tmp_path_factory.mktemp("undisturbed")
    return lockstep.train("Hopper-v5", logdir=logdir, settings=settings(LONG)).digest


def test_stopped_on_one_layout_and_resumed_on_others(tmp_path: Path, undisturbed: str) -> None:
    path = tmp_path / "run"
    arguments = ["train", "Hopper-v5", *options(settings(LONG)), "--logdir", str(tmp_path), "--name", "run"]
    process = start_and_wait([*arguments, *ranks(4, "average")], path, 2)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert told.count("continue with: lockstep resume") == 1
    process = start_and_wait(["resume", str(path), *ranks(2, "gather", workers=2)], path, rows(path) + 1)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143, told
    finished = run("resume", str(path))
    assert digest_in(finished.stdout) == undisturbed


def test_a_rank_that_is_killed_ends_all_and_the_run_resumes(tmp_path: Path, undisturbed: str) -> None:
    path = tmp_path / "run"
    arguments = ["train", "Hopper-v5", *options(settings(LONG)), "--logdir", str(tmp_path), "--name", "run"]
    process = start_and_wait([*arguments, *ranks(2, "average")], path, 1)
    os.kill(a_rank(), signal.SIGKILL)
    began = time.monotonic()
    _, told = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 6, told
    assert f"a rank was lost; continue with: lockstep resume {path}" in told
    wait_until_gone()
    finished = run("resume", str(path))
    assert digest_in(finished.stdout) == undisturbed


def test_workers_that_are_killed_do_not_change_the_digest(tmp_path: Path, undisturbed: str) -> None:
    """One of each rank's, in the middle of whatever it is doing."""
    path = tmp_path / "run"
    arguments = ["train", "Hopper-v5", *options(settings(LONG)), "--logdir", str(tmp_path), "--name", "run"]
    process = start_and_wait([*arguments, *ranks(2, "gather", workers=2)], path, 2)
    by_rank = workers_by_rank()
    assert [len(workers) for workers in by_rank.values()] == [2, 2]
    for workers in by_rank.values():
        os.kill(workers[0], signal.SIGKILL)
    printed, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert digest_in(printed) == undisturbed
    assert told.count("was killed by SIGKILL") == 2
    assert told.count("It is replaced, and its running episodes are replayed.") == 2


def test_ranks_and_workers_end_with_the_command_that_started_them(tmp_path: Path) -> None:
    arguments = ["train", "Hopper-v5", *options(settings(500)), "--logdir", str(tmp_path), "--name", "run"]
    for i, nprocs in enumerate((1, 2)):
        path = tmp_path / f"run{i}"
        process = start_and_wait([*arguments[:-1], path.name, *ranks(nprocs, "gather", workers=2)], path, 1)
        assert len(workers_by_rank()) == nprocs
        process.kill()
        process.communicate()
        wait_until_gone()


def workers_by_rank() -> dict[int, list[int]]:
    """The workers that this test's ranks started, oldest first."""
    found: dict[int, list[int]] = {}
    for pid in sorted(family()):
        process = Path("/proc") / str(pid)
        if b"lockstep.envs.worker" in (process / "cmdline").read_bytes():
            found.setdefault(int((process / "stat").read_text().split()[3]), []).append(pid)
    return found


def a_rank() -> int:
    """One of the ranks that this test started, not the command or the launchers."""
    lines = {pid: (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0") for pid in family()}
    python = [pid for pid, line in lines.items() if line[0] == sys.executable.encode()]
    parents = {int((Path("/proc") / str(pid) / "stat").read_text().split()[3]) for pid in lines}
    return max(pid for pid in python if pid not in parents)


def test_a_broken_environment_on_one_rank_is_told_once(tmp_path: Path) -> None:
    kwargs = ["--set", 'env.kwargs.what="nan"', "--set", "env.kwargs.at=9", "--steps", "20000"]
    where = ["--logdir", str(tmp_path), "--name", "run"]
    failed = run("train", "lockstep.envs.testing:Scripted-v0", *kwargs, *where, *ranks(2, "average"))
    assert failed.returncode == 3, failed.stderr
    assert "broke its contract: the observation is nan at index 1, at step 9" in failed.stderr
    assert failed.stderr.count("broke its contract") == 1
    assert "Traceback" not in failed.stderr


def test_processes_that_do_not_divide_the_lanes_are_refused(tmp_path: Path) -> None:
    failed = run("train", "pendulum", "--nprocs", "3", "--logdir", str(tmp_path))
    assert failed.returncode == 2
    assert "nprocs (3) must divide the 4 lanes: 1, 2, 4." in failed.stderr
    assert not list(tmp_path.iterdir())


def test_a_worker_that_keeps_dying_ends_the_run_with_status_6(tmp_path: Path) -> None:
    kwargs = ["--set", 'env.kwargs.what="exit"', "--set", "env.kwargs.at=60", "--steps", "20000"]
    where = ["--logdir", str(tmp_path), "--name", "run"]
    failed = run("train", "lockstep.envs.testing:Scripted-v0", *kwargs, *where, *ranks(2, "average", workers=1))
    assert failed.returncode == 6, failed.stderr
    assert "exited with status 3, for the 4th time in a row, at step 60 of the episode with seed" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_broken_environment_in_a_worker_is_told_as_in_a_rank(tmp_path: Path) -> None:
    kwargs = ["--set", 'env.kwargs.what="raise"', "--set", "env.kwargs.at=9", "--steps", "20000"]
    where = ["--logdir", str(tmp_path), "--name"]
    told = []
    for workers in (0, 2):
        failed = run(
            "train", "lockstep.envs.testing:Scripted-v0", *kwargs, *where, f"run{workers}", "--workers", str(workers)
        )
        assert failed.returncode == 3, failed.stderr
        told.append(failed.stderr.replace(f"run{workers}", "run"))
        (trace,) = (tmp_path / f"run{workers}" / "faults").glob("*.txt")
        assert trace.read_text().endswith("RuntimeError: scripted failure\n")
        (episode,) = (tmp_path / f"run{workers}" / "faults").glob("*.json")
        replayed = run("check", "lockstep.envs.testing:Scripted-v0", "--replay", str(episode))
        assert "at step 9 it raised RuntimeError: scripted failure" in replayed.stderr
    assert told[0] == told[1]


def test_an_environment_that_does_not_repeat_itself_costs_the_promise(tmp_path: Path) -> None:
    """Once a worker was replaced, checkpoints say that bits may differ."""
    chance = {"env.kwargs.what": "random", "env.kwargs.at": 1, "layout.workers": 2}
    arguments = ["train", "lockstep.envs.testing:Scripted-v0", *options(settings(LONG, **chance))]
    path = tmp_path / "run"
    process = start_and_wait([*arguments, "--logdir", str(tmp_path), "--name", "run"], path, 1)
    (workers,) = workers_by_rank().values()
    os.kill(workers[1], signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "did not repeat itself when its running episode was replayed" in told
    assert not newest(path)[1].exact


def test_more_workers_than_environments_are_refused(tmp_path: Path) -> None:
    failed = run("train", "pendulum", "--nprocs", "2", "--workers", "99", "--logdir", str(tmp_path))
    assert failed.returncode == 2
    assert "workers (99) can't be more than the 8 environments of a rank." in failed.stderr
    assert not list(tmp_path.iterdir())


def test_ranks_that_a_launcher_started_are_joined(tmp_path: Path) -> None:
    one = lockstep.train("Pendulum-v1", logdir=tmp_path, name="one", settings=settings(2))
    arguments = ["train", "Pendulum-v1", *options(settings(2)), "--logdir", str(tmp_path), "--name", "joined"]
    done = on_ranks(2, "-m", "lockstep", *arguments)
    assert done.returncode == 0, done.stderr
    assert digest_in(done.stdout) == one.digest


def test_one_process_imports_no_mpi(tmp_path: Path) -> None:
    code = (
        "import sys, lockstep; settings = {'steps': 64, 'collect.steps': 8, 'watch.eval_every': 0};"
        "lockstep.train('Pendulum-v1', logdir=sys.argv[1], settings=settings); sys.exit('mpi4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True).returncode == 0


def test_a_layout_that_is_set_is_not_ignored(tmp_path: Path) -> None:
    one = lockstep.train("Pendulum-v1", logdir=tmp_path, name="one", settings=settings(2))
    layout = {"layout.nprocs": 2, "layout.mode": "average"}
    where = ["--logdir", str(tmp_path), "--name", "two"]
    done = run("train", "Pendulum-v1", *options(settings(2, **layout)), *where)
    assert digest_in(done.stdout) == one.digest, done.stderr
    assert 'nprocs = 2\nmode = "average"' in (tmp_path / "two" / "config.toml").read_text()
    with pytest.raises(UsageError, match=r"here 1: layout\.nprocs must be 1"):
        lockstep.train("Pendulum-v1", logdir=tmp_path, settings=layout)
