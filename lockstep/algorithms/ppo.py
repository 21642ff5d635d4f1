"""Proximal policy optimisation with the clipped objective (Schulman et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Batch, Estimate, Setup
from lockstep.core import Algorithm, Array, Key, Lanes, Learner, Metrics, Output, Tree
from lockstep.ranges import Count, NonNegative, Positive, Share


@dataclass(frozen=True)
class PPO:
    """Epochs of clipped policy-gradient steps on minibatches of the update's own data."""

    discount: Share = 0.99  # gamma
    trace: Share = 0.95  # lambda of generalised advantage estimation
    clip: Positive = 0.2  # the probability ratio stays useful within 1 +- this
    epochs: Count = 10  # passes over an update's data
    minibatch: Count = 64  # rows of one gradient step, drawn evenly from all lanes
    learning_rate: Positive = 3e-4
    schedule: Literal["linear", "constant"] = (
        "linear"  # of the learning rate over the budget: linear (to zero) or constant
    )
    adam_epsilon: Positive = 1e-5
    value_coefficient: NonNegative = 0.5
    value_clip: NonNegative = 0.0  # how far a value may move from the old one in an update; 0: as far as it likes
    entropy: NonNegative = 0.0  # bonus for entropy
    max_gradient: Positive = 0.5  # the gradient is scaled down to this norm
    target_kl: NonNegative = 0.0  # no further epoch once the mean KL exceeds this; 0: all epochs
    normalize_advantage: bool = True  # over the whole batch
    recompute_advantages: bool = True  # before every epoch, with the newest value function


def ppo_problems(config: PPO, lanes: int, rows: int) -> list[str]:
    """What is wrong with these numbers for so many lanes of `rows` steps."""
    return ac.minibatch_problems("algo.minibatch", config.minibatch, lanes, rows)


class Rows(NamedTuple):
    """One lane's rows as the loss needs them."""

    observation: Tree
    action: Array
    log_prob: Array  # of the policy that acted
    value: Array  # of the value function before the update
    advantage: Array
    value_target: Array


class Before(NamedTuple):
    """One lane's batch and what the networks said of it before the update."""

    batch: Batch
    output: Output  # [T E, ...]
    log_prob: Array
    estimate: Estimate


