"""The experiment (what the result depends on), the layout and the watch (what it must not depend on)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import tomli_w

from lockstep import config, files, names
from lockstep.algorithms import REGISTRY, algorithm_name, entry, unknown
from lockstep.algorithms.actor_critic import Normalize
from lockstep.algorithms.ppo import PPO
from lockstep.core import Discrete
from lockstep.envs.make import Env, check_id, longest_episode, spec_for
from lockstep.errors import FileFault, UsageError
from lockstep.networks import MLP
from lockstep.ranges import Count, Natural, NonNegative, Seconds, Seed

Mode = Literal["gather", "average"]
MOST_STEPS = 2**40  # of one update; no machine has memory for more
MOST_WEIGHTS = 2**32  # of a network's hidden layers, likewise
MANY = 4096  # processes, at most, that are proposed
OF_REAL_ACTIONS = ("policy.log_std", "env.action")  # settings that discrete ones have no use for


@dataclass(frozen=True)
class Collect:
    """How much is collected for one update."""

    steps: Count = 256  # steps of each environment
    episodes: Natural = 0  # instead of `steps`, so many whole episodes of each environment; 0: `steps`


@dataclass(frozen=True)
class Algo:
    """Stands for the configuration of whichever algorithm `name` says."""


@dataclass(frozen=True)
class Experiment:
    """What the result depends on."""

    env: Env = Env()
    algo: Algo = PPO()  # type: ignore[assignment]
    policy: MLP = MLP()
    normalize: Normalize = Normalize()
    collect: Collect = Collect()
    lanes: Count = 4  # units of work; as many processes as divide this can share them
    envs_per_lane: Count = 2
    seed: Seed = 0
    steps: Count = 1_000_000  # environment steps in all; whole updates are made, so a few more may be

    @property
    def length(self) -> int:
        """Steps of each environment in one update; the most that they can be where episodes are collected."""
        return self.collect.episodes * longest_episode(self.env) if self.collect.episodes else self.collect.steps

    @property
    def rows(self) -> int:
        """Environment steps of one lane in one update, or the most that they can be."""
        return self.envs_per_lane * self.length

    @property
    def batch(self) -> int:
        """Environment steps of one update, or the most that they can be."""
        return self.lanes * self.rows

    @property
    def digest(self) -> str:
        """Of everything but the budget: runs with the same one can continue each other."""
        data = {name: value for name, value in to_dict(self, config.counted).items() if name != "steps"}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Layout:
    """What the result must not depend on: how the lanes are spread over processes."""

    nprocs: Count = 1  # MPI ranks; must divide the lanes
    mode: Mode = "gather"  # trajectories to one rank, or gradients between all
    workers: Natural = 0  # external processes that step each rank's environments; 0: the rank steps them itself
    threads: Natural = 0  # of MuJoCo step a rank's environments, at most; 0: all cores for a single process, else one
    worker_timeout_s: Seconds = 60.0  # after which a worker that is still at one step is replaced
    watchdog_s: NonNegative = 1800.0  # a rank that makes no step for so long hangs, and ends the job; 0: wait for ever

    def __str__(self) -> str:
        processes = f"{self.nprocs} processes, {self.mode}" if self.nprocs > 1 else "1 process"
        return f"{processes}, {self.workers} workers each" if self.workers else processes


@dataclass(frozen=True)
class Watch:
    """What is observed of a run, counted in environment steps. It never changes the result."""

    eval_every: Natural = 100_000  # evaluate this often; 0: never
    eval_episodes: Count = 10  # episodes of one evaluation, always the same ones
    checkpoint_every: Count = 50_000
    keep: Count = 3  # newest checkpoints that are kept, besides the best
    trace: bool = False  # keep a timeline of every rank, in trace.json; for short runs


@dataclass(frozen=True)
class Config:
    """All of a run's settings: `config.toml`."""

    experiment: Experiment = field(default_factory=Experiment)
    layout: Layout = field(default_factory=Layout)
    watch: Watch = field(default_factory=Watch)


def from_dict(data: dict[str, Any]) -> Config:
    """A configuration, not yet `checked`; UsageError lists what is wrong with single values."""
    try:
        built: Config = config.build(Config, data, _choose)
    except UsageError as error:  # in a user's words the experiment's settings have no prefix
        raise UsageError(re.sub(r"(?<=[ '])experiment\.", "", str(error))) from None
    return built


def checked(settings: Config) -> Config:
    """The same, if its numbers go together; a UsageError otherwise."""
    problems = _cross_problems(settings)
    if problems:
        raise UsageError("\n".join(problems))
    return settings


