"""PPO with a penalty on KL whose coefficient adapts (Heess et al. 2017, Schulman et al. 2017), and its two ancestors.

With other settings it is batch-ppo's method (preset `batch-ppo`) or Pat Coady's (preset `coady`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.algorithms import actor_critic as ac
from lockstep.algorithms.actor_critic import Setup
from lockstep.algorithms.proximal import Before, Carry, Proximal, Rows, repeated
from lockstep.core import Algorithm, Array, Key, Lanes, Learner, Metrics, Tree
from lockstep.ranges import Count, Natural, NonNegative, Positive, Share
from lockstep.tracing import traced_once, zeros

NEAR = 6 / 7  # of the way to a bound of the penalty the learning rate begins to help (Coady: beyond 30 of 35)


@dataclass(frozen=True)
class PPOKL:
    """Epochs of policy-gradient steps with a penalty on the KL to the policy that acted."""

    discount: Share = 0.99  # gamma
    trace: Share = 0.95  # lambda of generalised advantage estimation
    value_trace: Share = 0.95  # the same for the value function's targets; 1: whole discounted returns
    target_kl: Positive = 0.01  # what an update should change the policy by (Schulman et al. 2017)
    penalty: Positive = 1.0  # initial coefficient of the mean KL; after an update it is moved
    servo_low: Positive = 0.67  # down where the KL was below this times the target (Schulman et al. 2017)
    servo_high: Positive = 1.5  # up where it was above this times the target
    servo_factor: Positive = 2.0  # by this factor
    penalty_max: Positive = 35.0  # never above this, nor below one over this (Coady)
    rate_servo: bool = False  # also move the learning rate where the penalty is near its bounds (Coady)
    cutoff: NonNegative = 2.0  # beyond this times the target, the KL is punished by its square too
    cutoff_coefficient: NonNegative = 50.0  # so much (Coady; batch-ppo: 1000); 0: not at all
    stop: NonNegative = 4.0  # no further epoch once the mean KL exceeds this times the target; 0: all epochs
    epochs: Count = 10  # passes over an update's data
    minibatch: Natural = 64  # rows of one gradient step, drawn evenly from all lanes; 0: all of them
    learning_rate: Positive = 3e-4
    schedule: Literal["linear", "constant"] = "linear"  # of the learning rates over the budget: to zero, or constant
    rate_by_width: bool = False  # divide each network's rate by the root of its second layer's width (Coady)
    adam_epsilon: Positive = 1e-5
    max_gradient: Positive = 0.5  # the gradient is scaled down to this norm
    entropy: NonNegative = 0.0  # bonus for entropy
    normalize_advantage: bool = True  # over the whole batch
    recompute_advantages: bool = True  # before every epoch, with the newest value function
    value_coefficient: NonNegative = 0.5  # of the value function's loss in the same steps; 0: it is fitted afterwards
    value_epochs: Count = 10  # where it is fitted afterwards: passes (Coady)
    value_minibatch: Count = 256  # its rows of one gradient step, drawn evenly from all lanes (Coady)
    value_learning_rate: Positive = 1e-3
    value_replay: bool = False  # fit it on this update's data and that of the one before (Coady)


class Replay(NamedTuple):
    """The value function's data of one update, for the next. One row per row of every lane."""

    observation: Tree  # [lanes, T E, ...]
    target: Array  # [lanes, T E]
    real: Array  # [lanes, T E] rows that count; none before the first update


class State(NamedTuple):
    adam: Tree
    penalty: Array  # coefficient of the mean KL
    multiplier: Array  # of the learning rate
    value: Tree  # Adam's, of a value function that is fitted afterwards
    replay: Tree  # the update before, as Replay; () where it is not kept


