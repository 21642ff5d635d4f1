"""lockstep from Python: what there is, what it takes, and what it says to something else."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import lockstep
from lockstep.cli import main
from lockstep.errors import Differs, FileFault, NumericFault, UsageError
from lockstep.run.metrics import read_metrics
from lockstep.run.policy import TILE
from lockstep.run.train import Run
from tests.laws.table import settings

ACTS = """
import pickle, sys
import numpy as np
policy = pickle.loads(open(sys.argv[1], "rb").read())
np.save(sys.argv[2], policy.act(np.load(sys.argv[3])))
print(policy)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return lockstep.train("Pendulum-v1", logdir=tmp_path_factory.mktemp("runs"), name="run", settings=settings(3))


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return lockstep.train("CartPole-v1", logdir=tmp_path_factory.mktemp("runs"), name="run", settings=settings(2))


def observations(count: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)


def test_dir_shows_what_is_meant_for_users_and_all_of_it_is_there() -> None:
    code = "import lockstep as ls; print(*dir(ls)); print(*ls.__all__); [getattr(ls, name) for name in dir(ls)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    meant = "__version__ digest errors evaluate load plot ranks resume train verify"
    assert done.stdout == f"{meant}\n{meant.removeprefix('__version__ ')}\n", done.stderr
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__doc__, name
    with pytest.raises(AttributeError, match=r"has no attribute 'trian'\. There is: digest, errors,"):
        lockstep.trian  # noqa: B018


def test_a_policy_says_what_it_is(run: Run) -> None:
    assert repr(lockstep.load(run)) == f"<TrainedPolicy: ppo on Pendulum-v1, 768 steps, {run.path}>"


def test_a_pickled_policy_acts_alike_in_another_process(run: Run, tmp_path: Path) -> None:
    policy, seen = lockstep.load(run), observations(TILE + 3, 3)
    (tmp_path / "policy").write_bytes(pickle.dumps(policy))
    np.save(tmp_path / "seen.npy", seen)
    files = [str(tmp_path / name) for name in ("policy", "acted.npy", "seen.npy")]
    done = subprocess.run([sys.executable, "-c", ACTS, *files], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.load(files[1]).tobytes() == policy.act(seen).tobytes()
    assert done.stdout == f"{policy}\n"


@pytest.mark.parametrize("count", [0, 1, TILE, TILE + 1, 3 * TILE])
def test_a_batch_gets_an_action_for_each_of_its_observations(run: Run, choosing: Run, count: int) -> None:
    for done, size, shape in ((run, 3, (1,)), (choosing, 4, ())):
        policy, seen = lockstep.load(done), observations(count, size)
        acted = policy.act(seen)
        assert acted.shape == (count, *shape)
        assert all(np.array_equal(acted[i], policy.act(seen[i])) for i in range(count))
        assert policy.act(list(seen[0])) == acted[0] if count else True


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (np.zeros(4), r"not \(4,\)\."),
        (np.zeros((2, 2)), r"not \(2, 2\)\."),
        (np.zeros((2, 2, 3)), r"not \(2, 2, 3\)\."),
        (1.0, r"not \(\)\."),
        (None, "not a NoneType of object"),
        ("abc", "not a str of "),
        ({"a": 1}, "not a dict of object"),
        ((np.zeros(3), {}), "not a tuple of "),
        ([[1, 2, 3], [1, 2]], "not a list of "),
    ],
)
def test_anything_else_is_no_observation(run: Run, given: Any, told: str) -> None:
    with pytest.raises(
        UsageError, match=rf"act takes one observation of shape \(3,\), or a batch of shape \(N, 3\), {told}"
    ):
        lockstep.load(run).act(given)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_an_observation_that_is_no_number_is_named(run: Run, wrong: float) -> None:
    batch = observations(3, 3)
    batch[1, 2] = wrong
    with pytest.raises(UsageError, match=rf"observation 1 is {wrong} at index \[2\]"):
        lockstep.load(run).act(batch)


def test_actions_that_are_no_numbers_are_the_policys_fault(run: Run) -> None:
    policy = lockstep.load(run)
    policy.learner.params["policy"]["layer2"]["bias"] = np.full(1, np.nan, np.float32)
    with pytest.raises(NumericFault, match=r"the policy's actions are not numbers: \[\[nan\]\]"):
        policy.act(observations(1, 3)[0])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"steps": 6e4 + 0.5}, "'steps' must be a whole number"),
        ({"steps": 2**70}, "'steps' must be at most"),
        ({"mode": "x"}, "'layout.mode' must be one of gather, average, not 'x'"),
        ({"workers": -1}, "'layout.workers' must be at least 0"),
    ],
)
def test_what_resume_is_given_is_checked_before_it_is_kept(run: Run, given: dict[str, Any], told: str) -> None:
    before = (run.path / "config.toml").read_bytes()
    with pytest.raises(UsageError, match=re.escape(told)):
        lockstep.resume(run, **given)
    assert (run.path / "config.toml").read_bytes() == before


