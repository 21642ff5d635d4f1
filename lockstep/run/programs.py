"""The programs of an experiment. They are kept: another seed or budget needs no others."""

from __future__ import annotations

import dataclasses
import pickle
from functools import lru_cache
from typing import Any

import jax

from lockstep.algorithms import entry
from lockstep.algorithms.actor_critic import Setup
from lockstep.collect import Actor, make_actor
from lockstep.core import Algorithm, Array, Learner, Metrics, Policy, Spec, Trajectory
from lockstep.experiment import Experiment, algorithm_name
from lockstep.networks import mlp_policy
from lockstep.parallel.lanes import Exchange, LaneBlock
from lockstep.runtime import own_settings

KEPT = 8  # as many experiments' programs stay in memory


def assemble(experiment: Experiment, spec: Spec, budget: Array | None = None) -> tuple[Policy, Algorithm]:
    """The experiment's policy and algorithm, for environments of this spec.

    Inside a compiled program the budget is one of its arguments: another number of steps is no other program.
    """
    with own_settings():
        policy = mlp_policy(experiment.policy, spec)
        steps = experiment.steps if budget is None else budget
        setup = Setup(policy, spec, experiment.normalize, steps, lanes=experiment.lanes, rows=experiment.rows)
        setup = setup._replace(padded=experiment.collect.episodes > 0)
        return policy, entry(algorithm_name(experiment.algo)).make(experiment.algo, setup)


class Recipe:
    """What decides an experiment's programs. Equal ones make the same."""

    def __init__(self, experiment: Experiment, spec: Spec) -> None:
        self.experiment, self.spec = dataclasses.replace(experiment, seed=0, steps=1), spec
        make = entry(algorithm_name(experiment.algo)).make
        self._key = (self.experiment.digest, pickle.dumps(spec), make)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._key == other._key


@lru_cache(KEPT)
def actor_of(recipe: Recipe) -> Actor:
    experiment = recipe.experiment
    policy, _ = assemble(experiment, recipe.spec)
    return make_actor(policy, experiment.normalize, experiment.length, experiment.envs_per_lane)


@lru_cache(KEPT)
def update_of(recipe: Recipe, exchange: Exchange) -> jax.stages.Wrapped:
    """The whole update, for (learner, trajectory, key data, budget)."""

    def update(learner: Learner, trajectory: Trajectory, key_data: Any, budget: Any) -> tuple[Learner, Metrics]:
        _, algorithm = assemble(recipe.experiment, recipe.spec, budget)
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return algorithm.update(learner, LaneBlock(trajectory, exchange), key)

    return jax.jit(update)