def ppo_kl_problems(config: PPOKL, lanes: int, rows: int) -> list[str]:
    """What is wrong with these numbers for so many lanes of `rows` steps."""
    problems = ac.minibatch_problems("algo.minibatch", config.minibatch, lanes, rows) if config.minibatch else []
    if not config.value_coefficient and config.value_minibatch % lanes:
        problems.append(f"algo.value_minibatch ({config.value_minibatch}) must be a multiple of the {lanes} lanes.")
    if config.value_replay and config.value_coefficient:
        problems.append("algo.value_replay needs a value function that is fitted afterwards: algo.value_coefficient=0.")
    if config.rate_by_width and config.value_coefficient:
        problems.append(
            "algo.rate_by_width needs a value function that is fitted afterwards, at a rate of its own:"
            " algo.value_coefficient=0."
        )
    if config.servo_factor <= 1:
        problems.append(
            f"algo.servo_factor ({config.servo_factor:g}) must be above 1: the penalty is multiplied by it."
        )
    if config.servo_low > config.servo_high:
        problems.append(
            f"algo.servo_low ({config.servo_low:g}) can't be above algo.servo_high ({config.servo_high:g})."
        )
    if not 1 / config.penalty_max <= config.penalty <= config.penalty_max:
        problems.append(
            f"algo.penalty ({config.penalty:g}) must lie between one over algo.penalty_max and algo.penalty_max"
            f" ({config.penalty_max:g})."
        )
    return problems


def ppo_kl_unread(config: PPOKL) -> dict[str, str]:
    unread = {} if config.cutoff_coefficient else {"cutoff": "algo.cutoff_coefficient=0"}
    if config.epochs == 1:
        unread |= dict.fromkeys(("stop", "recompute_advantages"), "algo.epochs=1")
    if config.value_coefficient:
        why = f"algo.value_coefficient={config.value_coefficient:g}, which trains the value function in the same steps"
        return unread | dict.fromkeys(("value_epochs", "value_minibatch", "value_learning_rate"), why)
    why = "algo.value_coefficient=0, which fits the value function after all epochs"
    return unread | {"recompute_advantages": why}


def servo(config: PPOKL, kl: Array, penalty: Array, multiplier: Array) -> tuple[Array, Array]:
    """Penalty and learning-rate multiplier after an update that changed the policy by `kl`.

    Too much change: a higher penalty and, where that is near its bound, a lower rate. Too little: the reverse.
    """
    high, low = kl > config.servo_high * config.target_kl, kl < config.servo_low * config.target_kl
    factor = jnp.where(high, config.servo_factor, jnp.where(low, 1 / config.servo_factor, 1.0))
    penalty = jnp.clip(penalty * factor, 1 / config.penalty_max, config.penalty_max)
    if not config.rate_servo:
        return penalty.astype(jnp.float32), multiplier
    slower = high & (penalty > NEAR * config.penalty_max) & (multiplier > 0.1)
    faster = low & (penalty < 1 / (NEAR * config.penalty_max)) & (multiplier < 10.0)
    change = jnp.where(slower, 1 / config.servo_factor, jnp.where(faster, config.servo_factor, 1.0))
    return penalty.astype(jnp.float32), (multiplier * change).astype(jnp.float32)


def slope(config: PPOKL, penalty: Array, kl: Array) -> Array:
    """The derivative of penalty KL + coefficient max(0, KL - cutoff)^2 by the mean KL."""
    beyond = jnp.maximum(kl - config.cutoff * config.target_kl, 0.0)
    return penalty + 2 * config.cutoff_coefficient * beyond


