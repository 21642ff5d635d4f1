from __future__ import annotations

import json
import math
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lockstep.address import Purpose, integer
from lockstep.envs.make import Env
from lockstep.run.evaluate import Evaluation, evaluate


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30).filter(lambda numbers: np.std(numbers) > 1e-3))
def test_mean_deviation_and_interval_are_students(returns: list[float]) -> None:
    evaluation = Evaluation(returns, [1] * len(returns))
    n, mean = len(returns), sum(returns) / len(returns)
    std = math.sqrt(sum((x - mean) ** 2 for x in returns) / (n - 1))
    np.testing.assert_allclose([evaluation.mean, evaluation.std], [mean, std], rtol=1e-9, atol=1e-9)
    interval = stats.t.interval(0.95, n - 1, loc=mean, scale=stats.sem(returns))
    told = evaluation.as_dict()["return_95"]
    np.testing.assert_allclose(told, interval, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(2 * evaluation.half_interval, interval[1] - interval[0], rtol=1e-9)


def test_the_interval_of_three_returns_by_hand() -> None:
    """Of 1, 2, 3: mean 2, deviation 1, and t(2 degrees, 97.5 %) is 4.3027."""
    assert Evaluation([1.0, 2.0, 3.0], [1, 1, 1]).half_interval == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_one_episode_has_a_mean_and_no_deviation() -> None:
    evaluation = Evaluation([5.0], [7])
    assert (evaluation.mean, math.isnan(evaluation.std), math.isnan(evaluation.half_interval)) == (5.0, True, True)
    told = json.loads(json.dumps(evaluation.as_dict(), allow_nan=False))
    assert told == {
        "episodes": 1,
        "return_mean": 5.0,
        "return_std": None,
        "return_95": [None, None],
        "length_mean": 7.0,
        "returns": [5.0],
        "lengths": [7],
    }


class Experiment(NamedTuple):
    env: Env


class Leaning:
    """Pushes the cart to where the pole leans."""

    def __init__(self, env: Env) -> None:
        self.experiment = Experiment(env)

    def choose(self, observations: np.ndarray) -> np.ndarray:
        return (observations[:, 2] > 0).astype(np.int32)


def test_an_evaluation_is_the_first_episode_of_each_number_on_its_own_seed() -> None:
    env, seed, episodes = Env("CartPole-v1", time_limit=45), 3, 11
    returns, lengths = [], []
    for number in range(episodes):
        alone = gymnasium.make(env.id, max_episode_steps=45, disable_env_checker=True)
        observation, _ = alone.reset(seed=integer(seed, Purpose.EVALUATE, number, 0))
        total, steps, ended = 0.0, 0, False
        while not ended:
            observation, reward, terminated, truncated, _ = alone.step(int(observation[2] > 0))
            total, steps, ended = total + float(reward), steps + 1, terminated or truncated
        returns.append(total)
        lengths.append(steps)
    assert len(set(lengths)) > 3
    assert 45 in lengths
    assert evaluate(Leaning(env), episodes, seed) == Evaluation(returns, lengths)


def test_more_episodes_leave_the_first_ones_as_they_are() -> None:
    policy = Leaning(Env("CartPole-v1"))
    few, many = evaluate(policy, 3, 0), evaluate(policy, 10, 0)
    assert many.returns[:3] == few.returns
    assert many.lengths[:3] == few.lengths
    assert evaluate(policy, 3, 1) != few
