"""Whatever stands in place of a run's files: one message and its status, soon, and no traceback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.errors import FileFault
from lockstep.run import checkpoint, machine
from lockstep.run.checkpoint import Checkpoint, Damaged, newest, remove, write
from lockstep.run.metrics import MetricsFile, read_metrics
from lockstep.run.progress import Progress

Output = pytest.CaptureFixture[str]
OLDER = Path(__file__).parents[1] / "data" / "run-format-1"
LIMIT_S = 20  # far more than any refusal takes, and far less than 8 GB


class Hangs(BaseException):
    """A command took too long."""


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With one checkpoint, and nothing to fall back on."""
    path = Path(shutil.copytree(OLDER, tmp_path / "run"))
    for older in checkpoint.listed(path)[:-1]:
        shutil.rmtree(older)
    return path


def status_of(*arguments: str | Path) -> int:
    signal.alarm(LIMIT_S)
    status = main([str(argument) for argument in arguments])
    signal.alarm(0)
    return status


def linked(path: Path) -> None:
    """To a copy of the file itself: a link may lead anywhere."""
    original = path.with_name("original")
    shutil.copytree(path, original) if path.is_dir() else path.rename(original)
    path.symlink_to(original)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return replace


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 8 << 30)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": replaced(os.mkfifo),
    "a directory": replaced(os.mkdir),
    "endless": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link": linked,
    "nowhere": replaced(lambda path: path.symlink_to("nowhere")),
    "8 GB": replaced(huge),
}
NEWEST = "checkpoints/step_000000000768"
READERS = {
    "config.toml": ("resume", "evaluate", "verify", "digest", "plot"),
    "metrics.csv": ("resume", "verify", "digest", "plot"),
    "run.lock": ("resume",),
    **{
        f"{NEWEST}/{name}": ("resume", "evaluate", "digest")
        for name in (*checkpoint.FILES, "manifest.json", "manifest.sha256")
    },
}