def ppo_kl(config: PPOKL, setup: Setup) -> Algorithm:
    policy, distribution = setup.policy, setup.policy.distribution
    rows = config.minibatch // setup.lanes or setup.rows
    proximal = Proximal(
        config,
        setup,
        lambda params, batch: ac.estimate(policy, params, batch, config.discount, config.trace, config.value_trace),
        rows,
        shuffle=config.minibatch > 0,
    )
    adam = optax.scale_by_adam(eps=config.adam_epsilon)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_gradient), adam)

    def init(key: Key) -> Learner:
        def state(params: Tree) -> State:
            replay = _nothing_before(setup) if config.value_replay else ()
            penalty, multiplier = jnp.asarray(config.penalty, jnp.float32), jnp.ones((), jnp.float32)
            fitted = adam.init(params["value"]) if not config.value_coefficient else ()
            return State(optimizer.init(params), penalty, multiplier, fitted, replay)

        return ac.new_learner(setup, key, state)

    def losses(params: Tree, mine: Rows) -> tuple[tuple[Array, Array], Metrics]:
        """What a step descends besides the KL, and the KL."""
        output, log_prob = proximal.evaluate(params, mine.observation, mine.action)
        log_ratio = log_prob - mine.log_prob
        surrogate = ac.average(jnp.exp(log_ratio) * mine.advantage, mine.real)
        kl = ac.average(distribution.kl(mine.output.distribution, output.distribution), mine.real)
        value_loss = 0.5 * ac.average(jnp.square(output.value - mine.value_target), mine.real)
        entropy = ac.average(distribution.entropy(output.distribution), mine.real)
        rest = config.value_coefficient * value_loss - surrogate - config.entropy * entropy
        error = ac.average(jnp.abs(log_ratio), mine.real)
        return (rest, kl), {"surrogate": surrogate, "value_loss": value_loss, "ratio_error": error}

    def gradients(params: Tree, mine: Rows) -> tuple[Tree, Tree, Array, Metrics]:
        """Of the rest and of the KL apart, for what the KL's counts depends on the KL of all lanes."""
        (_, kl), back, metrics = jax.vjp(lambda p: losses(p, mine), params, has_aux=True)
        one, none = jnp.ones_like(kl), jnp.zeros_like(kl)
        return *back((one, none)), *back((none, one)), kl, metrics

    def lane_gradients(params: Tree, mine: Rows) -> tuple[Tree, Tree, Array, Metrics]:
        if not setup.padded:
            return gradients(params, mine)
        rows, count = ac.real_first(mine, mine.real), mine.real.sum()
        return ac.chunk_mean(lambda part, real: gradients(params, part._replace(real=real)), rows, count)

    def sweep(
        drawn: Lanes, carry: Carry, penalty: Array, learning_rate: Array, minibatches: Array | int
    ) -> tuple[Carry, Metrics]:
        def step(carry: Carry, number: Array) -> tuple[Carry, Metrics]:
            def part(mine: Rows) -> Rows:
                """A lane's rows of this minibatch."""
                if not proximal.windowed:
                    return ac.row(mine, number)
                return _window(mine, jnp.arange(setup.rows), number, minibatches, rows)

            params, state = carry
            weight = (lambda mine: part(mine).real.sum()) if setup.padded else None
            means = drawn.mean(lambda mine: lane_gradients(params, part(mine)), weight)
            of_rest, of_kl, kl, metrics = means
            steepness = slope(config, penalty, kl)
            gradient = jax.tree.map(lambda a, b: a + steepness * b, of_rest, of_kl)
            after = ac.take_step(optimizer, learning_rate, gradient, params, state)
            return (after.params, after.state), {**metrics, "gradient_norm": optax.tree.norm(gradient)}

        return _stepped(step, carry, minibatches)

    def divergence(start: Lanes, params: Tree) -> Array:
        def kl(mine: tuple[Tree, Tree], real: Tree) -> Array:
            observation, old = mine
            return ac.average(distribution.kl(old, policy.act(params, observation, ())[0]), real)

        def lane_kl(mine: Before) -> Array:
            observation, real = ac.flat_rows((mine.batch.observation, mine.batch.real))
            rows = (observation, mine.output.distribution)
            if not setup.padded:
                return kl(rows, ())
            return ac.chunk_mean(kl, ac.real_first(rows, real), real.sum())

        return start.mean(lane_kl, proximal.weight)

    def update(learner: Learner, lanes: Lanes, key: Key) -> tuple[Learner, Metrics]:
        learner, batches = ac.prepare(setup, learner, lanes)
        start = batches.map(lambda batch: proximal.before(learner.params, batch))
        state: State = learner.optimizer
        minibatches: Array | int = setup.rows // rows
        if proximal.windowed:
            minibatches = _windows(batches.map(lambda batch: batch.real.sum()).all(), rows)

        def rate(initial: float, layers: Tree) -> Array:
            width = _middle_width(layers) if config.rate_by_width else 1
            return ac.rate(initial / math.sqrt(width), config.schedule, learner.steps, setup.budget)

        learning_rate = rate(config.learning_rate, learner.params["policy"])

        def epoch(carry: Carry, number: Array) -> tuple[Carry, Metrics]:
            carry, metrics = proximal.epoch(
                start,
                carry,
                jax.random.fold_in(key, number),
                lambda drawn, c: sweep(drawn, c, state.penalty, learning_rate * state.multiplier, minibatches),
            )
            return carry, {**metrics, "stop_kl": divergence(start, carry[0]) if config.stop else jnp.zeros(())}

        def calm(metrics: Metrics) -> Array | bool:
            return metrics["stop_kl"] <= config.stop * config.target_kl if config.stop else True

        metrics: Metrics
        (params, adam_state), metrics, epochs = repeated(epoch, (learner.params, state.adam), config.epochs, calm)
        del metrics["stop_kl"]
        state = state._replace(adam=adam_state)
        if not config.value_coefficient:
            value_rate = rate(config.value_learning_rate, params["value"])
            value, state, metrics["value_loss"] = _fit(config, setup, adam, start, params, state, value_rate, key)
            params = {**params, "value": value}
        metrics |= {
            **proximal.changes(start, params),
            "penalty": state.penalty,
            "learning_rate": learning_rate * state.multiplier,
            "epochs": epochs,
        }
        penalty, multiplier = servo(config, metrics["kl"], state.penalty, state.multiplier)
        state = state._replace(penalty=penalty, multiplier=multiplier)
        return ac.advance(setup, learner, lanes, params, state), metrics

    return Algorithm(init, update)


