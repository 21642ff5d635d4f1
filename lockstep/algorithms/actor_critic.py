"""What every actor-critic algorithm does around its own step: normalise, estimate, keep count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep import moments, returns
from lockstep.core import Array, Key, Lanes, Learner, Metrics, Moments, Policy, Spec, Trajectory, Tree
from lockstep.ranges import NonNegative, Positive
from lockstep.tracing import traced_once, zeros


@dataclass(frozen=True)
class Normalize:
    """Running scales, kept in the learner and frozen while an update's data is collected."""

    observation: bool = True  # observations to zero mean and unit variance
    reward: bool = True  # rewards divided by the standard deviation of the discounted return
    observation_floor: NonNegative = 0.0  # added to standard deviations, so that what hardly varies is not blown up
    observation_clip: Positive = 10.0  # normalised observations stay within +-this
    reward_clip: Positive = 10.0  # scaled rewards stay within +-this


class Setup(NamedTuple):
    """What an algorithm is told about the problem."""

    policy: Policy
    spec: Spec
    normalize: Normalize
    budget: int | Array  # environment steps of the whole experiment, for schedules
    lanes: int
    rows: int  # environment steps of one lane in one update; the most that they can be where lanes are padded
    padded: bool = False  # whether lanes hold whole episodes, padded: `real` says which rows count

    @property
    def batch(self) -> int:
        return self.lanes * self.rows


class Batch(NamedTuple):
    """A lane's trajectory as the networks see it."""

    lane: Array
    observation: Tree  # [T, E, ...] normalised
    next_observation: Tree
    policy_state: Tree
    action: Array
    reward: Array  # [T, E] scaled
    terminated: Array
    truncated: Array
    real: Tree = ()  # [T, E] rows that count; () where all do


class Estimate(NamedTuple):
    advantage: Array  # [T, E]
    value_target: Array
    value: Array


def new_learner(setup: Setup, key: Key, optimizer: Callable[[Tree], Tree]) -> Learner:
    params = setup.policy.init(key)
    return Learner(
        params=params,
        optimizer=optimizer(params),
        observation=moments.empty(setup.spec.observation.shape),
        reward=moments.empty(()),
        steps=jnp.zeros((), jnp.int64),
        updates=jnp.zeros((), jnp.int64),
    )


def see(normalize: Normalize, seen: Moments, observation: Tree) -> Tree:
    """Observations as the networks see them."""
    if not normalize.observation:
        return observation.astype(jnp.float32)
    return moments.standardize(seen, observation, normalize.observation_clip, normalize.observation_floor)


def prepare(setup: Setup, learner: Learner, lanes: Lanes) -> tuple[Learner, Lanes]:
    """The lanes' trajectories as `Batch`es, and the learner that has seen their rewards.

    Observations are seen as the acting policy saw them. Rewards take no part in acting, so their scale may
    include the newest: the very first update is scaled too.
    """
    if setup.normalize.reward:
        seen = lanes.map(lambda lane: moments.measure(lane.discounted_return, (0, 1), marked(lane.real))).all()
        learner = learner._replace(reward=moments.merge_lanes(learner.reward, seen))
    scale = (1.0 / jnp.sqrt(moments.variance(learner.reward) + 1e-8)).astype(jnp.float32)
    clip = setup.normalize.reward_clip

    def lane_batch(lane: Trajectory) -> Batch:
        reward = lane.reward
        if setup.normalize.reward:
            reward = jnp.clip(reward * scale, -clip, clip)
        return Batch(
            lane=lane.lane,
            observation=see(setup.normalize, learner.observation, lane.observation),
            next_observation=see(setup.normalize, learner.observation, lane.next_observation),
            policy_state=lane.policy_state,
            action=lane.action,
            reward=reward,
            terminated=lane.terminated,
            truncated=lane.truncated,
            real=lane.real,
        )

    return learner, lanes.map(lane_batch)


