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
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path

from lockstep import errors

if typing.TYPE_CHECKING:
    from lockstep import ranks
    from lockstep.experiment import Config, Mode
    from lockstep.run.evaluate import Evaluation
    from lockstep.run.policy import TrainedPolicy
    from lockstep.run.train import Run

__version__ = "0.1.0"
__all__ = ["digest", "errors", "evaluate", "load", "plot", "ranks", "resume", "train", "verify"]


def __dir__() -> list[str]:
    """What is meant for users. What else is imported here is not."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> object:
    """`lockstep.ranks`, imported when it is first asked for."""
    if name == "ranks":
        import lockstep.ranks as ranks

        return ranks
    raise AttributeError(f"module 'lockstep' has no attribute '{name}'. There is: {', '.join(__all__)}.")


def train(
    config: Config | str | PathLike[str],
    algo: str | None = None,
    logdir: str | Path = "runs",
    name: str | None = None,
    settings: Mapping[str, object] | None = None,
    strict: bool = False,
    trust: bool = False,
) -> Run:
    """Train to the end and return the run.

    `config` is a preset's name, an environment id, a TOML file or a `Config`. `settings` override single values,
    as `--set` does on the command line: `{"seed": 1, "algo.clip": 0.1}`. `strict` refuses what can't be repeated
    bit for bit. What the arguments name as `module:name` is imported; what a TOML file names so, with `trust`. Under
    MPI's launcher every rank calls this, and they train together.
    """
    from lockstep.run.interrupt import Interrupt, as_pythons_own

    with as_pythons_own(), Interrupt():  # before JAX is imported, which takes a second
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
            return run_train(chosen, logdir, name, comm, strict)


def _chosen(
    config: Config | str | PathLike[str],
    algo: str | None,
    settings: Mapping[str, object] | None,
    size: int,
    trust: bool,
) -> tuple[str, Config]:
    """A label and the configuration, on as many ranks as there are."""
    from lockstep import names
    from lockstep.errors import UsageError
    from lockstep.experiment import Config, checked, from_dict, resolve, to_dict

    if isinstance(config, PathLike):
        config = fspath(config)
    if isinstance(config, str):
        label, config = Path(config).stem, resolve(config, algo, settings, trust)
    elif not isinstance(config, Config):
        raise UsageError(_what_to_give(config))
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


def _what_to_give(given: object) -> str:
    """What `train` takes instead of an environment that was made, or of something else."""
    import gymnasium

    spec = given.spec if isinstance(given, gymnasium.Env | gymnasium.vector.VectorEnv) else None
    its_class = given if isinstance(given, type) else type(given)
    if spec is not None:
        how = f"lockstep.train('{spec.id}')"
    elif issubclass(its_class, gymnasium.Env):
        name = f"{its_class.__name__}-v0"
        how = f"gymnasium.register('{name}', {its_class.__name__}) and lockstep.train('{name}')"
    else:
        how = "lockstep.train('CartPole-v1')"
    kind = "None" if given is None else f"the class {its_class.__name__}" if given is its_class else its_class.__name__
    return (
        "train takes the name of a preset or environment, a TOML file or a Config, and makes its environments itself;"
        f" not {kind}. Use {how}."
    )


def resume(
    run: str | PathLike[str],
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
    from lockstep.run.interrupt import Interrupt, as_pythons_own

    with as_pythons_own(), Interrupt():
        from lockstep.runtime import start_jax

        start_jax()
        from lockstep.parallel.launch import join, together
        from lockstep.run.train import resume as run_resume

        comm = join()
        with together(comm):
            return run_resume(fspath(run), steps, strict, mode, workers, comm, trust)


def load(run: str | PathLike[str], checkpoint: str | int = "newest", trust: bool = False) -> TrainedPolicy:
    """The policy of a run: `load(run).act(observation)`. `checkpoint`: newest, best, or a number of steps.

    `trust` lets a run that was not made here import the modules that it names.
    """
    from lockstep.runtime import start_jax

    start_jax()
    from lockstep.run.policy import load as load_policy

    return load_policy(fspath(run), checkpoint, trust)


def evaluate(
    run: str | PathLike[str],
    episodes: int = 100,
    seed: int | None = None,
    checkpoint: str | int = "newest",
    trust: bool = False,
) -> Evaluation:
    """Play episodes without noise: their returns and lengths, and `mean`, `std`, `half_interval` of the returns.

    The same `seed` gives the same episodes; without one it is the run's. `print` shows what the command line does.
    """
    policy = load(run, checkpoint, trust)
    from lockstep.run.evaluate import evaluate as run_evaluate

    if episodes < 1:
        raise errors.UsageError(f"episodes must be 1 or more, not {episodes}.")
    return run_evaluate(policy, episodes, policy.experiment.seed if seed is None else seed)


def plot(
    runs: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str | PathLike[str] = "curves.png",
    column: str = "return_mean",
    trust: bool = False,
) -> Path:
    """Draw a column of the runs' metrics.csv against steps into a PNG or SVG file, whose path is returned.

    Runs that differ only in seed are one curve, their mean, with its 95 % interval.
    """
    from lockstep.runtime import start_jax

    start_jax()
    from lockstep.run.plot import plot as run_plot

    several = [runs] if isinstance(runs, str | PathLike) else runs
    if not several:
        raise errors.UsageError("plot takes a run or several, such as lockstep.plot(['runs/first', 'runs/second']).")
    run_plot([Path(run) for run in several], Path(out), column, trust)
    return Path(out)


def verify(
    run: str | PathLike[str],
    updates: tuple[int | None, int | None] = (None, None),
    mode: Mode = "gather",
    workers: int = 0,
    trust: bool = False,
) -> str:
    """Make a run's updates again, compare their digests with those in metrics.csv, and say in words what is equal.

    `updates` are the first and the last, None for all there is evidence of. An update that differs raises
    `lockstep.errors.Differs`. As with `train`, the ranks are those that this was started as.
    """
    from lockstep.runtime import start_jax

    start_jax()
    from lockstep.config import build
    from lockstep.experiment import Layout
    from lockstep.parallel.launch import join, together
    from lockstep.run.verify import Slice
    from lockstep.run.verify import verify as run_verify

    comm = join()
    with together(comm):
        layout = build(Layout, {"nprocs": comm.size, "mode": mode, "workers": workers}, lambda cls, data: (cls, data))
        return run_verify(Path(run), layout, Slice(*updates), comm, trust)


def digest(run: str | PathLike[str], trust: bool = False) -> str:
    """The digest of a run's newest checkpoint, computed from its bytes: 64 hexadecimal digits."""
    from lockstep.runtime import start_jax

    start_jax()
    from lockstep.run.receipts import receipt

    return receipt(Path(run), trust).digest