def _stepped(
    step: Callable[[Carry, Array], tuple[Carry, Metrics]], carry: Carry, count: Array | int
) -> tuple[Carry, Metrics]:
    """`count` steps, and the metrics of each; where only the program knows the count, their means as those of one."""
    none = jnp.zeros((), jnp.int32)
    if isinstance(count, int) and count > 1:
        return jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
    if isinstance(count, int):
        carry, metrics = step(carry, none)
        return carry, jax.tree.map(lambda leaf: leaf[None], metrics)
    traced, (_, shapes) = traced_once(step, carry, none)

    def more(number: Array, state: tuple[Carry, Metrics, Array]) -> tuple[Carry, Metrics, Array]:
        carry, total, first_error = state
        carry, metrics = traced(carry, number)
        first_error = jnp.where(number == 0, metrics["ratio_error"], first_error)
        return carry, jax.tree.map(jnp.add, total, metrics), first_error

    start = carry, zeros(shapes), jnp.zeros((), jnp.float32)
    carry, total, first_error = jax.lax.fori_loop(none, count.astype(jnp.int32), more, start)
    means = jax.tree.map(lambda leaf: leaf[None] / count.astype(leaf.dtype), total)
    return carry, {**means, "ratio_error": first_error[None]}


def _middle_width(layers: Tree) -> int:
    """Units of a network's second hidden layer, or of its only one."""
    several_hidden = "layer2" in layers
    width: int = layers["layer1" if several_hidden else "layer0"]["bias"].shape[0]
    return width


def _nothing_before(setup: Setup) -> Replay:
    shape = (setup.lanes, setup.rows)
    observation = jnp.zeros((*shape, *setup.spec.observation.shape), jnp.float32)
    return Replay(observation, jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))


