"""THE loop: every lane collects, the algorithm updates, the run is reported and saved."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save

from lockstep import foreign, names, runtime, tree
from lockstep.address import Purpose, words
from lockstep.algorithms import entry, follows_budget
from lockstep.collect import Collector, Episode
from lockstep.core import Algorithm, Learner, Metrics, Spec, Trajectory
from lockstep.envs.episodes import BrokenEpisode, Envs
from lockstep.envs.local import LocalEnvs
from lockstep.envs.make import is_finite, spec_for
from lockstep.envs.workers import WorkerEnvs
from lockstep.errors import EnvironmentFault, FileFault, NumericFault, UsageError
from lockstep.experiment import (
    Config,
    Experiment,
    Mode,
    algorithm_name,
    checked,
    from_dict,
    replace_experiment,
    to_dict,
    to_toml,
)
from lockstep.parallel.comm import Comm, Solo
from lockstep.parallel.lanes import Exchange, alone, exchange_over
from lockstep.run import checkpoint, directory, machine
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.evaluate import evaluate
from lockstep.run.interrupt import Interrupt, Interrupted
from lockstep.run.machine import Machine
from lockstep.run.metrics import keep_beside, read_metrics
from lockstep.run.policy import TrainedPolicy, first_learner, learner_from
from lockstep.run.programs import Recipe, actor_of, assemble, update_of
from lockstep.run.progress import Progress
from lockstep.run.report import Observer, Reporter, Silent, Update
from lockstep.run.saver import Saver
from lockstep.run.timeline import Timeline, Untimed

SOLO = Solo()

Observe = Callable[[Path, Experiment, Progress, bool], Observer]  # run directory, experiment, start, whether resumed


class Run(NamedTuple):
    """A run that ended."""

    path: Path
    steps: int
    updates: int
    return_mean: float  # of the newest episodes
    eval_return: float | None  # the best evaluation
    digest: str

    def __fspath__(self) -> str:
        """A run can be given wherever its path can."""
        return str(self.path)


class Start(NamedTuple):
    """Where a run starts from: nothing, or a checkpoint at a path."""

    progress: Progress = Progress()
    saved: tuple[Path, Checkpoint] | None = None
    resumed: bool = False
    exact: bool = True  # whether the promise of equal bits holds so far
    strict: bool = False  # refuse to go on where it doesn't
    end: int | None = None  # steps to end at, where that is before the budget


def train(config: Config, logdir: str | Path, name: str, comm: Comm = SOLO, strict: bool = False) -> Run:
    """A new run of `config` in `logdir/name`; `strict` refuses where its bits can't be promised."""
    directory.check_name(name)
    logdir = Path(logdir).absolute()  # an environment may change the working directory
    _same_settings(config, comm)
    comm.on_root(lambda: directory.check_writable(logdir))
    with contextlib.ExitStack() as stack:
        stack.enter_context(comm.watched(config.layout.watchdog_s))
        envs = stack.enter_context(_envs(config, comm))
        here = machine.describe(config.experiment.env)
        exact = _is_exact(here, comm, strict)
        _same_machines(here.stored, comm, strict)
        path = comm.on_root(lambda: directory.create(logdir, name, config))
        comm.on_root(lambda: stack.enter_context(directory.locked(path)))
        return _run(path, config, envs, Start(exact=exact, strict=strict), here, comm, _reporter(comm))


def resume(
    path: str | Path,
    steps: int | None = None,
    strict: bool = False,
    mode: Mode = "gather",
    workers: int = 0,
    comm: Comm = SOLO,
    trust: bool = False,
) -> Run:
    """Continue a run from its newest valid checkpoint; `steps` gives it another budget."""
    path = Path(path).absolute()
    for name in comm.on_root(lambda: directory.modules(path, trust)):
        names.load(name)
    config = comm.on_root(lambda: directory.read_config(path))
    if steps is not None:
        config = replace_experiment(config, steps=steps)
    layout = dataclasses.replace(config.layout, nprocs=comm.size, mode=mode, workers=workers)
    config = checked(from_dict(to_dict(dataclasses.replace(config, layout=layout))))  # each value, as if it were typed
    steps = None if steps is None else config.experiment.steps
    _same_settings(config, comm)
    with contextlib.ExitStack() as stack:
        stack.enter_context(comm.watched(config.layout.watchdog_s))
        comm.on_root(lambda: stack.enter_context(directory.locked(path)))
        now = machine.describe(config.experiment.env)
        exact = _is_exact(now, comm, strict)
        _same_machines(now.stored, comm, strict)
        start = comm.on_root(lambda: _start(path, config, now.stored, steps, strict))
        start = start._replace(exact=start.exact and exact)
        envs = stack.enter_context(_envs(config, comm))
        return _run(path, config, envs, start, now, comm, _reporter(comm))


