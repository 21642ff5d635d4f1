"""Ranks that can't go together are named, with what differs; so is what an environment has that a run can't use."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import lockstep
from lockstep.cli import main
from lockstep.envs.make import Env
from lockstep.errors import EnvironmentFault
from lockstep.run import checkpoint
from lockstep.run.machine import compared, describe, rehearse
from tests.environments import CARELESS, MASKED, PICTURES, WILD
from tests.laws.process import options, run
from tests.laws.table import settings

HERE = {"versions": {"jax": "1", "python": "3.11.7"}, "kernels": "a", "simulation": "b"}
REPEATED = ("Pendulum-v1", "CartPole-v1", "MountainCarContinuous-v0", "LunarLander-v3", "BipedalWalker-v3")
SIMULATED = ("HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Humanoid-v5", "Reacher-v5", "InvertedDoublePendulum-v5")

Output = pytest.CaptureFixture[str]


def test_equal_ranks_go_together() -> None:
    assert compared([HERE, HERE, HERE]) == ([], [])


def test_other_versions_are_refused_with_rank_and_package() -> None:
    refused, doubtful = compared([HERE, HERE, HERE | {"versions": {"jax": "2", "python": "3.11.7"}, "kernels": "c"}])
    assert refused == ["rank 2 has other versions than rank 0: jax 1 -> 2. Install the same."]
    assert doubtful == []


def test_other_arithmetic_is_a_doubt() -> None:
    refused, doubtful = compared([HERE, HERE | {"kernels": "x"}])
    assert refused == []
    assert doubtful == ["rank 1 differs from rank 0 in the arithmetic of this CPU."]


@pytest.mark.parametrize("name", [*REPEATED, *SIMULATED])
def test_an_environment_that_repeats_itself_is_not_doubted(name: str) -> None:
    assert describe(Env(name)).doubt == ""
    assert rehearse(Env(name)) == rehearse(Env(name))


@pytest.mark.parametrize(
    ("name", "kwargs", "step"), [(WILD, {}, "0, the reset"), (WILD, {"at": 7}, "7"), (CARELESS, {}, "0, the reset")]
)
def test_the_first_step_that_an_environment_did_not_repeat_is_named(
    name: str, kwargs: dict[str, Any], step: str
) -> None:
    doubt = describe(Env(name, kwargs=kwargs)).doubt
    assert f"'{name}' is not a function of its seed and actions: played again" in doubt
    assert f"it differs at step {step}." in doubt
    assert doubt.endswith(f"lockstep check {name}")


def test_a_run_that_can_not_be_repeated_says_so_and_keeps_saying_so(tmp_path: Path, capsys: Output) -> None:
    wild = lockstep.train(WILD, logdir=tmp_path, name="wild", settings=settings(1))
    assert capsys.readouterr().err.count("is not a function of its seed and actions") == 1
    assert not checkpoint.newest(wild.path)[1].exact
    tame = lockstep.train("CartPole-v1", logdir=tmp_path, name="tame", settings=settings(1), strict=True)
    assert "is not a function" not in capsys.readouterr().err
    assert checkpoint.newest(tame.path)[1].exact


def test_strict_refuses_what_can_not_be_repeated_before_anything_is_created(tmp_path: Path, capsys: Output) -> None:
    logdir = tmp_path / "runs"
    assert main(["train", WILD, "--strict", "--logdir", str(logdir)]) == 3
    told = capsys.readouterr().err
    assert f"\nlockstep: --strict: '{WILD}' is not a function of its seed and actions" in told
    assert not logdir.exists()
    with pytest.raises(EnvironmentFault, match="differs at step 0"):
        lockstep.train(WILD, logdir=logdir, strict=True)
    assert main(["check", WILD]) == 3


@pytest.mark.parametrize("how", [["--nprocs", "2"], ["--workers", "2"]])
def test_ranks_and_workers_refuse_it_too(tmp_path: Path, how: list[str]) -> None:
    done = run("train", WILD, "--strict", "--logdir", str(tmp_path), *how, *options(settings(1)))
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("is not a function of its seed and actions") == 1
    assert "Traceback" not in done.stderr


def test_images_and_masks_are_told_once_and_nothing_else_is(tmp_path: Path, capsys: Output) -> None:
    small = settings(1, **{"env.kwargs": {"masks": True}, "normalize.observation": False})
    lockstep.train(PICTURES, logdir=tmp_path, settings=small)
    told = capsys.readouterr().err
    assert told.count("look like images (40 x 40 x 3, uint8): they are flattened to 4,800 inputs of an MLP.") == 1
    assert told.count("action masks, which are ignored") == 1


def test_a_fingerprint_is_the_hash_of_what_was_seen_as_it_always_was() -> None:
    """Computed here as checkpoints of earlier versions had it: another one would doubt every older run."""
    environment, rng, sha = gymnasium.make("CartPole-v1"), np.random.default_rng(0), hashlib.sha256()
    observation, _ = environment.reset(seed=0)
    for _ in range(50):
        sha.update(observation.tobytes())
        observation, reward, terminated, truncated, _ = environment.step(int(rng.integers(2)))
        sha.update(np.float64(reward).tobytes())
        if terminated or truncated:
            observation, _ = environment.reset(seed=1)
    assert describe(Env("CartPole-v1")).stored["simulation"] == sha.hexdigest()


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        (PICTURES, {"shape": (1, 84, 84), "dtype": "float32"}, ["7,056 inputs"]),
        (PICTURES, {"shape": (2000,), "dtype": "float32"}, []),
        (PICTURES, {"shape": (4, 4), "dtype": "float32"}, []),
        (PICTURES, {"shape": (16,), "dtype": "uint8"}, []),
        (PICTURES, {"shape": (3,), "masks": True}, ["action masks"]),
        (MASKED, {}, ["action masks"]),
        ("CartPole-v1", {}, []),
    ],
)
def test_what_lockstep_does_not_do_for_an_environment_is_noted(
    name: str, kwargs: dict[str, Any], words: list[str]
) -> None:
    notes = describe(Env(name, kwargs=kwargs)).notes
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