def _fit(
    config: PPOKL,
    setup: Setup,
    adam: optax.GradientTransformation,
    start: Lanes,
    params: Tree,
    state: State,
    learning_rate: Array,
    key: Key,
) -> tuple[Tree, State, Array]:
    """The value function after its own epochs of minibatches, the state, and the last epoch's loss.

    Only rows that count are drawn: in each epoch every one of them once, spread evenly over as many minibatches as
    the fullest lane needs.
    """

    def lane_rows(mine: Before) -> tuple[Array, Replay]:
        observation, target = ac.flat_rows((mine.batch.observation, mine.estimate.value_target))
        real = ac.flat_rows(mine.batch.real) if setup.padded else jnp.ones(setup.rows, bool)
        return mine.batch.lane, Replay(observation, target, real)

    now = start.map(lane_rows)
    data = now
    if config.value_replay:
        data = now.map(
            lambda mine: (
                mine[0],
                jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mine[1], ac.row(state.replay, mine[0])),
            )
        )
    counts = data.map(lambda mine: mine[1].real.sum()).all()
    rows = config.value_minibatch // setup.lanes
    minibatches = _windows(counts, rows)

    def loss(part: Tree, drawn: Replay) -> Array:
        value = setup.policy.value({**params, "value": part}, drawn.observation, ())
        return 0.5 * ac.average(jnp.square(value - drawn.target), drawn.real)

    def epoch(number: Array, carry: tuple[Tree, Tree, Array]) -> tuple[Tree, Tree, Array]:
        epoch_key = jax.random.fold_in(jax.random.fold_in(key, config.epochs), number)
        orders = data.map(lambda mine: (mine[1], _order(epoch_key, mine)))

        def step(number: Array, carry: tuple[Tree, Tree, Array]) -> tuple[Tree, Tree, Array]:
            part, state, total = carry

            def lane_gradient(mine: tuple[Replay, Array]) -> tuple[Array, Tree]:
                return jax.value_and_grad(loss)(part, _window(*mine, number, minibatches, rows))

            value, gradient = orders.mean(
                lane_gradient, lambda mine: _window_count(mine[0].real.sum(), number, minibatches)
            )
            after = ac.take_step(adam, learning_rate, gradient, part, state)
            return after.params, after.state, total + value

        part, state, _ = carry
        nothing = jnp.zeros((), jnp.float32)
        part, state, total = jax.lax.fori_loop(jnp.zeros_like(minibatches), minibatches, step, (part, state, nothing))
        return part, state, total / minibatches.astype(jnp.float32)

    first = (params["value"], state.value, jnp.zeros((), jnp.float32))
    part, fitted, last = jax.lax.fori_loop(0, config.value_epochs, epoch, first)
    state = state._replace(value=fitted, replay=now.all()[1] if config.value_replay else ())
    return part, state, last


def _order(key: Key, mine: tuple[Array, Replay]) -> Array:
    """A lane's rows in an order of its own, those that don't count last."""
    lane, data = mine
    draws = jax.random.uniform(jax.random.fold_in(key, lane), data.real.shape)
    return jnp.argsort(jnp.where(data.real, draws, 2.0))


def _windows(counts: Array, rows: int) -> Array:
    """The minibatches that lanes with so many rows that count are shared out to: as many as the fullest lane needs."""
    return -(-counts.max() // rows)


def _window(data: Any, order: Array, number: Array, minibatches: Array | int, rows: int) -> Any:
    """A lane's share of a minibatch: of its n rows that count, in this order, those from n k/m up to n (k+1)/m."""
    count = data.real.sum()
    places = count * number // minibatches + jnp.arange(rows)
    chosen = order[jnp.minimum(places, order.shape[0] - 1)]
    drawn = jax.tree.map(lambda leaf: leaf[chosen], data)
    return drawn._replace(real=jnp.arange(rows) < _window_count(count, number, minibatches))


def _window_count(count: Array, number: Array, minibatches: Array | int) -> Array:
    return count * (number + 1) // minibatches - count * number // minibatches
