from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep import tree
from lockstep.errors import UsageError
from lockstep.parallel.comm import Solo
from lockstep.ranks import Ranks, start
from tests.laws.process import wait_until_gone
from tests.unit.ranks_script import LAWS, pairwise

SCRIPT = Path(__file__).with_name("ranks_script.py")
ROOT = Path(__file__).parents[2]


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=env, cwd=cwd)


def script(folder: Path, nprocs: int, *lines: str) -> Path:
    """A script that begins on so many ranks."""
    file = folder / "script.py"
    head = ["import os, sys, time", "import numpy as np", "import lockstep.ranks"]
    file.write_text("\n".join([*head, f"ranks = lockstep.ranks.start({nprocs})", *lines, ""]))
    return file


@pytest.mark.parametrize("nprocs", [1, 2, 3, 5])
def test_what_holds_on_any_number_of_ranks(nprocs: int) -> None:
    done = python(str(SCRIPT), str(nprocs))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [*(f"held: {name}" for name in LAWS), ""]


def test_ranks_of_a_launcher_are_joined_and_the_number_is_theirs(tmp_path: Path) -> None:
    file = script(tmp_path, 3, "ranks.print0('ranks', ranks.size)")
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    command = [mpiexec, "-n", "2", sys.executable, str(file)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout) == (0, "ranks 2\n"), done.stderr
    assert "the launcher's 2 ranks are used, not nprocs=3" in done.stderr


def test_a_module_and_its_arguments_are_run_again_as_they_were(tmp_path: Path) -> None:
    script(tmp_path, 2, "ranks.print0(*(ranks.gather((sys.argv[1:], sys.flags.optimize)) or []))")
    done = python("-O", "-m", "script", "--steps", "1e6", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "(['--steps', '1e6'], 1) (['--steps', '1e6'], 1)\n"), done.stderr


def test_the_ranks_have_one_thread_each_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = script(tmp_path, 2, "ranks.print0(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])")
    assert python(str(file)).stdout == "1 3\n"


def test_an_exception_on_one_rank_ends_all_with_its_traceback(tmp_path: Path) -> None:
    work = "ranks.average(np.zeros(3)) if ranks.rank else np.zeros(3)[ranks.size + 7]"
    file = script(tmp_path, 3, "print('before', flush=False)", work)
    began = time.monotonic()
    failed = python(str(file))
    assert time.monotonic() - began < 60
    assert failed.returncode == 1
    assert failed.stderr.count("lockstep: rank 0 of 3: failed:\nTraceback") == 1
    assert "IndexError: index 10 is out of bounds" in failed.stderr
    assert "before" in failed.stdout
    wait_until_gone()


def test_what_all_ranks_find_wrong_is_told_once(tmp_path: Path) -> None:
    failed = python(str(script(tmp_path, 2, "ranks.average({'w': np.zeros(3 + ranks.rank)})")))
    assert failed.returncode == 2
    assert failed.stderr.count("Traceback") == 1
    assert "'w' is float64[3] on rank 0, but float64[4] on rank 1." in failed.stderr


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    failed = python(str(script(tmp_path, 2, "if ranks.rank: sys.exit(3)", "ranks.gather(1)")))
    assert failed.returncode == 2
    assert "rank 0 is at gather, rank 1 at the end of the script" in failed.stderr


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("sys.exit(3)", 3), ("if ranks.rank: sys.exit()", 0)])
def test_the_exit_status_is_the_scripts(tmp_path: Path, ending: str, status: int) -> None:
    assert python(str(script(tmp_path, 2, ending))).returncode == status


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    waiting = "ranks.gather(1) if ranks.rank else time.sleep(100)"
    file = script(tmp_path, 2, "ranks.gather(0)", "ranks.print0('ready')", waiting)  # all are there, not the root alone
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 130, told
    assert "lockstep: rank 0 of 2: stopped by Ctrl-C." in told
    assert "Traceback" not in told
    wait_until_gone()


def test_times_are_a_table_of_sections_and_ranks(tmp_path: Path) -> None:
    lines = [
        "with ranks.section('collect'): time.sleep(0.01 * (1 + ranks.rank))",
        "if ranks.rank == 0:",
        "    with ranks.section('update'): pass",
        "ranks.print_times()",
    ]
    done = python(str(script(tmp_path, 2, *lines)))
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["seconds", "rank", "0", "rank", "1"], done.stderr
    assert [row[0] for row in rows[1:]] == ["collect", "update", "communicate"]
    assert 0.01 <= float(rows[1][1]) < 5
    assert float(rows[1][2]) >= 0.02
    assert rows[2][1:] == ["0.000", "-"]