def estimate(
    policy: Policy, params: Tree, batch: Batch, discount: float, trace: float, value_trace: float | None = None
) -> Estimate:
    """Advantages and value targets of one lane under `params`; the targets with a trace of their own, if given."""
    value, next_value = _values(policy, params, batch)
    ends = batch.terminated, batch.truncated
    advantage = returns.gae(batch.reward, value, next_value, *ends, discount, trace)
    if value_trace is None or value_trace == trace:
        return Estimate(advantage, advantage + value, value)
    target = value + returns.gae(batch.reward, value, next_value, *ends, discount, value_trace)
    return Estimate(advantage, target, value)


def _values(policy: Policy, params: Tree, batch: Batch) -> tuple[Array, Array]:
    """The values of all observations and of all next ones.

    A next observation is the following row's observation, except where an episode was cut: only then are
    the next observations evaluated themselves.
    """
    rows = jax.tree.map(lambda now, then: jnp.concatenate([now, then[-1:]]), batch.observation, batch.next_observation)
    values = policy.value(params, rows, batch.policy_state)
    next_value = jax.lax.cond(
        batch.truncated.any(),
        lambda: jnp.where(
            batch.truncated, policy.value(params, batch.next_observation, batch.policy_state), values[1:]
        ),
        lambda: values[1:],
    )
    return values[:-1], next_value


def marked(real: Tree) -> Array | None:
    """Which rows count, or None where all do."""
    return None if isinstance(real, tuple) else real


def average(values: Array, real: Tree = ()) -> Array:
    """The mean of one lane's values over the rows that count; zero where none do."""
    counts = marked(real)
    if counts is None:
        return values.mean()
    return jnp.where(counts, values, 0.0).sum() / jnp.maximum(counts.sum(), 1)


def steps_made(setup: Setup, lanes: Lanes) -> Array | int:
    """The environment steps of this update, over all lanes."""
    return lanes.map(lambda lane: lane.real.sum(dtype=jnp.int64)).all().sum() if setup.padded else setup.batch


def spread(
    lanes: Lanes, values: Callable[[Any], Array], real: Callable[[Any], Array] | None = None
) -> tuple[Array, Array]:
    """Mean and standard deviation of `values` over all lanes' rows that count, in two passes of the fixed tree."""
    counts = real or (lambda lane: ())
    weight = None if real is None else lambda lane: real(lane).sum()
    mean = lanes.mean(lambda lane: average(values(lane), counts(lane)), weight)
    deviation = lanes.mean(lambda lane: average(jnp.square(values(lane) - mean), counts(lane)), weight)
    return mean, jnp.sqrt(deviation)


def standardizer(
    wanted: bool, lanes: Lanes, values: Callable[[Any], Array], real: Callable[[Any], Array] | None = None
) -> Callable[[Array], Array]:
    """What takes such values to a mean of zero and a deviation of one; leaves them alone where that is not `wanted`."""
    if not wanted:
        return lambda value: value
    mean, std = spread(lanes, values, real)
    return lambda value: (value - mean) / (std + 1e-8)


def explained_variance(target: Array, value: Array, real: Tree = ()) -> tuple[Array, Array, Array, Array]:
    """One lane's share of `explained`: first and second moments of the target and of what is left of it."""
    target, rest = target.astype(jnp.float64), (target - value).astype(jnp.float64)
    moments = (target, jnp.square(target), rest, jnp.square(rest))
    first, second, third, fourth = (average(moment, real) for moment in moments)
    return first, second, third, fourth


def explained(shares: tuple[Array, Array, Array, Array]) -> Array:
    """1 - Var(target - value) / Var(target): 1 is a perfect value function, 0 as good as a constant."""
    target, target_square, rest, rest_square = shares
    total = target_square - jnp.square(target)
    left = rest_square - jnp.square(rest)
    return jnp.where(total > 0, 1.0 - left / jnp.where(total > 0, total, 1.0), jnp.nan)


