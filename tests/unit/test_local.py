from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from lockstep.envs.episodes import BrokenEpisode
from lockstep.envs.local import LocalEnvs, OneByOne
from lockstep.envs.make import Env
from tests.environments import actions_for, started, stepped


class Odd(gymnasium.Env):
    """Observations of whatever kind the test wants."""

    def __init__(self, space: gymnasium.spaces.Space, observation: object) -> None:
        self.observation_space, self.action_space = space, gymnasium.spaces.Discrete(2)
        self._observation = observation

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[object, dict]:
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action: int) -> tuple[object, float, bool, bool, dict]:
        return self._observation, 0.0, False, False, {}


PIXELS, REAL = gymnasium.spaces.Box(0, 255, (2,), np.uint8), gymnasium.spaces.Box(-1, 1, (2,), np.float32)
SCALAR = gymnasium.spaces.Box(-1, 1, (), np.float32)


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (PIXELS, np.array([np.nan, 0.7])),
        (PIXELS, np.array([1, 300], np.int64)),
        (REAL, np.array(["a", "b"])),
        (REAL, np.array([1j, 2j])),
        (REAL, None),
    ],
    ids=repr,
)
def test_an_observation_of_another_kind_is_refused(space: gymnasium.spaces.Space, observation: object) -> None:
    gymnasium.register("Odd-v0", Odd, kwargs={"space": space, "observation": observation})
    try:
        with LocalEnvs(Env("Odd-v0"), 0, [0]) as envs:
            started(envs)
            with pytest.raises(BrokenEpisode, match="the observation has"):
                stepped(envs, np.zeros(1, np.int32))
    finally:
        del gymnasium.registry["Odd-v0"]


@pytest.mark.parametrize(("space", "observation"), [(PIXELS, np.uint8([3, 4])), (REAL, [0.5, 1.0]), (SCALAR, 0.25)])
def test_an_observation_of_its_space_is_taken(space: gymnasium.spaces.Space, observation: object) -> None:
    gymnasium.register("Odd-v0", Odd, kwargs={"space": space, "observation": observation})
    try:
        with LocalEnvs(Env("Odd-v0"), 0, [0, 1]) as envs:
            started(envs)
            out = stepped(envs, np.zeros(2, np.int32))
            np.testing.assert_array_equal(out.next_observation[1], np.asarray(observation))
            assert out.next_observation.dtype == space.dtype
    finally:
        del gymnasium.registry["Odd-v0"]


def test_a_simulation_that_mujoco_reset_by_itself_is_refused() -> None:
    with LocalEnvs(Env("Reacher-v5"), 0, [0, 1]) as envs:
        assert isinstance(envs._simulations, OneByOne)
        started(envs)
        actions = actions_for(envs, 2)
        stepped(envs, actions[0])
        envs._simulations._envs[1].bare.data.qvel[:] = 1e12
        with pytest.raises(BrokenEpisode, match=r"environment 1 .*MuJoCo reset the simulation by itself: .*unstable"):
            stepped(envs, actions[1])
