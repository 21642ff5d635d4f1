from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.address import Purpose, integer
from lockstep.envs.local import BrokenEpisode, LocalEnvs, OpenEpisode, Step
from lockstep.envs.make import Env

SCRIPTED = "lockstep.envs.testing:Scripted-v0"


def blank(envs: LocalEnvs) -> Step:
    """Filled with what no environment says."""
    n, spec = len(envs), envs.spec.observation
    rows = np.full((2, n, *spec.shape), 77, spec.dtype)
    return Step(np.full(n, 77.0), np.ones(n, bool), np.ones(n, bool), *rows)


def started(envs: LocalEnvs) -> np.ndarray:
    observation = blank(envs).observation
    envs.start(observation)
    return observation


def stepped(envs: LocalEnvs, actions: np.ndarray) -> Step:
    out = blank(envs)
    envs.step(actions, out)
    return out


def actions_for(envs: LocalEnvs, steps: int, seed: int = 0) -> np.ndarray:
    rng, n, action = np.random.default_rng(seed), len(envs), envs.spec.action
    if action.dtype == "int64":
        return rng.integers(action.n, size=(steps, n), dtype=np.int32)
    return rng.normal(size=(steps, n, action.low.size)).astype(np.float32)


@pytest.mark.parametrize(
    ("env", "command"),
    [
        (Env("CartPole-v1"), int),
        (Env("CartPole-v1", time_limit=11), int),
        (Env("Pendulum-v1", time_limit=7), lambda a: 2 * np.clip(a, -1, 1)),
        (Env("Pendulum-v1", action="clip", time_limit=7), lambda a: np.clip(a, -2, 2)),
        (Env("Hopper-v5"), lambda a: np.clip(a, -1, 1)),
    ],
)
def test_episodes_are_gymnasiums_on_seeds_by_address(env: Env, command: Any) -> None:
    """Each number's episodes one by one in an environment of its own; the final observation is the true one."""
    numbers, steps, seed = [8, 3, 5], 60, 4
    with LocalEnvs(env, seed, numbers) as envs:
        first, actions = started(envs), actions_for(envs, steps)
        outs = [stepped(envs, action) for action in actions]
        running = [envs.running(i) for i in range(3)]
    for i, number in enumerate(numbers):
        alone = gymnasium.make(env.id, max_episode_steps=env.time_limit or None, disable_env_checker=True)
        episode, since = 0, 0
        expected, _ = alone.reset(seed=integer(seed, Purpose.RESET, number, episode))
        np.testing.assert_array_equal(first[i], expected.astype(np.float32))
        for t, out in enumerate(outs):
            expected, reward, terminated, truncated, _ = alone.step(command(actions[t, i]))
            final = expected.astype(np.float32)
            since += 1
            assert (out.reward[i], out.terminated[i], out.truncated[i]) == (reward, terminated, truncated)
            np.testing.assert_array_equal(out.next_observation[i], final)
            if terminated or truncated:
                episode, since = episode + 1, 0
                expected, _ = alone.reset(seed=integer(seed, Purpose.RESET, number, episode))
                assert not np.array_equal(out.observation[i], final)
            np.testing.assert_array_equal(out.observation[i], expected.astype(np.float32))
        assert episode > 0
        assert running[i][0] == episode
        np.testing.assert_array_equal(running[i][1], actions[steps - since :, i])
        alone.close()


def test_another_seed_or_purpose_gives_other_episodes() -> None:
    firsts = []
    for seed, purpose in ((0, Purpose.RESET), (1, Purpose.RESET), (0, Purpose.EVALUATE)):
        with LocalEnvs(Env("Pendulum-v1"), seed, [0, 1], purpose) as envs:
            firsts += list(started(envs))
    assert len({row.tobytes() for row in firsts}) == 6


@pytest.mark.parametrize("env", [Env("Hopper-v5"), Env("CartPole-v1"), Env(SCRIPTED, kwargs={"length": 9})])
def test_a_restored_episode_goes_on_bit_for_bit(env: Env) -> None:
    with LocalEnvs(env, 1, [0, 1, 2]) as envs, LocalEnvs(env, 1, [0, 1, 2]) as again:
        observation = started(envs)
        actions = actions_for(envs, 75)
        for action in actions[:40]:
            observation = stepped(envs, action).observation
        for i in range(3):
            number, past = envs.running(i)
            assert again.restore(i, OpenEpisode(number, past, observation[i]))
            assert again.running(i)[0] == number
            np.testing.assert_array_equal(again.running(i)[1], past)
        ended = 0
        for action in actions[40:]:
            one, other = stepped(envs, action), stepped(again, action)
            assert [leaf.tobytes() for leaf in one] == [leaf.tobytes() for leaf in other]
            ended += int((one.terminated | one.truncated).sum())
        assert ended


