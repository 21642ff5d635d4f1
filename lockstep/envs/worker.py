"""A worker process: steps some of a rank's environments, as its parent asks. It imports no JAX.

Messages are single packets. The parent sends what to do; the worker sends back how it went.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import struct
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from lockstep import names
from lockstep.address import Purpose
from lockstep.envs.episodes import BrokenEpisode, OpenEpisode, Rollout, action_row
from lockstep.envs.local import LocalEnvs
from lockstep.envs.make import Env
from lockstep.envs.shared import Shared, attach, read_letter
from lockstep.errors import UsageError

# What a worker is asked. With MEMORY and RESTORE goes a file descriptor, in a packet of its own.
MEMORY, START, STEP, RESTORE, CLOSE = b"m", b"s", b"t", b"r", b"c"
# What it answers: done; the environment did not repeat itself; it broke its contract; it can't be made.
DONE, DIFFERS, BROKEN, UNUSABLE = b"d", b"x", b"b", b"u"

PACKET = 1 << 16  # bytes of the longest message
ROW = struct.Struct("<I")  # which row of the rollout a step is

STARTUP_S = 120.0  # more time for what is not a step: to import, to make environments, to reset them first
CLOSE_S = 10.0  # to close environments
LONGEST_S = 1e9  # about what system calls take
LEEWAY_S = 2.0  # after its time a worker that its parent did not end ends itself

PARENT_DIED = signal.SIGUSR1
PR_SET_PDEATHSIG = 1


def patience(message: bytes, timeout_s: float) -> float:
    """Seconds that the answer to a message may take. A replay gets a hundredth of a step's time for each step."""
    if message[:1] == STEP:
        return timeout_s
    steps = json.loads(message[1:])["steps"] if message[:1] == RESTORE else 0
    return min(timeout_s * (1 + steps / 100), LONGEST_S) + STARTUP_S


def main(given: dict[str, Any]) -> None:
    """Serve the parent until it says CLOSE or is gone, and close the environments."""
    _end_with_parent(given["parent"])
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT)  # the parent asks where a worker hangs
    connection = socket.socket(fileno=given["connection"])
    connection.set_inheritable(False)
    try:
        names.load(given["env"]["id"])  # the parent knows that it may be
        envs = LocalEnvs(Env(**given["env"]), given["seed"], given["numbers"], Purpose(given["purpose"]))
    except UsageError as error:
        connection.send(UNUSABLE + str(error).encode()[: PACKET // 2])
        return
    gc.freeze()
    try:
        _serve(connection, Block(envs, slice(*given["block"]), given["envs"]), given["timeout_s"])
    finally:
        try:
            signal.signal(PARENT_DIED, signal.SIG_IGN)
        finally:  # it may come just before it is ignored
            _alarm(CLOSE_S)
            envs.close()


def _serve(connection: socket.socket, block: Block, timeout_s: float) -> None:
    with contextlib.suppress(ConnectionError):  # the parent is gone
        while (message := connection.recv(PACKET)) not in (b"", CLOSE):
            file = socket.recv_fds(connection, 1, 1)[1][0] if message[:1] in (MEMORY, RESTORE) else -1
            _alarm(patience(message, timeout_s) + LEEWAY_S)
            try:
                answer = block.work[message[:1]](message[1:], file)
            except BrokenEpisode as broken:
                answer = _broken(broken)
            _alarm(0)
            connection.send(answer)


class Block:
    """A worker's environments and the memory it shares: `work` is what it can be asked."""

    def __init__(self, envs: LocalEnvs, mine: slice, count: int) -> None:
        self._envs, self._mine, self._count = envs, mine, count
        self._action: np.ndarray
        self._rollout: Rollout
        self.work: dict[bytes, Callable[[bytes, int], bytes]] = {
            MEMORY: self._share,
            START: self._start,
            STEP: self._step,
            RESTORE: self._restore,
        }

    def _share(self, message: bytes, file: int) -> bytes:
        (steps,) = ROW.unpack(message)
        shared: Shared = attach(file, self._envs.spec, self._count, steps)
        os.close(file)
        self._action, self._rollout = shared.action[self._mine], shared.rollout.block(self._mine)
        self._envs.resting = shared.resting[self._mine]
        return DONE

    def _start(self, message: bytes, file: int) -> bytes:
        self._envs.start(self._rollout.observation[0])
        return DONE

    def _step(self, message: bytes, file: int) -> bytes:
        self._envs.step(self._action.copy(), self._rollout, ROW.unpack(message)[0])
        return DONE

    def _restore(self, message: bytes, file: int) -> bytes:
        asked = json.loads(message)
        shape, dtype = action_row(self._envs.spec.action)
        actions = np.frombuffer(read_letter(file), dtype).reshape(asked["steps"], *shape)
        latest = self._rollout.observation[asked["row"], asked["env"], ...]
        repeated = self._envs.restore(asked["env"], OpenEpisode(asked["episode"], actions, latest))
        return DONE if repeated else DIFFERS


def _broken(broken: BrokenEpisode) -> bytes:
    """The parent has the actions; it is told how many of them, and what can't be known there."""
    told = {
        "number": broken.number,
        "seed": broken.seed,
        "steps": len(broken.actions),
        "why": broken.why[:2000],
        "trace": broken.trace[-6000:],
    }
    return BROKEN + json.dumps(told, ensure_ascii=False).encode()


def _end_with_parent(parent: int) -> None:
    """Ctrl-C and SIGTERM are the parent's to handle. When it dies the kernel tells, and environments are closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(PARENT_DIED, _leave)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, PARENT_DIED)
    if os.getppid() != parent:  # it died before it could be told
        raise SystemExit


def _leave(number: int, frame: FrameType | None) -> None:
    _alarm(CLOSE_S)
    raise SystemExit


def _alarm(seconds: float) -> None:
    """Unless it is set anew by then the kernel ends this process, whatever native code it is stuck in. 0: never."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