def compared(setup: Setup, start: Lanes, old: Tree, new: Tree) -> Metrics:
    """What an update changed, over (Batch, Estimate) lanes: KL, entropy, explained variance before and after."""
    distribution = setup.policy.distribution

    def lane_changes(lane: tuple[Batch, Estimate]) -> tuple:
        batch, estimate = lane
        was, _ = setup.policy.act(old, batch.observation, batch.policy_state)
        output = setup.policy.evaluate(new, batch.observation, batch.policy_state)
        return (
            average(distribution.kl(was, output.distribution), batch.real),
            average(distribution.entropy(output.distribution), batch.real),
            explained_variance(estimate.value_target, estimate.value, batch.real),
            explained_variance(estimate.value_target, output.value, batch.real),
        )

    kl, entropy, before, after = start.mean(lane_changes, weight(setup))
    return {
        "kl": kl,
        "entropy": entropy,
        "explained_variance": explained(before),
        "explained_variance_after": explained(after),
    }


def weight(setup: Setup) -> Callable[[tuple[Batch, Estimate]], Array] | None:
    """How much a lane counts in a mean: by its steps, where they differ between lanes."""
    return (lambda lane: lane[0].real.sum()) if setup.padded else None


def advance(setup: Setup, learner: Learner, lanes: Lanes, params: Tree, optimizer: Tree) -> Learner:
    """The learner after an update: new weights, and the normaliser has seen this update's observations."""
    observation = learner.observation
    if setup.normalize.observation:
        seen = lanes.map(lambda lane: moments.measure(lane.observation, (0, 1), marked(lane.real))).all()
        observation = moments.merge_lanes(observation, seen)
    return learner._replace(
        params=params,
        optimizer=optimizer,
        observation=observation,
        steps=learner.steps + steps_made(setup, lanes),
        updates=learner.updates + 1,
    )


def rate(learning_rate: float, schedule: str, steps: Array, budget: int | Array) -> Array:
    """The learning rate after `steps` of `budget`: `constant`, or `linear` down to zero."""
    share = jnp.clip(1.0 - steps / budget, 0.0, 1.0) if schedule == "linear" else jnp.ones(())
    return (learning_rate * share).astype(jnp.float32)


def flat_rows(tree: Tree) -> Tree:
    """Time and environment as one axis: [T, E, ...] -> [T E, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def row(tree: Tree, number: Array) -> Tree:
    """One row of every leaf, by a number that only the compiled program knows."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, 0, False), tree)


class Step(NamedTuple):
    """One step of an optimizer."""

    params: Tree
    state: Tree
    size: Array  # how far the parameters moved


def take_step(
    optimizer: optax.GradientTransformation, learning_rate: Array, gradient: Tree, params: Tree, state: Tree
) -> Step:
    direction, state = optimizer.update(gradient, state)
    moved = jax.tree.map(lambda p, d: p - learning_rate * d, params, direction)
    return Step(moved, state, learning_rate * optax.tree.norm(direction))


def fit_value(
    setup: Setup,
    optimizer: optax.GradientTransformation,
    start: Lanes,
    carry: tuple[Tree, Tree],
    learning_rate: Array,
    steps: int,
) -> tuple[Tree, Tree, Array]:
    """Value weights and optimizer after `steps` steps towards the targets of (Batch, Estimate) lanes; the last loss."""

    def loss(value: Tree, batch: Batch, target: Array) -> Array:
        found = setup.policy.value({"value": value}, batch.observation, batch.policy_state)
        return 0.5 * average(jnp.square(found - target), batch.real)

    def step(_: Array, carry: tuple[Tree, Tree, Array]) -> tuple[Tree, Tree, Array]:
        value, state, _ = carry
        found, gradient = start.mean(
            lambda lane: jax.value_and_grad(loss)(value, lane[0], lane[1].value_target), weight(setup)
        )
        after = take_step(optimizer, learning_rate, gradient, value, state)
        return after.params, after.state, found

    return jax.lax.fori_loop(0, steps, step, (*carry, jnp.zeros((), jnp.float32)))


