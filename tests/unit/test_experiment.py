from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest

import lockstep
from lockstep.algorithms import REGISTRY
from lockstep.algorithms.ppo import PPO
from lockstep.config import LATER, assign, parse
from lockstep.envs.make import Env
from lockstep.errors import FileFault, UsageError
from lockstep.experiment import Experiment, algorithm_name, from_dict, preset_for, preset_names, resolve, to_dict
from lockstep.run.directory import read_config


def nest(depth: int) -> dict[str, object]:
    """Tables inside each other."""
    inner: dict[str, object] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize("algo", REGISTRY)
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_resolves_with_every_algorithm(preset: str, algo: str) -> None:
    """And goes evenly over as many processes as people have."""
    experiment = resolve(preset, algo, {"layout.nprocs": 4}).experiment
    assert algorithm_name(experiment.algo) == algo
    assert ("episodes" if experiment.collect.episodes else "steps") in REGISTRY[algo].collects


def test_the_ancestors_presets_name_their_algorithm_and_take_any_environment() -> None:
    for name in ("coady", "batch-ppo"):
        experiment = resolve(name, settings={"env.id": "CartPole-v1"}).experiment
        assert algorithm_name(experiment.algo) == "ppo-kl"
        assert experiment.length == experiment.collect.episodes * 500
    assert preset_for("Walker2d-v5") == "walker"


DIGESTS = {  # of experiments as runs were made of them: no later version may give others
    "ppo": "29501b1d8ce8201c874330449fa4bcd8fc8da4285f01aa3df1ef34b431ad7b6c",
    "ppo-kl": "547b69471c9d7607096984bc75b2eb9da2c50fd09da0b30ae1c6880f2ffb1ea5",
    "trpo": "d73b3d9ca900580ea030290fff71e2465b6f7304e9153135602f83129ca808af",
    "npg": "fc6959915d469683de8a4a7108188b4ec8aaa48ed5dc51b1d6d5b1613965da89",
    "acktr": "6410f774e854be25029e702c7160e63301a37da1039779fe00960313a0bede47",
    "a2c": "33f11beae817f2d9014ff281d2c5d2e32250fd5bd4e6ac8e91da83e3e7d2497a",
    "reinforce": "c668d1d40474591ad0dbb252f0789f699d060f879284f9c10fd9b7ff7f807825",
}


@pytest.mark.parametrize("algo", DIGESTS)
def test_an_experiments_digest_is_what_it_always_was(algo: str) -> None:
    """Only an algorithm that is new here may be added to the list."""
    assert DIGESTS.keys() == REGISTRY.keys()
    assert resolve("Pendulum-v1", algo, {"env.time_limit": 200}).experiment.digest == DIGESTS[algo]


@dataclass(frozen=True)
class Arithmetic:
    """A table of settings that came later."""

    products: str = "one order"
    sums: str = field(default="pairs", metadata=LATER)  # and one of it later still


@dataclass(frozen=True)
class LaterEnv(Env):
    frames: tuple[int, ...] = field(default_factory=lambda: (1,), metadata=LATER)


@dataclass(frozen=True)
class LaterPPO(PPO):
    bonus: float = field(default=0.0, metadata=LATER)


@dataclass(frozen=True)
class LaterExperiment(Experiment):
    arithmetic: Arithmetic = field(default=Arithmetic(), metadata=LATER)
    repeats: int = field(default=1, metadata=LATER)


def test_a_later_setting_counts_only_where_it_is_not_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve("Pendulum-v1", settings={"env.time_limit": 200}).experiment
    assert before.digest == (known := DIGESTS["ppo"])
    monkeypatch.setitem(REGISTRY, "ppo", REGISTRY["ppo"]._replace(config=LaterPPO))
    old = {f.name: getattr(before, f.name) for f in fields(before)}
    env, algo = ({f.name: getattr(part, f.name) for f in fields(part)} for part in (before.env, before.algo))
    later = LaterExperiment(**{**old, "env": LaterEnv(**env), "algo": LaterPPO(**algo)})
    assert later.digest == known
    changes = [
        {"repeats": 2},
        {"arithmetic": Arithmetic("any order")},
        {"arithmetic": Arithmetic(sums="in turn")},
        {"env": LaterEnv(**env, frames=(1, 2))},
        {"algo": LaterPPO(**algo, bonus=0.5)},
    ]
    assert len({known, *(replace(later, **change).digest for change in changes)}) == 1 + len(changes)
    earlier = replace(later, arithmetic=Arithmetic("any order")).digest
    monkeypatch.setattr(Arithmetic, "__dataclass_fields__", {"products": Arithmetic.__dataclass_fields__["products"]})
    assert replace(later, arithmetic=Arithmetic("any order")).digest == earlier, "from before there were sums"
    assert to_dict(later)["repeats"] == 1, "config.toml has all settings"


def test_whole_episodes_need_a_limit() -> None:
    with pytest.raises(UsageError, match=r"has no time limit, so a whole episode may be of any length\. Set env"):
        resolve("lockstep.envs.testing:Scripted-v0", "reinforce")
    given = resolve("lockstep.envs.testing:Scripted-v0", "reinforce", {"env.time_limit": 40}).experiment
    assert (given.length, given.rows, given.batch) == (40, 80, 320)


