"""The command line. Every failure is one message and its exit status."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep import __version__
from lockstep.config import LARGEST, brief
from lockstep.errors import Differs, FileFault, LockstepError, Untrusted, UsageError, nearest
from lockstep.parallel.launch import is_launched, join, launch, leave, speak

if TYPE_CHECKING:
    from lockstep.parallel.comm import Comm
    from lockstep.run.train import Run


INDENT = "    "
RUNS = "runs"  # where `train` keeps them, unless it is told another place
SHOWN = 5  # runs in a directory that are named


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(arguments)
        options.arguments = arguments
        _refuse_other_directories(options)
        return int(options.command(options) or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Untrusted as error:
        trusting = shlex.join(["lockstep", *arguments, "--trust"])
        return _failed(Untrusted(f"{error}\nThe command is then: {trusting}"))
    except (Exception, KeyboardInterrupt) as error:
        return _failed(error)


def _print(text: object) -> None:
    """To standard output, at once, or it is told that it can't."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        raise FileFault(f"standard output: {error.strerror or error}.") from error


def _refuse_other_directories(options: argparse.Namespace) -> None:
    """A directory of runs is no run, and a run is nothing to train anew: each with a command that works."""
    known = options.name_or_env if "name_or_env" in options else ""
    if known and _is_run(Path(known)):
        where = shlex.quote(known)
        raise UsageError(
            f"'{known}' is a run. Continue it: lockstep resume {where}, or repeat it: lockstep train"
            f" {where}/config.toml"
        )
    for path in options.runs if "runs" in options else [options.run] if "run" in options else []:
        if not _is_run(path):
            _point_to_runs(options, path)


def _is_run(path: Path) -> bool:
    try:
        return os.path.lexists(path / "config.toml")
    except OSError:  # a name that is too long
        return False


def _point_to_runs(options: argparse.Namespace, path: Path) -> None:
    """Refuse a path that is no run, where there are runs: in it, or where `train` keeps them."""
    inside = path.is_dir()
    found = [file.parent for file in (path if inside else Path(RUNS)).glob("*/config.toml")]
    newest = sorted(
        found, key=lambda run: (run == path.parent, path.name in run.name, run.stat().st_mtime), reverse=True
    )
    if not newest:
        return
    names = ", ".join(map(str, newest[:SHOWN])) + (", ..." if len(newest) > SHOWN else "")
    use = f"{path}/*" if inside and "runs" in options else shlex.quote(str(newest[0]))
    typed = " ".join(use if word == str(path) else shlex.quote(word) for word in options.arguments)
    told = "a directory with runs" if inside else "there are"
    raise UsageError(f"'{path}' is not a run, but {told}: {names}. Use: lockstep {typed}")


def _failed(error: BaseException) -> int:
    """Say what went wrong and return the exit status. Where there are several ranks, all end and one tells."""
    status, message = _told(error)
    comm = _ranks()
    comm.fail(status, message)
    return leave(comm, status, f"lockstep: {message}")


def _ranks() -> Comm:
    """Those that this process was started with, or itself where MPI itself is what is missing."""
    from lockstep.parallel.comm import Solo

    try:
        return join()
    except UsageError:
        return Solo()


def _told(error: BaseException) -> tuple[int, str]:
    """Exit status and message. What nobody expected comes with its traceback."""
    if isinstance(error, LockstepError):
        return error.status, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped at once; what was saved before is intact."
    if isinstance(error, OSError):
        return FileFault.status, f"{error.filename or 'a file'}: {error.strerror or error}"
    return 1, f"failed:\n{''.join(traceback.format_exception(error))}"


