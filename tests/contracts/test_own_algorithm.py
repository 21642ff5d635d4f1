"""An algorithm of one's own, named as `module:name`, is one like ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import algorithms
from lockstep.algorithms import Entry
from lockstep.algorithms.ppo import PPO, ppo
from lockstep.errors import UsageError
from lockstep.experiment import algorithm_name, resolve
from tests.laws.process import digest_in

ROOT = Path(__file__).parents[2]
SETTINGS = "collect.steps=64", "watch.eval_every=0", "watch.checkpoint_every=512"
SMALL = ["--steps", "2048", *(word for setting in SETTINGS for word in ("--set", setting))]


def run(folder: Path, *arguments: str) -> str:
    """A command in a fresh process, in the folder where the module is."""
    command = [sys.executable, "-m", "lockstep", *arguments]
    whole = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=whole)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_with_it_can_do_what_every_run_can(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "own_algorithm.py", tmp_path)
    train = ["train", "CartPole-v1", "--algo", "own_algorithm:vanilla", *SMALL, "--logdir", ".", "--name"]
    digest = digest_in(run(tmp_path, *train, "one"))
    assert digest_in(run(tmp_path, *train, "two", "--nprocs", "2", "--mode", "average")) == digest
    assert 'name = "own_algorithm:vanilla"' in (tmp_path / "one" / "config.toml").read_text()
    assert digest_in(run(tmp_path, "resume", "one", "--nprocs", "2")) == digest
    assert "2 digests equal" in run(tmp_path, "verify", "one")
    assert "over 2 episodes" in run(tmp_path, "evaluate", "one", "--episodes", "2")
    assert run(tmp_path, "digest", "one").split()[-1] == digest
    assert "episode" in run(tmp_path, "visualize", "one", "--format", "gif")
    run(tmp_path, "plot", "one", "two")
    assert (tmp_path / "curves.png").exists()
    from_file = ["train", "one/config.toml", "--trust", "--logdir", ".", "--name", "three"]
    assert digest_in(run(tmp_path, *from_file)) == digest


class Mine(PPO):
    pass


class Taken(PPO):
    pass


mine = Entry(Mine, ppo)
taken = Entry(Taken, ppo)
borrowed = Entry(PPO, ppo)
again = Entry(Taken, ppo)
undecorated = Entry(type("Plain", (), {}), ppo)


def test_it_is_known_by_its_settings() -> None:
    name = f"{__name__}:mine"
    experiment = resolve("pendulum", name, {"algo.clip": 0.3}).experiment
    assert (type(experiment.algo), algorithm_name(experiment.algo)) == (Mine, name)
    assert algorithms.entry(name) is mine


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("min", r"'min' is no algorithm .* Did you mean 'mine'\? There is: mine, taken,"),
        ("PPO", r"'PPO' is no algorithm .* There is: mine, taken,"),
        ("borrowed", r"its settings, PPO, are those of 'ppo': say that name, or give it .* `class Mine\(PPO\): pass`"),
        ("again", "its settings, Taken, are those of .*:taken': say that name"),
        ("undecorated", "its settings, Plain, must be a frozen dataclass"),
    ],
)
def test_what_is_no_algorithm_is_told_so(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve("pendulum", f"{__name__}:{name}")


def test_a_module_without_algorithms_says_so() -> None:
    with pytest.raises(
        UsageError, match=r"of the module 'json'\. There is none; docs/write-an-algorithm\.md shows one"
    ):
        resolve("pendulum", "json:loads")


def test_an_algorithm_registered_by_hand_under_anothers_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs would have been PPO's: settings are what an algorithm is known by."""
    monkeypatch.setitem(algorithms.REGISTRY, "own", borrowed)
    with pytest.raises(UsageError, match="algorithm 'own': its settings, PPO, are those of 'ppo'"):
        resolve("pendulum", "own")
