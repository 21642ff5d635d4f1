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
from lockstep.core import Algorithm, Learner, Metrics, Spec, Trajectory
from lockstep.envs.local import BrokenEpisode, LocalEnvs
from lockstep.errors import EnvironmentFault, FileFault, NumericFault, UsageError
from lockstep.experiment import Config, Experiment, algorithm_name, replace_experiment
from lockstep.parallel.lanes import LocalLanes
from lockstep.run import checkpoint, directory, machine
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.evaluate import evaluate
from lockstep.run.interrupt import Interrupt, Interrupted
from lockstep.run.policy import TrainedPolicy, assemble, first_learner, learner_from
from lockstep.run.progress import Progress
from lockstep.run.report import Events, MetricsFile, Row, Screen

SAVE_ATTEMPTS = 3  # checkpoints in a row that may fail before a run gives up


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
        return _run(path, config, envs, Start())


def resume(path: str | Path, steps: int | None = None, strict: bool = False) -> Run:
    """Continue a run from its newest valid checkpoint; `steps` gives it another budget."""
    path = Path(path)
    config = directory.read_config(path)
    if steps is not None:
        config = replace_experiment(config, steps=steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory.locked(path))
        found, saved, messages = checkpoint.newest(path)
        screen = Screen(0, Progress())
        for message in messages:
            screen.say(f"lockstep: {message}")
        progress = Progress.from_json(saved.progress)
        if steps is not None and progress.steps > steps:
            raise UsageError(f"--steps {steps}: the run is at {progress.steps} steps already.")
        changed = machine.differences(saved.machine, machine.describe(config.experiment.env))
        if changed and strict:
            raise FileFault(f"--strict: not the same machine as at the checkpoint: {', '.join(changed)}.")
        if changed:
            screen.say(f"lockstep: bits may differ from here on: {', '.join(changed)}.")
        checkpoint.set_aside(path)
        if steps is not None:
            directory.write_config(path, config)
        envs = stack.enter_context(_envs(config.experiment))
        return _run(path, config, envs, Start(progress, (found, saved), saved.exact and not changed))


def _envs(experiment: Experiment) -> LocalEnvs:
    return LocalEnvs(experiment.env, experiment.seed, range(experiment.lanes * experiment.envs_per_lane))


def _run(path: Path, config: Config, envs: LocalEnvs, start: Start) -> Run:
    loop = Loop(path, config, envs.spec, start)
    experiment = config.experiment
    with loop.reporting(), Interrupt() as interrupt, _episode_saved(path):
        collector = loop.collector(envs)
        learner, progress = loop.first(collector)
        digest = tree.digest(learner)
        gc.collect()
        gc.freeze()  # what is there by now stays: no need to look through all of JAX for garbage at every turn
        while progress.steps < experiment.steps and interrupt.number is None:
            began = time.perf_counter()
            trajectory, episodes = collector.collect(learner, words(experiment.seed, Purpose.ACT, progress.updates))
            collected = time.perf_counter()
            learner, metrics = loop.learn(learner, trajectory, words(experiment.seed, Purpose.LEARN, progress.updates))
            updated = time.perf_counter()
            digest = tree.digest(learner)
            progress = progress.after(experiment.batch, episodes, updated - began)
            times = {"time_collect": collected - began, "time_communicate": 0.0, "time_update": updated - collected}
            progress = loop.report(progress, learner, trajectory, metrics | times, digest)
            loop.save_when_due(progress, learner, collector)
        loop.save(progress, learner, collector, last=True)
    if interrupt.number is not None and progress.steps < experiment.steps:
        raise Interrupted(interrupt.number)
    return Run(path, progress.steps, progress.updates, progress.returns[0], progress.best, digest)


