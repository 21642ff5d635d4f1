"""On-policy reinforcement learning whose result does not depend on how it was run.

This module is light: JAX is imported when something is computed, after thread counts are pinned.
"""

# ruff: noqa: E402  (where modules are searched is decided before others are imported)
from __future__ import annotations

import sys

# `python -m lockstep` searches the working directory first, and ranks and workers the place where they are to find this
# package. It comes last from here on: a stray random.py there would hide Python's own.
_WORDS = {word.removeprefix("-m").split(".")[0] for word in sys.orig_argv}
_BY_MODULE = sys.argv[:1] == ["-m"] and "lockstep" in _WORDS and not sys.flags.safe_path
_AS_CHILD = sys.argv[:1] == ["-c"] and sys.path[:1] == [__file__.removesuffix("/lockstep/__init__.py")]
if _BY_MODULE or _AS_CHILD:
    sys.path.append(sys.path.pop(0))

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path

if typing.TYPE_CHECKING:
    from lockstep import ranks
    from lockstep.experiment import Config, Mode
    from lockstep.run.policy import TrainedPolicy
    from lockstep.run.train import Run

__version__ = "0.1.0"
__all__ = ["load", "ranks", "resume", "train"]


def __getattr__(name: str) -> object:
    """`lockstep.ranks`, imported when it is first asked for."""
    if name == "ranks":
        import lockstep.ranks as ranks

        return ranks
    raise AttributeError(f"module 'lockstep' has no attribute '{name}'")


def train(
    config: Config | str,
    algo: str | None = None,
    logdir: str | Path = "runs",
    name: str | None = None,
    settings: Mapping[str, object] | None = None,
    trust: bool = False,
) -> Run:
    """Train to the end and return the run.

    `config` is a preset's name, an environment id, a TOML file or a `Config`. `settings` override single values,
    as `--set` does on the command line: `{"seed": 1, "algo.clip": 0.1}`. What the arguments name as `module:name` is
    imported; what a TOML file names so, with `trust`. Under MPI's launcher every rank calls this, and they train
    together.
    """
    from lockstep.run.interrupt import Interrupt

    with Interrupt():  # before JAX is imported, which takes a second
        from lockstep.runtime import start_jax

        start_jax()
        from lockstep.experiment import algorithm_name
        from lockstep.parallel.launch import join, together
        from lockstep.run import directory
        from lockstep.run.train import train as run_train

        comm = join()
        with together(comm):
            label, chosen = _chosen(config, algo, settings, comm.size, trust)
            experiment = chosen.experiment
            if name is None:
                name = directory.new_name(label, algorithm_name(experiment.algo), experiment.seed)
            return run_train(chosen, logdir, name, comm)


def _chosen(
    config: Config | str, algo: str | None, settings: Mapping[str, object] | None, size: int, trust: bool
) -> tuple[str, Config]:
    """A label and the configuration, on as many ranks as there are."""
    from lockstep import names
    from lockstep.errors import UsageError
    from lockstep.experiment import checked, from_dict, resolve, to_dict

    if isinstance(config, str):
        label, config = Path(config).stem, resolve(config, algo, settings, trust)
    elif algo or settings:
        raise UsageError("algo and settings go with a name; change the Config itself instead.")
    else:
        names.load(config.experiment.env.id)
        label, config = config.experiment.env.id, from_dict(to_dict(config))
    if config.layout.nprocs not in (1, size):
        raise UsageError(
            f"lockstep.train runs on the ranks that it was started as, here {size}: layout.nprocs must be 1 or that."
            " Start the script with `mpiexec -n N`, or use `lockstep train --nprocs N`."
        )
    return label, checked(dataclasses.replace(config, layout=dataclasses.replace(config.layout, nprocs=size)))


def resume(
    run: str | Path,
    steps: int | None = None,
    strict: bool = False,
    mode: Mode = "gather",
    workers: int = 0,
    trust: bool = False,
) -> Run:
    """Continue a run that was stopped, to its end and to the bits of one that was never stopped.

    `steps` gives it another budget; `strict` refuses where bits may differ from the run so far. As with `train`, the
    ranks are those that this was started as; `mode` and `workers` say how they share the work from here on. `trust`
    lets a run that was not made here import the modules that it names.
    """
    from lockstep.run.interrupt import Interrupt

    with Interrupt():
        from lockstep.runtime import start_jax

        start_jax()
        from lockstep.parallel.launch import join, together
        from lockstep.run.train import resume as run_resume

        comm = join()
        with together(comm):
            return run_resume(run, steps, strict, mode, workers, comm, trust)


def load(run: str | Path, checkpoint: str = "newest", trust: bool = False) -> TrainedPolicy:
    """The policy of a run: `load(run).act(observation)`. `checkpoint`: newest, best, or a number of steps.

    `trust` lets a run that was not made here import the modules that it names.
    """
    from lockstep.runtime import start_jax

    start_jax()
    from lockstep.run.policy import load as load_policy

    return load_policy(run, checkpoint, trust)
