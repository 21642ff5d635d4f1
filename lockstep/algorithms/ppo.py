"""Proximal policy optimisation with the clipped objective (Schulman et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Setup
from lockstep.algorithms.proximal import Carry, Proximal, Rows, repeated
from lockstep.core import Algorithm, Array, Key, Lanes, Learner, Metrics, Tree
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


def ppo_idle(config: PPO) -> str:
    return "" if config.value_coefficient else "value"


def ppo_unread(config: PPO) -> dict[str, str]:
    """Without a loss of its own the value function stays as it began; after the only epoch there is nothing to stop."""
    alone = dict.fromkeys(("target_kl", "recompute_advantages"), "algo.epochs=1") if config.epochs == 1 else {}
    unmoved = ("value_clip", "recompute_advantages")
    return alone if config.value_coefficient else alone | dict.fromkeys(unmoved, "algo.value_coefficient=0")


def ppo(config: PPO, setup: Setup) -> Algorithm:
    policy, distribution = setup.policy, setup.policy.distribution
    rows = config.minibatch // setup.lanes
    proximal = Proximal(
        config,
        setup,
        lambda params, batch: ac.estimate(policy, params, batch, config.discount, config.trace),
        rows,
        shuffle=True,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_gradient), optax.scale_by_adam(eps=config.adam_epsilon)
    )

    def init(key: Key) -> Learner:
        return ac.new_learner(setup, key, optimizer.init)

    def loss(params: Tree, mine: Rows) -> tuple[Array, Metrics]:
        output, log_prob = proximal.evaluate(params, mine.observation, mine.action)
        log_ratio = log_prob - mine.log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        policy_loss = -jnp.minimum(ratio * mine.advantage, clipped * mine.advantage).mean()
        error = jnp.square(output.value - mine.value_target)
        if config.value_clip:
            near = mine.output.value + jnp.clip(output.value - mine.output.value, -config.value_clip, config.value_clip)
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

    def calm(metrics: Metrics) -> Array | bool:
        return metrics["kl_estimate"] <= config.target_kl if config.target_kl else True

    def update(learner: Learner, lanes: Lanes, key: Key) -> tuple[Learner, Metrics]:
        learner, batches = ac.prepare(setup, learner, lanes)
        start = batches.map(lambda batch: proximal.before(learner.params, batch))
        learning_rate = ac.rate(config.learning_rate, config.schedule, learner.steps, setup.budget)
        descent = ac.Descent(loss, optimizer, learning_rate)

        def sweep(drawn: Lanes, carry: Carry) -> tuple[Carry, Metrics]:
            return ac.descend(descent, drawn, carry, setup.rows // rows)

        def epoch(carry: Carry, number: Array) -> tuple[Carry, Metrics]:
            return proximal.epoch(start, carry, jax.random.fold_in(key, number), sweep)

        metrics: Metrics
        (params, state), metrics, epochs = repeated(epoch, (learner.params, learner.optimizer), config.epochs, calm)

        metrics |= {**proximal.changes(start, params), "learning_rate": learning_rate, "epochs": epochs}
        return ac.advance(setup, learner, lanes, params, state), metrics

    return Algorithm(init, update)
