"""A trained policy, as somebody uses it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import tree
from lockstep.address import Purpose, words
from lockstep.collect import Actor
from lockstep.core import Algorithm, Discrete, Learner, Spec
from lockstep.envs.make import commands, spec_for
from lockstep.errors import FileFault, UsageError
from lockstep.experiment import Experiment
from lockstep.run import checkpoint, directory
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.programs import Recipe, actor_of, assemble
from lockstep.runtime import own_settings

TILE = 8  # observations are acted on so many at a time: one shape, so one answer however many there are


def first_learner(algorithm: Algorithm, seed: int) -> Learner:
    with own_settings():
        key_data = jnp.asarray(words(seed, Purpose.INIT))
        return algorithm.init(jax.random.wrap_key_data(key_data, impl="threefry2x32"))


def learner_from(arrays: dict[str, np.ndarray], algorithm: Algorithm, path: Path) -> Learner:
    """The learner a checkpoint holds, if it is one of this algorithm and environment."""
    with own_settings():
        template = jax.eval_shape(algorithm.init, jax.random.key(0))
    try:
        return tree.from_paths(template, arrays)
    except ValueError as error:
        raise FileFault(f"checkpoint '{path}' does not belong to this run's configuration: {error}.") from error


class TrainedPolicy:
    """`act(observation)` gives the action to take in the environment: the policy's best guess, no noise."""

    def __init__(self, experiment: Experiment, spec: Spec, learner: Learner, actor: Actor) -> None:
        self.experiment, self.spec, self.learner, self._mode = experiment, spec, learner, actor.mode
        self._fit = commands(spec.action, experiment.env.action)

    def act(self, observation: Any) -> Any:
        """One observation -> one action, in the environment's own units."""
        array = np.asarray(observation)
        if array.shape != self.spec.observation.shape:
            raise UsageError(f"act takes one observation of shape {self.spec.observation.shape}, not {array.shape}.")
        command = self.act_many(array[None])[0]
        return int(command) if isinstance(self.spec.action, Discrete) else command

    def act_many(self, observations: np.ndarray) -> np.ndarray:
        """[N, ...] -> [N, ...], each row as if it were alone."""
        return self._fit(self.choose(observations))

    def choose(self, observations: np.ndarray) -> np.ndarray:
        """The policy's own actions [N, ...], before they are fitted to the environment."""
        chosen = []
        for start in range(0, len(observations), TILE):
            rows = np.asarray(observations[start : start + TILE], self.spec.observation.dtype)
            tile = np.zeros((TILE, *self.spec.observation.shape), self.spec.observation.dtype)
            tile[: len(rows)] = rows
            action = self._mode(self.learner.params, self.learner.observation, tile)
            chosen.append(np.asarray(action)[: len(rows)])
        return np.concatenate(chosen)


def find(run: Path, which: str) -> tuple[Path, Checkpoint]:
    """The checkpoint `newest`, `best`, or at a number of steps; one that is damaged is named."""
    path, saved, messages = checkpoint.newest(run)
    for message in messages:
        print(f"lockstep: {message}", file=sys.stderr)
    if which == "newest":
        return path, saved
    if which == "best":
        if saved.progress.best_steps is None:
            raise UsageError(f"'{run}' has no best checkpoint: it was not evaluated while it trained.")
        which = str(saved.progress.best_steps)
    known = {str(int(path.name.removeprefix("step_"))): path for path in checkpoint.listed(run)}
    if which not in known:
        raise UsageError(f"'{run}' has no checkpoint '{which}'. There is: newest, best, {', '.join(known)}.")
    return known[which], checkpoint.read(known[which])


def load(run: str | Path, which: str = "newest", trust: bool = False) -> TrainedPolicy:
    """The policy of a run, from its `newest` or `best` checkpoint or the one at a number of steps."""
    run = Path(run)
    config = directory.read_config(run, trust)
    path, saved = find(run, which)
    checkpoint.refuse_another_experiment(run, config, path, saved)
    experiment = config.experiment
    spec = spec_for(experiment.env)
    _, algorithm = assemble(experiment, spec)
    learner = learner_from(saved.learner, algorithm, path)
    return TrainedPolicy(experiment, spec, learner, actor_of(Recipe(experiment, spec)))
