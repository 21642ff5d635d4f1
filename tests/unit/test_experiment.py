from __future__ import annotations

import pytest

from lockstep.algorithms import REGISTRY
from lockstep.errors import UsageError
from lockstep.experiment import algorithm_name, preset_for, preset_names, resolve


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
