from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.returns import discounted, gae


def column(*numbers: float) -> jnp.ndarray:
    return jnp.asarray(numbers, jnp.float64)[:, None]


def flags(*indices: int, length: int = 3) -> jnp.ndarray:
    return jnp.asarray([i in indices for i in range(length)])[:, None]


def test_advantages_up_to_a_terminal() -> None:
    advantages = gae(column(1, 1, 1), column(3, 2, 1), column(2, 1, 7), flags(2), flags(), 0.99, 0.95)
    np.testing.assert_allclose(advantages[:, 0], [-0.029, -0.010, 0], atol=5e-4)


def test_truncation_bootstraps_termination_does_not() -> None:
    reward, value, following = column(1), column(10), column(100)
    yes, no = flags(0, length=1), flags(length=1)
    assert gae(reward, value, following, yes, no, 0.5, 0.9)[0, 0] == 1 - 10
    assert gae(reward, value, following, no, yes, 0.5, 0.9)[0, 0] == 1 + 0.5 * 100 - 10
    assert gae(reward, value, following, yes, yes, 0.5, 0.9)[0, 0] == 1 - 10


@pytest.mark.parametrize(("terminated", "truncated"), [((1,), ()), ((), (1,))])
def test_nothing_of_the_next_episode_comes_through(terminated: tuple[int, ...], truncated: tuple[int, ...]) -> None:
    before, after = (
        gae(column(1, 1, r), column(0, 0, 0), column(0, 0, 0), flags(*terminated), flags(*truncated), 0.9, 0.9)
        for r in (0.0, 1e6)
    )
    np.testing.assert_array_equal(before[:2], after[:2])
    assert after[2, 0] == 1e6


def test_the_last_step_of_a_batch_bootstraps_when_its_episode_goes_on() -> None:
    advantages = gae(column(0, 0), column(0, 0), column(0, 8), *[flags(length=2)] * 2, 0.5, 0.5)
    np.testing.assert_array_equal(advantages[:, 0], [0.25 * 4, 4])


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (12, 4)]), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_backward_recursion(seed: int, shape: tuple[int, int], discount: float, trace: float) -> None:
    rng = np.random.default_rng(seed)
    steps, envs = shape
    reward, value, following = rng.normal(size=(3, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.3
    expected = np.zeros(shape)
    for e in range(envs):
        advantage = 0.0
        for t in reversed(range(steps)):
            future = 0.0 if terminated[t, e] else discount * following[t, e]
            ended = terminated[t, e] or truncated[t, e]
            advantage = reward[t, e] + future - value[t, e] + (0.0 if ended else discount * trace * advantage)
            expected[t, e] = advantage
    np.testing.assert_allclose(
        gae(*map(jnp.asarray, (reward, value, following, terminated, truncated)), discount, trace),
        expected,
        rtol=1e-12,
        atol=1e-12,
    )


def test_discounted_returns_with_boundaries() -> None:
    """Ends after the first and third of four steps."""
    found = discounted(column(1, 2, 3, 4), flags(0, 2, length=4), 0.9)
    np.testing.assert_allclose(found[:, 0], [1, 2 + 0.9 * 3, 3, 4], rtol=1e-12)


def test_discounted_returns_of_two_episodes() -> None:
    """Of three steps and of one."""
    found = discounted(column(1, 2, 3, 4), flags(2, 3, length=4), 0.9)
    np.testing.assert_allclose(found[:, 0], [5.23, 4.7, 3, 4], rtol=1e-12)


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_discounted_returns_are_the_sums_of_what_is_left(seed: int, discount: float) -> None:
    rng = np.random.default_rng(seed)
    reward, ended = rng.normal(size=(9, 2)), rng.random((9, 2)) < 0.3
    found = discounted(jnp.asarray(reward), jnp.asarray(ended), discount)
    for e in range(2):
        for t in range(9):
            last = next((i for i in range(t, 9) if ended[i, e]), 8)
            expected = sum(discount ** (i - t) * reward[i, e] for i in range(t, last + 1))
            np.testing.assert_allclose(found[t, e], expected, rtol=1e-9, atol=1e-12)


def test_advantages_up_to_a_terminal_that_padding_follows() -> None:
    """What stands after the end of an episode, values included, does not come through."""
    reward, value, following = column(1, 1, 1, 0, 0), column(3, 2, 1, 50, 50), column(2, 1, 50, 50, 50)
    advantages = gae(reward, value, following, flags(2, length=5), flags(length=5), 0.99, 0.95)
    np.testing.assert_allclose(advantages[:3, 0], [-0.029, -0.010, 0], atol=5e-4)
