from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from lockstep.core import Distribution
from lockstep.distributions import Gaussian, categorical, gaussian

RNG = np.random.default_rng(0)
P = Gaussian(*map(jnp.asarray, RNG.normal(size=(2, 5, 3))))
Q = Gaussian(*map(jnp.asarray, RNG.normal(size=(2, 5, 3))))
LOGITS_P, LOGITS_Q = map(jnp.asarray, RNG.normal(0, 3, (2, 5, 4)))
FAMILIES = [(gaussian(3), P), (categorical(4), LOGITS_P)]


def normals(p: Gaussian) -> list[stats._multivariate.multivariate_normal_frozen]:
    return [stats.multivariate_normal(m, np.diag(np.exp(2 * s))) for m, s in zip(*map(np.asarray, p), strict=True)]


def test_gaussian_log_prob_and_entropy_are_those_of_the_joint_normal() -> None:
    action = RNG.normal(size=(5, 3))
    expected = [normal.logpdf(a) for normal, a in zip(normals(P), action, strict=True)]
    np.testing.assert_allclose(gaussian(3).log_prob(P, jnp.asarray(action)), expected, rtol=1e-12)
    np.testing.assert_allclose(gaussian(3).entropy(P), [normal.entropy() for normal in normals(P)], rtol=1e-12)


def test_gaussian_kl_is_that_of_the_joint_normals() -> None:
    """(tr(Sq^-1 Sp) + (mq - mp)' Sq^-1 (mq - mp) - k + log(det Sq / det Sp)) / 2"""
    expected = []
    for p, q in zip(normals(P), normals(Q), strict=True):
        precision, shift = np.linalg.inv(q.cov), q.mean - p.mean
        log_ratio = np.log(np.linalg.det(q.cov) / np.linalg.det(p.cov))
        expected.append((np.trace(precision @ p.cov) + shift @ precision @ shift - 3 + log_ratio) / 2)
    np.testing.assert_allclose(gaussian(3).kl(P, Q), expected, rtol=1e-10)


def test_categorical_log_prob_entropy_and_kl_are_those_of_the_probabilities() -> None:
    p, q = special.softmax(LOGITS_P, -1), special.softmax(LOGITS_Q, -1)
    action = np.int32([0, 1, 2, 3, 0])
    family = categorical(4)
    np.testing.assert_allclose(family.log_prob(LOGITS_P, jnp.asarray(action)), np.log(p[range(5), action]), rtol=1e-12)
    np.testing.assert_allclose(family.entropy(LOGITS_P), stats.entropy(p, axis=-1), rtol=1e-12)
    np.testing.assert_allclose(family.kl(LOGITS_P, LOGITS_Q), stats.entropy(p, q, axis=-1), rtol=1e-10)


def test_logits_need_not_be_normalised() -> None:
    family, action, moved = categorical(4), jnp.asarray([0, 1, 2, 3, 0]), LOGITS_P + 1000
    for function in (lambda x: family.log_prob(x, action), family.entropy, lambda x: family.kl(x, LOGITS_Q)):
        np.testing.assert_allclose(function(moved), function(LOGITS_P), rtol=1e-9)


@pytest.mark.parametrize(("family", "p"), FAMILIES)
def test_kl_from_itself_is_zero(family: Distribution, p: object) -> None:
    assert not family.kl(p, p).any()


@pytest.mark.parametrize(("family", "p", "q"), [(gaussian(3), P, Q), (categorical(4), LOGITS_P, LOGITS_Q)])
def test_kl_is_the_mean_log_ratio_of_samples_of_the_first(family: Distribution, p: object, q: object) -> None:
    wide_p, wide_q = (jax.tree.map(lambda x: jnp.broadcast_to(x, (20_000, *x.shape)), d) for d in (p, q))
    samples = family.sample(wide_p, family.noise(jax.random.key(1), (20_000, 5)))
    ratio = np.asarray(family.log_prob(wide_p, samples) - family.log_prob(wide_q, samples))
    error = ratio.std(0) / np.sqrt(len(ratio))
    assert (np.abs(ratio.mean(0) - family.kl(p, q)) < 4 * error).all()


def test_gaussian_samples_are_normal() -> None:
    p = Gaussian(jnp.full((20_000, 2), 3.0), jnp.broadcast_to(jnp.log(jnp.asarray([0.5, 2.0])), (20_000, 2)))
    samples = gaussian(2).sample(p, gaussian(2).noise(jax.random.key(0), (20_000,)))
    for i, std in enumerate((0.5, 2.0)):
        assert stats.kstest(np.asarray(samples[:, i]), stats.norm(3, std).cdf).pvalue > 0.01
    assert abs(stats.pearsonr(*np.asarray(samples).T).statistic) < 0.03


def test_categorical_samples_come_with_their_probabilities() -> None:
    logits = jnp.log(jnp.asarray([0.05, 0.5, 0.15, 0.3])) + 7
    noise = categorical(4).noise(jax.random.key(0), (40_000,))
    samples = categorical(4).sample(jnp.broadcast_to(logits, noise.shape), noise)
    assert samples.dtype == jnp.int32
    assert stats.chisquare(np.bincount(samples), [2_000, 20_000, 6_000, 12_000]).pvalue > 0.01


@pytest.mark.parametrize(("family", "p"), FAMILIES)
def test_noise_is_a_function_of_its_key_alone(family: Distribution, p: object) -> None:
    one, same, other = (family.noise(jax.random.key(seed), (5,)) for seed in (0, 0, 1))
    assert one.dtype == jnp.float32
    assert (one == same).all()
    assert (one != other).any()
    assert (family.sample(p, one) == family.sample(p, same)).all()


@pytest.mark.parametrize(("family", "p"), FAMILIES)
def test_the_mode_is_the_sample_without_noise_and_the_likeliest_action(family: Distribution, p: object) -> None:
    mode = family.mode(p)
    size = 3 if isinstance(p, Gaussian) else 4
    np.testing.assert_array_equal(mode, family.sample(p, jnp.zeros((5, size))))
    for key in range(10):
        sample = family.sample(p, family.noise(jax.random.key(key), (5,)))
        assert (family.log_prob(p, mode) >= family.log_prob(p, sample)).all()


@pytest.mark.parametrize(("family", "p"), FAMILIES)
def test_the_fisher_matrix_is_the_hessian_of_the_kl_from_itself(family: Distribution, p: Any) -> None:
    tangent = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape)), p)
    slope = jax.grad(lambda q: family.kl(p, q).sum())
    _, expected = jax.jvp(slope, (p,), (tangent,))
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-12), family.fisher(p, tangent), expected
    )
