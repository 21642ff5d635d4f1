"""The contract of every block of environments, wherever it is stepped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from lockstep.address import Purpose, integer
from lockstep.envs.episodes import BrokenEpisode, Envs, OpenEpisode
from lockstep.envs.local import LocalEnvs
from lockstep.envs.make import Env
from tests.environments import KINDS, OBEDIENT, SCRIPTED, actions_for, followed, started, stepped

Kind = Callable[..., Envs]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.mark.parametrize(
    ("env", "command"),
    [
        (Env("CartPole-v1"), int),
        (Env("CartPole-v1", time_limit=11), int),
        (Env("Pendulum-v1", time_limit=7), lambda a: 2 * np.clip(a, -1, 1)),
        (Env("Pendulum-v1", action="clip", time_limit=7), lambda a: np.clip(a, -2, 2)),
        (Env("Hopper-v5"), lambda a: np.clip(a, -1, 1)),
        (Env("Walker2d-v5"), lambda a: np.clip(a, -1, 1)),
        (Env("HalfCheetah-v5", time_limit=25), lambda a: np.clip(a, -1, 1)),
        (Env("Swimmer-v5", time_limit=25), lambda a: np.clip(a, -1, 1)),
        (Env("InvertedPendulum-v5"), lambda a: 3 * np.clip(a, -1, 1)),
        (Env("Ant-v5", time_limit=25), lambda a: np.clip(a, -1, 1)),
        (Env("Humanoid-v5"), lambda a: np.float32(0.4) * np.clip(a, -1, 1)),
        (Env("Reacher-v5"), lambda a: np.clip(a, -1, 1)),
    ],
)
def test_episodes_are_gymnasiums_on_seeds_by_address(kind: Kind, env: Env, command: Any) -> None:
    """Each number's episodes one by one in an environment of its own; the final observation is the true one."""
    numbers, steps, seed = [8, 3, 5], 60, 4
    with kind(env, seed, numbers) as envs:
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


def test_another_seed_or_purpose_gives_other_episodes(kind: Kind) -> None:
    firsts = []
    for seed, purpose in ((0, Purpose.RESET), (1, Purpose.RESET), (0, Purpose.EVALUATE)):
        with kind(Env("Pendulum-v1"), seed, [0, 1], purpose) as envs:
            firsts += list(started(envs))
    assert len({row.tobytes() for row in firsts}) == 6


@pytest.mark.parametrize("env", [Env("Hopper-v5"), Env("CartPole-v1"), Env(SCRIPTED, kwargs={"length": 9})])
def test_a_restored_episode_goes_on_bit_for_bit(kind: Kind, env: Env) -> None:
    with kind(env, 1, [0, 1, 2]) as envs, kind(env, 1, [0, 1, 2]) as again:
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


def test_an_episode_that_does_not_repeat_itself_is_noticed(kind: Kind) -> None:
    with kind(Env(SCRIPTED, kwargs={"what": "random", "at": 3}), 0, [0]) as envs:
        started(envs)
        for action in actions_for(envs, 3):
            latest = stepped(envs, action).observation[0]
        assert not envs.restore(0, OpenEpisode(*envs.running(0), latest))


def test_an_episode_without_a_step_has_no_actions_and_restores(kind: Kind) -> None:
    for env, shape, dtype in ((Env("CartPole-v1"), (0,), "int32"), (Env("Hopper-v5"), (0, 3), "float32")):
        with kind(env, 0, [0]) as envs:
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
def test_a_broken_episode_is_named_and_can_be_replayed(kind: Kind, what: str, message: str) -> None:
    env = Env(SCRIPTED, kwargs={"what": what, "at": 5, "length": 8})
    with kind(env, 2, [6, 7]) as envs:
        started(envs)
        actions = actions_for(envs, 5)
        for action in actions[:4]:
            stepped(envs, action)
        with pytest.raises(BrokenEpisode, match=message) as caught:
            stepped(envs, actions[4])
    broken = caught.value
    assert (broken.env, broken.number, broken.seed) == (env, 6, integer(2, Purpose.RESET, 6, 0))
    np.testing.assert_array_equal(broken.actions, actions[:, 0])


def test_the_environment_that_broke_is_the_one_that_is_named(kind: Kind) -> None:
    with kind(Env(OBEDIENT), 0, [10, 11, 12]) as envs:
        started(envs)
        for culprit, misbehaviour in itertools.product(range(3), (1, 2, 3, 4)):
            actions = np.zeros(3, np.int32)
            actions[culprit] = misbehaviour
            with pytest.raises(BrokenEpisode) as caught:
                stepped(envs, actions)
            assert caught.value.number == 10 + culprit


def test_a_rollout_is_written_step_by_step(kind: Kind) -> None:
    """Row by row the same as one step at a time, in rollouts of different lengths one after the other."""
    env = Env("CartPole-v1", time_limit=9)
    with kind(env, 0, [0, 1, 2]) as envs, LocalEnvs(env, 0, [0, 1, 2]) as alone:
        latest, actions = started(envs), actions_for(envs, 30)
        np.testing.assert_array_equal(latest, started(alone))
        for first, last in ((0, 7), (7, 14), (14, 30)):
            rollout = envs.rollout(last - first)
            rollout.observation[0] = latest
            for t in range(last - first):
                envs.step(actions[first + t], rollout, t)
            for t in range(last - first):
                expected = stepped(alone, actions[first + t])
                for one, other in zip(followed(rollout, t), expected, strict=True):
                    np.testing.assert_array_equal(one, other)
            latest = rollout.observation[-1].copy()


def test_a_reset_that_breaks_its_contract_is_refused(kind: Kind) -> None:
    with (
        kind(Env(OBEDIENT, kwargs={"broken_reset": True}), 0, [4]) as envs,
        pytest.raises(BrokenEpisode, match="the observation is nan at index 0") as caught,
    ):
        started(envs)
    assert (caught.value.number, len(caught.value.actions)) == (4, 0)


def test_closing_twice_is_fine(kind: Kind) -> None:
    envs = kind(Env("CartPole-v1"), 0, [0])
    envs.close()
    envs.close()


def test_an_environment_that_rests_keeps_its_observation_and_its_episode(kind: Kind) -> None:
    with kind(Env(SCRIPTED, kwargs={"length": 3}), 0, [0, 1]) as envs:
        started(envs)
        action = actions_for(envs, 1)[0]
        first = out = stepped(envs, action)
        envs.resting[0] = True
        for _ in range(5):
            out = stepped(envs, action, out.observation)
        assert len(envs.running(0)[1]) == 1
        assert envs.running(1)[0] == 2
        assert (out.reward[0], out.truncated[0]) == (0, False)
        np.testing.assert_array_equal(out.observation[0], first.observation[0])
        envs.resting[:] = False
        stepped(envs, action)
        assert len(envs.running(0)[1]) == 2
