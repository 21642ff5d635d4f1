from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.algorithms import REGISTRY
from lockstep.config import parse
from lockstep.errors import UsageError
from lockstep.experiment import Experiment, algorithm_name, preset_for, preset_names, resolve


@pytest.mark.parametrize("algo", REGISTRY)
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_resolves_with_every_algorithm(preset: str, algo: str) -> None:
    """And goes evenly over as many processes as people have."""
    experiment = resolve(preset, algo, {"layout.nprocs": 4}).experiment
    assert algorithm_name(experiment.algo) == algo
    assert ("episodes" if experiment.collect.episodes else "steps") in REGISTRY[algo].collects


def test_the_ancestors_presets_name_their_algorithm_and_take_any_environment() -> None:
    for name in ("coady", "batch-ppo"):
        experiment = resolve(name, settings={"env.id": "CartPole-v1"}).experiment
        assert algorithm_name(experiment.algo) == "ppo-kl"
        assert experiment.length == experiment.collect.episodes * 500
    assert preset_for("Walker2d-v5") == "walker"


def test_whole_episodes_need_a_limit() -> None:
    with pytest.raises(UsageError, match=r"has no time limit, so a whole episode may be of any length\. Set env"):
        resolve("lockstep.envs.testing:Scripted-v0", "reinforce")
    given = resolve("lockstep.envs.testing:Scripted-v0", "reinforce", {"env.time_limit": 40}).experiment
    assert (given.length, given.rows, given.batch) == (40, 80, 320)


def test_an_algorithm_says_what_it_does_not_learn_from() -> None:
    with pytest.raises(UsageError, match=r"reinforce does not learn from a number of steps: set collect\.episodes"):
        resolve("CartPole-v1", "reinforce", {"collect.episodes": 0})
    with pytest.raises(UsageError, match=r"a2c does not learn from whole episodes: collect\.episodes must be 0"):
        resolve("CartPole-v1", "a2c", {"collect.episodes": 2})


def test_a_files_numbers_are_those_of_the_algorithm_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('experiment = { seed = 7, algo = { name = "a2c", learning_rate = 0.05, decay = 0.9 } }')
    mine, other = (resolve(str(file), algo).experiment for algo in (None, "ppo"))
    assert (algorithm_name(mine.algo), mine.algo.learning_rate) == ("a2c", 0.05)  # type: ignore[attr-defined]
    assert resolve(str(file), "a2c").experiment == mine
    assert other == resolve("Pendulum-v1", "ppo", {"seed": 7}).experiment


@pytest.mark.parametrize("text", ["experiment = 3", "experiment = { algo = 3 }"])
def test_a_file_whose_tables_are_none_is_told_so(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match="is a group of settings, not 3"):
        resolve(str(file))


UNREAD = [  # algorithm, a setting and its value; a setting with which that does nothing, and one with which it does
    ("a2c", "algo.decay=0.5", "algo.optimizer=adam", "algo.optimizer=rmsprop"),
    ("ppo-kl", "algo.value_learning_rate=0.1", "algo.value_coefficient=0.5", "algo.value_coefficient=0"),
    ("ppo-kl", "algo.value_epochs=4", "algo.value_coefficient=0.5", "algo.value_coefficient=0"),
    ("ppo-kl", "algo.value_minibatch=64", "algo.value_coefficient=0.5", "algo.value_coefficient=0"),
    ("ppo-kl", "algo.cutoff=3", "algo.cutoff_coefficient=0", "algo.cutoff_coefficient=1"),
    ("reinforce", "algo.value_steps=4", "algo.baseline=mean", "algo.baseline=value"),
    ("reinforce", "algo.value_learning_rate=0.1", "algo.baseline=none", "algo.baseline=value"),
    ("acktr", "algo.cold_rate=0.1", "algo.cold_updates=0", "algo.cold_updates=1"),
    ("acktr", "algo.max_gradient=4", "algo.cold_updates=0", "algo.cold_updates=1"),
    ("ppo-kl", "collect.steps=64", "collect.episodes=2", "collect.episodes=0"),
]


@pytest.mark.parametrize(("algo", "setting", "without", "with_it"), UNREAD)
def test_a_setting_that_does_nothing_is_refused_where_it_was_typed(
    algo: str, setting: str, without: str, with_it: str
) -> None:
    """But not a preset's, which is none of the user's doing: cartpole has a value_learning_rate for reinforce."""

    def resolved(*typed: str) -> Experiment:
        return resolve("cartpole", algo, dict(map(parse, typed))).experiment

    name, _, _ = setting.partition("=")
    with pytest.raises(UsageError, match=rf"^{name} has no effect with {without}[^0-9]*\.$"):
        resolved(without, setting)
    assert resolved(without) != resolved(with_it) != resolved(with_it, setting)