def rerun(path: Path, config: Config, start: Start, observe: Observe, comm: Comm) -> None:
    """The loop once more, from `start` to its end, for another observer. `path` is a scratch directory."""
    with _envs(config, comm) as envs:
        _run(path, config, envs, start, machine.describe(config.experiment.env), comm, observe)


def _same_settings(config: Config, comm: Comm) -> None:
    """Every rank must have been given the same."""
    told = comm.share(to_toml(config))
    if different := [rank for rank, theirs in enumerate(told) if theirs != told[0]]:
        lines = zip(told[0].splitlines(), told[different[0]].splitlines(), strict=False)
        here, there = next(((a, b) for a, b in lines if a != b), ("fewer settings", "more"))
        raise UsageError(f"rank {different[0]} was started with other settings than rank 0: {there}, not {here}.")


def _is_exact(here: Machine, comm: Comm, strict: bool) -> bool:
    """Whether every rank's process and environment let equal bits be promised. Why they don't is told, or refused."""
    everyones = comm.share((runtime.doubts(), here.doubt))
    process = next((doubts[0] for doubts, _ in everyones if doubts), "")
    environment = next((doubt for _, doubt in everyones if doubt), "")
    for doubt, fault in ((process, UsageError), (environment, EnvironmentFault)):
        if doubt and strict:
            raise fault(f"--strict: {doubt}")
        if doubt and comm.rank == 0:
            Reporter.warn(doubt)
    return not (process or environment)


def _same_machines(mine: dict[str, Any], comm: Comm, strict: bool) -> None:
    """Refuse ranks with other versions; where only the arithmetic differs, say what that means."""
    refused, doubtful = machine.compared(comm.share(mine))
    if refused or (strict and doubtful):
        raise UsageError(" ".join([*refused, *doubtful]))
    if comm.rank == 0:
        for message in doubtful:
            Reporter.warn(f"{message} Ranks may compute other bits than one process.")


def _start(path: Path, config: Config, now: dict[str, Any], steps: int | None, strict: bool) -> Start:
    """The newest valid checkpoint, with the run directory put in order. A run killed before its first starts anew."""
    start = Start(resumed=True, strict=strict)
    notes: list[str] = []
    doubts: list[str] = []
    if not checkpoint.listed(path) and read_metrics(path).rows:
        keep_beside(path, Reporter.warn)
    if checkpoint.listed(path):
        found, saved, notes = checkpoint.newest(path)
        if saved.budget is None:
            saved = saved._replace(budget=directory.read_config(path).experiment.steps)
        checkpoint.refuse_another_experiment(path, config, found, saved)
        doubts = _doubts(saved, machine.differences(saved.machine, now), config.experiment)
        start = start._replace(progress=saved.progress, saved=(found, saved), exact=not doubts)
    if steps is not None and start.progress.steps > steps:
        raise UsageError(f"--steps {steps}: the run is at {start.progress.steps} steps already.")
    if strict and doubts:
        raise FileFault(f"--strict: {' '.join(doubts)}")
    for message in [*notes, *doubts]:
        Reporter.warn(message)
    checkpoint.set_aside(path)
    directory.write_config(path, config)
    return start


def had_another_schedule(saved: Checkpoint, experiment: Experiment) -> bool:
    """Whether updates were made before this checkpoint by a schedule that followed another budget."""
    followed = saved.progress.updates > 0 and follows_budget(experiment.algo)
    return followed and saved.budget not in (None, experiment.steps)


def _doubts(saved: Checkpoint, changed: list[str], experiment: Experiment) -> list[str]:
    """Why the bits of a run that was never stopped are not promised, if they aren't."""
    doubts = [] if saved.exact else ["the run has been continued before where bits may differ."]
    if changed:
        doubts.append(f"bits may differ from here on: {', '.join(changed)}.")
    if had_another_schedule(saved, experiment):
        doubts.append("another budget is another learning-rate schedule: not the run that config.toml alone gives.")
    return doubts


def _lanes_of(experiment: Experiment, comm: Comm) -> range:
    """The block of lanes that this rank owns."""
    count = experiment.lanes // comm.size
    return range(comm.rank * count, (comm.rank + 1) * count)


