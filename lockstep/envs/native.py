"""Some of Gymnasium's MuJoCo environments, stepped together: the same bits, with less Python.

Only those whose observations and rewards need no more than sums, products and comparisons, which round alike for one
number and for many. Sines and norms need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

from lockstep.envs.episodes import Blame, Step
from lockstep.envs.make import MUJOCO_WARNINGS, TimeLimited, unstable

FEW = 4  # simulations for which it does not pay to wake one more thread

Bind = Callable[[str], np.ndarray]  # a field of MuJoCo's data -> that of all simulations, which every step renews
Place = Callable[[], np.ndarray]  # where each is along the way, [N]
Told = Callable[[np.ndarray, np.ndarray, Step], None]  # speeds, actions -> written: all that a step gave but truncation
Healthy = Callable[[Any, np.ndarray, np.ndarray], np.ndarray]  # environment, positions and velocities -> [N]


class Task(NamedTuple):
    """What Gymnasium makes of a simulation."""

    place: Callable[[Any, Bind], Place]
    tell: Callable[[Any, Bind], Told]
    forces: bool = False  # whether it needs what MuJoCo computes only when asked, or as it was at a reset


class Engine(Protocol):
    """N simulations of one model, shared by threads, which does not change a bit."""

    def bind(self, name: str) -> np.ndarray: ...

    def load(self, i: int, data: Any) -> None:
        """Simulation i is as `data` is, and nothing has gone wrong in it."""

    def step(self, which: Sequence[int], frames: int) -> None:
        """Steps of some. An error names the simulations in `ids`."""

    def gave_up(self) -> tuple[int, int, int] | None:
        """The first simulation that MuJoCo reset by itself, the kind of its warning, and where it was."""

    def close(self) -> None: ...


def native(made: gymnasium.Env | TimeLimited, count: int, threads: int, blame: Blame) -> Native | None:
    """`count` environments like the one that was `made`, if they are of those that are known here."""
    if not isinstance(made, TimeLimited) or made.bare.spec is None or made.bare.render_mode is not None:
        return None
    if "xml_file" in made.bare.spec.kwargs:
        return None
    task = TASKS.get(made.bare.spec.entry_point)
    if task is None:
        return None
    env: Any = made.bare
    engine = (Separate if task.forces else Batched)(env.model, count, max(min(threads, count // FEW), 1))
    return Native(made, task, engine, blame)


class Native:
    """The one environment that was made resets all."""

    def __init__(self, made: TimeLimited, task: Task, engine: Engine, blame: Blame) -> None:
        import mujoco

        env: Any = made.bare
        self._env, self.engine = env, engine
        self._limit, self._blame = made.limit or 0, blame
        self._warning = mujoco.mju_warningText
        self._controls = engine.bind("ctrl")
        self._place, self._tell = task.place(env, engine.bind), task.tell(env, engine.bind)
        self._steps = np.zeros(len(self._controls), int)

    def reset(self, i: int, seed: int) -> np.ndarray:
        observation, _ = self._env.reset(seed=seed)
        self.engine.load(i, self._env.data)
        self._steps[i] = 0
        return observation

    def step(self, which: Sequence[int], actions: np.ndarray, into: Step) -> None:
        self._controls[:] = actions
        try:
            before = self._place()
            self.engine.step(which, self._env.frame_skip)
            self._tell((self._place() - before) / self._env.dt, actions, into)
        except Exception as error:
            raise self._blame(int(getattr(error, "ids", which)[0]), error) from error
        if MUJOCO_WARNINGS:
            self._heed()
        self._steps[which] += 1
        np.equal(self._steps, self._limit, out=into.truncated)

    def _heed(self) -> None:
        """Blame the first simulation that MuJoCo gave up on. What was heard may be of another."""
        MUJOCO_WARNINGS.clear()
        if found := self.engine.gave_up():
            i, kind, where = found
            raise self._blame(i, unstable(self._warning(kind, where)))

    def close(self) -> None:
        self.engine.close()
        self._env.close()


class Batched:
    """All in one call of MuJoCo."""

    def __init__(self, model: Any, count: int, threads: int) -> None:
        import mujoco
        from mujoco.batch import Batch

        self._batch = Batch(model, count, threads, persistent=True)
        self.bind, self.nthread, self._count = self._batch.bind, threads, count
        self._read_state = partial(mujoco.mj_getState, model, sig=mujoco.mjtState.mjSTATE_INTEGRATION)
        self._unstable = int(mujoco.mjtWarning.mjWARN_BADQPOS)  # and the kinds of warning after it

    def load(self, i: int, data: Any) -> None:
        self._read_state(data, self._batch.state[i])
        self._batch.warning[i] = 0

    def step(self, which: Sequence[int], frames: int) -> None:
        self._batch.step(None if len(which) == self._count else which, frames)

    def gave_up(self) -> tuple[int, int, int] | None:
        for i, kind in np.argwhere(self._batch.warning[:, self._unstable :, 1])[:1].tolist():
            kind += self._unstable
            return i, kind, int(self._batch.warning[i, kind, 0])
        return None

    def close(self) -> None:
        """Its threads end with it."""


class Separate:
    """Each with data of its own, in which MuJoCo computes the forces of contacts too."""

    def __init__(self, model: Any, count: int, threads: int) -> None:
        import mujoco
        from mujoco.batch import SimulationError

        self._mujoco, self._model, self._failure = mujoco, model, SimulationError
        self._data = [mujoco.MjData(model) for _ in range(count)]
        self._bound = {"ctrl": np.zeros((count, model.nu))}
        self._commands = [(data.ctrl, row) for data, row in zip(self._data, self._bound["ctrl"], strict=True)]
        self._copies: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in self._data]  # to here, from there
        self._state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        self._unstable = int(mujoco.mjtWarning.mjWARN_BADQPOS)  # and the kinds of warning after it
        self.nthread, self._pool = threads, ThreadPoolExecutor(threads)

    def bind(self, name: str) -> np.ndarray:
        if name not in self._bound:
            fields = [getattr(data, name) for data in self._data]
            self._bound[name] = np.stack(fields)
            for copies, row, field in zip(self._copies, self._bound[name], fields, strict=True):
                copies.append((row, field))
        return self._bound[name]

    def load(self, i: int, data: Any) -> None:
        mine, kind = self._data[i], self._mujoco.mjtState.mjSTATE_INTEGRATION
        self._mujoco.mj_resetData(self._model, mine)
        self._mujoco.mj_getState(self._model, data, self._state, kind)
        self._mujoco.mj_setState(self._model, mine, self._state, kind)
        for name, rows in self._bound.items():
            rows[i] = getattr(data, name)

    def step(self, which: Sequence[int], frames: int) -> None:
        if self.nthread == 1:
            self._advance(which, frames)
        else:
            shares = [which[k :: self.nthread] for k in range(self.nthread)]
            running = [self._pool.submit(self._advance, share, frames) for share in shares]
            wait(running)
            for done in running:
                done.result()

    def _advance(self, which: Sequence[int], frames: int) -> None:
        step, forces = self._mujoco.mj_step, self._mujoco.mj_rnePostConstraint
        for i in which:
            data, (control, command) = self._data[i], self._commands[i]
            control[:] = command
            try:
                step(self._model, data, frames)
                forces(self._model, data)
            except self._mujoco.FatalError as error:
                raise self._failure(np.asarray([i]), str(error)) from error
            for row, field in self._copies[i]:
                row[...] = field

    def gave_up(self) -> tuple[int, int, int] | None:
        for i, data in enumerate(self._data):
            for kind in np.flatnonzero(data.warning.number[self._unstable :])[:1].tolist():
                kind += self._unstable
                return i, kind, int(data.warning.lastinfo[kind])
        return None

    def close(self) -> None:
        self._pool.shutdown()


def along(env: Any, bind: Bind) -> Place:
    """The first coordinate."""
    qpos = bind("qpos")
    return lambda: qpos[:, 0].copy()


def of_main_body(env: Any, bind: Bind) -> Place:
    xpos = bind("xpos")
    return lambda: xpos[:, env.data.body(env._main_body).id, 0].copy()


def of_mass(env: Any, bind: Bind) -> Place:
    """The center of mass, all three coordinates of it summed as Gymnasium does."""
    xipos, mass = bind("xipos"), env.model.body_mass[:, None]
    return lambda: (np.sum(mass * xipos, axis=1) / np.sum(mass))[:, 0]


def runner(env: Any, bind: Bind, fastest: float, healthy: Healthy | None) -> Told:
    """Rewarded for its speed and its health, less its effort."""
    qpos, qvel = bind("qpos"), bind("qvel")
    hidden = env.observation_structure["skipped_qpos"]
    seen = qpos.shape[1] - hidden

    def told(speed: np.ndarray, actions: np.ndarray, into: Step) -> None:
        into.observation[:, :seen] = qpos[:, hidden:]
        into.observation[:, seen:] = np.clip(qvel, -fastest, fastest) if fastest else qvel
        reward = env._forward_reward_weight * speed
        into.terminated[:] = False
        if healthy:
            reward = reward + _health(env, healthy(env, qpos, qvel), into)
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


def ant(env: Any, bind: Bind) -> Told:
    """A runner that pays for its contacts, and feels them."""
    qpos, qvel, cfrc_ext = bind("qpos"), bind("qvel"), bind("cfrc_ext")
    hidden = env.observation_structure["skipped_qpos"]

    def told(speed: np.ndarray, actions: np.ndarray, into: Step) -> None:
        low, high = env._contact_force_range
        forces = np.clip(cfrc_ext, low, high)
        felt = [forces[:, 1:]] if env._include_cfrc_ext_in_observation else []
        _observe(into, qpos[:, hidden:], qvel, *felt)
        low, high = env._healthy_z_range
        well = (
            np.isfinite(qpos).all(axis=1) & np.isfinite(qvel).all(axis=1) & (low <= qpos[:, 2]) & (qpos[:, 2] <= high)
        )
        reward = speed * env._forward_reward_weight + _health(env, well, into)
        effort = env._ctrl_cost_weight * np.square(actions).sum(axis=1)
        into.reward[:] = reward - (effort + env._contact_cost_weight * _squares(forces))

    return told


def humanoid(env: Any, bind: Bind) -> Told:
    """A runner that pays for its contacts, and feels its body."""
    qpos, qvel, ctrl, cfrc_ext = bind("qpos"), bind("qvel"), bind("ctrl"), bind("cfrc_ext")
    hidden = env.observation_structure["skipped_qpos"]
    body = [  # what may be left out
        *([bind("cinert")[:, 1:]] if env._include_cinert_in_observation is True else []),
        *([bind("cvel")[:, 1:]] if env._include_cvel_in_observation is True else []),
        *([bind("qfrc_actuator")[:, 6:]] if env._include_qfrc_actuator_in_observation is True else []),
        *([cfrc_ext[:, 1:]] if env._include_cfrc_ext_in_observation is True else []),
    ]

    def told(speed: np.ndarray, actions: np.ndarray, into: Step) -> None:
        _observe(into, qpos[:, hidden:], qvel, *body)
        well = _inside(qpos[:, 2], env._healthy_z_range)
        reward = env._forward_reward_weight * speed + _health(env, well, into)
        low, high = env._contact_cost_range
        contacts = np.clip(env._contact_cost_weight * _squares(cfrc_ext), low, high)
        into.reward[:] = reward - (env._ctrl_cost_weight * np.square(ctrl).sum(axis=1) + contacts)

    return told


def _observe(into: Step, *parts: np.ndarray) -> None:
    np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1, out=into.observation, casting="same_kind")


def _squares(forces: np.ndarray) -> np.ndarray:
    return np.square(forces).reshape(len(forces), -1).sum(axis=1)


def _health(env: Any, well: np.ndarray, into: Step) -> np.ndarray:
    """What those earn that are well. The others may end."""
    into.terminated[:] = ~well & bool(env._terminate_when_unhealthy)
    return well * env._healthy_reward


def balanced(env: Any, bind: Bind) -> Told:
    """Rewarded for every step until the pole falls."""
    qpos, qvel = bind("qpos"), bind("qvel")

    def told(speed: np.ndarray, actions: np.ndarray, into: Step) -> None:
        observation = np.concatenate([qpos, qvel], axis=1)
        into.observation[:] = observation
        into.terminated[:] = ~np.isfinite(observation).all(axis=1) | (np.abs(observation[:, 1]) > 0.2)
        np.logical_not(into.terminated, out=into.reward)

    return told


TASKS: dict[Any, Task] = {  # by what Gymnasium makes the environment with
    "gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv": Task(along, partial(runner, fastest=0, healthy=None)),
    "gymnasium.envs.mujoco.swimmer_v5:SwimmerEnv": Task(along, partial(runner, fastest=0, healthy=None)),
    "gymnasium.envs.mujoco.hopper_v5:HopperEnv": Task(along, partial(runner, fastest=10, healthy=upright_and_calm)),
    "gymnasium.envs.mujoco.walker2d_v5:Walker2dEnv": Task(along, partial(runner, fastest=10, healthy=upright)),
    "gymnasium.envs.mujoco.inverted_pendulum_v5:InvertedPendulumEnv": Task(along, balanced),
    "gymnasium.envs.mujoco.ant_v5:AntEnv": Task(of_main_body, ant, forces=True),
    "gymnasium.envs.mujoco.humanoid_v5:HumanoidEnv": Task(of_mass, humanoid, forces=True),
}
