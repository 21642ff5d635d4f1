"""An algorithm of one's own. On the command line: `lockstep train CartPole-v1 --algo own_algorithm:vanilla`."""

from dataclasses import dataclass

import jax
import optax

import lockstep
from lockstep.algorithms import Entry, actor_critic
from lockstep.core import Algorithm


@dataclass(frozen=True)
class Vanilla:
    discount: float = 0.98
    learning_rate: float = 3e-2


def make(config, setup):
    optimizer = optax.adam(config.learning_rate)

    def update(learner, lanes, key):
        learner, batches = actor_critic.prepare(setup, learner, lanes)

        def loss(params, batch):
            output = setup.policy.evaluate(params, batch.observation, ())
            estimate = actor_critic.estimate(setup.policy, learner.params, batch, config.discount, 0.95)
            log_prob = setup.policy.distribution.log_prob(output.distribution, batch.action)
            return -(log_prob * estimate.advantage).mean() + ((output.value - estimate.value_target) ** 2).mean()

        gradient = batches.mean(lambda batch: jax.grad(loss)(learner.params, batch))
        step, state = optimizer.update(gradient, learner.optimizer)
        params = optax.apply_updates(learner.params, step)
        return actor_critic.advance(setup, learner, lanes, params, state), {"gradient_norm": optax.tree.norm(gradient)}

    return Algorithm(lambda key: actor_critic.new_learner(setup, key, optimizer.init), update)


vanilla = Entry(Vanilla, make)

if __name__ == "__main__":
    run = lockstep.train("CartPole-v1", "own_algorithm:vanilla", settings={"steps": 40_960, "collect.steps": 64})
    print(f"return {run.return_mean:.1f}, digest {run.digest}")
