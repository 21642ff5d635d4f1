"""Action distributions, as functions of a tree of parameters. The last axis is the action's."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.core import Array, Distribution, Key


class Gaussian(NamedTuple):
    mean: Array  # [..., A]
    log_std: Array  # [..., A]


def gaussian(size: int) -> Distribution:
    """Independent normals. `size`: how many."""
    log_2pi = math.log(2 * math.pi)

    def noise(key: Key, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(key, (*shape, size), jnp.float32)

    def sample(p: Gaussian, noise: Array) -> Array:
        return p.mean + jnp.exp(p.log_std) * noise

    def mode(p: Gaussian) -> Array:
        return p.mean

    def log_prob(p: Gaussian, action: Array) -> Array:
        z = (action - p.mean) * jnp.exp(-p.log_std)
        return -(0.5 * jnp.square(z) + p.log_std + 0.5 * log_2pi).sum(-1)

    def entropy(p: Gaussian) -> Array:
        return (p.log_std + 0.5 * (1 + log_2pi)).sum(-1)

    def kl(p: Gaussian, q: Gaussian) -> Array:
        """sum of log(s_q/s_p) + (s_p^2 + (m_p - m_q)^2) / (2 s_q^2) - 1/2"""
        spread = jnp.exp(2 * (p.log_std - q.log_std))
        shift = jnp.square((p.mean - q.mean) * jnp.exp(-q.log_std))
        return (q.log_std - p.log_std + 0.5 * (spread + shift - 1)).sum(-1)

    def fisher(p: Gaussian, tangent: Gaussian) -> Gaussian:
        """1 / s^2 for the mean, 2 for the log-std, nothing between them"""
        return Gaussian(tangent.mean * jnp.exp(-2 * p.log_std), 2 * tangent.log_std)

    return Distribution(noise, sample, mode, log_prob, entropy, kl, fisher)


def categorical(n: int) -> Distribution:
    """One of `n`. The parameters are unnormalised log-probabilities [..., n]."""

    def noise(key: Key, shape: tuple[int, ...]) -> Array:
        return jax.random.gumbel(key, (*shape, n), jnp.float32)

    def sample(logits: Array, noise: Array) -> Array:
        return jnp.argmax(logits + noise, -1).astype(jnp.int32)

    def mode(logits: Array) -> Array:
        return jnp.argmax(logits, -1).astype(jnp.int32)

    def log_prob(logits: Array, action: Array) -> Array:
        logs = jax.nn.log_softmax(logits)
        return (logs * jax.nn.one_hot(action, n, dtype=logs.dtype)).sum(-1)

    def entropy(logits: Array) -> Array:
        logs = jax.nn.log_softmax(logits)
        return -(jnp.exp(logs) * logs).sum(-1)

    def kl(p: Array, q: Array) -> Array:
        log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
        return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)

    def fisher(logits: Array, tangent: Array) -> Array:
        """diag(p) - p p^T"""
        p = jax.nn.softmax(logits)
        return p * (tangent - (p * tangent).sum(-1, keepdims=True))

    return Distribution(noise, sample, mode, log_prob, entropy, kl, fisher)
