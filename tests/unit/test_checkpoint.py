from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep.errors import FileFault
from lockstep.run import checkpoint
from lockstep.run.checkpoint import Checkpoint, Damaged, name_of, newest, read, set_aside, write
from lockstep.run.progress import Progress

ODD_BITS = [0x80000000, 0x7FC00001, 0xFFC12345, 0x7F812345, 1, 0x807FFFFF, 0x7F800000]  # -0, NaNs, denormals, infinity
EXPERIMENT = "e" * 64
ODD = np.array(ODD_BITS, np.uint32).view(np.float32)


def at(steps: int, learner: dict[str, np.ndarray] | None = None, best_steps: int | None = None) -> Checkpoint:
    learner = {"params/w": np.float32([1, 2, 3])} if learner is None else learner
    progress = Progress(steps=steps, seconds=0.1, best_steps=best_steps)
    return Checkpoint(learner, {"length": np.int64([4, 0])}, progress, EXPERIMENT, {"kernels": "x"}, True, 9)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in ((one[k], other[k]) for k in one)
    )


def stepped(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoint.listed(run)]


LEAVES = arrays.arrays(
    st.sampled_from(["float32", "float64", "float16", "int32", "int64", "uint8", "uint32", "bool"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(
    st.dictionaries(st.text(min_size=1, alphabet="ab/é"), LEAVES),
    LEAVES,
    st.floats(),
    st.booleans(),
    st.sampled_from([None, 7]),
)
def test_what_is_written_is_read_bit_for_bit(
    learner: dict[str, np.ndarray], episode: np.ndarray, number: float, exact: bool, budget: int | None
) -> None:
    learner = learner | {"odd": ODD}
    progress = Progress(steps=7, recent=((number, 3),), best=-0.0, best_steps=2)
    saved = Checkpoint(learner, {"actions": episode}, progress, EXPERIMENT, {"é": [1, None]}, exact, budget)
    with tempfile.TemporaryDirectory() as run:
        found = read(write(Path(run), saved, keep=1))
    assert same(found.learner, learner)
    assert same(found.episodes, {"actions": episode})
    assert repr(found.progress) == repr(progress)
    assert (found.experiment, found.machine, found.exact, found.budget) == (EXPERIMENT, {"é": [1, None]}, exact, budget)


VIEWS = {
    "transposed": lambda a: a.T,
    "by columns": np.asfortranarray,
    "every second": lambda a: a[:, ::2],
    "reversed": lambda a: a[::-1],
    "big-endian": lambda a: a.astype(">f8"),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_an_array_is_saved_as_it_reads_however_it_lies_in_memory(
    tmp_path: Path, view: Callable[[np.ndarray], np.ndarray]
) -> None:
    leaf = view(np.arange(12.0).reshape(3, 4))
    found = read(write(tmp_path, at(1, {"w": leaf}), keep=1))
    np.testing.assert_array_equal(found.learner["w"], leaf)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, at(1), keep=1)
    for file in path.iterdir():
        content = file.read_bytes()
        for length in range(len(content)):
            file.write_bytes(content[:length])
            with pytest.raises(Damaged, match=f"{name_of(1)}' is damaged"):
                read(path)
        file.unlink()
        with pytest.raises(Damaged, match=f"{name_of(1)}' is damaged"):
            read(path)
        file.write_bytes(content)
        assert read(path).progress.steps == 1


@pytest.mark.parametrize("of_arrays", [True, False], ids=["arrays", "the rest"])
def test_every_flipped_bit_is_noticed(tmp_path: Path, of_arrays: bool) -> None:
    path = write(tmp_path, at(1), keep=1)
    unnoticed = []
    for file in (file for file in path.iterdir() if (file.suffix == ".safetensors") == of_arrays):
        content = file.read_bytes()
        for bit in random.Random(0).sample(range(8 * len(content)), 300):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            try:
                read(path)
            except Damaged:
                continue
            except FileFault as error:
                unnoticed.append((file.name, str(error)))
            else:
                unnoticed.append((file.name, bytes(changed[max(bit // 8 - 20, 0) : bit // 8 + 20])))
        file.write_bytes(content)
    assert not unnoticed


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for steps in (10, 20, 30, 40, 50, 60, 70):
        write(tmp_path, at(steps, best_steps=20 if steps >= 20 else None), keep=3)
    assert stepped(tmp_path) == [20, 50, 60, 70]
    write(tmp_path, at(80, best_steps=70), keep=2)
    assert stepped(tmp_path) == [70, 80]
    write(tmp_path, at(90, best_steps=70), keep=1)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {name_of(70), name_of(90)}


def test_what_unfinished_writes_left_is_ignored_and_removed(tmp_path: Path) -> None:
    folder = write(tmp_path, at(10), keep=2).parent
    for leftover in (f".tmp.{name_of(20)}.123", f".del.{name_of(5)}"):
        shutil.copytree(folder / name_of(10), folder / leftover)
    for file in (folder / ".file.123", tmp_path / ".config.toml.123", tmp_path / ".metrics.csv.123"):
        file.write_bytes(b"{")
    assert newest(tmp_path)[0].name == name_of(10)
    set_aside(tmp_path)
    assert [path.name for path in folder.iterdir()] == [name_of(10)]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_an_older_checkpoint_is_used_where_newer_ones_are_damaged_and_these_are_set_aside(tmp_path: Path) -> None:
    paths = [write(tmp_path, at(steps), keep=9) for steps in (10, 20, 30)]
    (paths[1] / "learner.safetensors").write_bytes(b"")
    (paths[2] / "manifest.json").unlink()
    path, found, messages = newest(tmp_path)
    assert (path, found.progress.steps) == (paths[0], 10)
    assert [name_of(30) in messages[0], name_of(20) in messages[1]] == [True, True]
    assert all(message.endswith("An older one is used.") for message in messages)
    for _ in range(2):
        set_aside(tmp_path)
        assert stepped(tmp_path) == [10]
        assert len(list(paths[0].parent.glob("*.corrupt"))) == 2
    assert newest(tmp_path)[2] == []


def test_without_a_valid_checkpoint_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileFault, match="there is no checkpoint in"):
        newest(tmp_path)
    path = write(tmp_path, at(10), keep=1)
    (path / "learner.safetensors").write_bytes(b"")
    with pytest.raises(FileFault, match=r"no valid checkpoint is left in .*learner\.safetensors is not \d+ bytes long"):
        newest(tmp_path)


def test_a_newer_format_is_refused_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, at(10), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 41)
        path = write(tmp_path, at(20), keep=2)
    for reading in (lambda: read(path), lambda: newest(tmp_path), lambda: set_aside(tmp_path)):
        with pytest.raises(FileFault, match=rf"newer lockstep \(format {checkpoint.FORMAT + 41}\)") as caught:
            reading()
        assert not isinstance(caught.value, Damaged)
    assert stepped(tmp_path) == [10, 20]


def test_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, at(10), keep=1).parent

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, at(20), keep=1)
    assert [path.name for path in folder.iterdir()] == [name_of(10)]
    assert newest(tmp_path)[1].progress.steps == 10


class Killed(BaseException):
    """Nobody handles this, as nobody handles a SIGKILL."""


@pytest.mark.parametrize("steps", [20, 30], ids=["written again", "the next one"])
def test_a_kill_between_any_two_file_operations_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    template = tmp_path / "template"
    template.mkdir()
    for done in (10, 20):
        write(template, at(done), keep=2)
    survived = []
    for kill_at in range(1, 100):
        run = tmp_path / str(kill_at)
        shutil.copytree(template, run)
        operations = 0

        def watch(operation: Callable) -> Callable:
            def watched(*args: object, **kwargs: object) -> object:
                nonlocal operations
                operations += 1
                if operations == kill_at:  # noqa: B023
                    raise Killed
                return operation(*args, **kwargs)

            return watched

        with monkeypatch.context() as patch:
            for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, watch(getattr(os, name)))
            try:
                write(run, at(steps), keep=1)
                survived.append(kill_at)
            except Killed:
                pass
        assert newest(run)[1].progress.steps >= 20, f"killed at operation {kill_at}"
        assert all(read(path) for path in checkpoint.listed(run))
        if survived:
            break
    assert survived[0] > 1


WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from lockstep.run.checkpoint import Checkpoint, write
from lockstep.run.progress import Progress

for line in sys.stdin:  # the step from which the next life counts
    child = os.fork()
    if child == 0:
        os.write(1, f"{os.getpid()}\\n".encode())
        for steps in range(int(line), 10**9):
            leaf = np.full(20_000, steps, np.float32)
            saved = Checkpoint({"w": leaf}, {}, Progress(steps=steps), "0" * 64, {}, True, None)
            write(Path(sys.argv[1]), saved, keep=1)
            os.write(1, f"{steps}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def test_kill_9_never_goes_back_behind_a_confirmed_checkpoint(tmp_path: Path) -> None:
    moment, reached = random.Random(0), 0
    command = [sys.executable, "-W", "ignore", "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        for _ in range(15):
            process.stdin.write(f"{reached + 1}\n")
            process.stdin.flush()
            child, confirmed = int(process.stdout.readline()), int(process.stdout.readline())
            time.sleep(moment.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            while (line := process.stdout.readline()) != "dead\n":
                confirmed = int(line)
            _, found, messages = newest(tmp_path)
            reached = found.progress.steps
            assert not messages
            assert reached >= confirmed
            assert (found.learner["w"] == reached).all()
    set_aside(tmp_path)
    assert len(list((tmp_path / "checkpoints").iterdir())) <= 2
