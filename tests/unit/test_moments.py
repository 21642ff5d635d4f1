from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import moments
from lockstep.core import Moments


def stacked(parts: list[Moments]) -> Moments:
    return Moments(*(jnp.stack(leaves) for leaves in zip(*parts, strict=True)))


@given(
    st.lists(st.sampled_from([1, 2, 7]), min_size=1, max_size=4),
    st.sampled_from([0.0, -3.0, 1e8]),
    st.sampled_from([np.float32, np.float64]),
)
def test_lanes_of_unequal_size_merge_to_the_moments_of_all(sizes: list[int], offset: float, dtype: type) -> None:
    rng = np.random.default_rng(len(sizes))
    batches = [(offset + rng.normal(size=(2, n, 3))).astype(dtype) for n in sizes]
    lanes = stacked([moments.measure(jnp.asarray(batch), (0, 1)) for batch in batches])
    merged = moments.merge_lanes(moments.empty((3,)), lanes)
    everything = np.concatenate(batches, 1).reshape(-1, 3).astype(np.float64)
    assert {leaf.dtype for leaf in merged} == {np.dtype("float64")}
    assert merged.count == 2 * sum(sizes)
    np.testing.assert_allclose(merged.mean, everything.mean(0), rtol=1e-14, atol=1e-13)
    np.testing.assert_allclose(merged.squares, ((everything - everything.mean(0)) ** 2).sum(0), rtol=1e-6, atol=1e-13)


def test_lanes_are_merged_one_after_the_other() -> None:
    parts = [
        moments.measure(jnp.asarray(np.random.default_rng(i).normal(size=n)), (0,)) for i, n in enumerate((3, 5, 4))
    ]
    by_hand = moments.merge(moments.merge(moments.merge(moments.empty(()), parts[0]), parts[1]), parts[2])
    assert moments.merge_lanes(moments.empty(()), stacked(parts)) == by_hand


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("lanes", [moments.UNROLLED - 1, moments.UNROLLED + 1])
def test_a_loop_over_many_lanes_has_the_bits_of_a_program_that_names_each(
    monkeypatch: pytest.MonkeyPatch, lanes: int, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(lanes)
    counts, means, squares = rng.integers(0, 9, lanes), rng.normal(size=(lanes, *shape)), rng.random((lanes, *shape))
    parts = Moments(counts.astype(float), means * 1e3, squares * 1e-3)
    merged = []
    for unrolled in (1, lanes):
        monkeypatch.setattr(moments, "UNROLLED", unrolled)
        merged.append(jax.jit(lambda seen, parts: moments.merge_lanes(seen, parts))(moments.empty(shape), parts))
    for one, other in zip(*merged, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_merging_nothing_changes_nothing() -> None:
    some = moments.measure(jnp.asarray([1.0, 2.0, 6.0]), (0,))
    assert tuple(some) == (3, 3, 14)
    assert moments.merge(some, moments.empty(())) == some
    assert moments.merge(moments.empty(()), some) == some
    assert moments.merge(moments.empty(()), moments.empty(())) == moments.empty(())


@pytest.mark.parametrize(("seen", "variance"), [([], 1), ([5.0], 1), ([5.0, 5.0], 0), ([1.0, 2.0, 6.0], 14 / 3)])
def test_variance_is_the_samples_own_and_one_before_there_are_two(seen: list[float], variance: float) -> None:
    measured = moments.measure(jnp.asarray(seen), (0,)) if seen else moments.empty(())
    assert moments.variance(measured) == variance


def test_standardize_is_the_distance_from_the_mean_in_deviations() -> None:
    batch = np.float32([[[1, 10], [2, 20]], [[6, 60], [7, 0]]])
    seen = moments.measure(jnp.asarray(batch), (0, 1))
    expected = (batch - batch.mean((0, 1))) / batch.std((0, 1))
    out = moments.standardize(seen, jnp.asarray(batch), 10.0)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(moments.standardize(seen, jnp.asarray(batch), 0.5), expected.clip(-0.5, 0.5), rtol=1e-6)


def test_nothing_is_scaled_before_it_is_seen() -> None:
    batch = jnp.asarray([[3, -4]], jnp.int32)
    np.testing.assert_array_equal(moments.standardize(moments.empty((2,)), batch, 10.0), np.float32([[3, -4]]))


def test_a_constant_observation_standardizes_to_zero() -> None:
    batch = jnp.full((5, 1), 7.0)
    assert not moments.standardize(moments.measure(batch, (0,)), batch, 10.0).any()


def test_padding_does_not_count() -> None:
    rng = np.random.default_rng(3)
    batch, real = rng.normal(size=(6, 4, 2)), rng.random((6, 4)) < 0.5
    found = moments.measure(jnp.asarray(batch), (0, 1), jnp.asarray(real))
    kept = batch[real]
    assert found.count == len(kept)
    np.testing.assert_allclose(found.mean, kept.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.squares, ((kept - kept.mean(0)) ** 2).sum(0), rtol=1e-12)