def _train(options: argparse.Namespace) -> int:
    from lockstep.runtime import start_jax

    speak(options.verbose_ranks)
    start_jax()
    from lockstep.experiment import algorithm_name, preset_for, resolve
    from lockstep.run import directory
    from lockstep.run.train import train

    settings = _settings(options)
    given = {"steps": options.steps, "layout.nprocs": options.nprocs, "layout.mode": options.mode}
    given |= {"layout.workers": options.workers}
    settings |= {name: value for name, value in given.items() if value is not None}
    if is_launched():
        settings["layout.nprocs"] = join().size
    resolved = resolve(options.name_or_env, options.algo, settings, options.trust)
    experiment = resolved.experiment
    label = Path(options.name_or_env).stem
    name = options.name
    if name is None:
        name = directory.new_name(label, algorithm_name(experiment.algo), experiment.seed)
    directory.check_name(name)
    path = Path(options.logdir) / name
    if not is_launched():
        if (tuned := preset_for(options.name_or_env)) is not None:
            print(f"lockstep: the preset '{tuned}' has tuned numbers for this environment.", file=sys.stderr)
        if resolved.layout.nprocs > 1:
            directory.check_writable(Path(options.logdir))
            return launch(resolved.layout.nprocs, [*options.arguments, "--name", name], _continue(path))
    return _finish(lambda comm: train(resolved, options.logdir, name, comm, options.strict), path)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What `--set`, `--seed` and `--lanes` say of the experiment."""
    from lockstep import config

    settings: dict[str, Any] = dict(config.parse(setting) for setting in options.set)
    given = {"seed": options.seed, "lanes": options.lanes}
    return settings | {name: value for name, value in given.items() if value is not None}


def _resume(options: argparse.Namespace) -> int:
    from lockstep.runtime import start_jax

    speak(options.verbose_ranks)
    start_jax()
    from lockstep.experiment import Mode
    from lockstep.run.train import resume

    if (options.nprocs or 1) > 1 and not is_launched():
        return launch(options.nprocs, options.arguments, _continue(options.run))
    mode: Mode = options.mode or "gather"
    workers = options.workers or 0
    return _finish(
        lambda comm: resume(options.run, options.steps, options.strict, mode, workers, comm, options.trust), options.run
    )


def _verify(options: argparse.Namespace) -> int:
    from lockstep.runtime import start_jax

    speak(options.verbose_ranks)
    start_jax()
    from lockstep.experiment import Layout
    from lockstep.run.directory import read_config
    from lockstep.run.verify import Slice, evidence, verify

    told = "the run is as it was; nothing was found to differ so far"
    nprocs = join().size if is_launched() else options.nprocs or 1
    layout, wanted = Layout(nprocs, options.mode or "gather", options.workers or 0), Slice(*options.updates)
    if nprocs > 1 and not is_launched():
        read_config(options.run, options.trust)
        evidence(options.run, layout, wanted)  # what is wrong with it is told before ranks are started
        return launch(nprocs, options.arguments, told)
    return _together(lambda comm: verify(options.run, layout, wanted, comm, options.trust), told)


def _finish(work: Callable[[Comm], Run], path: Path) -> int:
    """Train, and say how it ended; the last line is the digest."""
    return _together(lambda comm: _summary(work(comm)._replace(path=path)), _continue(path))


def _continue(path: Path) -> str:
    return f"continue with: lockstep resume {shlex.quote(str(path))}"


def _summary(run: Run) -> str:
    score = "" if run.eval_return is None else f", best evaluation {run.eval_return:.2f}"
    mean = "no episode ended yet" if math.isnan(run.return_mean) else f"return {run.return_mean:.2f}"
    return (
        f"{run.steps:,} steps, {run.updates} updates, {mean}{score}\n"
        f"look at it with: lockstep visualize {shlex.quote(str(run.path))}\n"
        f"digest {run.digest}"
    )


def _together(work: Callable[[Comm], str], when_stopped: str) -> int:
    """Work on the ranks there are. The root tells what came of it."""
    from lockstep.run.interrupt import Interrupted

    comm = join()
    try:
        told = work(comm)
    except Interrupted as stopped:
        return leave(comm, stopped.status, f"lockstep: stopped by {stopped.signal}; {when_stopped}")
    except SystemExit as error:
        raise RuntimeError(f"something in the run called sys.exit({error.code!r})") from error
    if comm.rank == 0:
        _print(told)
    return leave(comm, 0)


def _evaluate(options: argparse.Namespace) -> int:
    from lockstep import evaluate

    result = evaluate(options.run, options.episodes, options.seed, options.checkpoint, options.trust)
    _print(json.dumps(result.as_dict()) if options.json else result)
    return 0


def _visualize(options: argparse.Namespace) -> int:
    from lockstep.run.visualize import choose_renderer, visualize

    choose_renderer()
    from lockstep import load

    policy = load(options.run, options.checkpoint, options.trust)
    outdir = options.outdir or options.run / "videos"
    seed = policy.experiment.seed if options.seed is None else options.seed
    for video in visualize(policy, outdir, options.episodes, seed, options.format):
        _print(f"{video.path}  return {video.total:.2f}  {video.steps} steps")
    return 0


def _digest(options: argparse.Namespace) -> int:
    from lockstep.run.receipts import receipt

    found = receipt(options.run, options.trust)
    _print(f"{options.run}: update {found.updates}, {found.steps} steps; {found.agreement}")
    _print(found.digest)
    return 0


def _plot(options: argparse.Namespace) -> int:
    from lockstep.run.plot import plot

    plot(options.runs, options.out, options.column, options.trust)
    _print(options.out)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from lockstep.experiment import resolve
    from lockstep.run import bench
    from lockstep.run.plot import check_picture

    settings = _settings(options)
    if refused := [name for name in settings if name.split(".")[0] in ("layout", "watch")]:
        raise UsageError(
            f"--set {refused[0]}: bench chooses layouts with --nprocs, --mode and --workers, and watches nothing."
        )
    if is_launched():
        raise UsageError("bench starts its processes itself: run it without MPI's launcher.")
    check_picture(options.out)
    config = bench.budgeted(resolve(options.name_or_env, options.algo, settings, options.trust), options.steps)
    chosen = bench.layouts(options.nprocs, options.mode, options.workers)
    result = bench.bench(config, chosen, options.repeats, options.trace)
    _print(json.dumps(bench.as_dict(result)) if options.json else bench.table(result))
    bench.draw(result, options.out)
    if result.difference:
        raise Differs(result.difference)
    if not options.json:
        _print(f"all digests agree, update by update; the picture is {options.out}")
    return 0


def _presets(options: argparse.Namespace) -> int:
    from lockstep.algorithms import REGISTRY
    from lockstep.experiment import preset_names, preset_table

    tables = {name: preset_table(name) for name in preset_names()}
    algorithms = {name: ", ".join(algo for algo in REGISTRY if algo in table) for name, table in tables.items()}
    width = max(map(len, tables))
    lines = [
        f"{name:<{width}}  {table['env']['id']:<28} {algorithms[name]:<44} {table['about']}"
        for name, table in tables.items()
    ]
    columns = _columns()
    if max(map(len, lines)) > columns:
        lines = [
            textwrap.fill(f"{name}  {table['env']['id']}", columns, subsequent_indent=INDENT)
            + "\n"
            + textwrap.fill(
                f"{table['about']} ({algorithms[name]})", columns, initial_indent=INDENT, subsequent_indent=INDENT
            )
            for name, table in tables.items()
        ]
    _print("\n".join(lines))
    return 0


def _columns() -> int:
    """Of the terminal that is printed to. A file has as many as are needed."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or sys.maxsize
    except (OSError, AttributeError):  # none at all, too
        return sys.maxsize