def _envs(config: Config, comm: Comm) -> Envs:
    experiment, layout = config.experiment, config.layout
    machine.check_memory(experiment, spec_for(experiment.env))
    if comm.rank == 0:
        count = experiment.lanes * experiment.envs_per_lane
        print(f"starting {count:,} environment{'s' * (count > 1)}: {experiment.env.id}", file=sys.stderr, flush=True)
    lanes, each = _lanes_of(experiment, comm), experiment.envs_per_lane
    numbers = range(lanes.start * each, lanes.stop * each)
    if layout.workers == 0:
        threads = layout.threads or (len(os.sched_getaffinity(0)) if comm.size == 1 else 1)
        return LocalEnvs(experiment.env, experiment.seed, numbers, threads=threads)

    def warn(message: str) -> None:
        """Every rank is heard here, also those that are otherwise silent."""
        who = f"rank {comm.rank}: " if comm.size > 1 else ""
        print(f"lockstep: {who}{message}", file=sys.__stderr__, flush=True)

    return WorkerEnvs(experiment.env, experiment.seed, numbers, layout.workers, layout.worker_timeout_s, warn=warn)


def _reporter(comm: Comm) -> Observe:
    return Reporter if comm.rank == 0 else Silent


def _run(path: Path, config: Config, envs: Envs, start: Start, here: Machine, comm: Comm, observe: Observe) -> Run:
    experiment, watch = config.experiment, config.watch
    timeline = Timeline() if watch.trace else Untimed()
    comm = timeline.over(comm)
    _, algorithm = assemble(experiment, envs.spec)
    actor = actor_of(Recipe(experiment, envs.spec))
    learn = timeline.around("update", LEARN[config.layout.mode](experiment, envs.spec, comm))
    discount = experiment.algo.discount  # type: ignore[attr-defined]
    lanes, whole = _lanes_of(experiment, comm), experiment.collect.episodes
    collector = Collector(envs, actor, lanes, experiment.length, discount, whole, comm.beat)
    collect, score_of = timeline.around("collect", collector.collect), timeline.around("evaluate", _score)
    end = experiment.steps if start.end is None else start.end
    with (
        _garbage_frozen(),
        observe(path, experiment, start.progress, start.resumed) as reporter,
        Interrupt() as interrupt,
        _episode_saved(path),
    ):
        comm.beat("starting the environments")
        learner, exact = _first(algorithm, experiment, collector, start, comm)
        saver = Saver(path, config, here.stored, exact, reporter.say, comm)
        if not start.resumed:
            for note in here.notes:
                reporter.say(note)
            _name_the_idle(experiment, learner, reporter.say)
        report, save = timeline.around("report", reporter.report), timeline.around("save", saver.save_when_due)
        progress, digest, stop = start.progress, tree.digest(learner), _asked_to_stop(comm.share(interrupt.number))
        if start.saved is None:
            saver.save(progress, learner, collector)
        if progress.steps < end:
            reporter.say(f"compiling update {progress.updates + 1}, or reading the program that an earlier run kept")
        began = time.perf_counter()
        while progress.steps < end and stop is None:
            comm.beat(f"collecting for update {progress.updates + 1}")
            started, waited = time.perf_counter(), comm.seconds
            trajectory, mine = collect(learner, words(experiment.seed, Purpose.ACT, progress.updates))
            comm.beat(f"making update {progress.updates + 1}")
            collected = time.perf_counter()
            key_data = words(experiment.seed, Purpose.LEARN, progress.updates)
            learner, metrics = learn(learner, trajectory, key_data)
            updated, talked = time.perf_counter(), comm.seconds - waited
            arrays = {name: np.asarray(leaf) for name, leaf in tree.paths(learner).items()}
            digest = tree.digest_of_paths(arrays)
            episodes, made, stop = _agree(comm, mine, _steps_in(trajectory), learner, digest, interrupt.number)
            _refuse_what_is_not_a_number(arrays, progress.updates + 1, trajectory, path, comm)
            seconds = start.progress.seconds + time.perf_counter() - began
            progress = progress.after(made, episodes, seconds)
            score = None
            if progress.evaluation_due(watch.eval_every, made, experiment.steps):
                comm.beat(f"evaluating after update {progress.updates}")
                trained = TrainedPolicy(experiment, envs.spec, learner, actor)
                score = comm.on_root(partial(score_of, trained, watch.eval_episodes, comm.beat))
            times = {
                "time_collect": collected - started,
                "time_communicate": talked,
                "time_update": updated - collected - talked,
                "time_evaluate": time.perf_counter() - updated,
            }
            progress, is_best = progress.scored(score)
            report(Update(progress, made, metrics | times, digest, score, learner, trajectory))
            save(progress, learner, collector, made, is_best)
        saver.save(progress, learner, collector, last=True)
        timeline.write(path, comm)
    if stop is not None and progress.steps < end:
        raise Interrupted(stop, path)
    return Run(path, progress.steps, progress.updates, progress.returns[0], progress.best, digest)


