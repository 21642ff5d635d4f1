"""Running mean and variance that merge exactly alike on every layout: float64, in lane order."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lockstep.core import Array, Moments


def empty(shape: tuple[int, ...]) -> Moments:
    """The moments of nothing; `variance` of it is one, so that nothing is scaled before it is seen."""
    return Moments(jnp.zeros((), jnp.float64), jnp.zeros(shape, jnp.float64), jnp.zeros(shape, jnp.float64))


def measure(batch: Array, axes: tuple[int, ...], real: Array | None = None) -> Moments:
    """The moments of `batch` over `axes`, in two passes; of its `real` rows alone where they are marked."""
    batch = batch.astype(jnp.float64)
    if real is not None:
        return _measure_real(batch, axes, real)
    count = 1.0
    for axis in axes:
        count *= batch.shape[axis]
    mean = batch.mean(axes)
    squares = jnp.square(batch - jnp.expand_dims(mean, axes)).sum(axes)
    return Moments(jnp.asarray(count, jnp.float64), mean, squares)


def _measure_real(batch: Array, axes: tuple[int, ...], real: Array) -> Moments:
    counts = jnp.expand_dims(real, tuple(range(real.ndim, batch.ndim)))
    count = real.sum(axes, dtype=jnp.float64)
    mean = jnp.where(counts, batch, 0.0).sum(axes) / jnp.maximum(count, 1.0)
    squares = jnp.where(counts, jnp.square(batch - jnp.expand_dims(mean, axes)), 0.0).sum(axes)
    return Moments(count, mean, squares)


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of both samples together (Chan, Golub, LeVeque 1979)."""
    count = a.count + b.count
    shift = b.mean - a.mean
    share = jnp.where(count > 0, b.count / jnp.maximum(count, 1.0), 0.0)
    return Moments(count, a.mean + shift * share, a.squares + b.squares + jnp.square(shift) * (a.count * share))


UNROLLED = 64  # lanes that a program names one by one; with many more it would take minutes to compile


def merge_lanes(moments: Moments, lanes: Moments) -> Moments:
    """`moments` with the stacked moments of every lane, one after the other. A loop over many has the same bits."""
    if lanes.count.shape[0] > UNROLLED:
        merged: Moments = jax.lax.scan(lambda moments, lane: (merge(moments, lane), None), moments, lanes)[0]
        return merged
    for lane in range(lanes.count.shape[0]):
        moments = merge(moments, Moments(lanes.count[lane], lanes.mean[lane], lanes.squares[lane]))
    return moments


def variance(moments: Moments) -> Array:
    return jnp.where(moments.count > 1, moments.squares / jnp.maximum(moments.count, 1.0), 1.0)


def standardize(moments: Moments, batch: Array, clip: float, floor: float = 0.0) -> Array:
    """(batch - mean) / (std + floor), within +-clip, in float32."""
    mean = moments.mean.astype(jnp.float32)
    scale = (1.0 / (jnp.sqrt(variance(moments) + 1e-8) + floor)).astype(jnp.float32)
    shape = (1,) * (batch.ndim - mean.ndim) + mean.shape
    return jnp.clip((batch.astype(jnp.float32) - mean.reshape(shape)) * scale.reshape(shape), -clip, clip)