def alone() -> Ranks:
    return Ranks(Solo())


def test_a_section_counts_all_its_visits_and_those_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.5, 10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    ranks = alone()
    with ranks.section("collect"):
        pass
    with pytest.raises(ValueError, match="broken"), ranks.section("collect"):
        raise ValueError("broken")
    assert ranks.times == {"collect": 3.5}


def test_the_order_of_addition_is_that_of_lanes() -> None:
    parts = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    for count in range(1, 8):
        np.testing.assert_array_equal(pairwise(list(parts[:count])), tree.pairwise_sum(parts[:count]))


def test_seeds_have_addresses_and_are_not_those_of_neighbouring_seeds() -> None:
    seeds = [alone().env_seeds(seed, 50) for seed in range(20)]
    assert len({seed for some in seeds for seed in some}) == 1000
    assert seeds[3][:10] == alone().env_seeds(3, 10)


def test_one_process_talks_to_itself() -> None:
    ranks, array = alone(), np.zeros(2)
    ranks.send({"x": array}, 0, tag=4)
    array += 1
    np.testing.assert_array_equal(ranks.recv(0, tag=4)["x"], np.zeros(2))
    with pytest.raises(UsageError, match="waits for a message of its own with tag 4: send it first"):
        ranks.recv(0, tag=4)


@pytest.mark.parametrize(
    ("work", "match"),
    [
        (lambda ranks: ranks.send(1, 1), "there is no rank 1: they are 0 to 0"),
        (lambda ranks: ranks.recv(-1), "there is no rank -1"),
        (lambda ranks: ranks.send(1, 0, tag=-1), "a tag is a whole number, 0 or more, not -1"),
        (lambda ranks: ranks.scatter([1, 2]), "one tree for each of the 1 ranks, not 2"),
        (lambda ranks: ranks.average({"name": "x"}), "'name' is a str, not an array or a number: use gather"),
        (lambda ranks: ranks.gather_batches(["x"]), "'0' is a str"),
        (lambda ranks: ranks.average(np.array(["x"])), "the tree is of dtype <U1, which has no mean"),
        (lambda ranks: ranks.gather(np.array([None])), "'' is an array of Python objects"),
        (lambda ranks: ranks.average(1.0, count=0), r"not all of them 0. They are, by rank: \[0.0\]"),
        (lambda ranks: ranks.average(1.0, count=float("nan")), "counts of 0 or more"),
        (lambda ranks: start(0), "nprocs must be 1 or more, not 0"),
    ],
)
def test_what_cannot_be_is_refused(work, match) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=match):
        work(alone())


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_there_must_be_a_script_to_run_again(arguments: list[str]) -> None:
    code = "import lockstep; lockstep.ranks.start(2)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    failed = subprocess.run(command, input=code, capture_output=True, text=True, timeout=60, env=env)
    assert failed.returncode == 1
    assert "UsageError: start(nprocs) runs a script again on every rank: put this into a file" in failed.stderr


def test_what_one_process_gets_back_is_its_own_copy_where_it_may_be_changed() -> None:
    ranks, mine = alone(), {"w": np.zeros(2)}
    ranks.average(mine)["w"] += 1
    ranks.gather_batches(mine)["w"][:] = 1
    np.testing.assert_array_equal(mine["w"], np.zeros(2))


def test_importing_lockstep_stays_light() -> None:
    code = (
        "import sys, lockstep; assert 'numpy' not in sys.modules; lockstep.ranks.start; sys.exit('jax' in sys.modules)"
    )
    assert python("-c", code).returncode == 0
    assert "no attribute 'rank'" in python("-c", "import lockstep; lockstep.rank").stderr


def test_one_process_has_nobody_to_talk_to() -> None:
    with pytest.raises(UsageError, match="one process has no rank 1 to send to"):
        Solo().send([], 1, 0)
    with pytest.raises(UsageError, match="one process has no rank 1 to receive from"):
        Solo().receive([], 1, 0)
