"""The collector's records: what a trajectory says is what the environments did."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import jax
import numpy as np
import pytest

from lockstep.address import Purpose, integer, words
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.algorithms.ppo import PPO, ppo
from lockstep.collect import Collector, Episode, make_actor
from lockstep.core import Learner, Trajectory
from lockstep.envs.episodes import Rollout
from lockstep.envs.local import LocalEnvs
from lockstep.envs.make import Env, one_command
from lockstep.errors import NumericFault
from lockstep.networks import MLP, mlp_policy

LANES, E, T, SEED = 2, 2, 70, 5


def made(
    envs: LocalEnvs, steps: int = T, episodes: int = 0, hidden: tuple[int, ...] = (8,)
) -> tuple[Collector, Learner]:
    policy = mlp_policy(MLP(hidden=hidden), envs.spec)
    setup = Setup(policy, envs.spec, Normalize(), 10_000, LANES, steps * E)
    learner = ppo(PPO(minibatch=2), setup).init(jax.random.key(0))
    actor = make_actor(policy, Normalize(), steps, E)
    return Collector(envs, actor, range(LANES), steps, 0.9, episodes), learner


@pytest.fixture(scope="module", params=["CartPole-v1", "Pendulum-v1"])
def collected(request: pytest.FixtureRequest) -> tuple[str, list[Trajectory], list[list[Episode]]]:
    with LocalEnvs(Env(request.param), SEED, range(LANES * E)) as envs:
        collector, learner = made(envs)
        collector.start()
        parts = [collector.collect(learner, words(SEED, Purpose.ACT, update)) for update in range(4)]
    return request.param, [part[0] for part in parts], [part[1] for part in parts]


def test_every_step_is_repeated_by_a_plain_gymnasium_loop(
    collected: tuple[str, list[Trajectory], list[list[Episode]]],
) -> None:
    env_id, parts, finished = collected
    episodes: list[tuple[int, int, int, float]] = []
    for number in range(LANES * E):
        lane, e = divmod(number, E)
        env = gymnasium.make(env_id)
        spec = LocalEnvs(Env(env_id), SEED, [0]).spec
        episode, length, total, discounted = 0, 0, 0.0, 0.0
        observation, _ = env.reset(seed=integer(SEED, Purpose.RESET, number, episode))
        for update, part in enumerate(parts):
            for t in range(T):
                at = (lane, t, e)
                np.testing.assert_array_equal(part.observation[at], np.asarray(observation, np.float32))
                command = one_command(spec.action, "rescale", part.action[at])
                observation, reward, terminated, truncated, _ = env.step(command)
                np.testing.assert_array_equal(part.next_observation[at], np.asarray(observation, np.float32))
                assert part.reward[at] == np.float32(reward)
                assert (part.terminated[at], part.truncated[at]) == (terminated, truncated)
                discounted = 0.9 * discounted + float(reward)
                total += float(reward)
                length += 1
                assert part.discounted_return[at] == pytest.approx(discounted, rel=1e-12)
                if terminated or truncated:
                    episodes.append((update, number, length, total))
                    episode, length, total, discounted = episode + 1, 0, 0.0, 0.0
                    observation, _ = env.reset(seed=integer(SEED, Purpose.RESET, number, episode))
    told = sorted((update, e.env, e.steps, round(e.total, 6)) for update, part in enumerate(finished) for e in part)
    assert told == sorted((update, number, length, round(total, 6)) for update, number, length, total in episodes)
    assert told, "some episodes ended"


def test_lanes_draw_different_noise(collected: tuple[str, list[Trajectory], list[list[Episode]]]) -> None:
    _, parts, _ = collected
    actions = np.concatenate([part.action.reshape(LANES, T, E, -1) for part in parts], axis=1)
    streams = {actions[lane, :, e].tobytes() for lane in range(LANES) for e in range(E)}
    assert len(streams) == LANES * E


def test_running_episodes_survive_a_round_trip() -> None:
    with LocalEnvs(Env("CartPole-v1"), SEED, range(4)) as one, LocalEnvs(Env("CartPole-v1"), SEED, range(4)) as other:
        (first, learner), (second, _) = made(one), made(other)
        first.start()
        first.collect(learner, words(SEED, Purpose.ACT, 0))
        assert second.restore(first.open_episodes()) == []
        expected, episodes = first.collect(learner, words(SEED, Purpose.ACT, 1))
        found, same_episodes = second.collect(learner, words(SEED, Purpose.ACT, 1))
        for one_leaf, other_leaf in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(one_leaf, other_leaf)
        assert episodes == same_episodes
        record, again = first.open_episodes(), second.open_episodes()
        assert all(record[name].tobytes() == again[name].tobytes() for name in record)


class Tiny(gymnasium.Env):
    """Its numbers are zero where programs compute."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.asarray([1e-40]), float(np.asarray([1e-310])[0] / 2 > 0), False, False, {}