class Loop:
    """What stays the same while a run goes on."""

    def __init__(self, path: Path, config: Config, spec: Spec, start: Start) -> None:
        self._path, self._config, self._start = path, config, start
        experiment = config.experiment
        self._policy, self._algorithm = assemble(experiment, spec)
        self._spec = spec
        self._actor = make_actor(self._policy, experiment.normalize, experiment.collect.steps, experiment.envs_per_lane)
        self._update = compiled_update(self._algorithm)
        self._machine = machine.describe(experiment.env)
        self._failed_saves = 0
        self._saved_at = -1

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        start = self._start.progress
        self._file = MetricsFile(self._path, start.updates)
        self._events = Events(self._path, start.steps)
        experiment = self._config.experiment
        self._screen = Screen(experiment.steps, start)
        going = f"resuming at {start.steps:,} steps" if start.steps else "training"
        algorithm = algorithm_name(experiment.algo)
        self._screen.say(f"{going}: {experiment.env.id} with {algorithm}, seed {experiment.seed}, in {self._path}")
        try:
            yield
        finally:
            for sink in (self._screen, self._events, self._file):
                sink.close()

    def collector(self, envs: LocalEnvs) -> Collector:
        experiment = self._config.experiment
        discount = experiment.algo.discount  # type: ignore[attr-defined]
        return Collector(envs, self._actor, range(experiment.lanes), experiment.collect.steps, discount)

    def first(self, collector: Collector) -> tuple[Learner, Progress]:
        """The learner and the environments as the run starts: new, or as the checkpoint has them."""
        if self._start.saved is None:
            collector.start()
            learner = first_learner(self._algorithm, self._config.experiment.seed)
            self.save(self._start.progress, learner, collector)
            return learner, self._start.progress
        path, saved = self._start.saved
        strangers = collector.restore(saved.episodes)
        if strangers:
            self._start = self._start._replace(exact=False)
            self._screen.say(
                f"lockstep: environment {strangers[0]} did not repeat itself when its running episode was replayed:"
                " it is not a function of its seed and actions. The run goes on, but not with the bits of one that"
                " was never stopped."
            )
        return learner_from(saved.learner, self._algorithm, path), self._start.progress

    def learn(self, learner: Learner, trajectory: Trajectory, key_data: np.ndarray) -> tuple[Learner, dict[str, float]]:
        """One update; refused, with the data kept, where it leads to something that is not a number."""
        new, metrics = self._update(learner, trajectory, key_data)
        broken = [name for name, leaf in tree.paths(new).items() if not np.isfinite(np.asarray(leaf)).all()]
        if broken:
            folder = self._path / "diverged"
            folder.mkdir(exist_ok=True)
            arrays = {name: np.asarray(leaf) for name, leaf in tree.paths(trajectory).items()}
            directory.write_file(folder / "trajectory.safetensors", save(arrays))
            raise NumericFault(
                f"update {int(learner.updates) + 1} made '{broken[0]}' infinite or not a number, and was not applied."
                f" Its data is in '{folder}', the run's checkpoints are as they were. A smaller learning rate may help."
            )
        return new, {name: float(value) for name, value in metrics.items()}

    def report(
        self, progress: Progress, learner: Learner, trajectory: Trajectory, metrics: dict[str, float], digest: str
    ) -> Progress:
        """Evaluate if it is time, then tell everybody."""
        watch, experiment = self._config.watch, self._config.experiment
        due = progress.crossed(watch.eval_every, experiment.batch)
        began = time.perf_counter()
        score = None
        if due or (watch.eval_every and progress.steps >= experiment.steps):
            policy = TrainedPolicy(experiment, self._spec, learner, self._actor)
            score = evaluate(policy, watch.eval_episodes, experiment.seed).mean
            self._screen.say(f"{progress.steps:>10,} steps  evaluation {score:.2f} over {watch.eval_episodes} episodes")
        evaluated = time.perf_counter() - began
        rate = experiment.batch / (metrics["time_collect"] + metrics["time_update"])
        mean, std, length = progress.returns
        row: Row = {
            "update": progress.updates,
            "steps": progress.steps,
            "seconds": progress.seconds,
            "steps_per_second": rate,
            "episodes": progress.episodes,
            "return_mean": mean,
            "return_std": std,
            "length_mean": length,
            "eval_return": float("nan") if score is None else score,
            "time_evaluate": evaluated,
            "digest": digest,
            **metrics,
        }
        try:
            self._file.write(row)
            self._events.scalars(row)
            if score is not None:
                self._events.histograms(progress.steps, learner, trajectory, progress)
        except OSError as error:
            raise FileFault(
                f"update {progress.updates} could not be reported in '{self._path}': {error.strerror or error}."
                " The run's checkpoints are as they were; resume it when there is room."
            ) from error
        self._screen.show(progress, rate)
        return self._with_best(progress, score)

    def _with_best(self, progress: Progress, score: float | None) -> Progress:
        if score is None or (progress.best is not None and score <= progress.best):
            return progress
        self._best_at = progress.steps
        return dataclasses.replace(progress, best=score)

    _best_at = -1

    def save_when_due(self, progress: Progress, learner: Learner, collector: Collector) -> None:
        best = self._best_at == progress.steps
        if best or progress.crossed(self._config.watch.checkpoint_every, self._config.experiment.batch):
            self.save(progress, learner, collector)
        if best and progress.best is not None and self._saved_at == progress.steps:
            checkpoint.mark_best(self._path, progress.steps, progress.best)

    def save(self, progress: Progress, learner: Learner, collector: Collector, last: bool = False) -> None:
        """Write a checkpoint. A full disk is survived: the next attempt may do better, the last one must."""
        if self._saved_at == progress.steps:
            return
        arrays = {name: np.asarray(leaf) for name, leaf in tree.paths(learner).items()}
        state = Checkpoint(arrays, collector.open_episodes(), progress.to_json(), self._machine, self._start.exact)
        try:
            checkpoint.write(self._path, state, self._config.watch.keep)
        except OSError as error:
            self._failed_saves += 1
            message = f"the checkpoint at {progress.steps} steps could not be written: {error.strerror or error}."
            if last or self._failed_saves >= SAVE_ATTEMPTS or progress.steps == 0:
                raise FileFault(f"{message} The checkpoints before it are as they were.") from error
            self._screen.say(f"lockstep: {message} Training goes on; it is tried again.")
            return
        self._failed_saves, self._saved_at = 0, progress.steps


def compiled_update(algorithm: Algorithm) -> Callable[[Learner, Trajectory, Any], tuple[Learner, Metrics]]:
    """One update of all lanes in one compiled call."""

    def update(learner: Learner, trajectory: Trajectory, key_data: Any) -> tuple[Learner, Metrics]:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return algorithm.update(learner, LocalLanes(trajectory), key)

    return jax.jit(update)


@contextlib.contextmanager
def _episode_saved(path: Path) -> Iterator[None]:
    """Keep the actions of an episode in which the environment broke its contract, and say how to replay it."""
    try:
        yield
    except BrokenEpisode as broken:
        file = path / "faults" / f"env{broken.number}-seed{broken.seed}.json"
        file.parent.mkdir(exist_ok=True)
        record = {
            "env": dataclasses.asdict(broken.env),
            "seed": broken.seed,
            "actions": broken.actions.tolist(),
        }
        directory.write_file(file, json.dumps(record).encode())
        after = f", after action {broken.actions[-1]}" if len(broken.actions) else ""
        raise EnvironmentFault(
            f"environment {broken.number} ('{broken.env.id}') broke its contract: {broken.why},"
            f" at step {len(broken.actions)} of the episode with seed {broken.seed}{after}.\n"
            f"Replay it with: lockstep check {broken.env.id} --replay {file}\n"
            f"The checkpoints in '{path}' are as they were."
        ) from broken
