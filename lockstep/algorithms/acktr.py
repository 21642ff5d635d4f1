"""Actor-critic with K-FAC steps in a trust region (Wu et al. 2017), for continuous and discrete actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lockstep import tree
from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Batch, Estimate, Setup
from lockstep.core import Algorithm, Array, Key, Lanes, Learner, Metrics, Output, Tree
from lockstep.optim import kfac
from lockstep.optim.kfac import Factors, Layers
from lockstep.ranges import Count, Natural, NonNegative, Positive, Share

LOG_STD_FISHER = 2.0  # of a Gaussian's log standard deviation, whatever its mean and deviation: E[(z^2 - 1)^2]


@dataclass(frozen=True)
class ACKTR:
    """One natural-gradient step of the policy and some Gauss-Newton steps of the value function per update."""

    discount: Share = 0.99  # gamma
    trace: Share = 0.97  # lambda of generalised advantage estimation (as the original's)
    learning_rate: Positive = 1.0  # largest step of the policy along the natural gradient
    schedule: Literal["linear", "constant"] = (
        "linear"  # of the policy's steps over the budget: linear (to zero) or constant
    )
    kl_clip: Positive = (
        0.01  # a step of the policy changes it by about this KL at most: by the factors, and as measured
    )
    desired_kl: NonNegative = 0.0  # the learning rate follows the measured KL towards this; 0: it doesn't
    damping: Positive = 0.01  # added to the eigenvalues of the policy's Fisher blocks
    damping_form: Literal["added", "factored"] = (
        "added"  # to the products of the factors' eigenvalues, or the square root to each factor (Tikhonov)
    )
    fisher: Literal["taken", "sampled"] = (
        "taken"  # the actions whose score makes the Fisher matrix: those that were taken, or others drawn anew
    )
    decay: Share = 0.95  # weight of the old in the running mean of the policy's factors
    momentum: Share = 0.9  # weight of the old in the running mean of the gradient
    statistics_every: Count = 4  # of so many time steps one makes the factors and tries out the steps
    decompose_every: Count = 10  # updates between two eigendecompositions of the factors
    cold_updates: Natural = 2  # first updates, made by plain gradient descent while the factors see data
    cold_rate: Positive = 0.03  # learning rate of these
    max_gradient: Positive = 0.5  # a cold step's gradient is scaled down to this norm
    value_rate: Positive = 1.0  # largest step of the value function along the Gauss-Newton direction
    value_steps: Count = 1  # steps of the value function per update
    value_clip: Positive = 0.3  # no step changes the values by more than this: half the mean square
    value_damping: Positive = 0.1  # of the value function's Gauss-Newton blocks
    value_decay: Share = 0.95  # weight of the old in the running mean of the value function's factors
    entropy: NonNegative = 0.0  # bonus for entropy
    normalize_advantage: bool = True  # over the whole batch


class State(NamedTuple):
    """What is kept between updates."""

    policy: kfac.State
    value: kfac.State
    rate: Array  # the servo's learning rate


class Before(NamedTuple):
    """One lane's batch with its advantages and value targets."""

    batch: Batch
    estimate: Estimate


class Rows(NamedTuple):
    """One lane's rows and what the networks say of them before the update."""

    observation: Tree  # [T E, ...]
    action: Array
    advantage: Array
    value_target: Array
    output: Output
    log_prob: Array


class Measured(NamedTuple):
    """One lane's part in the step."""

    rows: Rows
    some: Rows  # those that make the factors and try out the steps
    gradient: dict[str, Layers]  # of the losses of policy and value function
    factors: dict[str, dict[str, Factors]]