def _name_the_idle(experiment: Experiment, learner: Learner, say: Callable[[str], None]) -> None:
    """Say once which parameters no gradient will ever reach: they count as zeros in every mean."""
    scope = entry(algorithm_name(experiment.algo)).idle(experiment.algo)
    idle = [name for name in tree.paths(learner.params) if scope and name.startswith(f"{scope}/")]
    if idle:
        say(f"no gradient reaches these parameters, which stay as they are: {', '.join(idle)}")


def _score(policy: TrainedPolicy, episodes: int, beat: Callable[[], None]) -> float:
    return evaluate(policy, episodes, policy.experiment.seed, beat).mean


def _steps_in(trajectory: Trajectory) -> int:
    """The environment steps that were made for it: padding is none."""
    return int(np.size(trajectory.reward) if isinstance(trajectory.real, tuple) else np.sum(trajectory.real))


def _agree(
    comm: Comm, episodes: list[Episode], steps: int, learner: Learner, digest: str, stop: int | None
) -> tuple[list[Episode], int, int | None]:
    """All ranks' episodes in the order of one process, their steps, and whether any rank was asked to stop.

    Every rank must hold the same learner: a difference is a bug of the first order, and ends the run.
    """
    told = comm.share((episodes, steps, digest, stop))
    if any(theirs != told[0][2] for _, _, theirs, _ in told):
        raise NumericFault(_difference(comm, learner))
    merged = sorted(episode for mine, _, _, _ in told for episode in mine)
    made = sum(count for _, count, _, _ in told)
    return merged, made, _asked_to_stop([number for *_, number in told])


def _asked_to_stop(numbers: list[int | None]) -> int | None:
    """The signal by which one of the ranks was asked to stop, if any was."""
    return next((number for number in numbers if number is not None), None)


def _difference(comm: Comm, learner: Learner) -> str:
    """Which ranks hold another learner than the root, and the first parameter that differs."""
    told = comm.share({name: tree.digest(leaf) for name, leaf in tree.paths(learner).items()})
    first = next(name for name in told[0] if any(theirs.get(name) != told[0][name] for theirs in told))
    ranks = ", ".join(str(rank) for rank, theirs in enumerate(told) if theirs.get(first) != told[0][first])
    return (
        f"update {int(learner.updates)}: rank {ranks} holds another '{first}' than rank 0. This must not happen: ranks"
        " on one kind of machine with the same versions compute the same. The run's checkpoints are as they were."
    )


def _first(
    algorithm: Algorithm, experiment: Experiment, collector: Collector, start: Start, comm: Comm
) -> tuple[Learner, bool]:
    """The learner as the run starts, with the environments brought there too; whether bits are still promised."""
    if start.saved is None:
        collector.start()
        return first_learner(algorithm, experiment.seed), start.exact
    path, saved = start.saved
    if not collector.accepts(saved.episodes):
        raise FileFault(f"checkpoint '{path}' does not hold the episodes of this run's environments.")
    strangers = [env for rank in comm.share(collector.restore(saved.episodes)) for env in rank]
    if strangers:
        why = (
            f"environment {strangers[0]} did not repeat itself when its running episode was replayed: it is not a"
            " function of its seed and actions."
        )
        if start.strict:
            raise EnvironmentFault(f"--strict: {why}")
        if comm.rank == 0:
            Reporter.warn(f"{why} The run goes on, but not with the bits of one that was never stopped.")
    return learner_from(saved.learner, algorithm, path), start.exact and not strangers


Learn = Callable[[Learner, Trajectory, np.ndarray], tuple[Learner, dict[str, float]]]


def gather(experiment: Experiment, spec: Spec, comm: Comm) -> Learn:
    """Trajectories go to the root, which updates in one compiled call; the new learner goes to everybody."""
    update = _Update(experiment, spec, alone)

    def learn(learner: Learner, trajectory: Trajectory, key_data: np.ndarray) -> tuple[Learner, dict[str, float]]:
        parts = comm.gather(trajectory)
        metrics: dict[str, float] = {}
        if parts is not None:
            learner, found = update(learner, _joined(parts), key_data)
            metrics = _numbers(found)
        return comm.broadcast(learner), metrics

    return learn


