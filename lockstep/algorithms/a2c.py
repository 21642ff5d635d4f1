"""Advantage actor-critic, synchronous (Mnih et al. 2016; the A2C of OpenAI's baselines)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Batch, Setup
from lockstep.core import Algorithm, Array, Key, Lanes, Learner, Metrics, Tree
from lockstep.ranges import Count, NonNegative, Positive, Share


@dataclass(frozen=True)
class A2C:
    """One policy-gradient step on each small batch."""

    discount: Share = 0.99  # gamma
    trace: Share = 1.0  # lambda of generalised advantage estimation; 1: n-step returns, n = collect.steps
    learning_rate: Positive = 7e-4  # (baselines, Stable-Baselines3, Tianshou)
    schedule: Literal["linear", "constant"] = "linear"  # of the learning rate over the budget: to zero, or constant
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    decay: Share = 0.99  # RMSProp's memory of squared gradients
    epsilon: Positive = 1e-5  # the optimizer's; RMSProp adds it under the root
    value_coefficient: NonNegative = 0.5
    value_steps: Count = 1  # gradient steps of the value function in one update, the first together with the policy's
    entropy: NonNegative = 0.0  # bonus for entropy
    max_gradient: Positive = 0.5  # the gradient is scaled down to this norm
    normalize_advantage: bool = False  # over the whole batch


def a2c_idle(config: A2C) -> str:
    return "" if config.value_coefficient or config.value_steps > 1 else "value"


def a2c_unread(config: A2C) -> dict[str, str]:
    return {"decay": "algo.optimizer=adam"} if config.optimizer == "adam" else {}


def a2c(config: A2C, setup: Setup) -> Algorithm:
    policy, distribution = setup.policy, setup.policy.distribution
    rules = {
        "rmsprop": optax.scale_by_rms(config.decay, config.epsilon, initial_scale=1.0),
        "adam": optax.scale_by_adam(eps=config.epsilon),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_gradient), rules[config.optimizer])

    def init(key: Key) -> Learner:
        def state(params: Tree) -> Tree:
            """Of the joint step; the value function's further steps have one of their own."""
            joint = optimizer.init(params)
            return (joint, optimizer.init(params["value"])) if config.value_steps > 1 else joint

        return ac.new_learner(setup, key, state)

    def loss(params: Tree, batch: Batch, advantage: Array, target: Array) -> tuple[Array, Metrics]:
        output = policy.evaluate(params, batch.observation, batch.policy_state)
        policy_loss = -(distribution.log_prob(output.distribution, batch.action) * advantage).mean()
        value_loss = 0.5 * jnp.square(output.value - target).mean()
        entropy = distribution.entropy(output.distribution).mean()
        total = policy_loss + config.value_coefficient * value_loss - config.entropy * entropy
        return total, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

    def update(learner: Learner, lanes: Lanes, key: Key) -> tuple[Learner, Metrics]:
        learner, batches = ac.prepare(setup, learner, lanes)
        start = batches.map(
            lambda batch: (batch, ac.estimate(policy, learner.params, batch, config.discount, config.trace))
        )
        scaled = ac.standardizer(config.normalize_advantage, start, lambda lane: lane[1].advantage)

        def lane_gradient(lane: tuple[Batch, ac.Estimate]) -> tuple[Tree, Metrics]:
            batch, estimate = lane
            return jax.grad(loss, has_aux=True)(
                learner.params, batch, scaled(estimate.advantage), estimate.value_target
            )

        gradient, metrics = start.mean(lane_gradient)
        learning_rate = ac.rate(config.learning_rate, config.schedule, learner.steps, setup.budget)
        joint, further = learner.optimizer if config.value_steps > 1 else (learner.optimizer, ())
        step = ac.take_step(optimizer, learning_rate, gradient, learner.params, joint)
        params, state = step.params, step.state
        if config.value_steps > 1:
            carry = params["value"], further
            value, further, _ = ac.fit_value(setup, optimizer, start, carry, learning_rate, config.value_steps - 1)
            params, state = {**params, "value": value}, (state, further)
        metrics |= {
            "gradient_norm": optax.tree.norm(gradient),
            "step_size": step.size,
            "learning_rate": learning_rate,
            **ac.compared(setup, start, learner.params, params),
        }
        return ac.advance(setup, learner, lanes, params, state), metrics

    return Algorithm(init, update)
