"""Workers: the bits of one process whatever happens to them, and nothing left behind whatever happens to us."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.envs.episodes import BrokenEpisode, Envs, OpenEpisode
from lockstep.envs.local import LocalEnvs
from lockstep.envs.make import Env
from lockstep.envs.workers import RemoteTraceback, WorkerEnvs, _blocks
from lockstep.errors import ProcessLost, UsageError
from tests.environments import CARELESS, SCRIPTED, actions_for, started, stepped
from tests.laws.process import wait_until_gone

NUMBERS = [4, 5, 6, 7]


def played(envs: Envs, steps: int = 12) -> list[bytes]:
    """Everything that is seen in so many steps."""
    seen = [started(envs).tobytes()]
    return seen + [leaf.tobytes() for action in actions_for(envs, steps) for leaf in stepped(envs, action)]


def undisturbed(env: Env, steps: int = 12) -> list[bytes]:
    with LocalEnvs(env, 1, NUMBERS) as envs:
        return played(envs, steps)


@pytest.mark.parametrize("env", [Env("CartPole-v1"), Env("Hopper-v5")], ids=lambda env: env.id)
def test_a_worker_that_is_killed_is_replaced_and_nothing_changes(env: Env) -> None:
    warnings: list[str] = []
    gc.collect()  # what an earlier test left to be closed is not counted
    open_files = len(os.listdir("/proc/self/fd"))
    with WorkerEnvs(env, 1, NUMBERS, 2, warn=warnings.append) as envs:
        first, seen = envs.pids, [started(envs).tobytes()]
        for t, action in enumerate(actions_for(envs, 40)):
            if t in (0, 25):
                os.kill(envs.pids[1], signal.SIGKILL)
            seen += [leaf.tobytes() for leaf in stepped(envs, action)]
        assert envs.pids[0] == first[0]
        assert envs.pids[1] != first[1]
        assert envs.strangers == []
    assert seen == undisturbed(env, 40)
    assert len(warnings) == 2
    assert warnings[0].startswith(f"worker 1 (process {first[1]}, environments 6 to 7) was killed by SIGKILL")
    del envs
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize(
    ("what", "told"),
    [("kill", "was killed by SIGKILL"), ("exit", "exited with status 3"), ("hang", "did not answer within 3 s")],
)
def test_a_worker_lost_in_the_middle_of_a_step_repeats_the_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str, told: str
) -> None:
    warnings: list[str] = []
    kwargs = {"what": what, "at": 5, "length": 9, "once": str(tmp_path / "once")}
    with WorkerEnvs(Env(SCRIPTED, kwargs=kwargs), 1, NUMBERS, 2, timeout_s=3, warn=warnings.append) as envs:
        seen = played(envs)
    assert seen == undisturbed(Env(SCRIPTED, kwargs={"length": 9}))
    assert told in warnings[0]
    assert ("in _misbehave" in capfd.readouterr().err) == (what == "hang"), "a worker that hangs tells where"


def test_a_worker_lost_while_it_rebuilds_episodes_starts_again(tmp_path: Path) -> None:
    kwargs = {"what": "kill", "at": 5, "once": str(tmp_path / "once")}
    with LocalEnvs(Env(SCRIPTED), 1, NUMBERS) as envs:
        started(envs)
        for action in actions_for(envs, 8):
            latest = stepped(envs, action).observation
        episodes = [OpenEpisode(*envs.running(i), latest[i]) for i in range(4)]
        expected = stepped(envs, actions_for(envs, 1, seed=9)[0])
    with WorkerEnvs(Env(SCRIPTED, kwargs=kwargs), 1, NUMBERS, 1) as envs:
        assert all(envs.restore(i, episode) for i, episode in enumerate(episodes))
        found = stepped(envs, actions_for(envs, 1, seed=9)[0])
    assert [leaf.tobytes() for leaf in found] == [leaf.tobytes() for leaf in expected]
    assert (tmp_path / "once").exists()


def test_a_worker_that_keeps_failing_ends_it_with_the_reason() -> None:
    warnings: list[str] = []
    with WorkerEnvs(Env(SCRIPTED, kwargs={"what": "exit", "at": 5}), 1, NUMBERS, 2, warn=warnings.append) as envs:
        reason = (
            r"worker 0 \(process \d+, environments 4 to 5\) exited with status 3, for the 4th time in a row,"
            r" at step 5 of the episode with seed \d+ of environment 4 or one that is stepped with it\."
        )
        with pytest.raises(ProcessLost, match=reason):
            played(envs)
    assert len(warnings) == 3


def test_an_environment_that_does_not_repeat_itself_is_named() -> None:
    warnings: list[str] = []
    with WorkerEnvs(Env(SCRIPTED, kwargs={"what": "random", "at": 3}), 1, NUMBERS, 4, warn=warnings.append) as envs:
        started(envs)
        for action in actions_for(envs, 3):
            stepped(envs, action)
        os.kill(envs.pids[2], signal.SIGKILL)
        stepped(envs, actions_for(envs, 1)[0])
        assert envs.strangers == [6]
    assert "environment 6 did not repeat itself" in warnings[1]


def test_an_exception_arrives_as_if_it_were_raised_here_with_its_traceback() -> None:
    env = Env(SCRIPTED, kwargs={"what": "raise", "at": 5})
    told = []
    for envs in (LocalEnvs(env, 1, NUMBERS), WorkerEnvs(env, 1, NUMBERS, 2)):
        with envs, pytest.raises(BrokenEpisode) as caught:
            played(envs)
        told.append(caught.value)
    here, there = told
    assert str(there) == str(here)
    assert (there.number, there.seed) == (here.number, here.seed)
    np.testing.assert_array_equal(there.actions, here.actions)
    for trace in (here.trace, there.trace):
        assert "in _misbehave" in trace
        assert trace.endswith("RuntimeError: scripted failure\n")
    assert isinstance(there.__cause__, RemoteTraceback)
    assert there.trace in str(there.__cause__)


@pytest.fixture
def living() -> Iterator[WorkerEnvs]:
    with WorkerEnvs(Env("Hopper-v5"), 1, NUMBERS, 2) as envs:
        started(envs)
        yield envs


def test_workers_have_no_jax_and_one_thread_each(living: WorkerEnvs) -> None:
    for pid in living.pids:
        libraries = Path(f"/proc/{pid}/maps").read_text()
        assert "mujoco" in libraries
        assert "jaxlib" not in libraries
        assert "libmpi" not in libraries
        assert "Threads:\t1\n" in Path(f"/proc/{pid}/status").read_text()


def test_workers_leave_signals_to_the_parent(living: WorkerEnvs) -> None:
    pids = living.pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    stepped(living, actions_for(living, 1)[0])
    assert living.pids == pids


def test_workers_never_inherit_random_state() -> None:
    firsts = []
    for _ in range(2):
        np.random.seed(0)
        with WorkerEnvs(Env(CARELESS), 1, NUMBERS, 2) as envs:
            firsts.append(started(envs))
    assert len({row.tobytes() for first in firsts for row in first}) == 8


def test_shared_memory_has_no_name_in_the_file_system(living: WorkerEnvs) -> None:
    """So there is nothing that could stay, whoever is killed."""
    for pid in living.pids:
        shared = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " rw-s " in line]
        assert any("/memfd:lockstep (deleted)" in line for line in shared)
        assert not any("/dev/shm" in line for line in shared)


def test_environments_are_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    with WorkerEnvs(Env(SCRIPTED, kwargs={"closed": str(closed)}), 1, NUMBERS, 2) as envs:
        played(envs)
        closed.unlink()  # the parent looked at one of its own
    assert closed.exists()


PARENT = """
import sys, time
import numpy as np
from lockstep import names
from lockstep.envs.make import Env
from lockstep.envs.workers import WorkerEnvs