CHUNK = 256  # rows of a padded lane that are looked at together


def real_first(tree: Tree, real: Array) -> Tree:
    """One lane's rows with those that count in front, otherwise in their order."""
    order = jnp.argsort(~real, stable=True)
    return jax.tree.map(lambda leaf: leaf[order], tree)


def chunk_mean(fn: Callable[[Any, Array], Any], rows: Tree, count: Array) -> Any:
    """The mean of `fn(part, real)` over the first `count` rows, so many at a time: padding costs next to nothing.

    `fn` gives means over those rows of a part that are real. Zero where none is.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    chunk = min(CHUNK, total)

    def at(number: Array) -> Any:
        places = number * chunk + jnp.arange(chunk)
        part = jax.tree.map(lambda leaf: leaf[jnp.minimum(places, total - 1)], rows)
        real = places < count
        return jax.tree.map(lambda leaf: leaf * real.sum().astype(leaf.dtype), fn(part, real))

    def add(number: Array, sums: Any) -> Any:
        return jax.tree.map(jnp.add, sums, traced(number.astype(jnp.int32)))

    traced, shapes = traced_once(at, jnp.zeros((), jnp.int32))
    nothing, chunks = zeros(shapes), (-(-count // chunk)).astype(jnp.int32)
    sums = jax.lax.fori_loop(jnp.zeros((), jnp.int32), chunks, add, nothing)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(count, 1).astype(leaf.dtype), sums)


def in_minibatches(tree: Tree, rows: int) -> Tree:
    """One lane's rows as minibatches of so many: [N, ...] -> [N / rows, rows, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, rows, *leaf.shape[1:]), tree)


def shuffled(tree: Tree, key: Key, lane: Array) -> Tree:
    """One lane's rows in an order of its own."""
    order = jax.random.permutation(jax.random.fold_in(key, lane), jax.tree.leaves(tree)[0].shape[0])
    return jax.tree.map(lambda leaf: leaf[order], tree)


class Descent(NamedTuple):
    """How gradient steps on minibatches are made."""

    loss: Callable[[Tree, Any], tuple[Array, Metrics]]  # params, one lane's rows of a minibatch -> loss and metrics
    optimizer: optax.GradientTransformation
    learning_rate: Array


def descend(descent: Descent, drawn: Lanes, carry: tuple[Tree, Tree], count: int) -> tuple[tuple[Tree, Tree], Metrics]:
    """A gradient step for each of the `count` minibatches that every lane has drawn; metrics of each step."""

    def step(carry: tuple[Tree, Tree], number: Array) -> tuple[tuple[Tree, Tree], Metrics]:
        params, state = carry

        def lane_gradient(mine: Any) -> tuple[Tree, Metrics]:
            return jax.grad(descent.loss, has_aux=True)(params, row(mine, number))

        gradient, metrics = drawn.mean(lane_gradient)
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        after = take_step(descent.optimizer, descent.learning_rate, gradient, params, state)
        return (after.params, after.state), metrics

    return jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))


def minibatch_problems(setting: str, minibatch: int, lanes: int, rows: int) -> list[str]:
    """What is wrong with a minibatch of this size for so many lanes of `rows` steps."""
    if minibatch % lanes == 0 and rows % (minibatch // lanes) == 0:
        return []
    small = [m for m in range(1, math.isqrt(rows) + 1) if rows % m == 0]
    fitting = sorted({m * lanes for m in small} | {rows // m * lanes for m in small})
    below = [size for size in fitting if size < minibatch]
    close = [*below[-1:], *(size for size in fitting if size > minibatch)][:2]
    return [
        f"{setting} ({minibatch}) must be drawn evenly from {lanes} lanes of {rows} steps."
        f" Try {' or '.join(map(str, close))}."
    ]
