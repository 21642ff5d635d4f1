"""Some of Gymnasium's MuJoCo environments, all stepped by one call of MuJoCo: the same bits, with less Python.

Only those whose observations and rewards need no more than sums, products and comparisons, which round alike for one
number and for many. Sines and norms need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from lockstep.envs.episodes import Blame, Step
from lockstep.envs.make import MUJOCO_WARNINGS, TimeLimited, unstable

# positions before the step [N, q] and actions -> written: what it gave, but for the time limit
Told = Callable[[np.ndarray, np.ndarray, Step], None]
Healthy = Callable[[Any, np.ndarray, np.ndarray], np.ndarray]  # environment, positions and velocities -> [N]
FEW = 4  # simulations for which it does not pay to wake one more thread


def native(made: gymnasium.Env | TimeLimited, count: int, threads: int, blame: Blame) -> Native | None:
    """`count` environments like the one that was `made`, if they are of those that are known here."""
    if not isinstance(made, TimeLimited) or made.bare.spec is None or made.bare.render_mode is not None:
        return None
    if "xml_file" in made.bare.spec.kwargs:
        return None
    tell = TASKS.get(made.bare.spec.entry_point)
    return Native(made, count, max(min(threads, count // FEW), 1), tell, blame) if tell else None


class Native:
    """The one environment that was made resets all; MuJoCo's threads share the steps, which does not change a bit."""

    def __init__(
        self, made: TimeLimited, count: int, threads: int, tell: Callable[[Any, Any], Told], blame: Blame
    ) -> None:
        import mujoco
        from mujoco.batch import Batch

        env: Any = made.bare
        self._env = env
        self._limit, self._blame = made.limit or 0, blame
        self._warning = mujoco.mju_warningText
        self._batch = Batch(env.model, count, threads, persistent=True)
        self._positions, self._controls = self._batch.bind("qpos"), self._batch.bind("ctrl")
        self._read_state = partial(mujoco.mj_getState, sig=mujoco.mjtState.mjSTATE_INTEGRATION)
        self._unstable = int(mujoco.mjtWarning.mjWARN_BADQPOS)  # and the kinds of warning after it
        self._tell, self._steps = tell(env, self._batch), np.zeros(count, int)

    def reset(self, i: int, seed: int) -> np.ndarray:
        observation, _ = self._env.reset(seed=seed)
        self._read_state(self._env.model, self._env.data, self._batch.state[i])
        self._steps[i], self._batch.warning[i] = 0, 0
        return observation

    def step(self, which: Sequence[int], actions: np.ndarray, into: Step) -> None:
        before, some = self._positions.copy(), None if len(which) == len(self._steps) else which
        self._controls[:] = actions
        try:
            self._batch.step(some, self._env.frame_skip)
            self._tell(before, actions, into)
        except Exception as error:
            raise self._blame(int(getattr(error, "ids", which)[0]), error) from error
        if MUJOCO_WARNINGS:
            self._heed()
        self._steps[slice(None) if some is None else some] += 1
        np.equal(self._steps, self._limit, out=into.truncated)

    def _heed(self) -> None:
        """Blame the first simulation that MuJoCo gave up on. What was heard may be of another."""
        MUJOCO_WARNINGS.clear()
        for i, kind in np.argwhere(self._batch.warning[:, self._unstable :, 1])[:1].tolist():
            kind += self._unstable
            raise self._blame(i, unstable(self._warning(kind, self._batch.warning[i, kind, 0])))

    def close(self) -> None:
        self._env.close()


def runner(env: Any, batch: Any, fastest: float, healthy: Healthy | None) -> Told:
    """Rewarded for its speed and its health, less its effort."""
    qpos, qvel, dt = batch.bind("qpos"), batch.bind("qvel"), env.dt
    hidden = env.observation_structure["skipped_qpos"]
    seen = qpos.shape[1] - hidden

    def told(before: np.ndarray, actions: np.ndarray, into: Step) -> None:
        into.observation[:, :seen] = qpos[:, hidden:]
        into.observation[:, seen:] = np.clip(qvel, -fastest, fastest) if fastest else qvel
        reward = env._forward_reward_weight * ((qpos[:, 0] - before[:, 0]) / dt)
        into.terminated[:] = False
        if healthy:
            well = healthy(env, qpos, qvel)
            reward = reward + well * env._healthy_reward
            if env._terminate_when_unhealthy:
                np.logical_not(well, out=into.terminated)
        into.reward[:] = reward - env._ctrl_cost_weight * np.square(actions).sum(axis=1)

    return told


def upright(env: Any, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
    z, angle = qpos[:, 1:3].T
    return _inside(z, env._healthy_z_range) & _inside(angle, env._healthy_angle_range)


def upright_and_calm(env: Any, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
    state = np.concatenate([qpos[:, 2:], qvel], axis=1)
    return upright(env, qpos, qvel) & _inside(state, env._healthy_state_range).all(axis=1)


def _inside(value: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    low, high = bounds
    return (low < value) & (value < high)


def balanced(env: Any, batch: Any) -> Told:
    """Rewarded for every step until the pole falls."""
    qpos, qvel = batch.bind("qpos"), batch.bind("qvel")

    def told(before: np.ndarray, actions: np.ndarray, into: Step) -> None:
        observation = np.concatenate([qpos, qvel], axis=1)
        into.observation[:] = observation
        into.terminated[:] = ~np.isfinite(observation).all(axis=1) | (np.abs(observation[:, 1]) > 0.2)
        np.logical_not(into.terminated, out=into.reward)

    return told


TASKS: dict[Any, Callable[[Any, Any], Told]] = {  # by what Gymnasium makes the environment with
    "gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv": partial(runner, fastest=0, healthy=None),
    "gymnasium.envs.mujoco.swimmer_v5:SwimmerEnv": partial(runner, fastest=0, healthy=None),
    "gymnasium.envs.mujoco.hopper_v5:HopperEnv": partial(runner, fastest=10, healthy=upright_and_calm),
    "gymnasium.envs.mujoco.walker2d_v5:Walker2dEnv": partial(runner, fastest=10, healthy=upright),
    "gymnasium.envs.mujoco.inverted_pendulum_v5:InvertedPendulumEnv": balanced,
}