def average(experiment: Experiment, spec: Spec, comm: Comm) -> Learn:
    """Trajectories stay where they are; means travel, and every rank makes the same step.

    One rank of each machine compiles; the others then find the program on its disk.
    """
    update, first = _Update(experiment, spec, exchange_over(comm)), comm.size > 1

    def learn(learner: Learner, trajectory: Trajectory, key_data: np.ndarray) -> tuple[Learner, dict[str, float]]:
        nonlocal first
        if first:
            machines = comm.share(platform.node())
            if machines.index(machines[comm.rank]) == comm.rank:
                update.compile(learner, trajectory, key_data)
            comm.share(None)
            first = False
        learner, found = update(learner, trajectory, key_data)
        metrics = _numbers(found)  # they wait for the program
        foreign.reraise()
        return learner, metrics

    return learn


LEARN = {"gather": gather, "average": average}


class _Update:
    """The experiment's update, as one program."""

    def __init__(self, experiment: Experiment, spec: Spec, exchange: Exchange) -> None:
        self._program = update_of(Recipe(experiment, spec), exchange)
        self._budget = np.asarray(experiment.steps, np.int64)

    def compile(self, learner: Learner, trajectory: Trajectory, key_data: np.ndarray) -> None:
        """Only that, for what is of this shape: the program is on disk then."""
        with runtime.own_settings():
            self._program.lower(learner, trajectory, key_data, self._budget).compile()

    def __call__(self, learner: Learner, trajectory: Trajectory, key_data: np.ndarray) -> tuple[Learner, Metrics]:
        with runtime.own_settings():
            return self._program(learner, trajectory, key_data, self._budget)


def _numbers(metrics: Metrics) -> dict[str, float]:
    """JAX's own `float` takes five times as long."""
    return {name: float(np.asarray(value)) for name, value in metrics.items()}


def _refuse_what_is_not_a_number(
    learner: dict[str, np.ndarray], update: int, trajectory: Trajectory, path: Path, comm: Comm
) -> None:
    """Stop, with the data kept, where an update led to something that is not a number."""
    broken = next((name for name, leaf in learner.items() if not is_finite(leaf)), None)
    if broken is None:
        return
    folder, parts = path / "diverged", comm.gather(trajectory)

    def refuse() -> None:
        folder.mkdir(exist_ok=True)
        arrays = {name: np.asarray(leaf, order="C") for name, leaf in tree.paths(_joined(parts or [])).items()}
        directory.write_file(folder / "trajectory.safetensors", save(arrays))
        raise NumericFault(
            f"update {update} made '{broken}' infinite or not a number, and was not applied."
            f" Its data is in '{folder}', the run's checkpoints are as they were. A smaller learning rate may help."
        )

    comm.on_root(refuse)


def _joined(parts: list[Trajectory]) -> Trajectory:
    """The lanes of several ranks, in their order."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts) if len(parts) > 1 else parts[0]


@contextlib.contextmanager
def _garbage_frozen() -> Iterator[None]:
    """What is there by now stays: no need to look through all of JAX for garbage at every turn."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _episode_saved(path: Path) -> Iterator[None]:
    """Keep the actions of an episode in which the environment broke its contract, and say how to replay it."""
    try:
        yield
    except BrokenEpisode as broken:
        file = path / "faults" / f"env{broken.number}-seed{broken.seed}.json"
        record = {"env": dataclasses.asdict(broken.env), "seed": broken.seed, "actions": broken.actions.tolist()}
        told = str(broken)
        try:
            file.parent.mkdir(exist_ok=True)
            directory.write_file(file, json.dumps(record).encode())
            if broken.trace:
                directory.write_file(file.with_suffix(".txt"), broken.trace.encode())
                told += f"\nIts traceback is in {file.with_suffix('.txt')}"
        except OSError as error:  # a full disk, or a rank on a host that does not have the run's directory
            why = f"{broken}\nIts actions could not be kept in '{file}': {error.strerror or error}."
            raise EnvironmentFault(why) from broken
        raise EnvironmentFault(
            f"{told}\n"
            f"Replay it with: lockstep check {broken.env.id} --replay {shlex.quote(str(file))}\n"
            f"The checkpoints in '{path}' are as they were."
        ) from broken