def test_an_episode_that_does_not_repeat_itself_is_noticed() -> None:
    with LocalEnvs(Env(SCRIPTED, kwargs={"what": "random", "at": 3}), 0, [0]) as envs:
        started(envs)
        for action in actions_for(envs, 3):
            latest = stepped(envs, action).observation[0]
        assert not envs.restore(0, OpenEpisode(*envs.running(0), latest))


def test_an_episode_without_a_step_has_no_actions_and_restores() -> None:
    for env, shape, dtype in ((Env("CartPole-v1"), (0,), "int32"), (Env("Hopper-v5"), (0, 3), "float32")):
        with LocalEnvs(env, 0, [0]) as envs:
            first = started(envs)
            number, actions = envs.running(0)
            assert (number, actions.shape, actions.dtype) == (0, shape, dtype)
            assert envs.restore(0, OpenEpisode(number, actions, first[0]))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", "the observation is nan at index 1, at step 5"),
        ("inf", "the observation is inf at index 1, at step 5"),
        ("nan-reward", "the reward is nan, at step 5"),
        ("raise", "it raised RuntimeError: scripted failure, at step 5"),
        ("shape", r"the observation has shape \(2,\), its space says \(3,\), at step 5"),
    ],
)
def test_a_broken_episode_is_named_and_can_be_replayed(what: str, message: str) -> None:
    env = Env(SCRIPTED, kwargs={"what": what, "at": 5, "length": 8})
    with LocalEnvs(env, 2, [6, 7]) as envs:
        started(envs)
        actions = actions_for(envs, 5)
        for action in actions[:4]:
            stepped(envs, action)
        with pytest.raises(BrokenEpisode, match=message) as caught:
            stepped(envs, actions[4])
    broken = caught.value
    assert (broken.env, broken.number, broken.seed) == (env, 6, integer(2, Purpose.RESET, 6, 0))
    np.testing.assert_array_equal(broken.actions, actions[:, 0])


class Obedient(gymnasium.Env):
    """Misbehaves when it is told to."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, render_mode: str | None = None, broken_reset: bool = False) -> None:
        self._broken_reset = broken_reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return np.full(2, np.nan if self._broken_reset else 0, np.float32), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        observation = {1: np.zeros(3), 2: np.float32([np.nan, 0])}.get(action, np.zeros(2, np.float32))
        return observation, {3: [1.0, 2.0], 4: np.inf}.get(action, 0.0), False, False, {}


gymnasium.register("Obedient-v0", Obedient)


@pytest.mark.parametrize("misbehaviour", [1, 2, 3, 4])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_environment_that_broke_is_the_one_that_is_named(misbehaviour: int, culprit: int) -> None:
    with LocalEnvs(Env("Obedient-v0"), 0, [10, 11, 12]) as envs:
        started(envs)
        actions = np.zeros(3, np.int32)
        actions[culprit] = misbehaviour
        with pytest.raises(BrokenEpisode) as caught:
            stepped(envs, actions)
    assert caught.value.number == 10 + culprit


def test_a_reset_that_breaks_its_contract_is_refused() -> None:
    with (
        LocalEnvs(Env("Obedient-v0", kwargs={"broken_reset": True}), 0, [4]) as envs,
        pytest.raises(BrokenEpisode, match="the observation is nan at index 0") as caught,
    ):
        started(envs)
    assert (caught.value.number, len(caught.value.actions)) == (4, 0)


def test_closing_twice_is_fine() -> None:
    envs = LocalEnvs(Env("CartPole-v1"), 0, [0])
    envs.close()
    envs.close()


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
    with LocalEnvs(Env("HalfCheetah-v5"), 0, [0, 1]) as envs:
        started(envs)
        actions = actions_for(envs, 2)
        stepped(envs, actions[0])
        envs._envs[1]._bare.data.qvel[:] = 1e12
        with pytest.raises(BrokenEpisode, match=r"environment 1 .*MuJoCo reset the simulation by itself: .*unstable"):
            stepped(envs, actions[1])


def test_a_retired_environment_rests() -> None:
    with LocalEnvs(Env(SCRIPTED, kwargs={"length": 3}), 0, [0, 1]) as envs:
        started(envs)
        action = actions_for(envs, 1)[0]
        stepped(envs, action)
        envs.retire(0)
        for _ in range(5):
            out = stepped(envs, action)
        assert len(envs.running(0)[1]) == 1
        assert envs.running(1)[0] == 2
        assert not out.truncated[0]