def to_dict(settings: Any, fields: Callable[[Any], Iterable[Field]] = dataclasses.fields) -> dict[str, Any]:
    """Nested dictionaries that `from_dict` takes back, the algorithm by name."""
    data = config.dump(settings, fields)
    table = data.get("experiment", data)
    algo = settings.experiment.algo if isinstance(settings, Config) else settings.algo
    if isinstance(settings, Config | Experiment):
        table["algo"] = {"name": algorithm_name(algo), **table["algo"]}
    return data


def to_toml(settings: Config) -> str:
    return tomli_w.dumps(to_dict(settings))


def resolve(
    name: str, algo: str | None = None, settings: Mapping[str, Any] | None = None, trust: bool = False
) -> Config:
    """The configuration of a preset, an environment id or a TOML file, with `settings` laid over it.

    The keys of `settings` are those of the experiment (`seed`, `algo.clip`), or start with `watch.` or `layout.`.
    What the arguments name as `module:name` is imported; what a file names so, with `trust`.
    """
    if algo is not None and algo not in REGISTRY and ":" not in algo:
        raise UsageError(f"{unknown(algo)} Use: lockstep train {name} --algo ppo")
    config.check_depth(settings)
    typed = config.leaves(settings or {})
    for given in (algo, typed.get("env.id")):
        if isinstance(given, str):
            names.load(given)
    is_file = name.endswith(".toml")
    data = _file(Path(name)) if is_file else _preset(name, algo) if name in preset_names() else _plain_environment(name)
    if algo is not None and algo != _table_in(data, "algo").get("name", "ppo"):
        if _table_in(data, "algo"):  # the numbers of another are none of its
            data = config.assign(data, "experiment.algo", None)
        data = config.assign(data, "experiment.algo.name", algo)
    for key, given in named_in(data).items():
        if key not in typed:
            names.load_from(f"'{name}'", given, trust or not is_file)
    data = config.merged({"experiment": dict(entry(_named(_table_in(data, "algo"))).defaults)}, data)
    for key, value in typed.items():
        if key == "algo.name":  # the preset's numbers of another algorithm would stay
            given = config.shown(value)
            raise UsageError(
                f"algo.name is not a setting: say --algo {given.strip(chr(39))}, or algo={given} in Python."
            )
        group = key.split(".")[0]
        data = config.assign(data, key if group in ("watch", "layout") else f"experiment.{key}", value)
    resolved = from_dict(data)
    if is_file:
        check_environment(data, name)
    checked(resolved)
    check_id(resolved.experiment.env.id)
    unread = _unread(resolved.experiment, typed)
    if ignored := [f"{key} has no effect with {unread[key]}." for key in typed if key in unread]:
        raise UsageError("\n".join(ignored))
    return resolved


def named_in(data: dict[str, Any]) -> dict[str, str]:
    """What a configuration says that may be `module:name`: its algorithm and its environment."""
    given = {"algo.name": _table_in(data, "algo").get("name"), "env.id": _table_in(data, "env").get("id")}
    return {key: name for key, name in given.items() if isinstance(name, str)}


def check_environment(data: dict[str, Any], file: str) -> None:
    """Refuse a file that leaves open which environment it is for."""
    if "id" not in _table_in(data, "env"):
        raise UsageError(
            f"'{file}' names no environment. Write `[experiment.env]`, and below it `id = \"Pendulum-v1\"`."
        )


def _file(path: Path) -> dict[str, Any]:
    try:
        file = Path(os.path.realpath(path)) if path.is_symlink() else path  # the user's own: it may be a link
        return config.read(bytes(files.read(file, files.TEXT)))
    except FileFault as error:
        raise UsageError(str(error)) from error
    except UsageError as error:
        raise UsageError(f"'{path}': {error}") from error


def preset_names() -> list[str]:
    found = resources.files("lockstep.presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml"))


def preset_table(name: str) -> dict[str, Any]:
    """A preset's file: `about`, `[env]`, and a table per algorithm with what differs from the defaults.

    `algo` names the one that it is for, where that is not ppo.
    """
    return tomllib.loads((resources.files("lockstep.presets") / f"{name}.toml").read_text())


def _preset(name: str, algo: str | None) -> dict[str, Any]:
    table = preset_table(name)
    chosen = algo or table.get("algo", "ppo")
    numbers = dict(table.get(chosen, {}))
    watch = numbers.pop("watch", {})
    named = {"env": table["env"], "algo": {"name": chosen}}
    return {"experiment": config.merged(named, numbers), "watch": watch}


