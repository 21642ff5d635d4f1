"""Videos of a policy's episodes, also without a screen."""

from __future__ import annotations

import ctypes.util
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import imageio.v2 as imageio
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv

from lockstep.address import Purpose, integer
from lockstep.envs.make import Env, make
from lockstep.errors import EnvironmentFault, FileFault, UsageError
from lockstep.run.evaluate import LONGEST
from lockstep.run.policy import TrainedPolicy

NO_RENDERER = (
    "MuJoCo needs a system library to draw without a screen, and finds none. On Debian or Ubuntu:"
    " `apt install libegl1 libgl1`, or `apt install libosmesa6`."
)

NO_PICTURES = (
    "'{}' has no picture to show. An environment that has one says metadata = {{'render_modes': ['rgb_array'],"
    " 'render_fps': 30}}, takes render_mode=None in its constructor, and returns an array [height, width, 3] of uint8"
    " from render()."
)


class Video(NamedTuple):
    path: Path
    total: float
    steps: int


def choose_renderer() -> None:
    """Pick the way MuJoCo draws, before it is imported. The user's own MUJOCO_GL stands."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # classic control draws with SDL
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if "MUJOCO_GL" in os.environ:
        return
    if ctypes.util.find_library("EGL") and ctypes.util.find_library("GL"):
        os.environ["MUJOCO_GL"] = "egl"
    elif ctypes.util.find_library("OSMesa"):
        os.environ["MUJOCO_GL"] = "osmesa"


def visualize(policy: TrainedPolicy, outdir: Path, episodes: int, seed: int, suffix: str) -> Iterator[Video]:
    """A video of each of the first `episodes` episodes that `evaluate` plays with the same seed."""
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFault(f"videos can't be kept in '{outdir}': {error.strerror}.") from error
    place = outdir.absolute()  # an environment may change the working directory
    environment = _drawing(policy)
    try:
        for number in range(episodes):
            name = f"episode{number}.{suffix}"
            video = _episode(policy, environment, place / name, integer(seed, Purpose.EVALUATE, number, 0))
            yield video._replace(path=outdir / name)
    finally:
        environment.close()


def _drawing(policy: TrainedPolicy) -> gymnasium.Env:
    """The environment with a renderer that was seen to work."""
    env = policy.experiment.env
    if "rgb_array" not in _render_modes(env):
        raise UsageError(NO_PICTURES.format(env.id))
    try:
        environment = make(_with_following_camera(env), render_mode="rgb_array")
        environment.reset(seed=0)
        frame = environment.render()
    except UsageError as error:
        if "render_mode" in str(error):
            raise UsageError(NO_PICTURES.format(env.id)) from error
        raise
    except NotImplementedError as error:
        raise UsageError(NO_PICTURES.format(env.id)) from error
    except Exception as error:
        if type(error).__module__.startswith(("mujoco", "OpenGL")) or "OpenGL" in str(error):
            raise UsageError(f"{NO_RENDERER} ({error})") from error
        raise EnvironmentFault(f"'{env.id}' can't be drawn: {type(error).__name__} {error}".rstrip()) from error
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3:
        raise UsageError(NO_PICTURES.format(env.id))
    return environment


def _render_modes(env: Env) -> list[str]:
    environment = make(env)
    environment.close()
    return list(environment.metadata.get("render_modes", []))


def _with_following_camera(env: Env) -> Env:
    """Gymnasium's MuJoCo models that move have a camera 'track', which is left unused unless it is asked for."""
    environment = make(env)
    base = environment.unwrapped
    environment.close()
    if not isinstance(base, MujocoEnv) or env.kwargs.keys() & {"camera_name", "camera_id"}:
        return env
    if "track" not in {base.model.camera(i).name for i in range(base.model.ncam)}:
        return env
    following = dataclasses.replace(env, kwargs={**env.kwargs, "camera_name": "track"})
    try:
        make(following).close()
    except UsageError:  # an environment of somebody's own, which takes no camera
        return env
    return following


def _episode(policy: TrainedPolicy, environment: gymnasium.Env, path: Path, seed: int) -> Video:
    fps = environment.metadata.get("render_fps", 30)
    side = path.with_name(f".{path.name}".removesuffix(path.suffix) + ".part" + path.suffix)
    settings: dict[str, Any] = (
        {"fps": fps, "macro_block_size": 2} if path.suffix == ".mp4" else {"duration": 1000 / min(fps, 50), "loop": 0}
    )
    observation, _ = environment.reset(seed=seed)
    total, steps, ended = 0.0, 0, False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        video: Any = imageio.get_writer(side, **settings)
        with video:
            video.append_data(environment.render())
            while not ended and steps < LONGEST:
                observation, reward, terminated, truncated, _ = environment.step(policy.act(observation))
                video.append_data(environment.render())
                total, steps, ended = total + float(reward), steps + 1, terminated or truncated
    side.replace(path)
    return Video(path, total, steps)