def test_an_algorithm_says_what_it_does_not_learn_from() -> None:
    with pytest.raises(UsageError, match=r"reinforce does not learn from a number of steps: set collect\.episodes"):
        resolve("CartPole-v1", "reinforce", {"collect.episodes": 0})
    with pytest.raises(UsageError, match=r"a2c does not learn from whole episodes: collect\.episodes must be 0"):
        resolve("CartPole-v1", "a2c", {"collect.episodes": 2})


def test_a_files_numbers_are_those_of_the_algorithm_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[experiment]\nseed = 7\nenv.id = "Pendulum-v1"\nalgo = { name = "a2c", learning_rate = 0.05, decay = 0.9 }'
    )
    mine, other = (resolve(str(file), algo).experiment for algo in (None, "ppo"))
    assert (algorithm_name(mine.algo), mine.algo.learning_rate) == ("a2c", 0.05)  # type: ignore[attr-defined]
    assert resolve(str(file), "a2c").experiment == mine
    assert other == resolve("Pendulum-v1", "ppo", {"seed": 7}).experiment


@pytest.mark.parametrize("algo", [None, "trpo"])
@pytest.mark.parametrize("typed", [{}, {"algo.discount": 0.9}])
@pytest.mark.parametrize("text", ["experiment = 3", "experiment = { algo = 3 }"])
def test_a_file_whose_tables_are_none_is_told_so(
    tmp_path: Path, text: str, typed: dict[str, float], algo: str | None
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match="is a group of settings, not 3"):
        resolve(str(file), algo, typed)


