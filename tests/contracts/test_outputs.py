"""What a run leaves behind is readable by the programs it is meant for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.cli import main
from lockstep.run.metrics import read_metrics
from lockstep.run.train import Run
from tests.environments import CARELESS, PICTURES, PROMISING, UNPREPARED
from tests.laws.table import settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    watch = {"watch.eval_every": 256, "watch.eval_episodes": 2}
    return lockstep.train("Pendulum-v1", logdir=tmp_path_factory.mktemp("runs"), settings=settings(8, **watch))


def test_metrics_have_the_promised_columns(run: Run) -> None:
    rows = read_metrics(run.path).rows
    first = ["update", "steps", "seconds", "steps_per_second", "episodes", "return_mean", "return_std", "length_mean"]
    assert list(rows[0])[:11] == [*first, "kl", "entropy", "explained_variance"]
    assert list(rows[0])[-7:] == [
        *("eval_return", "time_collect", "time_communicate", "time_update", "time_evaluate", "seal", "digest")
    ]
    assert [int(row["steps"]) for row in rows] == [256 * (i + 1) for i in range(8)]
    assert all(float(row["first_ratio_error"]) == 0.0 for row in rows), "the first ratio is exactly one"


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_scalars_and_histograms(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path)).Reload()
    tags = events.Tags()
    assert {"learn/kl", "episode/eval_return", "time/collect", "time/steps_per_second"} <= set(tags["scalars"])
    assert {"weights/policy/layer0/kernel", "actions/0", "returns"} <= set(tags["histograms"])
    rows = read_metrics(run.path).rows
    kl = events.Scalars("learn/kl")
    assert [point.step for point in kl] == [int(row["steps"]) for row in rows]
    np.testing.assert_allclose([point.value for point in kl], [float(row["kl"]) for row in rows], rtol=1e-5)


reads_video = pytest.mark.filterwarnings("ignore")  # the reader forks beside JAX and leaves pipes open


@reads_video
@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_a_video_has_a_picture_for_every_step(run: Run, tmp_path: Path, suffix: str) -> None:
    assert main(["visualize", str(run.path), "--outdir", str(tmp_path), "--format", suffix]) == 0
    frames = imageio.imread(tmp_path / f"episode0.{suffix}", index=None if suffix == "gif" else ...)
    assert 195 < frames.shape[0] <= 201, "a GIF leaves out pictures that repeat the one before"
    assert frames[0].std() > 5, "not an empty picture"
    assert np.abs(frames[0].astype(int) - frames[-1].astype(int)).max() > 50, "something moves"


@reads_video
def test_mujoco_is_drawn_or_the_missing_package_is_named(tmp_path: Path) -> None:
    done = lockstep.train("Hopper-v5", logdir=tmp_path, name="run", settings=settings(1, **{"env.time_limit": 20}))
    command = [sys.executable, "-m", "lockstep", "visualize", str(done.path)]
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        assert shown.returncode == 2
        assert "apt install libegl1 libgl1" in shown.stderr
    else:
        assert imageio.imread(done.path / "videos" / "episode0.mp4")[0].std() > 5


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [(PICTURES, {"shape": [3]}), (CARELESS, {}), (PROMISING, {}), (PROMISING, {"wrong": True}), (UNPREPARED, {})],
)
def test_an_environment_without_a_picture_is_told_what_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kwargs: dict[str, Any]
) -> None:
    done = lockstep.train(name, logdir=tmp_path, name="run", settings=settings(1, **{"env.kwargs": kwargs}))
    capsys.readouterr()
    assert main(["visualize", str(done.path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"lockstep: '{name}' has no picture to show. An environment that has one says metadata = {{")
    assert "takes render_mode=None in its constructor" in told
    assert not list((done.path / "videos").glob("*")), "nothing half made is left"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_of_several_seeds_are_drawn(run: Run, tmp_path: Path, suffix: str) -> None:
    watch = {"watch.eval_every": 256, "watch.eval_episodes": 2}
    other = lockstep.train("Pendulum-v1", logdir=tmp_path, settings=settings(8, seed=5, **watch))
    out = tmp_path / f"curves.{suffix}"
    assert main(["plot", str(run.path), str(other.path), "--out", str(out), "--column", "eval_return"]) == 0
    if suffix == "png":
        assert np.asarray(Image.open(out)).std() > 5
    else:
        assert "<svg" in out.read_text()[:1000]


def test_runs_that_differ_only_in_seed_are_one_curve(tmp_path: Path) -> None:
    from lockstep.run.plot import _groups

    for limit in (100, 200):
        for seed in (0, 1):
            changes = {"env.time_limit": limit, "seed": seed}
            lockstep.train("CartPole-v1", logdir=tmp_path, name=f"t{limit}-s{seed}", settings=settings(1, **changes))
    groups = _groups(sorted(tmp_path.iterdir()), "kl")
    assert {label: len(curves) for label, curves in groups.items()} == {
        "CartPole-v1 ppo": 2,
        "CartPole-v1 ppo, t200-s0": 2,
    }


def test_a_loaded_policy_acts_like_the_evaluation(run: Run) -> None:
    from lockstep.address import Purpose, integer
    from lockstep.run.evaluate import evaluate

    policy = lockstep.load(run.path)
    env = gymnasium.make("Pendulum-v1")
    observation, _ = env.reset(seed=integer(3, Purpose.EVALUATE, 0, 0))
    total, ended = 0.0, False
    while not ended:
        action = policy.act(observation)
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    assert evaluate(policy, 3, 3).returns[0] == pytest.approx(total, rel=1e-12)


def test_the_best_checkpoint_is_kept_and_loads(run: Run) -> None:
    from lockstep.run.evaluate import evaluate

    score = evaluate(lockstep.load(run.path, "best"), 2, 3).mean
    rows = read_metrics(run.path).rows
    assert score == pytest.approx(max(float(row["eval_return"]) for row in rows if row["eval_return"]), rel=1e-8)


def test_parameters_without_a_gradient_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for case in ("reinforce+none", "reinforce"):
        lockstep.train("CartPole-v1", "reinforce", tmp_path, case, settings(2, case))
        told = capsys.readouterr().err
        assert told.count("no gradient reaches these parameters") == (case == "reinforce+none")
        assert ("value/layer0/bias, value/layer0/kernel, value/layer1/bias" in told) == (case == "reinforce+none")


def test_importing_lockstep_is_light() -> None:
    code = "import sys, lockstep, lockstep.cli; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_stepping_environments_imports_no_jax() -> None:
    code = "import sys, lockstep.envs.local, lockstep.envs.testing; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
