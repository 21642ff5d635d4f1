"""Environments with scripted behaviour, for tests: `lockstep check lockstep.envs.testing:Nan-v0`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Scripted(gymnasium.Env):
    """A walk on a line towards the origin; episodes of `length` steps. At step `at` it does `what`.

    `what`: nothing, nan, inf, nan-reward, raise, shape, kill, exit, sys-exit, hang, stop (as SIGSTOP does), stuck (in
    native code that lets no signal handler run), random (to a place that no seed repeats). Where a file `once` is
    named, only the first that makes it does it. `close` makes the file `closed`.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(
        self,
        what: str = "nothing",
        at: int = 57,
        length: int = 100,
        once: str = "",
        closed: str = "",
        render_mode: str | None = None,
    ) -> None:
        self._what, self._at, self._length, self._once, self._closed = what, at, length, once, closed
        self._place = np.zeros(3, np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step = 0
        self._place = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self._place.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        self._place[:2] = self._place[:2] + 0.1 * np.asarray(action, np.float32)
        observation, reward = self._place.copy(), -float(np.abs(self._place[:2]).sum())
        if self._step == self._at and self._is_first():
            observation, reward = self._misbehave(observation, reward)
        return observation, reward, False, self._step >= self._length, {}

    def _is_first(self) -> bool:
        if self._once:
            try:
                Path(self._once).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def close(self) -> None:
        if self._closed:
            Path(self._closed).touch()

    def _misbehave(self, observation: np.ndarray, reward: float) -> tuple[np.ndarray, float]:
        if self._what == "raise":
            raise RuntimeError("scripted failure")
        if self._what in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._what == "kill" else signal.SIGSTOP)
        if self._what == "exit":
            os._exit(3)
        if self._what == "sys-exit":
            sys.exit(3)
        while self._what == "hang":
            time.sleep(0.1)
        if self._what == "stuck":
            ctypes.PyDLL(None).sleep(3600)
        if self._what in ("nan", "inf"):
            observation[1] = float(self._what)
        if self._what == "nan-reward":
            reward = float("nan")
        if self._what == "shape":
            observation = observation[:2]
        if self._what == "random":
            self._place[2] = observation[2] = np.random.default_rng().random()
        return observation, reward


gymnasium.register("Scripted-v0", f"{__name__}:Scripted")
gymnasium.register("Nan-v0", f"{__name__}:Scripted", kwargs={"what": "nan"})