@pytest.mark.parametrize("text", ["", "[experiment]\nseed = 3\n", "[experiment.env]\ntime_limit = 9\n", "[layout]\n"])
def test_a_file_names_its_environment(tmp_path: Path, text: str) -> None:
    """Pendulum was trained for a million steps."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(
        UsageError, match=r"config.toml' names no environment. Write `\[experiment.env\]`, and below it `id"
    ):
        resolve(str(file))
    with pytest.raises(FileFault, match=r"config.toml' names no environment. Write"):
        read_config(tmp_path)
    assert resolve(str(file), settings={"env.id": "CartPole-v1"}).experiment.env.id == "CartPole-v1"


@pytest.mark.parametrize("settings", [{"env.kwargs": nest(40)}, {"env.kwargs.a": nest(5000)}, {"a." * 5000 + "b": 1}])
def test_settings_that_nest_too_deeply_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"tables or lists nest more than 32 deep|none has so many parts"):
        resolve("pendulum", settings=settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"collect.steps": 2**63 - 1},
            "x 9223372036854775807 steps fits into no machine",
        ),
        ({"lanes": 10**15}, "an update of 1000000000000000 lanes x .* fits into no machine"),
        (
            {"layout.worker_timeout_s": float("inf")},
            r"'layout\.worker_timeout_s' must be between 0 and 1e\+09, not inf",
        ),
        ({"policy.hidden": [2**62]}, "networks of that size fit into no machine"),
        ({"policy.value_hidden": [2**20, 2**20]}, "networks of that size fit into no machine"),
        (
            {"lanes": 10**9, "collect.steps": 1, "layout.nprocs": 3, "algo.minibatch": 10**9},
            r"nprocs \(3\) must divide the",
        ),
    ],
)
def test_what_fits_into_no_machine_is_refused_at_once(settings: dict[str, object], message: str) -> None:
    """Some of it was computed with for hours."""
    with pytest.raises(UsageError, match=message):
        resolve("pendulum", settings=settings)


def test_a_value_in_place_of_a_table_is_told_whatever_else_was_typed() -> None:
    """It was swallowed by a second setting of that table, and Pendulum was trained."""
    with pytest.raises(UsageError, match=r"^'env' is a group of settings, not 'Hopper-v5'\.$"):
        resolve("halfcheetah", settings={"env": "Hopper-v5", "env.time_limit": 100})


def test_what_gymnasium_is_told_of_the_time_limit_counts() -> None:
    longer = {"env.kwargs.max_episode_steps": 2000}
    assert resolve("CartPole-v1", "reinforce", longer).experiment.length == 2000
    for none in (-1, "many"):
        with pytest.raises(UsageError, match="has no time limit"):
            resolve("CartPole-v1", "reinforce", {"env.kwargs.max_episode_steps": none})


@pytest.mark.parametrize("given", [None, {"inner": [1, None]}, object])
def test_what_config_toml_cannot_hold_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"^'env\.kwargs\.camera' must be a number of at most 64 bits, .* not "):
        resolve("CartPole-v1", settings={"env.kwargs": {"camera": given, "fine": {"also": [1, "two", 3.0, True]}}})


UNREAD = [  # algorithm, a setting and its value; a setting with which that does nothing, and one with which it does
    ("a2c", "algo.decay=0.5", "algo.optimizer=adam", "algo.optimizer=rmsprop"),
    ("ppo-kl", "algo.value_learning_rate=0.1", "algo.value_coefficient=0.5", "algo.value_coefficient=0"),
    ("ppo-kl", "algo.value_epochs=4", "algo.value_coefficient=0.5", "algo.value_coefficient=0"),
    ("ppo-kl", "algo.value_minibatch=64", "algo.value_coefficient=0.5", "algo.value_coefficient=0"),
    ("ppo-kl", "algo.cutoff=3", "algo.cutoff_coefficient=0", "algo.cutoff_coefficient=1"),
    ("reinforce", "algo.value_steps=4", "algo.baseline=mean", "algo.baseline=value"),
    ("reinforce", "algo.value_learning_rate=0.1", "algo.baseline=none", "algo.baseline=value"),
    ("acktr", "algo.cold_rate=0.1", "algo.cold_updates=0", "algo.cold_updates=1"),
    ("acktr", "algo.max_gradient=4", "algo.cold_updates=0", "algo.cold_updates=1"),
    ("ppo-kl", "algo.recompute_advantages=false", "algo.value_coefficient=0", "algo.value_coefficient=0.5"),
    ("ppo-kl", "collect.steps=64", "collect.episodes=2", "collect.episodes=0"),
    ("ppo", "algo.value_clip=0.2", "algo.value_coefficient=0", "algo.value_coefficient=0.25"),
    ("ppo", "algo.recompute_advantages=false", "algo.value_coefficient=0", "algo.value_coefficient=0.25"),
    ("ppo", "algo.target_kl=0.001", "algo.epochs=1", "algo.epochs=2"),
    ("ppo", "algo.recompute_advantages=false", "algo.epochs=1", "algo.epochs=2"),
    ("ppo-kl", "algo.stop=0", "algo.epochs=1", "algo.epochs=2"),
    ("ppo-kl", "algo.recompute_advantages=false", "algo.epochs=1", "algo.epochs=2"),
    ("trpo", "algo.shrink=0.3", "algo.backtracks=1", "algo.backtracks=2"),
    ("ppo", "normalize.observation_floor=0.1", "normalize.observation=false", "normalize.observation=true"),
    ("ppo", "normalize.observation_clip=5", "normalize.observation=false", "normalize.observation=true"),
    ("ppo", "normalize.reward_clip=5", "normalize.reward=false", "normalize.reward=true"),
]


@pytest.mark.parametrize(("algo", "setting", "without", "with_it"), UNREAD)
def test_a_setting_that_does_nothing_is_refused_where_it_was_typed(
    algo: str, setting: str, without: str, with_it: str
) -> None:
    """But not a preset's, which is none of the user's doing: cartpole has a value_learning_rate for reinforce."""

    def resolved(*typed: str) -> Experiment:
        return resolve("cartpole", algo, dict(map(parse, typed))).experiment

    name, value = parse(setting)
    group, _, member = name.partition(".")
    refusal = rf"^{name} has no effect with {without}[^0-9]*\.$"
    with pytest.raises(UsageError, match=refusal):
        resolved(without, setting)
    with pytest.raises(UsageError, match=refusal):
        resolve("cartpole", algo, {**dict([parse(without)]), group: {member: value}})
    assert resolved(without) != resolved(with_it) != resolved(with_it, setting)


@pytest.mark.parametrize("setting", ["policy.log_std=-1", "env.action=clip"])
def test_what_only_real_actions_have_is_refused_with_others(setting: str) -> None:
    with pytest.raises(UsageError, match=r"^(policy\.log_std|env\.action) has no effect with discrete actions\.$"):
        resolve("cartpole", settings=dict([parse(setting)]))
    assert resolve("pendulum", settings=dict([parse(setting)])) != resolve("pendulum")


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "setting", "without", "with_it"), UNREAD)
def test_a_setting_that_is_refused_would_have_done_nothing(
    tmp_path: Path, algo: str, setting: str, without: str, with_it: str
) -> None:
    few = {"envs_per_lane": 2, "steps": 600, "watch.eval_every": 0, "env.time_limit": 64}
    config = resolve("cartpole", algo, {**few, **dict([parse(without)])})
    key, value = parse(setting)
    other = from_dict(assign(to_dict(config), f"experiment.{key}", value))
    assert other != config
    assert lockstep.train(other, logdir=tmp_path).digest == lockstep.train(config, logdir=tmp_path).digest


@pytest.mark.parametrize("value", [2**40_000, "y" * 10_000, [1]], ids=["number", "text", "list"])
def test_a_name_of_an_algorithm_that_is_none_is_told_briefly(tmp_path: Path, value: object) -> None:
    with pytest.raises(UsageError, match=r"algo\.name is not a setting: say --algo ") as caught:
        resolve("pendulum", settings={"algo.name": value})
    assert len(str(caught.value)) < 600
    file = tmp_path / "mine.toml"
    file.write_text(f'[experiment]\nenv.id = "Pendulum-v1"\nalgo.name = 0x{"f" * 9000}\n')
    with pytest.raises(UsageError, match=r"'algo\.name' must be text, not a number of thousands of digits"):
        resolve(str(file))
