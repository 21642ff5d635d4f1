"""Simulations stepped together against the same ones one by one. Both are held against Gymnasium in the contracts."""

from __future__ import annotations

from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from mujoco.batch import SimulationError

from lockstep.envs import local
from lockstep.envs.episodes import BrokenEpisode
from lockstep.envs.local import LocalEnvs, OneByOne
from lockstep.envs.make import MUJOCO_WARNINGS, Env
from lockstep.envs.native import FEW, Batched, Engine, Native, Separate
from tests.environments import actions_for, started, stepped

NUMBERS = range(2 * FEW + 1)


class Mine(HalfCheetahEnv):
    """What a user made of it."""


def made(**options: Any) -> HalfCheetahEnv:
    return HalfCheetahEnv(**options)


MINE = {
    "Mine-v0": {"entry_point": Mine},
    "Made-v0": {"entry_point": made},
    "Model-v0": {
        "entry_point": "gymnasium.envs.mujoco.hopper_v5:HopperEnv",
        "kwargs": {"xml_file": "walker2d_v5.xml"},
    },
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "env",
    [
        Env("HalfCheetah-v5", time_limit=30),
        Env("HalfCheetah-v5", time_limit=30, kwargs={"frame_skip": 3, "forward_reward_weight": 0.3}),
        Env("Swimmer-v5", time_limit=30, kwargs={"exclude_current_positions_from_observation": False}),
        Env("Walker2d-v5", kwargs={"healthy_z_range": (1.0, 1.3), "healthy_reward": 0.7}),
        Env("Walker2d-v5", kwargs={"healthy_angle_range": (-0.1, 0.1), "ctrl_cost_weight": 0.1}),
        Env("Hopper-v5", kwargs={"healthy_state_range": (-3.0, 3.0)}),
        Env("Hopper-v5", time_limit=50, kwargs={"terminate_when_unhealthy": False}),
        Env("InvertedPendulum-v5", kwargs={"reset_noise_scale": 0.1}),
        Env("Ant-v5", time_limit=30),
        Env("Ant-v5", time_limit=50, kwargs={"terminate_when_unhealthy": False, "contact_force_range": (-9.0, 5.0)}),
        Env("Ant-v5", kwargs={"healthy_z_range": (0.4, 0.9), "main_body": "front_left_leg", "healthy_reward": 0.7}),
        Env("Ant-v5", time_limit=30, kwargs={"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.1}),
        Env("Humanoid-v5"),
        Env("Humanoid-v5", time_limit=40, kwargs={"terminate_when_unhealthy": False, "contact_cost_weight": 1e-4}),
        Env("Humanoid-v5", kwargs={"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 2.0}),
        Env("Humanoid-v5", kwargs={f"include_{name}_in_observation": False for name in ("cinert", "cfrc_ext")}),
        Env("Humanoid-v5", kwargs={f"include_{name}_in_observation": False for name in ("cvel", "qfrc_actuator")}),
    ],
    ids=str,
)
def test_stepped_together_they_have_the_bits_of_one_by_one(
    monkeypatch: pytest.MonkeyPatch, env: Env, threads: int
) -> None:
    with LocalEnvs(env, 3, NUMBERS, threads=threads) as envs:
        assert isinstance(envs._simulations, Native)
        assert envs._simulations.engine.nthread == threads
        monkeypatch.setattr(local, "native", lambda *_: None)
        with LocalEnvs(env, 3, NUMBERS) as others:
            assert isinstance(others._simulations, OneByOne)
            seen, ended = started(envs), 0
            np.testing.assert_array_equal(seen, started(others))
            for t, action in enumerate(3 * actions_for(envs, 120)):
                for block in (envs, others):
                    block.resting[:] = t % 40 > 30
                    block.resting[::2] = False
                one, other = stepped(envs, action, seen), stepped(others, action, seen)
                assert [leaf.tobytes() for leaf in one] == [leaf.tobytes() for leaf in other]
                seen, ended = one.observation, ended + int((one.terminated | one.truncated).sum())
    assert ended


def test_few_simulations_get_few_threads() -> None:
    with LocalEnvs(Env("HalfCheetah-v5"), 0, range(FEW), threads=8) as envs:
        assert isinstance(envs._simulations, Native)
        assert envs._simulations.engine.nthread == 1


@pytest.mark.parametrize(
    "env",
    [
        *(Env(name) for name in MINE),
        Env("Reacher-v5"),
        Env("HalfCheetah-v5", time_feature=0.01),
        Env("HalfCheetah-v5", kwargs={"xml_file": "walker2d_v5.xml"}),
        Env("HalfCheetah-v5", kwargs={"render_mode": "rgb_array"}),
    ],
    ids=str,
)
def test_what_is_not_known_is_stepped_by_its_own_code(env: Env) -> None:
    for name, how in MINE.items():
        gymnasium.register(name, max_episode_steps=50, **how)
    try:
        with LocalEnvs(env, 0, [0]) as envs:
            assert isinstance(envs._simulations, OneByOne)
    finally:
        for name in MINE:
            del gymnasium.registry[name]


def disturb(engine: Engine, i: int, field: str) -> None:
    if isinstance(engine, Batched):
        engine.bind(field)[i] = 1e12
    if isinstance(engine, Separate):
        getattr(engine._data[i], field)[:] = 1e12


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Ant-v5"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_simulation_that_mujoco_reset_by_itself_is_named(name: str, threads: int) -> None:
    with LocalEnvs(Env(name), 0, NUMBERS, threads=threads) as envs:
        assert isinstance(envs._simulations, Native)
        engine, actions = envs._simulations.engine, actions_for(envs, 2)
        for which in (5, 2, 7):  # one after the other, in new episodes
            started(envs)
            stepped(envs, actions[0])
            disturb(engine, which, "qvel")
            disturb(engine, 8, "qpos")
            with pytest.raises(BrokenEpisode, match=rf"environment {which} .*by itself: .* QVEL .*unstable") as caught:
                stepped(envs, actions[1])
            np.testing.assert_array_equal(caught.value.actions, actions[:, which])


def test_a_warning_of_something_else_is_nobodys() -> None:
    with LocalEnvs(Env("HalfCheetah-v5"), 0, NUMBERS) as envs:
        assert isinstance(envs._simulations, Native)
        started(envs)
        MUJOCO_WARNINGS.append("another simulation is unstable")
        stepped(envs, actions_for(envs, 1)[0])
        assert not MUJOCO_WARNINGS


SENSELESS = [
    *(Env("Hopper-v5", kwargs={"healthy_z_range": bounds}) for bounds in ([0.7], [0.7, 2, 3], ["low", "high"], None)),
    Env("Ant-v5", kwargs={"main_body": "tail"}),
    Env("Ant-v5", kwargs={"healthy_z_range": [1]}),
    Env("Humanoid-v5", kwargs={"contact_cost_range": ["low", "high"]}),
]


@pytest.mark.parametrize("env", SENSELESS, ids=str)
def test_settings_that_the_environment_would_refuse_are_its_fault(env: Env) -> None:
    with LocalEnvs(env, 0, NUMBERS) as envs:
        assert isinstance(envs._simulations, Native)
        started(envs)
        with pytest.raises(BrokenEpisode, match="it raised"):
            stepped(envs, actions_for(envs, 1)[0])


def test_a_simulation_that_mujoco_gives_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEnvs(Env("HalfCheetah-v5"), 0, NUMBERS) as envs:
        assert isinstance(envs._simulations, Native)
        assert isinstance(envs._simulations.engine, Batched)
        started(envs)

        def gives_up(*_: object) -> None:
            raise SimulationError(np.asarray([7, 8]), "stack overflow")

        monkeypatch.setattr(envs._simulations.engine._batch, "step", gives_up)
        with pytest.raises(BrokenEpisode, match=r"environment 7 .*it raised SimulationError: .*stack overflow"):
            stepped(envs, actions_for(envs, 1)[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_one_with_data_of_its_own_that_mujoco_gives_up_is_named(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    with LocalEnvs(Env("Ant-v5"), 0, NUMBERS, threads=threads) as envs:
        assert isinstance(envs._simulations, Native)
        assert isinstance(envs._simulations.engine, Separate)
        started(envs)
        given_up, forces = envs._simulations.engine._data[7], mujoco.mj_rnePostConstraint

        def gives_up(model: mujoco.MjModel, data: mujoco.MjData) -> None:
            if data is given_up:
                raise mujoco.FatalError("stack overflow")
            forces(model, data)

        monkeypatch.setattr(mujoco, "mj_rnePostConstraint", gives_up)
        with pytest.raises(BrokenEpisode, match=r"environment 7 .*it raised SimulationError: .*stack overflow"):
            stepped(envs, actions_for(envs, 1)[0])