def ppo(config: PPO, setup: Setup) -> Algorithm:
    policy, distribution = setup.policy, setup.policy.distribution
    rows = config.minibatch // setup.lanes
    minibatches = setup.rows // rows
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_gradient), optax.scale_by_adam(eps=config.adam_epsilon)
    )

    def init(key: Key) -> Learner:
        return ac.new_learner(setup, key, optimizer.init)

    def evaluate(params: Tree, observation: Tree, action: Array) -> tuple[Output, Array]:
        output = policy.evaluate(params, observation, ())
        return output, distribution.log_prob(output.distribution, action)

    def before(params: Tree, batch: Batch) -> Before:
        """By minibatches, so that old and new log-probability come from one program and start out equal."""
        chunks = ac.in_minibatches(ac.flat_rows((batch.observation, batch.action)), rows)
        outputs = jax.lax.map(lambda chunk: evaluate(params, *chunk), chunks)
        output, log_prob = jax.tree.map(lambda leaf: leaf.reshape(setup.rows, *leaf.shape[2:]), outputs)
        return Before(batch, output, log_prob, ac.estimate(policy, params, batch, config.discount, config.trace))

    def loss(params: Tree, mine: Rows) -> tuple[Array, Metrics]:
        output, log_prob = evaluate(params, mine.observation, mine.action)
        log_ratio = log_prob - mine.log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        policy_loss = -jnp.minimum(ratio * mine.advantage, clipped * mine.advantage).mean()
        error = jnp.square(output.value - mine.value_target)
        if config.value_clip:
            near = mine.value + jnp.clip(output.value - mine.value, -config.value_clip, config.value_clip)
            error = jnp.maximum(error, jnp.square(near - mine.value_target))
        value_loss = 0.5 * error.mean()
        entropy = distribution.entropy(output.distribution).mean()
        total = policy_loss + config.value_coefficient * value_loss - config.entropy * entropy
        return total, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "clip_fraction": (jnp.abs(ratio - 1) > config.clip).mean(dtype=jnp.float32),
            "ratio_error": jnp.abs(log_ratio).max(),
            "kl_estimate": (ratio - 1 - log_ratio).mean(),
        }

    def draw(mine: Before, epoch_key: Key, mean: Array, std: Array) -> Rows:
        now = mine.estimate
        if config.normalize_advantage:
            now = now._replace(advantage=(now.advantage - mean) / (std + 1e-8))
        advantage, target, _ = ac.flat_rows(now)
        observation, action = ac.flat_rows((mine.batch.observation, mine.batch.action))
        everything = Rows(observation, action, mine.log_prob, mine.output.value, advantage, target)
        return ac.in_minibatches(ac.shuffled(everything, epoch_key, mine.batch.lane), rows)

    def update(learner: Learner, lanes: Lanes, key: Key) -> tuple[Learner, Metrics]:
        learner, batches = ac.prepare(setup, learner, lanes)
        start = batches.map(lambda batch: before(learner.params, batch))
        learning_rate = ac.rate(config.learning_rate, config.schedule, learner.steps, setup.budget)
        descent = ac.Descent(loss, optimizer, learning_rate)

        def epoch(carry: tuple[Tree, Tree], number: Array) -> tuple[tuple[Tree, Tree], Metrics]:
            params, _ = carry
            now = start
            if config.recompute_advantages:
                now = start.map(
                    lambda mine: mine._replace(
                        estimate=ac.estimate(policy, params, mine.batch, config.discount, config.trace)
                    )
                )
            mean, std = ac.spread(now, lambda mine: mine.estimate.advantage)
            epoch_key = jax.random.fold_in(key, number)
            drawn = now.map(lambda mine: draw(mine, epoch_key, mean, std))
            carry, metrics = ac.descend(descent, drawn, carry, minibatches)
            first_ratio = metrics.pop("ratio_error")[0]
            return carry, {**{k: v.mean() for k, v in metrics.items()}, "first_ratio_error": first_ratio}

        metrics: Metrics
        (params, state), metrics, epochs = _epochs(epoch, (learner.params, learner.optimizer), config)

        def after(mine: Before) -> tuple:
            output, _ = evaluate(params, *ac.flat_rows((mine.batch.observation, mine.batch.action)))
            kl = distribution.kl(mine.output.distribution, output.distribution).mean()
            entropy = distribution.entropy(output.distribution).mean()
            shares = ac.explained_variance(mine.estimate.value_target, mine.estimate.value)
            return kl, entropy, shares

        kl, entropy, shares = start.mean(after)
        metrics |= {
            "kl": kl,
            "entropy": entropy,
            "explained_variance": ac.explained(shares),
            "learning_rate": learning_rate,
            "epochs": epochs,
        }
        return ac.advance(setup, learner, lanes, params, state), metrics

    return Algorithm(init, update)


def _epochs(epoch: Callable[[Any, Array], tuple[Any, Metrics]], carry: Any, config: PPO) -> tuple:
    """Up to `config.epochs` epochs. The metrics are the last one's, but for the first ratio: that is the first's."""

    def going_on(state: tuple) -> Array:
        _, metrics, done = state
        calm = metrics["kl_estimate"] <= config.target_kl if config.target_kl else True
        return (done < config.epochs) & calm

    def more(state: tuple) -> tuple:
        carry, last, done = state
        carry, metrics = epoch(carry, done)
        metrics["first_ratio_error"] = jnp.where(done == 0, metrics["first_ratio_error"], last["first_ratio_error"])
        return carry, metrics, done + 1

    _, shapes = jax.eval_shape(epoch, carry, jnp.zeros((), jnp.int32))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.while_loop(going_on, more, (carry, nothing, jnp.zeros((), jnp.int32)))
