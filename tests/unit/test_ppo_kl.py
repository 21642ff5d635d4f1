"""PPO with adaptive KL: the servos' rules, the penalty's slope, and the value function's minibatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.ppo_kl import PPOKL, Replay, _order, _window, ppo_kl_problems, servo, slope
from lockstep.experiment import resolve
from lockstep.networks import from_dimensions

COADY: Any = resolve("coady").experiment.algo
BATCH_PPO: Any = resolve("batch-ppo").experiment.algo


def moved(config: PPOKL, kl: float, penalty: float, multiplier: float = 1.0) -> tuple[float, float]:
    found = servo(config, jnp.float32(kl), jnp.float32(penalty), jnp.float32(multiplier))
    return float(found[0]), float(found[1])


def coady_rule(kl: float, beta: float, rate: float, target: float) -> tuple[float, float]:
    """The published rule, restated."""
    if kl > 2 * target:
        beta = min(35.0, 1.5 * beta)
        rate = rate / 1.5 if beta > 30 and rate > 0.1 else rate
    elif kl < target / 2:
        beta = max(1 / 35, beta / 1.5)
        rate = rate * 1.5 if beta < 1 / 30 and rate < 10 else rate
    return beta, rate


@pytest.mark.parametrize("times", [0.1, 0.49, 0.51, 1.0, 1.99, 2.01, 9.0])
@pytest.mark.parametrize("penalty", [1 / 35, 0.031, 1.0, 25.0, 35.0])
@pytest.mark.parametrize("multiplier", [0.05, 1.0, 11.0])
def test_coady_moves_penalty_and_rate(times: float, penalty: float, multiplier: float) -> None:
    expected = coady_rule(times * 0.003, penalty, multiplier, 0.003)
    np.testing.assert_allclose(moved(COADY, times * 0.003, penalty, multiplier), expected, rtol=1e-5)


@pytest.mark.parametrize(("times", "factor"), [(0.6, 1 / 1.5), (0.8, 1.0), (1.2, 1.0), (1.4, 1.5)])
def test_batch_ppo_moves_the_penalty_alone(times: float, factor: float) -> None:
    np.testing.assert_allclose(moved(BATCH_PPO, times * 0.01, 2.0, 3.0), (2.0 * factor, 3.0), rtol=1e-6)


@pytest.mark.parametrize(("times", "factor"), [(0.6, 0.5), (1.0, 1.0), (1.6, 2.0)])
def test_the_paper_halves_and_doubles(times: float, factor: float) -> None:
    np.testing.assert_allclose(moved(PPOKL(), times * 0.01, 1.0), (factor, 1.0), rtol=1e-6)


def test_the_slope_is_the_derivative_of_penalty_and_hinge() -> None:
    config = PPOKL(target_kl=0.01, cutoff=2.0, cutoff_coefficient=50.0)

    def cost(kl: Any) -> Any:
        return 3.0 * kl + 50.0 * jnp.square(jnp.maximum(kl - 0.02, 0.0))

    for kl in (0.0, 0.019, 0.021, 0.5):
        np.testing.assert_allclose(slope(config, jnp.float64(3.0), jnp.float64(kl)), jax.grad(cost)(kl), rtol=1e-9)


def test_an_epoch_of_the_value_function_sees_every_real_row_once_and_no_other() -> None:
    rng = np.random.default_rng(0)
    real = np.stack([rng.random(40) < share for share in (0.1, 0.5, 1.0)])
    rows = 8
    minibatches = jnp.asarray(-(-real.sum(-1).max() // rows))
    for lane in range(3):
        data = Replay(jnp.arange(40.0)[:, None], jnp.arange(40.0), jnp.asarray(real[lane]))
        order = _order(jax.random.key(0), (jnp.int32(lane), data))
        parts = [_window(data, order, jnp.asarray(k), minibatches, rows) for k in range(int(minibatches))]
        seen = np.concatenate([np.asarray(part.target)[np.asarray(part.real)] for part in parts])
        np.testing.assert_array_equal(np.sort(seen), np.flatnonzero(real[lane]))
        counts = [int(part.real.sum()) for part in parts]
        assert max(counts) - min(counts) <= 1, "spread evenly"


@pytest.mark.parametrize("count", [1, 255, 256, 257, 700])
def test_a_mean_by_chunks_is_the_mean_of_the_rows_that_count(count: int) -> None:
    x = np.random.default_rng(1).normal(size=700)
    found = ac.chunk_mean(lambda part, real: (ac.average(part, real),), jnp.asarray(x), jnp.asarray(count))
    np.testing.assert_allclose(found[0], x[:count].mean(), rtol=1e-10)


def test_widths_from_dimensions() -> None:
    assert from_dimensions(18, 60) == (180, 103, 60)
    assert from_dimensions(18, 5) == (180, 30, 5)


def test_settings_that_do_not_go_together_are_named() -> None:
    assert ppo_kl_problems(PPOKL(minibatch=0), 4, 500) == []
    (problem,) = ppo_kl_problems(PPOKL(value_replay=True), 4, 512)
    assert "algo.value_coefficient=0" in problem
    (problem,) = ppo_kl_problems(PPOKL(value_coefficient=0.0, value_minibatch=10), 4, 512)
    assert "multiple of the 4 lanes" in problem
