"""What the variants of PPO share: several epochs of gradient steps on the minibatches of an update's own data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Batch, Estimate, Setup
from lockstep.core import Array, Key, Lanes, Metrics, Output, Tree
from lockstep.tracing import traced_once, zeros


class Passes(Protocol):
    """The settings that every variant has."""

    @property
    def discount(self) -> float: ...
    @property
    def trace(self) -> float: ...
    @property
    def epochs(self) -> int: ...
    @property
    def normalize_advantage(self) -> bool: ...
    @property
    def recompute_advantages(self) -> bool: ...


class Rows(NamedTuple):
    """One lane's rows as a loss needs them."""

    observation: Tree
    action: Array
    log_prob: Array  # of the policy that acted
    output: Output  # of the networks before the update
    advantage: Array
    value_target: Array
    real: Tree = ()  # rows that count; () where all do


class Before(NamedTuple):
    """One lane's batch and what the networks said of it before the update."""

    batch: Batch
    output: Output  # [T E, ...]
    log_prob: Array
    estimate: Estimate


Carry = tuple[Tree, Tree]  # parameters and the optimizer's state
Sweep = Callable[[Lanes, Carry], tuple[Carry, Metrics]]  # gradient steps on all minibatches drawn; metrics of each


class Proximal(NamedTuple):
    """A variant: its settings, how it estimates, and how many rows of a lane are in one gradient step."""

    config: Passes
    setup: Setup
    estimate: Callable[[Tree, Batch], Estimate]  # under these parameters
    rows: int
    shuffle: bool  # not needed where all rows are in one step

    @property
    def windowed(self) -> bool:
        """Whether minibatches are windows of the rows that count, and only the program knows how many there are."""
        return self.shuffle and self.setup.padded

    def evaluate(self, params: Tree, observation: Tree, action: Array) -> tuple[Output, Array]:
        output = self.setup.policy.evaluate(params, observation, ())
        return output, self.setup.policy.distribution.log_prob(output.distribution, action)

    def before(self, params: Tree, batch: Batch) -> Before:
        """By minibatches, so that old and new log-probability come from one program and start out equal."""
        chunks = ac.in_minibatches(ac.flat_rows((batch.observation, batch.action)), self.rows)
        outputs = jax.lax.map(lambda chunk: self.evaluate(params, *chunk), chunks)
        output, log_prob = jax.tree.map(lambda leaf: leaf.reshape(self.setup.rows, *leaf.shape[2:]), outputs)
        return Before(batch, output, log_prob, self.estimate(params, batch))

    def draw(self, mine: Before, epoch_key: Key, scaled: Callable[[Array], Array]) -> Rows:
        """A lane's rows in minibatches; for windows, in one piece with those that count in front."""
        advantage, target, _ = ac.flat_rows(mine.estimate)
        observation, action, real = ac.flat_rows((mine.batch.observation, mine.batch.action, mine.batch.real))
        rows = Rows(observation, action, mine.log_prob, mine.output, scaled(advantage), target, real)
        if self.shuffle:
            rows = ac.shuffled(rows, epoch_key, mine.batch.lane)
        return ac.real_first(rows, rows.real) if self.windowed else ac.in_minibatches(rows, self.rows)

    def epoch(self, start: Lanes, carry: Carry, key: Key, sweep: Sweep) -> tuple[Carry, Metrics]:
        """One pass over the data: advantages with the newest value function, then a sweep over the minibatches."""
        params, now = carry[0], start
        if self.config.recompute_advantages:
            now = start.map(lambda mine: mine._replace(estimate=self.estimate(params, mine.batch)))
        real = (lambda mine: mine.batch.real) if self.setup.padded else None
        scaled = ac.standardizer(self.config.normalize_advantage, now, lambda mine: mine.estimate.advantage, real)
        carry, metrics = sweep(now.map(lambda mine: self.draw(mine, key, scaled)), carry)
        first_ratio = metrics.pop("ratio_error")[0]
        return carry, {**{k: v.mean() for k, v in metrics.items()}, "first_ratio_error": first_ratio}

    def changes(self, start: Lanes, params: Tree) -> Metrics:
        """What the update made of policy and value function: exact, over the whole batch."""
        distribution = self.setup.policy.distribution

        def lane_changes(mine: Before) -> tuple:
            real, target = ac.flat_rows((mine.batch.real, mine.estimate.value_target))
            output, _ = self.evaluate(params, *ac.flat_rows((mine.batch.observation, mine.batch.action)))
            return (
                ac.average(distribution.kl(mine.output.distribution, output.distribution), real),
                ac.average(distribution.entropy(output.distribution), real),
                ac.explained_variance(target, ac.flat_rows(mine.estimate.value), real),
                ac.explained_variance(target, output.value, real),
            )

        kl, entropy, before, after = start.mean(lane_changes, self.weight)
        return {
            "kl": kl,
            "entropy": entropy,
            "explained_variance": ac.explained(before),
            "explained_variance_after": ac.explained(after),
        }

    @property
    def weight(self) -> Callable[[Before], Array] | None:
        """How much a lane counts: by its steps, where they differ between lanes."""
        return (lambda mine: mine.batch.real.sum()) if self.setup.padded else None


def repeated(
    epoch: Callable[[Any, Array], tuple[Any, Metrics]], carry: Any, epochs: int, calm: Callable[[Metrics], Array | bool]
) -> tuple:
    """Up to `epochs` epochs, while the last was calm. The metrics are the last one's, but for the first ratio."""

    none = jnp.zeros((), jnp.int32)
    traced, (_, shapes) = traced_once(epoch, carry, none)

    def going_on(state: tuple) -> Array:
        _, metrics, done = state
        return (done < epochs) & calm(metrics)

    def more(state: tuple) -> tuple:
        carry, last, done = state
        carry, metrics = traced(carry, done)
        metrics["first_ratio_error"] = jnp.where(done == 0, metrics["first_ratio_error"], last["first_ratio_error"])
        return carry, metrics, done + 1

    return jax.lax.while_loop(going_on, more, (carry, zeros(shapes), none))
