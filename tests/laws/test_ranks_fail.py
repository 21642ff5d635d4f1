"""A rank that fails, hangs or does not fit ends the job within seconds, and one of the ranks says why."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockstep
from tests.laws.process import on_ranks, options, run, wait_until_gone
from tests.laws.table import settings

SCRIPTED = "lockstep.envs.testing:Scripted-v0"
AT = 60  # after the steps that every rank makes at the start to compare how it simulates, and within the first update
LIMIT_S = 8  # longer than anything that a run does on a slow machine before that


def arguments(tmp_path: Path, what: str, **more: object) -> list[str]:
    """A run in which one environment does `what`, once."""
    misdeed = {"env.kwargs.what": what, "env.kwargs.at": AT, "env.kwargs.once": str(tmp_path / "done")}
    chosen = settings(20, **{"collect.steps": 64, **misdeed, **more})
    return ["train", SCRIPTED, *options(chosen), "--logdir", str(tmp_path), "--name", "run"]


@pytest.mark.parametrize("mode", ["gather", "average"])
def test_a_fault_of_one_rank_ends_all_and_is_told_once_with_its_rank(tmp_path: Path, mode: str) -> None:
    failed = on_ranks(2, "-m", "lockstep", *arguments(tmp_path, "raise"), "--mode", mode)
    wait_until_gone()
    assert failed.returncode == 3, failed.stderr
    assert failed.stderr.count("it raised RuntimeError: scripted failure") == 1
    assert re.search(r"lockstep: rank [01] of 2: environment \d", failed.stderr)
    assert "Traceback" not in failed.stderr


def test_what_nobody_expected_has_its_traceback_and_rank(tmp_path: Path) -> None:
    failed = run(*arguments(tmp_path, "sys-exit"), "--nprocs", "2")
    assert failed.returncode == 1, failed.stderr
    assert re.search(r"lockstep: rank [01] of 2: failed:\nTraceback", failed.stderr)
    assert failed.stderr.count("something in the run called sys.exit(3)") == 1


def test_a_rank_that_hangs_is_found_and_named_with_where_it_is(tmp_path: Path) -> None:
    failed = run(*arguments(tmp_path, "hang", **{"layout.watchdog_s": LIMIT_S}), "--nprocs", "2")
    assert failed.returncode == 6, failed.stderr
    assert re.search(r"rank [01] of 2: hangs: \d+ s without a step while collecting for update 1", failed.stderr)
    assert "in _misbehave" in failed.stderr


def test_a_rank_that_can_not_speak_is_named_by_those_that_wait(tmp_path: Path) -> None:
    failed = run(*arguments(tmp_path, "stop", **{"layout.watchdog_s": LIMIT_S}), "--nprocs", "2")
    assert failed.returncode == 6, failed.stderr
    speaker, silent = re.findall(r"rank (\d) of 2: waited \d+ s while .*: rank (\d) does not answer", failed.stderr)[0]
    assert speaker != silent


def test_a_diverged_update_is_told_once_with_the_data_of_all_lanes(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    diverging = ["train", "Pendulum-v1", *options(settings(4, **{"algo.learning_rate": 1e30}))]
    where = ["--logdir", str(tmp_path), "--name", "run", "--mode", "average"]
    failed = on_ranks(2, "-m", "lockstep", *diverging, *where)
    assert failed.returncode == 4, failed.stderr
    assert failed.stderr.count("infinite or not a number") == 1
    kept = load_file(tmp_path / "run" / "diverged" / "trajectory.safetensors")
    assert kept["lane"].tolist() == [0, 1, 2, 3]


def test_usage_errors_under_a_launcher_are_told_once(tmp_path: Path) -> None:
    failed = on_ranks(2, "-m", "lockstep", "train", "pendulum", "--set", "alog.clip=1", "--logdir", str(tmp_path))
    assert failed.returncode == 2, failed.stderr
    assert failed.stderr.count("unknown setting 'alog'") == 1


def test_ranks_with_other_settings_are_refused(tmp_path: Path) -> None:
    launcher = str(Path(sys.executable).parent / "mpiexec")
    one = [sys.executable, "-m", "lockstep", "train", "pendulum", "--logdir", str(tmp_path), "--seed"]
    both = [launcher, "-n", "1", *one, "1", ":", "-n", "1", *one, "2"]
    failed = subprocess.run(both, capture_output=True, text=True, timeout=120)
    assert failed.returncode == 2, failed.stderr
    assert failed.stderr.count("rank 1 was started with other settings than rank 0: seed = 2, not seed = 1") == 1
    assert not list(tmp_path.iterdir())


ON_RANK_1 = """
import sys
from pathlib import Path
import lockstep
from lockstep.runtime import start_jax
start_jax()
from lockstep.parallel.launch import join
from lockstep.run import machine, train as loop
rank, settings, logdir = join().rank, {settings}, sys.argv[1]
{before}
digest = lockstep.train("Pendulum-v1", logdir=logdir, name="run", settings=settings).digest
Path(logdir, f"digest-{{rank}}").write_text(digest)  # what two ranks print may meet in one line
{after}
"""


def script(tmp_path: Path, before: str = "", after: str = "", **changes: object) -> subprocess.CompletedProcess[str]:
    """A script that trains, on two ranks, with something done before and after."""
    code = ON_RANK_1.format(settings=settings(2, **changes), before=before, after=after)
    return on_ranks(2, "-c", code, str(tmp_path))


def test_a_script_joins_the_ranks_it_was_started_as(tmp_path: Path) -> None:
    one = lockstep.train("Pendulum-v1", logdir=tmp_path, name="one", settings=settings(2))
    done = script(tmp_path, **{"layout.mode": "average"})
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"digest-{rank}").read_text() for rank in range(2)] == [one.digest] * 2


def test_a_script_that_fails_on_one_rank_ends_on_all(tmp_path: Path) -> None:
    began = time.monotonic()
    failed = script(tmp_path, after="if rank == 1: raise ValueError('mine')\njoin().share(0)")
    assert time.monotonic() - began < 100
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count("ValueError: mine") == 1
    assert "rank 1 of 2: failed:\nTraceback" in failed.stderr


def test_ranks_with_other_versions_are_refused(tmp_path: Path) -> None:
    failed = script(
        tmp_path, "true = machine.versions\nif rank == 1: machine.versions = lambda: true() | {'jax': '0.1'}"
    )
    assert failed.returncode == 2, failed.stderr
    assert re.search(r"UsageError: rank 1 has other versions than rank 0: jax .* -> 0\.1\. Install", failed.stderr)
    assert not (tmp_path / "run").exists()


def test_ranks_that_compute_otherwise_are_warned_of(tmp_path: Path) -> None:
    done = script(tmp_path, "if rank == 1: machine._kernels = lambda: 'other'")
    assert done.returncode == 0, done.stderr
    assert "rank 1 differs from rank 0 in the arithmetic of this CPU." in done.stderr


def test_the_first_parameter_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    change = """
def changed(*arguments, true=loop.average):
    learn = true(*arguments)
    def inner(learner, trajectory, key):
        learner, metrics = learn(learner, trajectory, key)
        kernel = learner.params["policy"]["layer1"]["kernel"]
        learner.params["policy"]["layer1"]["kernel"] = kernel + (rank == 1) * kernel.dtype.type(1e-6)
        return learner, metrics
    return inner
loop.LEARN["average"] = changed
"""
    failed = script(tmp_path, change, **{"layout.mode": "average"})
    assert failed.returncode != 0
    assert "update 1: rank 1 holds another 'params/policy/layer1/kernel' than rank 0" in failed.stderr


def test_only_the_root_is_heard_unless_asked(tmp_path: Path) -> None:
    quiet = run("train", "Pendulum-v1", *options(settings(1)), "--logdir", str(tmp_path), "--nprocs", "2")
    assert "[rank" not in quiet.stdout + quiet.stderr
    loud = run(
        "train", "Pendulum-v1", *options(settings(1)), "--logdir", str(tmp_path), "--nprocs", "2", "--verbose-ranks"
    )
    assert loud.returncode == 0, loud.stderr
    assert re.search(r"^\[rank 0\] process \d+ on ", loud.stdout, re.MULTILINE)
    assert re.search(r"^\[rank 1\] process \d+ on ", loud.stdout, re.MULTILINE)
    assert re.search(r"^\[rank 0\] digest ", loud.stdout, re.MULTILINE)