def _plain_environment(name: str) -> dict[str, Any]:
    names.load(name)
    check_id(name, preset_names())
    return {"experiment": {"env": {"id": name}}}


def _choose(cls: type, data: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """For the table `algo`, the dataclass of the algorithm that its `name` says."""
    if cls is not Algo:
        return cls, data
    return entry(_named(data)).config, {key: value for key, value in data.items() if key != "name"}


def _named(algo: dict[str, Any]) -> str:
    """The name of the algorithm that the table `algo` is for."""
    name = algo.get("name", "ppo")
    if not isinstance(name, str):
        raise UsageError(f"'algo.name' must be text, not {config.shown(name)}.")
    return name


def _table_in(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The experiment's table `algo` or `env` in a configuration. Tables that are none are told of later."""
    experiment = data.get("experiment")
    table = experiment.get(name) if isinstance(experiment, dict) else None
    return table if isinstance(table, dict) else {}


def _unread(experiment: Experiment, typed: Mapping[str, Any]) -> dict[str, str]:
    """The settings that are not read, each with what makes it so: whoever types them means something.

    What kind of actions an environment takes is looked up, by making it, only where a typed setting asks for it.
    """
    chosen, normalize = entry(algorithm_name(experiment.algo)), experiment.normalize
    unread = {f"algo.{name}": why for name, why in chosen.unread(experiment.algo).items()}
    if experiment.collect.episodes:
        unread["collect.steps"] = f"collect.episodes={experiment.collect.episodes}"
    if not normalize.observation:
        scales = ("normalize.observation_clip", "normalize.observation_floor")
        unread |= dict.fromkeys(scales, "normalize.observation=false")
    if not normalize.reward:
        unread["normalize.reward_clip"] = "normalize.reward=false"
    if not typed.keys().isdisjoint(OF_REAL_ACTIONS) and isinstance(spec_for(experiment.env).action, Discrete):
        unread |= dict.fromkeys(OF_REAL_ACTIONS, "discrete actions")
    return unread


def _cross_problems(settings: Config) -> list[str]:
    """What single values can't show."""
    experiment = settings.experiment
    name, collect = algorithm_name(experiment.algo), experiment.collect
    kind = "episodes" if collect.episodes else "steps"
    if kind not in entry(name).collects:
        wanted = "collect.episodes must be 0" if kind == "episodes" else "set collect.episodes to 1 or more"
        return [
            f"{name} does not learn from {'whole episodes' if collect.episodes else 'a number of steps'}: {wanted}."
        ]
    if experiment.batch > MOST_STEPS:
        size = f"{experiment.lanes} lanes x {experiment.envs_per_lane} envs x {experiment.length} steps"
        return [f"an update of {size} fits into no machine. Lower what is collected, envs_per_lane or lanes."]
    problems = entry(name).problems(experiment.algo, experiment.lanes, experiment.rows)
    layers = experiment.policy.hidden, experiment.policy.value_hidden
    if any(sum(a * b for a, b in pairwise((1, *widths))) > MOST_WEIGHTS for widths in layers):
        problems.append("policy.hidden or policy.value_hidden: networks of that size fit into no machine.")
    if experiment.policy.widths == "dimensions" and layers != (MLP.hidden, MLP.value_hidden):
        problems.append("policy.hidden and policy.value_hidden have no effect with policy.widths=dimensions.")
    nprocs, lanes = settings.layout.nprocs, experiment.lanes
    if lanes % nprocs:
        fitting = [str(n) for n in range(1, min(lanes, MANY) + 1) if lanes % n == 0]
        problems.append(f"nprocs ({nprocs}) must divide the {lanes} lanes: {', '.join(fitting)}.")
    workers, mine = settings.layout.workers, lanes // nprocs * experiment.envs_per_lane
    if workers > mine and not lanes % nprocs:
        problems.append(f"workers ({workers}) can't be more than the {mine} environments of a rank.")
    return problems


def replace_experiment(settings: Config, **changes: Any) -> Config:
    return dataclasses.replace(settings, experiment=dataclasses.replace(settings.experiment, **changes))


def preset_for(env_id: str) -> str | None:
    """The preset that is tuned for this environment id, if it is one."""
    tables = {name: preset_table(name) for name in preset_names()}
    return next((name for name, table in tables.items() if "algo" not in table and table["env"]["id"] == env_id), None)