def _info(options: argparse.Namespace) -> int:
    from lockstep.run.inspect import info

    _print(info(_env(options), options.steps))
    return 0


def _check(options: argparse.Namespace) -> int:
    from lockstep.run.inspect import check, replay

    if options.replay is not None:
        _print(replay(options.env, options.replay))
    else:
        _print(check(_env(options), options.seed))
    return 0


def _env(options: argparse.Namespace) -> Any:
    """The environment of a preset, or of an id."""
    from lockstep.experiment import resolve

    return resolve(options.env, trust=options.trust).experiment.env


class _Parser(argparse.ArgumentParser):
    """Names the nearest option when one is mistyped, and the whole command with it."""

    typed: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.typed = args or []
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            known = [name for action in self._every_action() for name in action.option_strings]
            wrong = message.removeprefix("unrecognized arguments: ").split("=")[0].split(" ")[0]
            hint = self._for_seeds() if wrong == "--seeds" else self._corrected(wrong, known)
        elif "invalid choice: '" in message:
            wrong = message.split("invalid choice: '")[1].split("'")[0]
            hint = self._corrected(wrong, self._commands())
        raise UsageError(f"{message}.{hint}" + ("" if "Use: " in hint else f" See `{self.prog} --help`."))

    def _corrected(self, wrong: str, known: Sequence[str]) -> str:
        """The nearest names, and what was typed with the first of them."""
        if wrong.startswith("--"):  # which all have: only what follows is like something
            hint = nearest(wrong[2:], [name[2:] for name in known if name.startswith("--")], "--")
            hint = hint or " Settings are given as in --set algo.learning_rate=1e-3."
        else:
            hint = nearest(wrong, known)
        if "'" not in hint or not self.typed:
            return hint
        right = hint.split("'")[1]
        words = [right + word[len(wrong) :] if word.split("=")[0] == wrong else word for word in self.typed]
        return f"{hint} Use: {shlex.join(['lockstep', *words])}"

    def _for_seeds(self) -> str:
        """A run has one seed: several are a loop."""
        at = next(i for i, word in enumerate(self.typed) if word.split("=")[0] == "--seeds")
        after = list(self.typed[at + 1 :])
        count = next((i for i, word in enumerate(after) if not word.replace(",", "").isdigit()), len(after))
        given = [
            seed for word in [self.typed[at].partition("=")[2], *after[:count]] for seed in word.split(",") if seed
        ]
        seeds = " ".join(given) if len(given) > 1 else "1 2 3"
        rest = shlex.join(["lockstep", *self.typed[:at], *after[count:]])
        return f" A run has one seed. Use: for seed in {seeds}; do {rest} --seed $seed; done"

    def _print_message(self, message: str, file: Any = None) -> None:
        """What --help and --version print."""
        _print(message.rstrip("\n"))

    def _subparsers_action(self) -> Any:
        return next((a for a in self._actions if isinstance(a, argparse._SubParsersAction)), None)

    def _commands(self) -> list[str]:
        return list(self._subparsers_action().choices) if self._subparsers_action() else []

    def _every_action(self) -> list[argparse.Action]:
        inner = self._subparsers_action().choices.values() if self._subparsers_action() else []
        return [*self._actions, *(action for parser in inner for action in parser._actions)]