names.load(sys.argv[1])
envs = WorkerEnvs(Env(sys.argv[1], kwargs=eval(sys.argv[2])), 1, range(4), 2, timeout_s=1)
envs.start(np.zeros((4, 3), np.float32))
print("started", flush=True)
rollout = envs.rollout(1)
for _ in range(5):
    envs.step(np.zeros((4, 2), np.float32), rollout, 0)
print("stepped", flush=True)
time.sleep(3600)
"""


def parent(env: str, kwargs: dict[str, object], until: str) -> subprocess.Popen[str]:
    """A script without a guard that starts workers, as it is when it has printed `until`."""
    command = [sys.executable, "-c", PARENT, env, repr(kwargs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(line.strip() == until for line in process.stdout)
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_workers_close_and_leave_when_the_parent_is_killed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    process = parent(SCRIPTED, {"closed": str(closed)}, "stepped")
    closed.unlink()
    kill(process)
    wait_until_gone()
    assert closed.exists()


@pytest.mark.parametrize("what", ["hang", "stuck"])
def test_workers_leave_even_from_a_step_that_never_ends(tmp_path: Path, what: str) -> None:
    """Also from native code that lets no signal handler run."""
    once = tmp_path / "once"
    process = parent(SCRIPTED, {"what": what, "at": 3, "once": str(once)}, "started")
    while not once.exists():
        time.sleep(0.01)
    kill(process)
    wait_until_gone(20)


def test_what_only_a_script_registers_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium\n"
        "from lockstep.envs.make import Env\n"
        "from lockstep.envs.workers import WorkerEnvs\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:PendulumEnv')\n"
        "WorkerEnvs(Env('Mine-v0'), 0, range(2), 2)\n"
    )
    failed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "unknown environment 'Mine-v0'" in failed.stderr
    assert "name it 'module:Name-v0'" in failed.stderr


def test_a_module_beside_the_script_is_found_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    )
    (tmp_path / "script.py").write_text(
        "import mine\n"
        "from lockstep.envs.make import Env\n"
        "from lockstep.envs.workers import WorkerEnvs\n"
        "with WorkerEnvs(Env('mine:Mine-v0'), 0, range(2), 2) as envs: print(len(envs))\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_arguments_that_the_environment_refuses_are_refused_before_a_worker_starts() -> None:
    with pytest.raises(UsageError, match="does not take env"):
        WorkerEnvs(Env(SCRIPTED, kwargs={"gravitas": 1}), 0, NUMBERS, 2)


def test_environments_are_dealt_in_blocks_of_nearly_one_size() -> None:
    assert _blocks(8, 2) == [range(4), range(4, 8)]
    assert [len(block) for block in _blocks(7, 3)] == [2, 2, 3]
    assert _blocks(2, 2) == [range(1), range(1, 2)]