@pytest.mark.parametrize("file", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_ordinary_file_is_refused_soon(run: Path, capsys: Output, kind: str, file: str) -> None:
    (run / "run.lock").touch()
    KINDS[kind](run / file)
    for command in READERS[file]:
        if (kind, file) == ("8 GB", "run.lock"):
            assert status_of(command, run) == 0, "nothing of it is read"
            continue
        assert status_of(command, run) in (2, 5), command
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert Path(file).name in told


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a link"])
def test_no_ordinary_configuration_is_trained(tmp_path: Path, capsys: Output, kind: str) -> None:
    """A link to one is fine: this file is the user's own."""
    KINDS[kind](tmp_path / "mine.toml")
    assert status_of("train", tmp_path / "mine.toml", "--logdir", tmp_path / "runs") in (2, 5)
    assert "mine.toml" in capsys.readouterr().err or kind in ("endless", "nowhere")
    assert not (tmp_path / "runs").exists()


ROWS: dict[str, tuple[bytes, bytes]] = {
    "a renamed column": (b"update,steps", b"updat,steps"),
    "a figure that is no digit": (b"\r\n5,640,", "\r\n5,64²,".encode()),
    "another figure that is no digit": (b"\r\n5,640,", "\r\n²,640,".encode()),
    "a cell of 200 kB": (b"\r\n5,640,", b"\r\n5,640," + b"6" * 200_000),
    "a number without an end": (b"\r\n5,640,", b"\r\n" + b"5" * 20_000 + b",640,"),
    "no text": (b"\r\n5,640,", b"\r\n5,\xff40,"),
    "a quote without an end": (b"\r\n5,640,", b'\r\n"5,640,'),
}


@pytest.mark.parametrize(("old", "new"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_row_is_one_message(run: Path, capsys: Output, sealed: bool, old: bytes, new: bytes) -> None:
    file = run / "metrics.csv"
    if sealed:
        rows = read_metrics(run).rows
        file.unlink()
        written = MetricsFile(run, 0, pytest.fail)
        for row in rows:
            written.write({name: int(value) if name == "update" else value for name, value in row.items()})
        written.close()
        assert not read_metrics(run).notes(run)
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    for command, statuses in {"digest": (0,), "plot": (0, 2), "verify": (5,), "resume": (0,)}.items():
        out = ("--out", run / "curves.png") if command == "plot" else ()
        assert status_of(command, run, *out) in statuses
        told = capsys.readouterr().err
        assert f"'{file}' is damaged in line" in told
        assert "Traceback" not in told


def test_checkpoints_that_are_no_directory_are_told_and_nothing_is_begun_anew(run: Path, capsys: Output) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()
    before = (run / "metrics.csv").read_bytes()
    assert status_of("resume", run) == 5
    assert f"'{run / 'checkpoints'}' is not a directory" in capsys.readouterr().err
    assert (run / "metrics.csv").read_bytes() == before


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another manifest, with the seal that belongs to it."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    content = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(content.replace(b'"1e999"', b"1e999"))
    (path / "manifest.sha256").write_text(hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest())


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        table = manifest
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value

    return change


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "infinite steps": (put("progress", "steps", value="1e999"), "'steps' must be a whole number, 0 or more, not inf"),
    "negative steps": (put("progress", "steps", value=-5), "'steps' must be a whole number, 0 or more, not -5"),
    "other steps": (put("progress", "steps", value=512), "manifest.json is of 512 steps"),
    "half an update": (put("progress", "updates", value=1.5), "'updates' must be a whole number, 0 or more, not 1.5"),
    "a flag of updates": (put("progress", "updates", value=True), "'updates' must be a whole number"),
    "updates beyond all counting": (put("progress", "updates", value=10**30), "'updates' must be a whole number"),
    "negative seconds": (put("progress", "seconds", value=-1.0), "'seconds' must be 0 or more, not -1.0"),
    "no seconds": (put("progress", "seconds", value=None), "'seconds' must be a number, not None"),
    "an episode that is none": (put("progress", "recent", value=[[1.0]]), "'recent' must be a list of pairs"),
    "an episode of negative length": (put("progress", "recent", value=[[1.0, -1]]), "'length' must be a whole number"),
    "a best in words": (put("progress", "best", value="good"), "'best' must be a number, not 'good'"),
    "no progress": (put("progress", value=None), "'progress' must be a table, not None"),
    "versions of five": (put("machine", "versions", value=5), "'versions' must be a table, not 5"),
    "a version of five": (put("machine", "versions", value={"jax": 5}), "'machine' must have text for 'jax', not 5"),
    "kernels of five": (put("machine", "kernels", value=5), "'machine' must have text for 'kernels', not 5"),
    "a machine of five": (put("machine", value=[5]), "'machine' must be a table, not [5]"),
    "an experiment of five": (put("experiment", value=5), "'experiment' must be a SHA-256, not 5"),
    "exact in words": (put("exact", value="yes"), "'exact' must be true or false, not 'yes'"),
    "a negative budget": (put("budget", value=-1), "'budget' must be a whole number, 0 or more, not -1"),
    "a format in words": (put("format", value="1"), "'format' must be a whole number, 0 or more, not '1'"),
    "files of five": (put("files", value=5), "'files' must be a table, not 5"),
    "a file of five": (put("files", "learner.safetensors", value=5), "does not describe learner.safetensors"),
    "negative bytes": (put("files", "learner.safetensors", "bytes", value=-1), "'bytes' must be a whole number"),
    "a hash of five": (put("files", "learner.safetensors", "sha256", value=5), "'sha256' must be a SHA-256, not 5"),
    "nothing": (dict.clear, "manifest.json has no 'format'"),
}


@pytest.mark.parametrize(("change", "message"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_resealed_manifest_is_one_message(
    run: Path, capsys: Output, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    reseal(run / NEWEST, change)
    for command in ("resume", "evaluate", "digest", "verify"):
        assert status_of(command, run) == 5
        told = capsys.readouterr().err
        assert message in told
        assert f"{NEWEST}' is damaged: " in told
        assert "Traceback" not in told


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
KEYS = [("format",), ("progress",), ("machine",), ("exact",), ("experiment",), ("budget",), ("files",)]
KEYS += [("progress", key) for key in Progress().to_json()]
KEYS += [("machine", key) for key in ("versions", "kernels", "simulation")]
KEYS += [("machine", "versions", "jax"), ("files", "learner.safetensors"), ("files", "episodes.safetensors", "sha256")]


@given(st.sampled_from(KEYS), JSON)
def test_no_value_in_a_manifest_does_more_than_damage_it(
    tmp_path_factory: pytest.TempPathFactory, keys: tuple[str, ...], value: Any
) -> None:
    path = Path(shutil.copytree(OLDER / NEWEST, tmp_path_factory.mktemp("run") / "step_000000000768"))
    reseal(path, put(*keys, value=value))
    try:
        saved = checkpoint.read(path)
    except Damaged:
        return
    except FileFault:
        if keys != ("format",):
            raise
        return
    now = checkpoint.read(OLDER / NEWEST).machine
    assert isinstance(machine.differences(saved.machine, now), list)
    assert saved.progress.after(128, [], 1.0).scored(1.0)[0].returns
    assert (saved.progress.steps, type(saved.exact)) == (768, bool)


EPISODES: dict[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "a negative number": lambda e: {"episode": -1 - e["episode"]},
    "a negative length": lambda e: {"length": np.int64([-1, len(e["actions"]) + 1])},
    "lengths that wrap around": lambda e: {"length": np.int64([2**62, 2**62])},
    "too many actions": lambda e: {"actions": np.concatenate([e["actions"], e["actions"]])},
    "actions of another shape": lambda e: {"actions": e["actions"][:, 0]},
    "actions of another dtype": lambda e: {"actions": e["actions"].astype(np.float64)},
    "one environment": lambda e: {name: array[:1] for name, array in e.items() if name != "actions"},
    "a number for a list": lambda e: {"length": np.array(len(e["actions"]))},
    "lengths of flags": lambda e: {"length": e["length"].astype(bool)},
    "observations of another shape": lambda e: {"observation": e["observation"].reshape(1, 2, 3)},
    "an unknown record": lambda e: {"more": e["total"]},
}


@pytest.mark.parametrize("change", EPISODES.values(), ids=EPISODES)
def test_resealed_episodes_are_one_message(
    run: Path, capsys: Output, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
) -> None:
    path, saved, _ = newest(run)
    resealed: Checkpoint = saved._replace(episodes={**saved.episodes, **change(saved.episodes)})
    remove(path)
    write(run, resealed, keep=1)
    assert status_of("resume", run) == 5
    told = capsys.readouterr().err
    assert f"checkpoint '{path}' does not hold the episodes of this run's environments." in told
    assert "Traceback" not in told
