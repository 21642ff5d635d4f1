"""When checkpoints are written, and what happens when they can't be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import tree
from lockstep.collect import Collector, joined
from lockstep.core import Learner
from lockstep.errors import FileFault
from lockstep.experiment import Config
from lockstep.parallel.comm import Comm
from lockstep.run import checkpoint, directory
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.progress import Progress

ATTEMPTS = 3  # checkpoints in a row that may fail before a run gives up


class Saver:
    """Writes a run's checkpoints. `exact`: whether the promise of equal bits holds."""

    def __init__(
        self,
        path: Path,
        config: Config,
        machine: dict[str, Any],
        exact: bool,
        say: Callable[[str], None],
        comm: Comm,
    ) -> None:
        self._path, self._watch, self._machine, self._exact = path, config.watch, machine, exact
        self._experiment, self._budget = config.experiment.digest, config.experiment.steps
        self._say, self._comm = say, comm
        self._failures = 0
        self._saved_at: int | None = None

    def save_when_due(
        self, progress: Progress, learner: Learner, collector: Collector, batch: int, is_best: bool
    ) -> None:
        if is_best or progress.crossed(self._watch.checkpoint_every, batch):
            self.save(progress, learner, collector)

    def save(self, progress: Progress, learner: Learner, collector: Collector, last: bool = False) -> None:
        """Write a checkpoint. A full disk is survived: the next attempt may do better, the last one must."""
        if self._saved_at == progress.steps:
            return
        told = self._comm.share((collector.open_episodes(), collector.strangers))
        episodes = joined([mine for mine, _ in told])
        self._exact = self._exact and not any(strangers for _, strangers in told)
        if self._comm.on_root(lambda: self._write(progress, learner, episodes, last)):
            self._saved_at = progress.steps

    def _write(self, progress: Progress, learner: Learner, episodes: dict[str, np.ndarray], last: bool) -> bool:
        arrays = {name: np.asarray(leaf) for name, leaf in tree.paths(learner).items()}
        state = Checkpoint(arrays, episodes, progress, self._experiment, self._machine, self._exact, self._budget)
        try:
            checkpoint.write(self._path, state, self._watch.keep)
        except OSError as error:
            directory.check_not_gone(self._path)
            self._failures += 1
            why = error.strerror or error
            message = f"the checkpoint at {progress.steps} steps could not be written in '{self._path}': {why}."
            if last or self._failures >= ATTEMPTS or progress.steps == 0:
                raise FileFault(f"{message} The checkpoints before it are as they were.") from error
            self._say(f"lockstep: {message} Training goes on; it is tried again.")
            return False
        self._failures = 0
        return True
