"""THE loop: every lane collects, the algorithm updates, the run is reported and saved."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save

from lockstep import tree
from lockstep.address import Purpose, words
from lockstep.collect import Collector, make_actor
from lockstep.core import Algorithm, Learner, Metrics, Trajectory
from lockstep.envs.local import BrokenEpisode, LocalEnvs
from lockstep.errors import EnvironmentFault, FileFault, NumericFault, UsageError
from lockstep.experiment import Config, Experiment, replace_experiment
from lockstep.parallel.lanes import LocalLanes
from lockstep.run import checkpoint, directory, machine
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.evaluate import evaluate
from lockstep.run.interrupt import Interrupt, Interrupted
from lockstep.run.policy import TrainedPolicy, assemble, first_learner, learner_from
from lockstep.run.progress import Progress
from lockstep.run.report import Reporter
from lockstep.run.saver import Saver


class Run(NamedTuple):
    """A run that ended."""

    path: Path
    steps: int
    updates: int
    return_mean: float  # of the newest episodes
    eval_return: float | None  # the best evaluation
    digest: str


class Start(NamedTuple):
    """Where a run starts from: nothing, or a checkpoint at a path."""

    progress: Progress = Progress()
    saved: tuple[Path, Checkpoint] | None = None
    exact: bool = True  # whether the promise of equal bits holds so far


def train(config: Config, logdir: str | Path, name: str) -> Run:
    """A new run of `config` in `logdir/name`."""
    directory.check_writable(Path(logdir))
    with contextlib.ExitStack() as stack:
        envs = stack.enter_context(_envs(config.experiment))
        path = directory.create(Path(logdir), name, config)
        stack.enter_context(directory.locked(path))
        return _run(path, config, envs, Start(), machine.describe(config.experiment.env))


def resume(path: str | Path, steps: int | None = None, strict: bool = False) -> Run:
    """Continue a run from its newest valid checkpoint; `steps` gives it another budget."""
    path = Path(path)
    config = directory.read_config(path)
    if steps is not None:
        config = replace_experiment(config, steps=steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory.locked(path))
        now = machine.describe(config.experiment.env)
        start, messages = _start(path, now)
        if steps is not None and start.progress.steps > steps:
            raise UsageError(f"--steps {steps}: the run is at {start.progress.steps} steps already.")
        if strict and not start.exact:
            raise FileFault(f"--strict: {' '.join(messages)}")
        for message in messages:
            Reporter.warn(message)
        checkpoint.set_aside(path)
        if steps is not None:
            directory.write_config(path, config)
        envs = stack.enter_context(_envs(config.experiment))
        return _run(path, config, envs, start, now)


def _start(path: Path, now: dict[str, Any]) -> tuple[Start, list[str]]:
    """The newest valid checkpoint, and what is to be said of it. A run killed before its first starts anew."""
    if not checkpoint.listed(path):
        return Start(), []
    found, saved, messages = checkpoint.newest(path)
    changed = machine.differences(saved.machine, now)
    if changed:
        messages.append(f"bits may differ from here on: {', '.join(changed)}.")
    return Start(Progress.from_json(saved.progress), (found, saved), saved.exact and not changed), messages


def _envs(experiment: Experiment) -> LocalEnvs:
    return LocalEnvs(experiment.env, experiment.seed, range(experiment.lanes * experiment.envs_per_lane))


def _run(path: Path, config: Config, envs: LocalEnvs, start: Start, here: dict[str, Any]) -> Run:
    experiment, watch = config.experiment, config.watch
    policy, algorithm = assemble(experiment, envs.spec)
    actor = make_actor(policy, experiment.normalize, experiment.collect.steps, experiment.envs_per_lane)
    update = compiled_update(algorithm)
    discount = experiment.algo.discount  # type: ignore[attr-defined]
    collector = Collector(envs, actor, range(experiment.lanes), experiment.collect.steps, discount)
    with Reporter(path, experiment, start.progress) as reporter, Interrupt() as interrupt, _episode_saved(path):
        learner, exact = _first(algorithm, experiment, collector, start)
        saver = Saver(path, watch, here, exact, reporter.say)
        progress, digest = start.progress, tree.digest(learner)
        if start.saved is None:
            saver.save(progress, learner, collector)
        gc.collect()
        gc.freeze()  # what is there by now stays: no need to look through all of JAX for garbage at every turn
        began = time.perf_counter()
        while progress.steps < experiment.steps and interrupt.number is None:
            started = time.perf_counter()
            trajectory, episodes = collector.collect(learner, words(experiment.seed, Purpose.ACT, progress.updates))
            collected = time.perf_counter()
            key_data = words(experiment.seed, Purpose.LEARN, progress.updates)
            learner, metrics = _learn(update, learner, trajectory, key_data, path)
            updated = time.perf_counter()
            digest = tree.digest(learner)
            seconds = start.progress.seconds + time.perf_counter() - began
            progress = progress.after(experiment.batch, episodes, seconds)
            score = None
            if progress.evaluation_due(watch.eval_every, experiment.batch, experiment.steps):
                trained = TrainedPolicy(experiment, envs.spec, learner, actor)
                score = evaluate(trained, watch.eval_episodes, experiment.seed).mean
            metrics |= {
                "time_collect": collected - started,
                "time_communicate": 0.0,
                "time_update": updated - collected,
                "time_evaluate": time.perf_counter() - updated,
            }
            progress, is_best = progress.scored(score)
            reporter.report(progress, metrics, digest, score, learner, trajectory)
            saver.save_when_due(progress, learner, collector, experiment.batch, is_best)
        saver.save(progress, learner, collector, last=True)
    if interrupt.number is not None and progress.steps < experiment.steps:
        raise Interrupted(interrupt.number)
    return Run(path, progress.steps, progress.updates, progress.returns[0], progress.best, digest)


def _first(algorithm: Algorithm, experiment: Experiment, collector: Collector, start: Start) -> tuple[Learner, bool]:
    """The learner as the run starts, with the environments brought there too; whether bits are still promised."""
    if start.saved is None:
        collector.start()
        return first_learner(algorithm, experiment.seed), start.exact
    path, saved = start.saved
    strangers = collector.restore(saved.episodes)
    if strangers:
        Reporter.warn(
            f"environment {strangers[0]} did not repeat itself when its running episode was replayed: it is not a"
            " function of its seed and actions. The run goes on, but not with the bits of one that was never stopped."
        )
    return learner_from(saved.learner, algorithm, path), start.exact and not strangers


Update = Callable[[Learner, Trajectory, Any], tuple[Learner, Metrics]]


def compiled_update(algorithm: Algorithm) -> Update:
    """One update of all lanes in one compiled call."""

    def update(learner: Learner, trajectory: Trajectory, key_data: Any) -> tuple[Learner, Metrics]:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return algorithm.update(learner, LocalLanes(trajectory), key)

    return jax.jit(update)


def _learn(
    update: Update, learner: Learner, trajectory: Trajectory, key_data: np.ndarray, path: Path
) -> tuple[Learner, dict[str, float]]:
    """One update; refused, with the data kept, where it leads to something that is not a number."""
    new, metrics = update(learner, trajectory, key_data)
    broken = [name for name, leaf in tree.paths(new).items() if not np.isfinite(np.asarray(leaf)).all()]
    if broken:
        folder = path / "diverged"
        folder.mkdir(exist_ok=True)
        arrays = {name: np.asarray(leaf) for name, leaf in tree.paths(trajectory).items()}
        directory.write_file(folder / "trajectory.safetensors", save(arrays))
        raise NumericFault(
            f"update {int(learner.updates) + 1} made '{broken[0]}' infinite or not a number, and was not applied."
            f" Its data is in '{folder}', the run's checkpoints are as they were. A smaller learning rate may help."
        )
    return new, {name: float(value) for name, value in metrics.items()}


@contextlib.contextmanager
def _episode_saved(path: Path) -> Iterator[None]:
    """Keep the actions of an episode in which the environment broke its contract, and say how to replay it."""
    try:
        yield
    except BrokenEpisode as broken:
        file = path / "faults" / f"env{broken.number}-seed{broken.seed}.json"
        file.parent.mkdir(exist_ok=True)
        record = {"env": dataclasses.asdict(broken.env), "seed": broken.seed, "actions": broken.actions.tolist()}
        directory.write_file(file, json.dumps(record).encode())
        after = f", after action {broken.actions[-1]}" if len(broken.actions) else ""
        raise EnvironmentFault(
            f"environment {broken.number} ('{broken.env.id}') broke its contract: {broken.why},"
            f" at step {len(broken.actions)} of the episode with seed {broken.seed}{after}.\n"
            f"Replay it with: lockstep check {broken.env.id} --replay {file}\n"
            f"The checkpoints in '{path}' are as they were."
        ) from broken
