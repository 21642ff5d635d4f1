"""What is imported by name, by whom, and on whose word."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium
import pytest

import lockstep
from lockstep import names
from lockstep.cli import main
from lockstep.envs.make import Env, check_id
from lockstep.errors import Untrusted, UsageError
from lockstep.experiment import Config, Experiment
from tests.laws.table import settings

PACKAGE = Path(lockstep.__file__).parent
IMPORTERS = {
    "import_module",
    "__import__",
    "find_spec",
    "exec",
    "eval",
    "runpy",
    "pkg_resources",
    "spec_from_file_location",
}

MODULE = """
import gymnasium, pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
if "Stranger-v0" not in gymnasium.registry:
    gymnasium.register("Stranger-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=20)
"""

Output = pytest.CaptureFixture[str]
Ran = Callable[[], bool]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """A module `stranger` in the working directory, and whether it ran since this was last asked."""
    (tmp_path / "stranger.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    mark = tmp_path / "stranger.ran"

    def since() -> bool:
        found = mark.exists()
        mark.unlink(missing_ok=True)
        sys.modules.pop("stranger", None)
        return found

    yield since
    since()
    gymnasium.registry.pop("Stranger-v0", None)


def test_one_module_imports_by_name() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            words = {
                ast.Name: lambda found: [found.id],
                ast.Attribute: lambda found: [found.attr],
                ast.Import: lambda found: [part for alias in found.names for part in alias.name.split(".")],
                ast.ImportFrom: lambda found: [found.module or "", *(alias.name for alias in found.names)],
            }.get(type(node), lambda found: [])(node)
            assert file.name == "names.py" or IMPORTERS.isdisjoint(words), f"{file}: {ast.unparse(node)}"


def fake_run(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "config.toml").write_text(text)
    return path


ENVIRONMENT = '[experiment.env]\nid = "stranger:Unknown-v0"\n'
ALGORITHM = '[experiment.env]\nid = "Pendulum-v1"\n[experiment.algo]\nname = "stranger:best"\n'
COMMANDS = [
    *([command, "run"] for command in ("resume", "evaluate", "visualize", "verify")),
    *(["train", "run/config.toml"], ["bench", "run/config.toml"], ["info", "run/config.toml"]),
]


@pytest.mark.parametrize("text", [ENVIRONMENT, ALGORITHM], ids=["environment", "algorithm"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_what_a_stranger_named_is_refused_before_it_runs(
    tmp_path: Path, ran: Ran, capsys: Output, arguments: list[str], text: str
) -> None:
    fake_run(tmp_path / "run", text)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "asks for the module 'stranger'" in told
    assert f"lockstep {' '.join(arguments)} --trust" in told
    assert not ran()
    assert main([*arguments, "--trust"]) != 0, "there is nothing to train or to go on with"
    assert "--trust" not in capsys.readouterr().err
    assert ran()


def test_what_only_reads_a_run_asks_for_its_algorithm_alone(tmp_path: Path, ran: Ran, capsys: Output) -> None:
    for name, text, module in (("env", ENVIRONMENT, ""), ("algo", ALGORITHM, "the module 'stranger'")):
        fake_run(tmp_path / name, text)
        for arguments in (["digest", name], ["plot", name]):
            assert main(arguments) != 0
            assert (module or "there is no checkpoint" if arguments[0] == "digest" else module or "no metrics") in (
                capsys.readouterr().err
            )
            assert not ran()


def test_what_was_typed_is_imported_whatever_the_file_says(tmp_path: Path, ran: Ran) -> None:
    file = fake_run(tmp_path / "run", '[experiment.env]\nid = "no_such_module:Hopper-v5"\n') / "config.toml"
    small = {**settings(1), "env.id": "stranger:Stranger-v0"}
    lockstep.train(str(file), logdir=tmp_path, name="typed", settings=small)
    assert ran()


def test_a_configuration_made_in_python_is_trusted(tmp_path: Path, ran: Ran) -> None:
    with pytest.raises(UsageError, match="unknown environment 'stranger:None-v0'"):
        lockstep.train(Config(Experiment(env=Env("stranger:None-v0"))), logdir=tmp_path)
    assert ran()


def test_a_run_made_here_is_trusted_and_the_same_elsewhere_is_not(
    tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = lockstep.train("stranger:Stranger-v0", logdir=tmp_path, name="run", settings=settings(1))
    assert ran()
    lockstep.load(done.path)
    assert ran()
    moved = done.path.rename(tmp_path / "elsewhere")
    lockstep.load(moved)
    assert ran(), "the seal goes with the bytes, not with the place"
    changed = shutil.copytree(moved, tmp_path / "changed")
    with (changed / "config.toml").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(Untrusted, match=r"'stranger:Stranger-v0' in '.*changed/config.toml' asks for the module"):
        lockstep.load(changed)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(Untrusted, match="trust=True"):
        lockstep.load(moved)
    assert not ran()
    lockstep.load(moved, trust=True)
    assert ran()
    assert lockstep.resume(moved, trust=True).digest == done.digest
    assert ran()
    lockstep.load(moved)
    assert ran(), "whoever resumed it here has sealed it"


def test_a_run_that_names_no_module_needs_neither_seal_nor_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(1))
    assert not (done.path / "config.seal").exists()
    assert lockstep.resume(done.path).digest == done.digest
    assert "seal" not in capsys.readouterr().err


def test_a_run_that_gets_no_seal_says_so_where_it_would_need_one(
    tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    lockstep.train("stranger:Stranger-v0", logdir=tmp_path, name="run", settings=settings(1))
    assert capsys.readouterr().err.count("the run gets no seal, so that it is resumed with --trust. /proc/nowhere") == 1


def test_looking_an_id_up_imports_nothing(ran: Ran) -> None:
    with pytest.raises(UsageError, match="the module 'stranger' is not imported"):
        check_id("stranger:Stranger-v0")
    assert not ran()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('on purpose')", "can't be imported: ValueError: on purpose"),
        ("import sys; sys.exit(0)", "can't be imported: SystemExit: 0"),
    ],
)
def test_a_module_that_fails_is_named(tmp_path: Path, ran: Ran, text: str, message: str) -> None:
    (tmp_path / "stranger.py").write_text(text)
    with pytest.raises(UsageError, match=f"'stranger:X-v0': the module 'stranger' {message}"):
        names.load("stranger:X-v0")


STRAY = "random", "json", "dataclasses", "argparse", "tempfile"


@pytest.mark.parametrize("command", [["-m", "lockstep"], [str(Path(sys.executable).parent / "lockstep")]], ids=len)
def test_a_stray_file_of_the_working_directory_hides_no_module_of_python(tmp_path: Path, command: list[str]) -> None:
    """And the user's own modules are found there, by ranks and workers too."""
    for name in STRAY:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the stray file ran')")
    (tmp_path / "stranger.py").write_text(MODULE)
    small = ["--steps", "256", "--set", "collect.steps=32", "--set", "watch.eval_every=0"]
    layout = ["--nprocs", "2", "--workers", "1", "--logdir", "runs", "--name", "run"]
    done = subprocess.run(
        [sys.executable, *command, "train", "stranger:Stranger-v0", *small, *layout],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "the stray file ran" not in done.stderr
    assert (tmp_path / "stranger.ran").exists()


def test_ranks_and_workers_run_the_package_that_started_them(tmp_path: Path) -> None:
    """A checkout in the working directory, where another one is installed."""
    shutil.copytree(PACKAGE, tmp_path / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cli.py", "envs/worker.py"):
        with (tmp_path / "lockstep" / name).open("a") as file:
            file.write(f"\nPath({str(tmp_path)!r}, '{Path(name).stem}', str(os.getpid())).touch()\n")
    with (tmp_path / "lockstep/envs/worker.py").open("r+") as file:
        text = file.read().replace("import json\n", "import json\nfrom pathlib import Path\n", 1)
        file.seek(0)
        file.write(text)
    for process in ("cli", "worker"):
        (tmp_path / process).mkdir()
    (tmp_path / "random.py").write_text("raise SystemExit('the stray file ran')")
    layout = ["--nprocs", "2", "--workers", "1", "--logdir", "runs", "--set", "watch.eval_every=0"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", "pendulum", "--steps", "1", *layout],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    processes = {name: len(os.listdir(tmp_path / name)) for name in ("cli", "worker")}
    assert processes == {"cli": 3, "worker": 5}, (
        "the launcher and two ranks; they know the workers' messages, as do workers"
    )
