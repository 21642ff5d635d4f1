"""A vanilla policy gradient as two pure functions on `lanes.mean`, trained with the ordinary loop."""

from dataclasses import dataclass

import jax
import optax

from lockstep.runtime import start_jax

start_jax()
from lockstep import algorithms, train  # noqa: E402
from lockstep.algorithms import actor_critic as ac  # noqa: E402
from lockstep.core import Algorithm  # noqa: E402


@dataclass(frozen=True)
class Vanilla:
    discount: float = 0.98
    learning_rate: float = 3e-2


def vanilla(config, setup):
    optimizer = optax.adam(config.learning_rate)

    def update(learner, lanes, key):
        learner, batches = ac.prepare(setup, learner, lanes)

        def loss(params, batch):
            output = setup.policy.evaluate(params, batch.observation, ())
            estimate = ac.estimate(setup.policy, learner.params, batch, config.discount, 0.95)
            log_prob = setup.policy.distribution.log_prob(output.distribution, batch.action)
            return -(log_prob * estimate.advantage).mean() + ((output.value - estimate.value_target) ** 2).mean()

        gradient = batches.mean(lambda batch: jax.grad(loss)(learner.params, batch))
        step, state = optimizer.update(gradient, learner.optimizer)
        params = optax.apply_updates(learner.params, step)
        return ac.advance(setup, learner, lanes, params, state), {"gradient_norm": optax.tree.norm(gradient)}

    return Algorithm(lambda key: ac.new_learner(setup, key, optimizer.init), update)


algorithms.REGISTRY["vanilla"] = algorithms.Entry(Vanilla, vanilla, lambda config, lanes, rows: [])
run = train("CartPole-v1", algo="vanilla", settings={"steps": 40_960, "collect.steps": 64})
print(f"return {run.return_mean:.1f}, digest {run.digest}")
