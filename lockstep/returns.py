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
    carry_on = jnp.where(terminated | truncated, 0.0, discount * trace)

    def backwards(following: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        step_delta, step_carry = now
        advantage = step_delta + step_carry * following
        return advantage, advantage

    _, advantages = jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, carry_on), reverse=True)
    return advantages
