"""REINFORCE (Williams 1992): whole episodes, one gradient step on each update's own episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep import moments, returns
from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Batch, Estimate, Setup
from lockstep.core import Algorithm, Array, Key, Lanes, Learner, Metrics, Moments, Tree
from lockstep.ranges import Count, NonNegative, Positive, Share


@dataclass(frozen=True)
class Reinforce:
    """The gradient of log-probabilities times discounted returns, less a baseline."""

    discount: Share = 0.99  # gamma
    baseline: Literal["none", "mean", "value"] = "value"  # what returns are compared with: nothing, the mean of all
    # returns of earlier updates (this one's own would bias the gradient), or the value function's guess
    learning_rate: Positive = 1e-3  # of the policy (Tianshou)
    schedule: Literal["linear", "constant"] = "linear"  # of the learning rates over the budget: to zero, or constant
    adam_epsilon: Positive = 1e-8
    entropy: NonNegative = 0.0  # bonus for entropy
    max_gradient: Positive = 0.5  # the policy's gradient is scaled down to this norm
    value_learning_rate: Positive = 1e-3  # of the value function (Spinning Up)
    value_steps: Count = 20  # gradient steps of the value function in one update


class State(NamedTuple):
    policy: Tree  # Adam's
    value: Tree
    returns: Moments  # the discounted returns so far


def reinforce_idle(config: Reinforce) -> str:
    return "" if config.baseline == "value" else "value"


def reinforce_unread(config: Reinforce) -> dict[str, str]:
    fitting = ("value_learning_rate", "value_steps")
    return {} if config.baseline == "value" else dict.fromkeys(fitting, f"algo.baseline={config.baseline}")


def outcome(config: Reinforce, setup: Setup, params: Tree, batch: Batch) -> Estimate:
    """The returns of one lane, as value targets, and how much better they are than the value function's guess.

    Where a time limit cut an episode, its future is worth what the value function says; nothing without one.
    """
    if config.baseline == "value":
        return ac.estimate(setup.policy, params, batch, config.discount, trace=1.0)
    target = returns.discounted(batch.reward, batch.terminated | batch.truncated, config.discount)
    return Estimate(target, target, jnp.zeros_like(target))


def reinforce(config: Reinforce, setup: Setup) -> Algorithm:
    policy, distribution = setup.policy, setup.policy.distribution
    adam = optax.scale_by_adam(eps=config.adam_epsilon)
    policy_optimizer = optax.chain(optax.clip_by_global_norm(config.max_gradient), adam)

    def init(key: Key) -> Learner:
        def state(params: Tree) -> State:
            return State(policy_optimizer.init(params["policy"]), adam.init(params["value"]), moments.empty(()))

        return ac.new_learner(setup, key, state)

    def loss(part: Tree, params: Tree, batch: Batch, advantage: Array) -> tuple[Array, Metrics]:
        output, _ = policy.act({**params, "policy": part}, batch.observation, batch.policy_state)
        log_prob = distribution.log_prob(output, batch.action)
        policy_loss = -ac.average(log_prob * advantage, batch.real)
        return policy_loss - config.entropy * ac.average(distribution.entropy(output), batch.real), {
            "policy_loss": policy_loss
        }

    def update(learner: Learner, lanes: Lanes, key: Key) -> tuple[Learner, Metrics]:
        learner, batches = ac.prepare(setup, learner, lanes)
        start = batches.map(
            lambda batch: ac.flat_rows((batch._replace(lane=()), outcome(config, setup, learner.params, batch)))
        )
        state: State = learner.optimizer
        shift = state.returns.mean.astype(jnp.float32) if config.baseline == "mean" else jnp.zeros((), jnp.float32)
        seen = start.map(lambda lane: moments.measure(lane[1].value_target, (0,), lane[0].real)).all()
        state = state._replace(returns=moments.merge_lanes(state.returns, seen))
        gradient, metrics = start.mean(
            lambda lane: jax.grad(loss, has_aux=True)(
                learner.params["policy"], learner.params, lane[0], lane[1].advantage - shift
            ),
            ac.weight(setup),
        )
        learning_rate = ac.rate(config.learning_rate, config.schedule, learner.steps, setup.budget)
        step = ac.take_step(policy_optimizer, learning_rate, gradient, learner.params["policy"], state.policy)
        params, state = {**learner.params, "policy": step.params}, state._replace(policy=step.state)
        if config.baseline == "value":
            value_rate = ac.rate(config.value_learning_rate, config.schedule, learner.steps, setup.budget)
            fitted = ac.fit_value(setup, adam, start, (params["value"], state.value), value_rate, config.value_steps)
            value, value_state, metrics["value_loss"] = fitted
            params, state = {**params, "value": value}, state._replace(value=value_state)
        metrics |= {
            "gradient_norm": optax.tree.norm(gradient),
            "step_size": step.size,
            "learning_rate": learning_rate,
            **ac.compared(setup, start, learner.params, params),
        }
        if config.baseline != "value":  # there is no value function to explain anything
            del metrics["explained_variance"], metrics["explained_variance_after"]
        return ac.advance(setup, learner, lanes, params, state), metrics

    return Algorithm(init, update)