def _count(text: str) -> int:
    """A positive whole number; 1e6 is one."""
    number = 0.0
    if re.fullmatch(r"[0-9]{1,40}", text):
        number = int(text)
    elif re.fullmatch(r"[0-9]{1,40}(\.[0-9]{0,40})?(e\+?[0-9]{1,2})?", text.lower()):
        number = float(text)
    if number != int(number) or number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {brief(text)}")
    if number > LARGEST:
        raise argparse.ArgumentTypeError(f"must be below 2^63, not {brief(text)}")
    return int(number)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if wrong := [mode for mode in modes if mode not in ("gather", "average")]:
        raise argparse.ArgumentTypeError(f"must be gather, average or both, not {brief(wrong[0])}")
    return modes


def _natural(text: str) -> int:
    if not re.fullmatch("[0-9]{1,39}", text):  # 39 digits are 128 bits
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, not {brief(text)}")
    return int(text)


def _naturals(text: str) -> list[int]:
    return [_natural(part) for part in text.split(",")]


def _slice(text: str) -> tuple[int | None, int | None]:
    """A:B, where either may be left out."""
    first, _, last = text.partition(":")
    if not re.fullmatch("[0-9]{0,18}:[0-9]{0,18}", text) or (first and last and int(first) > int(last)):
        raise argparse.ArgumentTypeError(f"must be A:B with A not above B, as in 10:20, 10: or :20, not {brief(text)}")
    return int(first) if first else None, int(last) if last else None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lockstep", description="On-policy reinforcement learning, bit for bit.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(command=run)
        if name != "presets":
            added.add_argument(
                "--trust",
                action="store_true",
                help="import the modules that a file names (module:name), though it was not made here",
            )
        return added

    def on_run(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = command(name, run, text)
        added.add_argument("run", type=Path, metavar="RUN", help="a run directory")
        return added

    train = command("train", _train, "train a policy")
    train.add_argument("name_or_env", metavar="PRESET|ENV", help="a preset, a Gymnasium id, or a config.toml")
    train.add_argument("--logdir", default=RUNS, help="where runs are kept; default: runs")
    train.add_argument("--name", help="the run's name; default: made from time, preset and seed")

    train.add_argument("--strict", action="store_true", help="refuse what can't be repeated bit for bit")

    resume = on_run("resume", _resume, "continue a run that was stopped, to the same bits")
    resume.add_argument("--steps", type=_count, help="another budget; learning-rate schedules follow it")
    resume.add_argument("--strict", action="store_true", help="refuse where bits may differ from the run so far")

    verify = on_run("verify", _verify, "re-run a slice of a run, and compare its digests with the receipts")
    verify.add_argument(
        "--updates",
        type=_slice,
        default=":",
        metavar="A:B",
        help="these and all between; default: from the oldest checkpoint on",
    )

    for trainer in (train, resume, verify):
        trainer.add_argument("--nprocs", type=_count, help="processes (MPI ranks) that share the lanes; default: 1")
        trainer.add_argument(
            "--mode",
            choices=("gather", "average"),
            help="what travels: trajectories to one rank (gather, the default), or gradients between all (average)",
        )
        trainer.add_argument(
            "--workers", type=_natural, help="external processes that step each rank's environments; default: 0"
        )
        trainer.add_argument(
            "--verbose-ranks", action="store_true", help="show what every rank prints, with its number; default: rank 0"
        )

    bench = command("bench", _bench, "measure layouts of one experiment, and check that their digests agree")
    bench.add_argument("name_or_env", nargs="?", default="halfcheetah", metavar="PRESET|ENV", help="as for train")
    bench.add_argument("--nprocs", type=_counts, default="1,2", help="numbers of processes; default: 1,2")
    bench.add_argument("--mode", type=_modes, default="gather,average", help="default: gather,average")
    bench.add_argument("--workers", type=_naturals, default="0", help="numbers of workers of each rank; default: 0")
    bench.add_argument("--repeats", type=_count, default=1, help="turns that the layouts take; the best one counts")
    bench.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    bench.add_argument("--out", type=Path, default=Path("bench.png"), help="PNG or SVG; default: bench.png")
    bench.add_argument("--trace", type=Path, metavar="DIR", help="keep a timeline of every rank, a file per layout")

    for starter in (train, bench):
        starter.add_argument(
            "--algo",
            help="ppo, ppo-kl, trpo, npg, acktr, a2c or reinforce, or module:name, your own; default: the preset's or"
            " file's, or ppo",
        )
        starter.add_argument("--steps", type=_count, help="environment steps in all, over all environments")
        starter.add_argument("--seed", type=_natural, help="another seed, another result; the same seed, the same bits")
        starter.add_argument("--lanes", type=_count, help="units of work that processes can share")
        starter.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting: algo.clip=0.1"
        )

    evaluate = on_run("evaluate", _evaluate, "play episodes without noise, on fixed seeds")
    evaluate.add_argument("--episodes", type=_count, default=100)
    evaluate.add_argument("--json", action="store_true", help="one JSON object instead of text")

    visualize = on_run("visualize", _visualize, "make videos of episodes")
    visualize.add_argument("--outdir", type=Path, help="default: RUN/videos")
    visualize.add_argument("--episodes", type=_count, default=1)
    visualize.add_argument("--format", choices=("mp4", "gif"), default="mp4")
    for reader in (evaluate, visualize):
        reader.add_argument("--checkpoint", default="newest", help="newest (default), best, or a number of steps")
        reader.add_argument("--seed", type=_natural, help="of the episodes; default: the run's")

    on_run("digest", _digest, "print the digest of a run's newest checkpoint; the last line is the digest alone")

    plot = command("plot", _plot, "draw return against steps; runs that differ only in seed are averaged")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    plot.add_argument("--out", type=Path, default=Path("curves.png"), help="PNG or SVG; default: curves.png")
    plot.add_argument("--column", default="return_mean", help="a column of metrics.csv; default: return_mean")

    command("presets", _presets, "list the presets")
    info = command("info", _info, "show an environment's spaces, limits, rewards and reset noise")
    info.add_argument("env", metavar="ENV")
    info.add_argument("--steps", type=_count, default=1000, help="random steps to measure rewards over")
    check = command("check", _check, "check that an environment keeps its contract and replays exactly")
    check.add_argument("env", metavar="ENV")
    check.add_argument("--seed", type=_natural, default=0)
    check.add_argument("--replay", type=Path, metavar="FILE", help="replay an episode that a run recorded")
    return parser