def test_environments_keep_the_smallest_numbers() -> None:
    gymnasium.register("Tiny-v0", Tiny)
    try:
        with LocalEnvs(Env("Tiny-v0"), SEED, range(LANES * E)) as envs:
            collector, learner = made(envs, steps=5)
            collector.start()
            trajectory, _ = collector.collect(learner, words(SEED, Purpose.ACT, 0))
    finally:
        del gymnasium.registry["Tiny-v0"]
    assert set(trajectory.reward.ravel()) == {1.0}
    assert set(trajectory.next_observation.ravel()) == {np.float32(1e-40)}


def test_an_environment_may_compute_with_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stepped while the program that acts is under way."""
    product = jax.jit(lambda x: (x @ x).sum())

    def collected(jax_too: bool) -> np.ndarray:
        with LocalEnvs(Env("CartPole-v1"), SEED, range(LANES * E)) as envs:
            plain = envs.step

            def step(actions: np.ndarray, rollout: Rollout, t: int) -> None:
                plain(actions, rollout, t)
                rollout.reward[t] *= float(product(np.ones((600, 600), np.float32))) / 600**3

            if jax_too:
                monkeypatch.setattr(envs, "step", step)
            collector, learner = made(envs)
            collector.start()
            return collector.collect(learner, words(SEED, Purpose.ACT, 0))[0].reward

    np.testing.assert_array_equal(collected(jax_too=True), collected(jax_too=False))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_a_step_raises_ends_collecting(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEnvs(Env("CartPole-v1"), SEED, range(LANES * E)) as envs:
        collector, learner = made(envs)
        collector.start()
        steps = []

        def step(actions: np.ndarray, rollout: Rollout, t: int) -> None:
            steps.append(t)
            if t == 3:
                raise kind("enough")

        with monkeypatch.context() as patched:
            patched.setattr(envs, "step", step)
            with pytest.raises(kind, match="enough"):
                collector.collect(learner, words(SEED, Purpose.ACT, 0))
        assert steps == [0, 1, 2, 3]
        collector.collect(learner, words(SEED, Purpose.ACT, 0))


def test_threads_collect_beside_each_other() -> None:
    def collected(seed: int) -> bytes:
        with LocalEnvs(Env("CartPole-v1"), seed, range(LANES * E)) as envs:
            collector, learner = made(envs)
            collector.start()
            return b"".join(
                collector.collect(learner, words(seed, Purpose.ACT, update))[0].observation.tobytes()
                for update in range(20)
            )

    with ThreadPoolExecutor(2) as threads:
        beside = list(threads.map(collected, range(4)))
    assert beside == [collected(seed) for seed in range(4)]


def test_environments_are_stepped_in_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with arguments that take a while to get to the device, as the learner that another rank sent."""
    with LocalEnvs(Env("CartPole-v1"), SEED, range(LANES * E)) as envs:
        collector, learner = made(envs, hidden=(512, 512))
        collector.start()
        threads, plain = set(), envs.step

        def step(actions: np.ndarray, rollout: Rollout, t: int) -> None:
            threads.add(threading.get_ident())
            plain(actions, rollout, t)

        monkeypatch.setattr(envs, "step", step)
        for update in range(20):
            collector.collect(jax.tree.map(np.array, learner), words(SEED, Purpose.ACT, update))
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_actions_that_are_no_numbers_are_the_policys_fault_and_reach_no_environment(wrong: float) -> None:
    with LocalEnvs(Env("Pendulum-v1"), SEED, range(LANES * E)) as envs:
        collector, learner = made(envs)
        collector.start()
        before = collector.open_episodes()
        bias = np.full_like(learner.params["policy"]["layer1"]["bias"], wrong)
        learner.params["policy"]["layer1"]["bias"] = bias
        with pytest.raises(NumericFault, match=r"the policy chose the action \[(nan|inf)\] in environment 0"):
            collector.collect(learner, words(SEED, Purpose.ACT, 0))
        np.testing.assert_equal(collector.open_episodes(), before)


