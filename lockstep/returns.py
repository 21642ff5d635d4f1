"""Discounted sums over time, restarted where episodes end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def gae(
    reward: Float[Array, "T E"],
    value: Float[Array, "T E"],
    next_value: Float[Array, "T E"],
    terminated: Bool[Array, "T E"],
    truncated: Bool[Array, "T E"],
    discount: float,
    trace: float,
) -> Float[Array, "T E"]:
    """Generalised advantage estimation (Schulman et al. 2015).

    delta[t] = r[t] + discount V(next[t]) - V(s[t]);  A[t] = delta[t] + discount trace A[t+1]

    A termination has no next value; a truncation has one, that of the true final observation. Neither
    lets the next episode's advantage through.
    """
    delta = reward + discount * jnp.where(terminated, 0.0, next_value) - value
    return _sums(delta, jnp.where(terminated | truncated, 0.0, discount * trace))


def discounted(reward: Float[Array, "T E"], ended: Bool[Array, "T E"], discount: float) -> Float[Array, "T E"]:
    """The rest of each episode's rewards: G[t] = r[t] + discount G[t+1], and r[t] alone where it ended."""
    return _sums(reward, jnp.where(ended, 0.0, discount))


def _sums(now: Float[Array, "T E"], carry_on: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """x[t] = now[t] + carry_on[t] x[t+1], with nothing after the last."""

    def backwards(following: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        step_now, step_carry = step
        total = step_now + step_carry * following
        return total, total

    _, totals = jax.lax.scan(backwards, jnp.zeros_like(now[0]), (now, carry_on), reverse=True)
    return totals