def test_numbers_are_taken_as_python_and_numpy_have_them(tmp_path: Path) -> None:
    given = {**settings(2), "seed": np.int64(3), "algo.clip": np.float32(0.25), "algo.schedule": "constant"}
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=given)
    longer = lockstep.resume(done, steps=7.68e2)  # type: ignore[arg-type]  # as somebody may write it
    assert lockstep.load(longer, 768).act(np.zeros(3)).shape == (1,)
    assert lockstep.evaluate(longer, 1).returns == lockstep.evaluate(longer, 1, checkpoint="768").returns


def test_evaluate_is_that_of_the_command_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    found = lockstep.evaluate(run, episodes=3, seed=7, checkpoint="768")
    assert main(["evaluate", str(run.path), "--episodes", "3", "--seed", "7"]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert lockstep.evaluate(str(run.path), 3) == lockstep.evaluate(run.path, 3, seed=3) != found
    with pytest.raises(UsageError, match="episodes must be 1 or more, not 0"):
        lockstep.evaluate(run, 0)


def test_digest_is_the_last_receipt_and_verify_makes_it_again(run: Run, tmp_path: Path) -> None:
    assert lockstep.digest(run) == run.digest == read_metrics(run.path).rows[-1]["digest"]
    assert lockstep.verify(run, updates=(2, 3), workers=2).startswith("updates 2 to 3: 2 digests equal")
    with ThreadPoolExecutor(1) as thread:  # which hears no signals
        assert thread.submit(lockstep.verify, run, (3, 3)).result().startswith("updates 3 to 3: 1 digests equal")
    other = lockstep.train("Pendulum-v1", logdir=tmp_path, name="other", settings=settings(1))
    file = other.path / "metrics.csv"
    file.write_text(file.read_text().replace(other.digest, "0" * 64))
    with pytest.raises((Differs, FileFault)):
        lockstep.verify(other)
    with pytest.raises(UsageError, match="'mode' must be one of gather, average, not 'gathre'"):
        lockstep.verify(run, mode="gathre")  # type: ignore[arg-type]


def test_plot_draws_one_run_or_several_and_leaves_pyplot_alone(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    assert lockstep.plot(run, out, column="kl") == out
    assert out.stat().st_size > 1000
    assert lockstep.plot([run, str(run.path)], tmp_path / "both.svg", "kl").read_text().startswith("<?xml")
    code = "import sys, lockstep; lockstep.plot(*sys.argv[1:]); sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(run.path), str(out), "kl"]).returncode == 0


def test_a_path_to_a_configuration_trains(run: Run, tmp_path: Path) -> None:
    assert lockstep.train(run.path / "config.toml", logdir=tmp_path).digest == run.digest


class OfOnesOwn(gymnasium.Env):
    pass


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: gymnasium.make("CartPole-v1"), r"not TimeLimit\. Use lockstep\.train\('CartPole-v1'\)\."),
        (lambda: gymnasium.make_vec("CartPole-v1", 2, "sync"), r"not SyncVectorEnv\. Use lockstep\.train\('CartPole"),
        (lambda: OfOnesOwn, r"gymnasium\.register\('OfOnesOwn-v0', OfOnesOwn\) and lockstep\.train\('OfOnesOwn-v0'\)"),
        (lambda: OfOnesOwn(), r"not OfOnesOwn\. Use gymnasium\.register\('OfOnesOwn-v0', OfOnesOwn\)"),
        (lambda: None, r"not None\. Use lockstep\.train\('CartPole-v1'\)\."),
        (lambda: 3, r"not int\. Use"),
    ],
    ids=["environment", "environments", "class", "object", "nothing", "number"],
)
def test_train_says_what_to_give_it(tmp_path: Path, given: Any, told: str) -> None:
    with pytest.raises(UsageError, match=f"makes its environments itself; .*{told}"):
        lockstep.train(given(), logdir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_page_has_every_name_with_its_arguments() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)(?:\((.*?)\))?` \|", page, re.MULTILINE))
    assert sorted(rows) == lockstep.__all__
    for name, arguments in rows.items():
        if arguments:
            assert arguments == ", ".join(inspect.signature(getattr(lockstep, name)).parameters)