INTERRUPTED = """
import os, signal, sys, threading, time
from lockstep.runtime import start_jax
start_jax()
from tests.unit.test_collect import E, LANES, SEED, LocalEnvs, Env, Purpose, made, words
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever started the tests ignores it
with LocalEnvs(Env("CartPole-v1"), SEED, range(LANES * E)) as envs:
    collector, learner = made(envs, hidden=(1024, 1024))
    collector.start()
    collector.collect(learner, words(SEED, Purpose.ACT, 0))
    began = time.perf_counter()
    collector.collect(learner, words(SEED, Purpose.ACT, 0))
    half = (time.perf_counter() - began) / 2
    threading.Timer(half, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        for update in range(9):
            collector.collect(learner, words(SEED, Purpose.ACT, update))
    except KeyboardInterrupt:
        collector.collect(learner, words(SEED, Purpose.ACT, 9))
        sys.exit(7)
"""


def test_an_interrupt_while_a_program_computes_ends_collecting() -> None:
    """It is raised where the program calls Python, before anything there could catch it."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
        assert done.returncode == 7, done.stderr


@pytest.fixture(scope="module")
def whole() -> tuple[list[Trajectory], list[list[Episode]], dict[str, np.ndarray]]:
    """Two whole episodes of each environment in each of two updates, at most 30 steps long."""
    with LocalEnvs(Env("CartPole-v1", time_limit=30), SEED, range(LANES * E)) as envs:
        collector, learner = made(envs, 60, episodes=2)
        collector.start()
        parts = [collector.collect(learner, words(SEED, Purpose.ACT, update)) for update in range(2)]
        return [part[0] for part in parts], [part[1] for part in parts], collector.open_episodes()


def test_whole_episodes_are_padded_and_none_is_left_out(
    whole: tuple[list[Trajectory], list[list[Episode]], dict[str, np.ndarray]],
) -> None:
    """Every environment makes exactly two, long or short; what is not real is empty."""
    parts, finished, _ = whole
    for part, episodes in zip(parts, finished, strict=True):
        ended = part.terminated | part.truncated
        np.testing.assert_array_equal(ended.sum(1), np.full((LANES, E), 2))
        assert sorted(episode.env for episode in episodes) == sorted([*range(LANES * E)] * 2)
        lengths = part.real.sum(1).reshape(-1)
        for env in range(LANES * E):
            assert lengths[env] == sum(episode.steps for episode in episodes if episode.env == env)
            lane, e = divmod(env, E)
            assert part.real[lane, : lengths[env], e].all(), "real steps come first"
            assert ended[lane, lengths[env] - 1, e]
        for leaf in (part.reward, part.action, part.terminated, part.truncated, part.discounted_return):
            assert not leaf[~part.real].any()
    assert len({episode.steps for episode in finished[0]}) > 1, "of different lengths"


def test_nothing_is_open_between_updates_of_whole_episodes(
    whole: tuple[list[Trajectory], list[list[Episode]], dict[str, np.ndarray]],
) -> None:
    parts, _, record = whole
    assert not record["length"].any()
    assert not record["total"].any()
    assert len(record["actions"]) == 0
    np.testing.assert_array_equal(record["episode"], [4] * (LANES * E))
    fresh = gymnasium.make("CartPole-v1")
    for env in range(LANES * E):
        lane, e = divmod(env, E)
        for episode, found in ((2, parts[1].observation[lane, 0, e]), (4, record["observation"][env])):
            expected, _ = fresh.reset(seed=integer(SEED, Purpose.RESET, env, episode))
            np.testing.assert_array_equal(found, np.asarray(expected, np.float32))
