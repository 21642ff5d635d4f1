"""The natural policy gradient (Kakade 2001), each step as long as a bound on the KL divergence allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Batch, Setup
from lockstep.core import Algorithm, Array, Key, Lanes, Learner, Metrics, Tree
from lockstep.optim.natural import Search, Trial, fisher_product, natural_direction
from lockstep.ranges import Count, NonNegative, Positive, Share


@dataclass(frozen=True)
class Natural:
    """What the natural-gradient algorithms have in common."""

    discount: Share = 0.99  # gamma
    trace: Share = 0.95  # lambda of generalised advantage estimation
    max_kl: Positive = 0.02  # mean KL(old || new) that a step aims at
    damping: NonNegative = 0.1  # added to the diagonal of the Fisher matrix when the direction is solved for
    cg_iterations: Count = 10  # of conjugate gradients
    fisher_every: Count = 1  # the Fisher matrix is taken over every n-th row, drawn anew in each update; 1: over all
    value_epochs: Count = 10  # passes over an update's data in which the value function is fitted
    value_minibatch: Count = 128  # rows of one step of it, drawn evenly from all lanes
    learning_rate: Positive = 1e-3  # of the value function's Adam
    schedule: Literal["linear", "constant"] = (
        "linear"  # of learning_rate and max_kl over the budget: linear (to zero) or constant
    )


@dataclass(frozen=True)
class NPG(Natural):
    """One natural-gradient step per update; nothing checks it afterwards."""


def natural_problems(config: Natural, lanes: int, rows: int) -> list[str]:
    """What is wrong with these numbers for so many lanes of `rows` steps."""
    problems = ac.minibatch_problems("algo.value_minibatch", config.value_minibatch, lanes, rows)
    if config.fisher_every > rows:
        problems.append(f"algo.fisher_every ({config.fisher_every}) leaves none of a lane's {rows} steps.")
    return problems


class Rows(NamedTuple):
    """One lane's rows [T E, ...] and what the networks said of them before the update."""

    lane: Array
    observation: Tree
    action: Array
    distribution: Tree
    log_prob: Array
    advantage: Array
    value_target: Array
    value: Array


VALUE_OPTIMIZER = optax.scale_by_adam(eps=1e-5)

# How far to go along a direction: what a fraction of it would do, the bound on the KL -> the fraction to take.
Choose = Callable[[Callable[[Array], Trial], Array], Search]


def npg(config: NPG, setup: Setup) -> Algorithm:
    return natural_gradient(config, setup, _all_the_way)


def _all_the_way(attempt: Callable[[Array], Trial], max_kl: Array) -> Search:
    return Search(jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32))


def natural_gradient(config: Natural, setup: Setup, choose: Choose) -> Algorithm:
    """Estimate advantages, step along the natural gradient as far as `choose` says, then fit the value function."""
    policy, distribution = setup.policy, setup.policy.distribution

    def init(key: Key) -> Learner:
        return ac.new_learner(setup, key, lambda params: VALUE_OPTIMIZER.init(params["value"]))

    def before(params: Tree, batch: Batch) -> Rows:
        observation, action = ac.flat_rows((batch.observation, batch.action))
        said, _ = policy.act(params, observation, ())
        estimate = ac.flat_rows(ac.estimate(policy, params, batch, config.discount, config.trace))
        return Rows(batch.lane, observation, action, said, distribution.log_prob(said, action), *estimate)

    def update(learner: Learner, lanes: Lanes, key: Key) -> tuple[Learner, Metrics]:
        policy_key, value_key = jax.random.split(key)
        learner, batches = ac.prepare(setup, learner, lanes)
        rows = batches.map(lambda batch: before(learner.params, batch))
        scaled = ac.standardizer(True, rows, lambda mine: mine.advantage)
        rows = rows.map(lambda mine: mine._replace(advantage=scaled(mine.advantage)))
        max_kl, learning_rate = (
            ac.rate(start, config.schedule, learner.steps, setup.budget)
            for start in (config.max_kl, config.learning_rate)
        )
        weights, told = _policy_step(config, setup, choose, learner.params["policy"], rows, policy_key, max_kl)
        (value, state), value_loss = _fit_value(config, setup, learner, rows, value_key, learning_rate)
        params = {**learner.params, "policy": weights, "value": value}

        def after(mine: Rows) -> tuple:
            said = policy.evaluate(params, mine.observation, ())
            was, now = (ac.explained_variance(mine.value_target, value) for value in (mine.value, said.value))
            return _trial(setup, said.distribution, mine), distribution.entropy(said.distribution).mean(), was, now

        (surrogate, kl), entropy, was, now = rows.mean(after)
        metrics = told | {
            "surrogate": surrogate,
            "kl": kl,
            "entropy": entropy,
            "explained_variance": ac.explained(was),
            "explained_variance_after": ac.explained(now),
            "value_loss": value_loss,
            "learning_rate": learning_rate,
        }
        return ac.advance(setup, learner, lanes, params, state), metrics

    return Algorithm(init, update)