def acktr_problems(config: ACKTR, lanes: int, rows: int) -> list[str]:
    """What is wrong with these numbers."""
    problems = []
    if config.momentum == 1:
        problems.append("algo.momentum must be below 1: no gradient would enter its running mean.")
    if config.desired_kl and config.learning_rate > kfac.LARGEST_RATE:
        problems.append(
            f"algo.learning_rate ({config.learning_rate:g}) can't be above {kfac.LARGEST_RATE:g} where it follows"
            " algo.desired_kl."
        )
    if config.desired_kl > config.kl_clip:
        problems.append(
            f"algo.desired_kl ({config.desired_kl:g}) can't be above algo.kl_clip ({config.kl_clip:g}), which no step"
            " passes by much."
        )
    if config.desired_kl and config.schedule != "constant":
        problems.append(
            "algo.desired_kl needs algo.schedule=constant: the learning rate would go up as the schedule goes down."
        )
    return problems


def acktr_unread(config: ACKTR) -> dict[str, str]:
    return {} if config.cold_updates else dict.fromkeys(("cold_rate", "max_gradient"), "algo.cold_updates=0")


def acktr(config: ACKTR, setup: Setup) -> Algorithm:
    policy, distribution = setup.policy, setup.policy.distribution
    policy_rule = kfac.Rule(
        config.damping, config.damping_form, config.momentum, config.kl_clip, config.cold_rate, config.max_gradient
    )
    value_rule = policy_rule._replace(damping=config.value_damping, clip=config.value_clip)

    def init(key: Key) -> Learner:
        def state(params: Tree) -> State:
            rate = jnp.asarray(config.learning_rate, jnp.float32)
            return State(kfac.new(params["policy"]), kfac.new(params["value"]), rate)

        return ac.new_learner(setup, key, state)

    def before(params: Tree, batch: Batch) -> Before:
        return Before(batch, ac.estimate(policy, params, batch, config.discount, config.trace))

    def measure(params: Tree, mine: Before, scaled: Callable[[Array], Array], key: Key) -> Measured:
        observation, action = ac.flat_rows((mine.batch.observation, mine.batch.action))
        advantage, target, _ = ac.flat_rows(mine.estimate)
        advantage = scaled(advantage)
        lane_key = jax.random.fold_in(key, mine.batch.lane)

        def heads(shifts: Tree) -> tuple[Metrics, tuple[Output, Tree]]:
            output, inputs = policy.tapped(params, shifts, observation, ())
            told = {"taken": distribution.log_prob(output.distribution, action), "value": output.value}
            if config.entropy:
                told["entropy"] = distribution.entropy(output.distribution)
            if config.fisher == "sampled":
                noise = distribution.noise(jax.random.fold_in(lane_key, 0), (setup.rows,))
                drawn = jax.lax.stop_gradient(distribution.sample(output.distribution, noise))
                told["drawn"] = distribution.log_prob(output.distribution, drawn)
            return told, (output, inputs)

        still = {part: kfac.no_shifts(params[part], setup.rows) for part in ("policy", "value")}
        told, pull, (output, inputs) = jax.vjp(heads, still, has_aux=True)

        def row_gradients(*names: str) -> Tree:
            """The layers' output gradients, row by row, of the sum of these."""
            (outputs,) = pull({name: jnp.full_like(head, name in names) for name, head in told.items()})
            return outputs

        scores = row_gradients("taken", "value")
        downhill = {
            "policy": _rows_scaled(scores["policy"], -advantage),
            "value": _rows_scaled(scores["value"], output.value - target),
        }
        if config.entropy:
            bonus = row_gradients("entropy")["policy"]
            downhill["policy"] = {
                name: rows - config.entropy * bonus[name] for name, rows in downhill["policy"].items()
            }
        if config.fisher == "sampled":
            scores["policy"] = row_gradients("drawn")["policy"]
        rows = Rows(observation, action, advantage, target, output, told["taken"])
        some, some_inputs, some_scores = some_of(
            (rows, inputs, scores), mine.batch.reward.shape, jax.random.fold_in(lane_key, 1)
        )
        gradient = {part: kfac.gradient_of(inputs[part], downhill[part]) for part in inputs}
        factors = {part: kfac.factors_of(some_inputs[part], some_scores[part]) for part in inputs}
        return Measured(rows, some, gradient, factors)

    def some_of(rows: Tree, shape: tuple[int, int], key: Key) -> Tree:
        """Of every `statistics_every` time steps one, beginning at a random one of them, in all environments."""
        steps, envs = shape
        every = min(config.statistics_every, steps)
        if every == 1:
            return rows
        phase, kept = jax.random.randint(key, (), 0, every), steps // every

        def pick(leaf: Array) -> Array:
            apart = leaf[: kept * every * envs].reshape(kept, every, envs, *leaf.shape[1:])
            return jax.lax.dynamic_index_in_dim(apart, phase, 1, False).reshape(kept * envs, *leaf.shape[1:])

        return jax.tree.map(pick, rows)

    def known_exactly(factors: dict[str, Factors]) -> dict[str, Factors]:
        """The factors of the policy, with the exact one where it has a closed form."""
        if "log_std" not in factors:
            return factors
        free = factors["log_std"]
        exact = LOG_STD_FISHER * jnp.eye(len(free.outputs), dtype=jnp.float32)
        return {**factors, "log_std": free._replace(outputs=exact)}

    def value_gradient(params: Tree, mine: Rows) -> Layers:
        def loss(params: Tree) -> Array:
            return 0.5 * jnp.square(policy.value(params, mine.observation, ()) - mine.value_target).mean()

        gradient = jax.grad(loss)(params)["value"]
        return {name: kfac.matrix(layer) for name, layer in gradient.items()}

    def try_policy(params: Tree, mine: Rows) -> Array:
        """The mean KL of a proposed policy."""
        proposed, _ = policy.act(params, mine.observation, ())
        return distribution.kl(mine.output.distribution, proposed).mean()

    def try_value(old: Array, params: Tree, mine: Rows) -> tuple[Array, Array]:
        """How a proposed value function moves from the old values: its gain on the error, and its square."""
        change = policy.value(params, mine.observation, ()) - old
        return (change * (mine.value_target - old)).mean(), jnp.square(change).mean()

    def fit_further(params: Tree, state: kfac.State, lanes: Lanes, cold: Array) -> tuple[Tree, kfac.State]:
        """The steps of the value function after the first."""

        def go(carry: tuple[Tree, kfac.State], _: None) -> tuple[tuple[Tree, kfac.State], None]:
            params, state = carry
            gradient = lanes.mean(lambda mine: value_gradient(params, mine.rows))
            state, made = kfac.step(state, gradient, value_rule, config.value_rate, cold)
            proposed = {**params, "value": kfac.moved(params["value"], made.change)}

            def tried(mine: Measured) -> tuple[Array, Array]:
                return try_value(policy.value(params, mine.some.observation, ()), proposed, mine.some)

            change = _scaled(made.change, _best(*lanes.mean(tried)))
            return ({**params, "value": kfac.moved(params["value"], change)}, state), None

        carry, _ = jax.lax.scan(go, (params, state), None, config.value_steps - 1)
        return carry

    def after(params: Tree, mine: Rows) -> tuple:
        output = policy.evaluate(params, mine.observation, ())
        log_prob = distribution.log_prob(output.distribution, mine.action)
        return (
            distribution.kl(mine.output.distribution, output.distribution).mean(),
            distribution.entropy(output.distribution).mean(),
            (jnp.exp(log_prob - mine.log_prob) * mine.advantage).mean(),
            0.5 * jnp.square(mine.output.value - mine.value_target).mean(),
            ac.explained_variance(mine.value_target, mine.output.value),
            ac.explained_variance(mine.value_target, output.value),
        )

    def steps(learner: Learner, lanes: Lanes, gradient: Tree, factors: Tree, share: Array) -> tuple:
        """Policy and value function one step further, each as far as the batch itself says is right."""
        params, old = learner.params, learner.optimizer
        cold = learner.updates < config.cold_updates
        due = (learner.updates < config.cold_updates + config.decompose_every) | (
            learner.updates % config.decompose_every == 0
        )
        actor = kfac.refresh(kfac.observe(old.policy, known_exactly(factors["policy"]), config.decay), due)
        critic = kfac.refresh(kfac.observe(old.value, factors["value"], config.value_decay), due)
        actor, move = kfac.step(actor, gradient["policy"], policy_rule, old.rate, cold)
        critic, fit = kfac.step(critic, gradient["value"], value_rule, config.value_rate, cold)
        proposed = {
            "policy": kfac.moved(params["policy"], move.change),
            "value": kfac.moved(params["value"], fit.change),
        }
        kl, value_moves = lanes.mean(
            lambda mine: (try_policy(proposed, mine.some), try_value(mine.some.output.value, proposed, mine.some))
        )
        shorter = share * jnp.minimum(1.0, jnp.sqrt(config.kl_clip / jnp.maximum(kl, 1e-30)))
        params = {
            "policy": kfac.moved(params["policy"], _scaled(move.change, shorter)),
            "value": kfac.moved(params["value"], _scaled(fit.change, _best(*value_moves))),
        }
        if config.value_steps > 1:
            params, critic = fit_further(params, critic, lanes, cold)
        return params, actor, critic, shorter * move.size, jnp.maximum(move.condition, fit.condition)

    def update(learner: Learner, lanes: Lanes, key: Key) -> tuple[Learner, Metrics]:
        learner, batches = ac.prepare(setup, learner, lanes)
        old = learner.optimizer
        start = batches.map(lambda batch: before(learner.params, batch))
        scaled = ac.standardizer(config.normalize_advantage, start, lambda mine: mine.estimate.advantage)
        measured = start.map(lambda mine: measure(learner.params, mine, scaled, key))
        gradient, factors = measured.mean(lambda mine: (mine.gradient, mine.factors))
        share = ac.rate(1.0, config.schedule, learner.steps, setup.budget)
        params, actor, critic, size, condition = steps(learner, measured, gradient, factors, share)

        made, kept = (params, actor, critic), (learner.params, old.policy, old.value)
        fine = jnp.stack([jnp.isfinite(vector).all() for vector in tree.pack(made).values()]).all()
        params, actor, critic = jax.lax.cond(fine, lambda: made, lambda: kept)
        kl, entropy, surrogate, value_loss, shares, new_shares = measured.mean(lambda mine: after(params, mine.rows))
        rate = old.rate
        if config.desired_kl:
            servo = fine & (learner.updates >= config.cold_updates)
            rate = jnp.where(servo, kfac.toward(rate, kl, config.desired_kl), rate)
        metrics = {
            "kl": kl,
            "entropy": entropy,
            "surrogate": surrogate,
            "explained_variance": ac.explained(shares),
            "explained_variance_after": ac.explained(new_shares),
            "value_loss": value_loss,
            "gradient_norm": kfac.norm(gradient["policy"]),
            "learning_rate": old.rate * share,
            "step_size": jnp.where(fine, size, 0.0),
            "factor_condition": condition,
            "skipped": (~fine).astype(jnp.float32),
        }
        return ac.advance(setup, learner, lanes, params, State(actor, critic, rate)), metrics

    return Algorithm(init, update)


def _rows_scaled(outputs: Layers, by: Array) -> Layers:
    return {name: by[:, None] * rows for name, rows in outputs.items()}


def _scaled(change: Layers, by: Array) -> Layers:
    return {name: by * layer for name, layer in change.items()}


def _best(gain: Array, square: Array) -> Array:
    """The share of a step that leaves the smallest squared error, if values were linear along it; at most all of it."""
    return jnp.clip(gain / jnp.maximum(square, 1e-30), 0.0, 1.0)
