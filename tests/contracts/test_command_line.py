"""Bad input gets one clear message and the right exit status, before anything is created."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import struct
import subprocess
import termios
from pathlib import Path

import pytest

import lockstep
from lockstep.cli import main
from lockstep.run.checkpoint import listed
from tests.laws.process import command, options, run
from tests.laws.table import settings

Output = pytest.CaptureFixture[str]

REFUSED = {
    "an unknown environment": (["train", "Pendulm-v1"], "unknown environment 'Pendulm-v1'. Did you mean 'Pendulum-v1'"),
    "an unknown preset": (["train", "halfcheeta"], "Did you mean 'halfcheetah'"),
    "an unknown module": (["train", "no_such_module:Env-v0"], "the module 'no_such_module' can't be imported"),
    "an unknown setting": (
        ["train", "pendulum", "--set", "algo.clp=1"],
        "unknown setting 'algo.clp'. Did you mean 'algo.clip'",
    ),
    "an unknown group": (["train", "pendulum", "--set", "alg.clip=1"], "unknown setting 'alg'"),
    "a wrong type": (["train", "pendulum", "--set", "algo.clip=big"], "'algo.clip' must be a number, not 'big'"),
    "out of range": (["train", "pendulum", "--set", "algo.discount=1.5"], "'algo.discount' must be between 0 and 1"),
    "no value": (["train", "pendulum", "--set", "algo.clip"], "--set takes KEY=VALUE"),
    "a group for a value": (["train", "pendulum", "--set", "algo=ppo"], "'algo' is a group of settings"),
    "negative steps": (
        ["train", "pendulum", "--steps", "-5"],
        "argument --steps: must be a whole number above 0, not -5",
    ),
    "steps beyond counting": (["train", "pendulum", "--steps", "1e30"], "--steps: must be below 2^63, not 1e30"),
    "steps without end": (["train", "pendulum", "--steps", "1e400"], "must be a whole number above 0, not 1e400"),
    "steps that are none": (["train", "pendulum", "--steps", "nan"], "must be a whole number above 0, not nan"),
    "steps in other digits": (["train", "pendulum", "--steps", "٣"], "must be a whole number above 0, not ٣"),
    "a long seed": (["train", "pendulum", "--seed", "9" * 5000], "must be a whole number, 0 or more, not 9999"),
    "a seed in other digits": (["train", "pendulum", "--seed", "²"], "must be a whole number, 0 or more, not ²"),
    "a seed of more than 128 bits": (
        ["train", "pendulum", "--seed", "9" * 39],
        "'seed' must be between 0 and 3.40282e+38",
    ),
    "a long seed as a setting": (
        ["train", "pendulum", "--set", f"seed={'9' * 5000}"],
        "--set seed: a number is too long",
    ),
    "lists without end": (["train", "pendulum", "--set", f"x={'[' * 5000}"], "--set x: tables or lists nest more than"),
    "a file that is none": (["train", "/dev/zero.toml"], "No such file"),
    "steps in words": (
        ["train", "pendulum", "--steps", "many"],
        "argument --steps: must be a whole number above 0, not many",
    ),
    "an unknown algorithm": (["train", "pendulum", "--algo", "pppo"], "unknown algorithm 'pppo'. Did you mean 'ppo'"),
    "a mistyped option": (
        ["train", "pendulum", "--sed", "1"],
        "unrecognized arguments: --sed 1. Did you mean '--seed'",
    ),
    "an option that is a setting": (
        ["train", "pendulum", "--lr", "0.1"],
        "unrecognized arguments: --lr 0.1. Settings are given as in --set algo.learning_rate=1e-3.",
    ),
    "a mistyped command": (["trian", "pendulum"], "Did you mean 'train'? Use: lockstep train pendulum\n"),
    "a mistyped option with a value": (["train", "pendulum", "--sed=1"], "Use: lockstep train pendulum --seed=1\n"),
    "several seeds": (
        ["train", "pendulum", "--seeds", "4", "5", "--steps", "9"],
        "A run has one seed. Use: for seed in 4 5; do lockstep train pendulum --steps 9 --seed $seed; done\n",
    ),
    "several seeds in one word": (
        ["train", "pendulum", "--seeds=7,8"],
        "Use: for seed in 7 8; do lockstep train pendulum --seed $seed; done\n",
    ),
    "a number of seeds": (["train", "pendulum", "--seeds", "5"], "Use: for seed in 1 2 3; do lockstep train pendulum"),
    "an algorithm that learns off-policy": (
        ["train", "pendulum", "--algo", "sac"],
        "'sac' learns off-policy, lockstep is on-policy only. There is: ppo, ppo-kl, trpo, npg, acktr, a2c, reinforce;"
        " or module:name, your own. Use: lockstep train pendulum --algo ppo\n",
    ),
    "another such algorithm": (["train", "hopper", "--algo", "TD3"], "Use: lockstep train hopper --algo ppo\n"),
    "an algorithm with memory": (["train", "pendulum", "--algo", "ppo-lstm"], "policies have no memory. There is: ppo"),
    "an algorithm with masks": (["train", "pendulum", "--algo", "maskable-ppo"], "action masks are not used."),
    "a minibatch that does not fit": (
        ["train", "pendulum", "--set", "algo.minibatch=100"],
        "algo.minibatch (100) must be drawn evenly from 4 lanes of",
    ),
    "an action space of another kind": (["train", "Blackjack-v1"], "has Tuple observations; only Box is supported"),
    "bad environment arguments": (
        ["train", "pendulum", "--set", "env.kwargs.gravitas=1"],
        "does not take env.kwargs {'gravitas': 1}",
    ),
    "more than fits into memory": (
        ["train", "pendulum", "--set", "collect.steps=1e9"],
        "of 58 bytes needs about",
    ),
    "an algorithm as a setting": (
        ["train", "pendulum", "--set", "algo.name=a2c"],
        "algo.name is not a setting: say --algo a2c, or algo='a2c' in Python.",
    ),
    "a setting of another algorithm": (
        ["train", "pendulum", "--algo", "reinforce", "--set", "algo.clip=1"],
        "unknown setting 'algo.clip'. It takes algo.discount, algo.baseline,",
    ),
    "widths given twice": (
        ["train", "coady", "--set", "policy.hidden=[32, 32]"],
        "policy.hidden and policy.value_hidden have no effect with policy.widths=dimensions.",
    ),
    "an empty argument": (["train", "pendulum", ""], "unrecognized arguments"),
    "a run that is none": (["evaluate", "nowhere"], "'nowhere' is not a run: there is no config.toml in it"),
    "a picture of another kind": (
        ["plot", "nowhere", "--out", "curves.pdf"],
        "a picture is .png or .svg. Use: --out curves.png",
    ),
    "a layout that does not fit": (
        ["bench", "pendulum", "--nprocs", "1,3"],
        "nprocs (3) must divide the 4 lanes: 1, 2",
    ),
    "a layout in words": (["bench", "--nprocs", "1,two"], "--nprocs: must be a whole number above 0, not two"),
    "an unknown mode": (["bench", "--mode", "gather,sum"], "--mode: must be gather, average or both, not sum"),
    "a layout for bench": (["bench", "--set", "layout.nprocs=2"], "bench chooses layouts with --nprocs, --mode"),
    "too little to measure": (["bench", "pendulum", "--steps", "6144"], "updates of 2,048 steps are not measured"),
    "a bench of another kind": (["bench", "--out", "bench.pdf"], "a picture is .png or .svg"),
    "updates the wrong way round": (["verify", "nowhere", "--updates", "9:2"], "must be A:B with A not above B"),
    "updates without an end": (["verify", "nowhere", "--updates", "9"], "as in 10:20, 10: or :20, not 9"),
    "a name that leads elsewhere": (["train", "pendulum", "--name", "../../x"], "a run's name is one directory inside"),
    "an empty name": (["train", "pendulum", "--name", ""], "--name '': a run's name is one directory inside --logdir"),
    "such a name of several ranks": (
        ["train", "pendulum", "--name", "..", "--nprocs", "2"],
        "--name '..': a run's name is one directory inside --logdir",
    ),
    "nothing to verify": (["verify", "nowhere"], "'nowhere' is not a run"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("lockstep: ")
    assert not list(tmp_path.iterdir()), "nothing may be created"


BROKEN_RECORDS = {
    "a seed without end": '{"env": {"id": "Pendulum-v1"}, "seed": Infinity, "actions": []}',
    "a seed below 0": '{"env": {"id": "Pendulum-v1"}, "seed": -1, "actions": []}',
    "a seed that is none": '{"env": {"id": "Pendulum-v1"}, "seed": true, "actions": []}',
    "an environment that is none": '{"env": "x", "seed": 0, "actions": []}',
    "no environment": '{"env": {}, "seed": 0, "actions": []}',
    "no table": "[]",
    "actions that are none": '{"env": {"id": "Pendulum-v1"}, "seed": 0, "actions": 5}',
    "an action in words": '{"env": {"id": "Pendulum-v1"}, "seed": 0, "actions": [["x"]]}',
    "an action of another size": '{"env": {"id": "Pendulum-v1"}, "seed": 0, "actions": [[0.5, 0.5]]}',
    "an action that is no number": '{"env": {"id": "Pendulum-v1"}, "seed": 0, "actions": [[NaN]]}',
    "an action beyond float32": '{"env": {"id": "Pendulum-v1"}, "seed": 0, "actions": [[1e300]]}',
    "actions of several sizes": '{"env": {"id": "Pendulum-v1"}, "seed": 0, "actions": [[[0.5], 1]]}',
    "kwargs of another": '{"env": {"id": "Pendulum-v1", "kwargs": {"gravitas": 1}}, "seed": 0, "actions": []}',
    "nests": '{"env": ' + "[" * 100_000,
    "other letters": "\xff",
}


@pytest.mark.parametrize("record", BROKEN_RECORDS.values(), ids=BROKEN_RECORDS)
def test_what_is_no_recorded_episode_is_status_5(tmp_path: Path, capsys: Output, record: str) -> None:
    file = tmp_path / "fault.json"
    file.write_bytes(record.encode("latin-1"))
    assert main(["check", "Pendulum-v1", "--replay", str(file)]) == 5
    told = capsys.readouterr().err
    assert told.startswith(f"lockstep: '{file}'")
    assert told.count("\n") == 1


def test_a_recorded_episode_of_a_discrete_environment_has_its_actions(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "fault.json"
    for action, status in ((1, 0), (2, 5), (-1, 5), (0.5, 5), ([1], 5), (True, 5)):
        file.write_text(json.dumps({"env": {"id": "CartPole-v1"}, "seed": 0, "actions": [action]}))
        assert main(["check", "CartPole-v1", "--replay", str(file)]) == status, action
    assert "action 1 must be a whole number that the policy can choose" in capsys.readouterr().err


def test_a_recorded_episode_of_another_environment_imports_nothing(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "fault.json"
    file.write_text('{"env": {"id": "no_such_module:Pendulum-v1"}, "seed": 0, "actions": []}')
    assert main(["check", "Pendulum-v1", "--replay", str(file)]) == 2
    assert "is an episode of 'no_such_module:Pendulum-v1', not of 'Pendulum-v1'" in capsys.readouterr().err


def test_all_problems_are_told_at_once(capsys: Output) -> None:
    wrong = ["--set", "algo.clip=-1", "--set", "policy.activation=tahn", "--set", "lanes=x"]
    assert main(["train", "pendulum", *wrong]) == 2
    told = capsys.readouterr().err
    assert "'algo.clip' must be above 0" in told
    assert "Did you mean 'tanh'" in told
    assert "'lanes' must be a whole number" in told


def test_an_unwritable_logdir_is_status_5(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below", Path("/proc/nowhere")):
        assert main(["train", "pendulum", "--logdir", str(place)]) == 5
        assert f"can't be kept in '{place}'" in capsys.readouterr().err


def test_an_environment_that_returns_nan_is_status_3_and_replays(tmp_path: Path, capsys: Output) -> None:
    name = "lockstep.envs.testing:Nan-v0"
    assert main(["train", name, "--logdir", str(tmp_path), "--name", "run"]) == 3
    told = capsys.readouterr().err
    assert re.search(
        r"environment 0 .*the observation is nan at index 1, at step 57 of the episode with seed \d+", told
    )
    assert "after action [" in told
    replay = re.search(r"Replay it with: lockstep (.*)", told)
    assert replay is not None
    assert listed(tmp_path / "run"), "the checkpoint from before is still there"
    assert main(replay.group(1).split()) == 3
    assert "replayed: at step 57 the observation is nan at index 1" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--set", 'env.kwargs.xml_file="half_cheetah.xml"']], ids=["together", "alone"])
def test_a_simulation_that_mujoco_reset_by_itself_is_status_3_and_replays(
    tmp_path: Path, capsys: Output, more: list[str]
) -> None:
    noisy = ["--set", "env.kwargs.reset_noise_scale=1e11", "--set", "collect.steps=8", *more]
    assert main(["train", "HalfCheetah-v5", *noisy, "--logdir", str(tmp_path), "--name", "run"]) == 3
    told = capsys.readouterr().err
    assert re.search(r"environment 0 .*MuJoCo reset the simulation by itself: .*, at step 1 of the episode", told)
    replay = re.search(r"Replay it with: lockstep (.*)", told)
    assert replay is not None
    assert main(replay.group(1).split()) == 3
    assert "replayed: at step 1 MuJoCo reset the simulation by itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("inf", "the observation is inf at index 1"),
        ("nan-reward", "the reward is nan"),
        ("shape", r"the observation has shape \(2,\), its space says \(3,\)"),
        ("raise", "it raised RuntimeError: scripted failure"),
    ],
)
def test_every_broken_contract_is_status_3(tmp_path: Path, capsys: Output, what: str, message: str) -> None:
    kwargs = ["--set", f'env.kwargs.what="{what}"', "--set", "env.kwargs.at=9"]
    where = ["--logdir", str(tmp_path), "--name", "run"]
    assert main(["train", "lockstep.envs.testing:Scripted-v0", *kwargs, *where]) == 3
    told = capsys.readouterr().err
    assert re.search(message, told)
    assert "at step 9" in told
    assert "Traceback" not in told


def test_a_learning_rate_that_explodes_is_status_4(tmp_path: Path, capsys: Output) -> None:
    huge = ["--set", "algo.learning_rate=1e30", "--set", "algo.max_gradient=1e30", "--steps", "20000"]
    assert main(["train", "pendulum", *huge, "--logdir", str(tmp_path), "--name", "run"]) == 4
    assert "not a number, and was not applied" in capsys.readouterr().err
    assert (tmp_path / "run" / "diverged" / "trajectory.safetensors").is_file()
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "1"]) == 0


def test_a_run_in_use_is_status_7(tmp_path: Path, capsys: Output) -> None:
    from lockstep.run.directory import locked

    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(1))
    with locked(done.path):
        assert main(["resume", str(done.path)]) == 7
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err


def test_a_name_that_exists_is_status_2(tmp_path: Path, capsys: Output) -> None:
    lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(1))
    assert main(["train", "Pendulum-v1", "--logdir", str(tmp_path), "--name", "run"]) == 2
    assert "lockstep resume" in capsys.readouterr().err


def test_a_full_disk_stops_a_run_with_status_5_and_keeps_what_was_saved(tmp_path: Path) -> None:
    """Files may not grow beyond a limit: the first checkpoint fits, later ones with longer episodes do not."""
    limit = 180_000
    small = ["--set", "collect.steps=256", "--set", "lanes=2", "--set", "env.time_limit=100000", "--steps", "40000"]
    arguments = ["train", "HalfCheetah-v5", *small, "--set", "watch.checkpoint_every=4096", "--set", "algo.epochs=1"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}  # compiled programs don't fit either, which may not matter
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        failed = run(*arguments, "--logdir", str(tmp_path), "--name", "run", env=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failed.returncode == 5, failed.stderr
    assert "could not be written" in failed.stderr
    assert "The checkpoints before it are as they were" in failed.stderr
    assert run("digest", str(tmp_path / "run")).returncode == 0


def test_evaluate_tells_mean_spread_and_interval(tmp_path: Path, capsys: Output) -> None:
    done = lockstep.train("CartPole-v1", logdir=tmp_path, settings=settings(1))
    capsys.readouterr()
    assert main(["evaluate", str(done.path), "--episodes", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episodes"] == len(found["returns"]) == 20
    assert found["return_95"][0] < found["return_mean"] < found["return_95"][1]
    assert main(["evaluate", str(done.path), "--episodes", "20"]) == 0
    assert f"return {found['return_mean']:.2f} +- {found['return_std']:.2f} over 20 episodes" in capsys.readouterr().out


@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1", "Hopper-v5"])
def test_info_and_check_of_environments(capsys: Output, env: str) -> None:
    assert main(["info", env, "--steps", "50"]) == 0
    told = capsys.readouterr().out
    assert env in told
    assert "reset noise" in told
    assert main(["check", env]) == 0
    assert capsys.readouterr().out.count("bit for bit the same") == 2


def test_check_refuses_an_environment_that_does_not_repeat_itself(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gymnasium

    entry = "lockstep.envs.testing:Scripted"
    gymnasium.register("Chance-v0", entry, kwargs={"what": "random", "at": 200, "length": 300})
    assert main(["check", "Chance-v0"]) == 3
    assert "it differs at step 200" in capsys.readouterr().err
    del gymnasium.registry["Chance-v0"]


def test_check_refuses_an_environment_that_returns_nan(capsys: Output) -> None:
    assert main(["check", "lockstep.envs.testing:Nan-v0"]) == 3
    assert "the observation is nan at index 1" in capsys.readouterr().err


def test_an_unreadable_run_and_a_long_name_are_status_5(tmp_path: Path, capsys: Output) -> None:
    assert main(["train", "pendulum", "--logdir", str(tmp_path), "--name", "x" * 300]) == 5
    assert "can't be created: File name too long" in capsys.readouterr().err
    (tmp_path / "run" / "config.toml").mkdir(parents=True)
    assert main(["evaluate", str(tmp_path / "run")]) == 5


@pytest.mark.parametrize("command", ["evaluate", "visualize", "digest", "resume", "verify", "plot"])
def test_a_directory_of_runs_names_them_newest_first_and_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("new", "old")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
        os.utime(tmp_path / "runs" / name, (10**9 - age, 10**9 - age))
    assert main([command, "runs"]) == 2
    told = capsys.readouterr().err
    assert "'runs' is not a run, but a directory with runs: runs/new, runs/old." in told
    assert told.endswith(f"Use: lockstep {command} {'runs/*' if command == 'plot' else 'runs/new'}\n")


def test_a_run_that_is_none_is_looked_for_where_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("1-hopper", "2-pendulum", "3-pendulum")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
        os.utime(tmp_path / "runs" / name, (10**9 - age, 10**9 - age))
    assert main(["evaluate", "pendulum", "--episodes", "5"]) == 2
    told = capsys.readouterr().err
    assert "'pendulum' is not a run, but there are: runs/2-pendulum, runs/3-pendulum, runs/1-hopper." in told
    assert told.endswith("Use: lockstep evaluate runs/2-pendulum --episodes 5\n")
    assert main(["evaluate", "runs/3-pendulum/config.toml"]) == 2
    assert capsys.readouterr().err.endswith("Use: lockstep evaluate runs/3-pendulum\n")
    assert (main(["train", "x" * 5000]), main(["evaluate", "x" * 5000])) == (2, 5)


def test_a_run_is_nothing_to_train_anew(tmp_path: Path, capsys: Output) -> None:
    done = lockstep.train("Pendulum-v1", logdir=tmp_path, name="run", settings=settings(1))
    assert main(["train", str(done.path)]) == 2
    told = capsys.readouterr().err
    assert f"Continue it: lockstep resume {done.path}, or repeat it: lockstep train {done.path}/config.toml" in told


def test_an_unknown_column_lists_those_there_are_nearest_first(tmp_path: Path, capsys: Output) -> None:
    done = lockstep.train("CartPole-v1", logdir=tmp_path, name="run", settings=settings(2))
    assert main(["plot", str(done.path), "--column", "eval"]) == 2
    told = capsys.readouterr().err
    columns, command = re.search(r"It has: (.*)\. Use: lockstep (.*)\n", told).groups()  # type: ignore[union-attr]
    assert columns.startswith("eval_return, time_evaluate, ")
    assert {"return_mean", "kl", "steps"} <= set(columns.split(", "))
    assert "digest" not in columns
    assert command == f"plot {done.path} --column eval_return"
    assert main(["plot", str(done.path), "--column", "kl", "--out", str(tmp_path / "kl.png")]) == 0


def test_one_episode_is_told_without_what_it_can_not_tell(tmp_path: Path, capsys: Output) -> None:
    done = lockstep.train("CartPole-v1", logdir=tmp_path, name="run", settings=settings(1))
    capsys.readouterr()
    assert main(["evaluate", str(done.path), "--episodes", "1"]) == 0
    told = capsys.readouterr().out
    assert re.fullmatch(r"return \d+\.00 over 1 episode\nlength \d+\.0\n", told)
    assert main(["evaluate", str(done.path), "--episodes", "1", "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["presets"], ["--help"], ["info", "CartPole-v1", "--steps", "5"]])
def test_a_full_disk_under_standard_output_is_named(arguments: list[str], buffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 5
    assert done.stderr == "lockstep: standard output: No space left on device.\n"


@pytest.mark.parametrize("columns", [200, 80, 50])
def test_presets_fit_the_terminal(columns: int) -> None:
    shown = on_terminal(columns, "presets")
    assert max(map(len, shown.splitlines())) <= columns
    assert len([line for line in shown.splitlines() if not line.startswith(" ")]) == shown.count("-v")
    assert "swing a two-link arm above a line" in " ".join(shown.split())


@pytest.mark.parametrize("columns", [80, 40, 20])
def test_progress_stays_on_one_line_of_a_terminal(tmp_path: Path, columns: int) -> None:
    small = options(settings(30, **{"watch.eval_every": 0}))
    shown = on_terminal(columns, "train", "CartPole-v1", "--logdir", str(tmp_path), "--name", "run", *small)
    live = [part for part in re.split(r"\r\x1b\[2K|\n", shown) if re.match(r" *[\d,]+ / ", part)]
    assert live
    assert max(map(len, live)) < columns, "a line that wraps is not written over by the next"
    assert ("return" in live[-1]) == (columns >= 40)
    assert ("ETA" in live[-1]) == (columns >= 80)


def test_the_first_seconds_say_what_is_going_on_and_no_number_is_made_up(tmp_path: Path, capsys: Output) -> None:
    small = options(settings(1, **{"env.time_limit": 1000}))
    assert main(["train", "Pendulum-v1", "--logdir", str(tmp_path), "--name", "run", *small]) == 0
    out, err = capsys.readouterr()
    lines = [" ".join(line.split()) for line in err.splitlines() if "preset" not in line]
    assert lines[0] == "starting 8 environments: Pendulum-v1"
    assert lines[1].startswith("training: Pendulum-v1 with ppo")
    assert lines[2].startswith("compiling update 1")
    assert "return - 0 episodes" in lines[3]
    assert out.startswith("256 steps, 1 updates, no episode ended yet\n")
    assert "nan" not in out + err


def on_terminal(columns: int, *arguments: str) -> str:
    """What a command shows on a real terminal of so many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(command(*arguments), stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so when the last one has closed the terminal
        while part := os.read(leader, 65536):
            shown += part
    os.close(leader)
    assert process.wait() == 0, shown
    return shown.decode().replace("\r\n", "\n")


def test_presets_are_listed_and_resolve(capsys: Output) -> None:
    from lockstep.experiment import preset_names, resolve

    assert main(["presets"]) == 0
    listed_names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed_names == preset_names()
    assert len(listed_names) >= 14
    for name in listed_names:
        assert resolve(name).experiment.steps >= 100_000


def test_a_config_file_trains_to_the_digest_of_its_run(tmp_path: Path) -> None:
    first = lockstep.train("Pendulum-v1", logdir=tmp_path, name="first", settings=settings(2))
    assert lockstep.train(str(first.path / "config.toml"), logdir=tmp_path, name="again").digest == first.digest