def _trial(setup: Setup, said: Tree, mine: Rows) -> Trial:
    """E[(ratio - 1) A] and E[KL(old || new)] of one lane, for what the new policy says of its rows."""
    distribution = setup.policy.distribution
    log_ratio = distribution.log_prob(said, mine.action) - mine.log_prob
    return Trial((jnp.expm1(log_ratio) * mine.advantage).mean(), distribution.kl(mine.distribution, said).mean())


def _policy_step(
    config: Natural, setup: Setup, choose: Choose, weights: Tree, rows: Lanes, key: Key, max_kl: Array
) -> tuple[Tree, Metrics]:
    old, unravel = ravel_pytree(weights)
    some = rows.map(lambda mine: _some(mine.observation, config.fisher_every, key, mine.lane))

    def act(vector: Array, observation: Tree) -> Tree:
        return setup.policy.act({"policy": unravel(vector)}, observation, ())[0]

    def fisher(vector: Array) -> Array:
        matrix = setup.policy.distribution.fisher
        return some.mean(lambda seen: fisher_product(lambda w: act(w, seen), matrix, old, vector))

    def lane_trial(vector: Array, mine: Rows) -> Trial:
        return _trial(setup, act(vector, mine.observation), mine)

    gradient = rows.mean(lambda mine: jax.grad(lambda w: lane_trial(w, mine).gain)(old))
    direction = natural_direction(fisher, gradient, config.damping, config.cg_iterations, max_kl)
    search = choose(lambda part: rows.mean(lambda mine: lane_trial(old + part * direction.step, mine)), max_kl)
    new = jnp.where(search.fraction > 0, old + search.fraction * direction.step, old)
    return unravel(new), {
        "gradient_norm": jnp.linalg.norm(gradient),
        "step_size": search.fraction * direction.size,
        "cg_residual": direction.residual,
        "line_search_steps": search.trials,
    }


def _some(observation: Tree, every: int, key: Key, lane: Array) -> Tree:
    """One of `every` rows, picked at random: a fixed stride may meet the same environment again and again."""
    if every == 1:
        return observation
    return jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // every], ac.shuffled(observation, key, lane))


def _fit_value(
    config: Natural, setup: Setup, learner: Learner, rows: Lanes, key: Key, learning_rate: Array
) -> tuple[tuple[Tree, Tree], Array]:
    """Value weights and optimizer after the epochs, and the mean loss of the last."""
    size = config.value_minibatch // setup.lanes

    def loss(value: Tree, part: tuple[Tree, Array]) -> tuple[Array, Metrics]:
        observation, target = part
        found = 0.5 * jnp.square(setup.policy.value({"value": value}, observation, ()) - target).mean()
        return found, {"value_loss": found}

    def draw(mine: Rows, epoch_key: Key) -> tuple[Tree, Array]:
        return ac.in_minibatches(ac.shuffled((mine.observation, mine.value_target), epoch_key, mine.lane), size)

    def epoch(carry: tuple[Tree, Tree], number: Array) -> tuple[tuple[Tree, Tree], Array]:
        epoch_key = jax.random.fold_in(key, number)
        carry, metrics = ac.descend(descent, rows.map(lambda mine: draw(mine, epoch_key)), carry, setup.rows // size)
        return carry, metrics["value_loss"].mean()

    descent = ac.Descent(loss, VALUE_OPTIMIZER, learning_rate)
    start = (learner.params["value"], learner.optimizer)
    carry, losses = jax.lax.scan(epoch, start, jnp.arange(config.value_epochs, dtype=jnp.int32))
    return carry, losses[-1]
