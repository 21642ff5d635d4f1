"""A trained policy, as somebody uses it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import tree
from lockstep.address import Purpose, words
from lockstep.collect import Actor
from lockstep.core import Algorithm, Discrete, Learner, Spec
from lockstep.envs.make import commands, is_finite, spec_for
from lockstep.errors import FileFault, NumericFault, UsageError
from lockstep.experiment import Experiment, algorithm_name
from lockstep.run import checkpoint, directory
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.pickled import unpickled
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
    """`act(observation)` gives the action to take in the environment: the policy's best guess, no noise.

    It can be pickled, and acts alike wherever it is loaded: it travels with its weights, not with its run.
    """

    def __init__(
        self, experiment: Experiment, spec: Spec, learner: Learner, actor: Actor, run: Path | None = None
    ) -> None:
        self.experiment, self.spec, self.learner, self.run, self._mode = experiment, spec, learner, run, actor.mode
        self._fit = commands(spec.action, experiment.env.action)

    def __repr__(self) -> str:
        what = f"{algorithm_name(self.experiment.algo)} on {self.experiment.env.id}, {int(self.learner.steps):,} steps"
        return f"<TrainedPolicy: {what}{'' if self.run is None else f', {self.run}'}>"

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        learner = jax.tree.map(np.asarray, self.learner)
        return unpickled, (pickle.dumps((self.experiment, self.spec, learner, self.run)),)

    def act(self, observation: Any) -> Any:
        """One observation -> one action in the environment's own units; a batch [N, ...] -> N actions."""
        array, shape = self._checked(observation), self.spec.observation.shape
        if array.shape != shape:
            return self.act_many(array)
        command = self.act_many(array[None])[0]
        return int(command) if isinstance(self.spec.action, Discrete) else command

    def _checked(self, observation: Any) -> np.ndarray:
        """An observation or a batch of them, as an array of numbers; a UsageError for anything else."""
        shape = self.spec.observation.shape
        wanted = f"act takes one observation of shape {shape}, or a batch of shape {('N', *shape)}".replace("'", "")
        try:
            array = np.asarray(observation)
        except (ValueError, TypeError) as error:  # such as the (observation, info) that reset gives
            raise UsageError(f"{wanted}, not a {type(observation).__name__} of other things.") from error
        if array.dtype.kind not in "fiub":
            raise UsageError(f"{wanted}, not a {type(observation).__name__} of {array.dtype}.")
        if array.shape not in (shape, array.shape[:1] + shape):
            raise UsageError(f"{wanted}, not {array.shape}.")
        return array

    def act_many(self, observations: np.ndarray) -> np.ndarray:
        """[N, ...] -> [N, ...], each row as if it were alone."""
        if not is_finite(observations):
            row, *where = np.argwhere(~np.isfinite(observations))[0].tolist()
            wrong = observations[(row, *where)]
            raise UsageError(f"act takes numbers, but observation {row} is {wrong} at index {where}.")
        return self._fit(self.choose(observations))

    def choose(self, observations: np.ndarray) -> np.ndarray:
        """The policy's own actions [N, ...], before they are fitted to the environment."""
        chosen = []
        for start in range(0, max(len(observations), 1), TILE):
            rows = np.asarray(observations[start : start + TILE], self.spec.observation.dtype)
            tile = np.zeros((TILE, *self.spec.observation.shape), self.spec.observation.dtype)
            tile[: len(rows)] = rows
            action = np.asarray(self._mode(self.learner.params, self.learner.observation, tile))[: len(rows)]
            if not is_finite(action):
                raise NumericFault(f"the policy's actions are not numbers: {action}. Its weights may not be, either.")
            chosen.append(action)
        return np.concatenate(chosen)


def find(run: Path, which: str | int) -> tuple[Path, Checkpoint]:
    """The checkpoint `newest`, `best`, or at a number of steps; one that is damaged is named."""
    which = str(which)
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


def load(run: str | Path, which: str | int = "newest", trust: bool = False) -> TrainedPolicy:
    """The policy of a run, from its `newest` or `best` checkpoint or the one at a number of steps."""
    run = Path(run)
    config = directory.read_config(run, trust)
    path, saved = find(run, which)
    checkpoint.refuse_another_experiment(run, config, path, saved)
    experiment = config.experiment
    spec = spec_for(experiment.env)
    _, algorithm = assemble(experiment, spec)
    learner = learner_from(saved.learner, algorithm, path)
    return TrainedPolicy(experiment, spec, learner, actor_of(Recipe(experiment, spec)), run)


def revive(experiment: Experiment, spec: Spec, learner: Learner, run: Path | None) -> TrainedPolicy:
    """The policy that was pickled."""
    return TrainedPolicy(experiment, spec, learner, actor_of(Recipe(experiment, spec)), run)
