"""The environments of a process's lanes, stepped by external processes. One that is lost is replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from lockstep.address import Purpose
from lockstep.core import Spec
from lockstep.envs import worker as theirs
from lockstep.envs.episodes import BrokenEpisode, Episodes, OpenEpisode, Rollout
from lockstep.envs.make import Env, spec_for
from lockstep.envs.shared import attach, create, letter
from lockstep.errors import ProcessLost, UsageError
from lockstep.threads import PINNED

REPLACEMENTS = 3  # of a worker that does not answer one and the same message
TIMEOUT_S = 60.0  # for one step of a worker's environments

# A fresh interpreter that finds what this one finds. It reads its task from its standard input.
BOOT = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path'];"
    "from lockstep.envs.worker import main; main(given)"
)


class Lost(Exception):
    """A worker died, or did not answer in time."""


class RemoteTraceback(Exception):
    """The cause of a fault in a worker, as the worker saw it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Message(NamedTuple):
    """What a worker is asked, and the file descriptor that goes with it."""

    content: bytes
    file: int | None = None


class Worker:
    """One external process, which steps the environments of `block`."""

    def __init__(self, block: range, task: dict[str, Any]) -> None:
        self.block = block
        self._task, self._timeout_s = task, task["timeout_s"]
        self._process: subprocess.Popen[bytes]
        self._connection: socket.socket
        self._patience, self._asked = 0.0, False
        self.launch()

    def launch(self) -> None:
        """Start the process; it shows with the first answer whether that went well."""
        self._connection, theirs_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {**self._task, "parent": os.getpid(), "connection": theirs_end.fileno()}
        found = str(Path(__file__).parents[2])  # this package, which is searched for there first
        given["path"] = [found, *(place for place in sys.path if isinstance(place, str))]
        with theirs_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT],  # -P: what lies in the working directory hides nothing of Python
                stdin=subprocess.PIPE,
                pass_fds=[theirs_end.fileno()],
                env={**os.environ, **PINNED},
                process_group=0,  # Ctrl-C is for the parent
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as task:
            task.write(json.dumps(given).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: Message) -> None:
        """Send a message, and don't wait. What can't be sent will not be answered either."""
        self._patience, self._asked = theirs.patience(message.content, self._timeout_s), True
        with contextlib.suppress(ConnectionError):
            self._connection.send(message.content)
            if message.file is not None:
                socket.send_fds(self._connection, [b"f"], [message.file])

    def answer(self) -> bytes:
        """What it says to the message; `Lost` where it can't say anything."""
        self._connection.settimeout(self._patience)
        try:
            answer = self._connection.recv(theirs.PACKET)
        except TimeoutError:
            raise Lost(f"did not answer within {self._patience:g} s") from None
        except ConnectionError:
            answer = b""
        if not answer:
            raise Lost(self._how_it_ended())
        self._asked = False
        return answer

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(theirs.CLOSE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status >= 0:
            return f"exited with status {status}"
        hint = " (memory may have been short)" if status == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-status).name}{hint}"

    def kill(self) -> None:
        """End it at once. One that hangs first tells where, on the standard error stream."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            time.sleep(0.1)
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def dismiss(self) -> None:
        """Tell it to close its environments and leave, and don't wait."""
        with contextlib.suppress(OSError):
            self._connection.send(theirs.CLOSE)

    def bury(self) -> None:
        """Wait for one that was dismissed; not for long if it is still busy."""
        try:
            self._process.wait(1.0 if self._asked else theirs.CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()


def _print(message: str) -> None:
    print(f"lockstep: {message}", file=sys.stderr)


class WorkerEnvs:
    """As `LocalEnvs`, but spread over `workers` processes, which write into memory that all share.

    A worker that dies or takes longer than `timeout_s` over a step is replaced, its running episodes are rebuilt by
    replay, and it is asked again: nothing is lost but time.
    """

    def __init__(
        self,
        env: Env,
        seed: int,
        numbers: Sequence[int],
        workers: int,
        timeout_s: float = TIMEOUT_S,
        purpose: Purpose = Purpose.RESET,
        warn: Callable[[str], None] = _print,
    ) -> None:
        self.spec: Spec = spec_for(env)
        self.strangers: list[int] = []
        self._env, self._warn = env, warn
        self._episodes = Episodes(env, seed, numbers, purpose, self.spec.action)
        self._begun = [False] * len(numbers)  # whether it has been reset
        self._steps, self._row = 1, 0  # of the rollout, and the row of `observation` that is the newest
        self._file = create(self.spec, len(numbers), self._steps)
        self._shared = attach(self._file, self.spec, len(numbers), self._steps)
        task = {"env": dataclasses.asdict(env), "seed": seed, "purpose": int(purpose), "timeout_s": timeout_s}
        self._workers: list[Worker] = []
        try:
            for block in _blocks(len(numbers), workers):
                mine = {"numbers": [numbers[i] for i in block], "block": [block.start, block.stop]}
                self._workers.append(Worker(block, {**task, **mine, "envs": len(numbers)}))
            self._ask_all(self._memory())
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def resting(self) -> np.ndarray:
        return self._shared.resting

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def rollout(self, steps: int) -> Rollout:
        if steps != self._steps:
            self._renew(steps)
        return self._shared.rollout

    def _renew(self, steps: int) -> None:
        """Other memory, which begins with the newest observations."""
        before, old = self._shared, self._file
        self._file, self._steps = create(self.spec, len(self), steps), steps
        self._shared = attach(self._file, self.spec, len(self), steps)
        self._shared.rollout.observation[0] = before.rollout.observation[self._row]
        self._shared.resting[:] = before.resting
        self._row = 0
        os.close(old)
        self._ask_all(self._memory())

    def _memory(self) -> Message:
        return Message(theirs.MEMORY + theirs.ROW.pack(self._steps), self._file)

    def start(self, observation: np.ndarray) -> None:
        self._ask_all(Message(theirs.START))
        self._begun = [True] * len(self)
        observation[:] = self._shared.rollout.observation[0]

    def step(self, actions: np.ndarray, rollout: Rollout, t: int) -> None:
        self._row = t
        self._shared.action[:] = actions
        self._ask_all(Message(theirs.STEP + theirs.ROW.pack(t)))
        for i in np.flatnonzero(~self.resting).tolist():
            self._episodes.actions[i].append(actions[i])
        for i in np.flatnonzero(rollout.terminated[t] | rollout.truncated[t]).tolist():
            self._episodes.begin(i, self._episodes.number[i] + 1)
        self._row = t + 1

    def running(self, i: int) -> tuple[int, np.ndarray]:
        return self._episodes.number[i], self._episodes.stacked(i)

    def restore(self, i: int, episode: OpenEpisode) -> bool:
        worker = next(worker for worker in self._workers if i in worker.block)
        self._shared.rollout.observation[self._row, i] = episode.observation
        self._begun[i] = False  # a worker that is replaced meanwhile is asked again for this one
        with self._replay(worker, i, episode.number, episode.actions) as message:
            worker.ask(message)
            repeated = self._answer(worker, message) == theirs.DONE
        self._episodes.begin(i, episode.number)
        self._episodes.actions[i].extend(episode.actions)
        self._begun[i] = True
        if not repeated:
            self.strangers.append(self._episodes.numbers[i])
        return repeated

    @contextlib.contextmanager
    def _replay(self, worker: Worker, i: int, episode: int, actions: np.ndarray) -> Iterator[Message]:
        """The message that has a worker rebuild an episode up to the newest observation."""
        asked = {"env": i - worker.block.start, "episode": episode, "row": self._row, "steps": len(actions)}
        file = letter(np.ascontiguousarray(actions).tobytes())
        try:
            yield Message(theirs.RESTORE + json.dumps(asked).encode(), file)
        finally:
            os.close(file)

    def _ask_all(self, message: Message) -> None:
        """All are asked before any is waited for. Of several faults the first environment's is raised."""
        for worker in self._workers:
            worker.ask(message)
        faults = []
        for worker in self._workers:
            try:
                self._answer(worker, message)
            except BrokenEpisode as broken:
                faults.append(broken)
        if faults:
            raise faults[0]

    def _answer(self, worker: Worker, message: Message) -> bytes:
        """The answer to a message that was sent; a worker that is lost is replaced and asked again."""
        failures = 0
        while True:
            try:
                if failures:
                    self._rebuild(worker)
                    worker.ask(message)
                return self._understood(worker.answer())
            except Lost as lost:
                failures += 1
                self._give_up_or_warn(worker, message, failures, lost)
                worker.kill()

    def _rebuild(self, worker: Worker) -> None:
        """A new process in the state in which the old one was asked."""
        worker.launch()
        worker.ask(self._memory())
        self._understood(worker.answer())
        for i in filter(self._begun.__getitem__, worker.block):
            with self._replay(worker, i, *self.running(i)) as message:
                worker.ask(message)
                if self._understood(worker.answer()) == theirs.DIFFERS:
                    self._note_stranger(self._episodes.numbers[i])
        self._rewards(worker)[:] = np.nan  # none is stepped yet

    def _rewards(self, worker: Worker) -> np.ndarray:
        """Of the step that is going on, if one is: a view."""
        going_on = slice(self._row, self._row + 1)
        return self._shared.rollout.reward[going_on, worker.block.start : worker.block.stop]

    def _understood(self, answer: bytes) -> bytes:
        """An answer that is not a fault."""
        if answer[:1] == theirs.UNUSABLE:
            raise UsageError(
                f"{answer[1:].decode()} This was found in a worker, a fresh process: what a script registers by"
                " itself is unknown there. Put it into a module and name it 'module:Name-v0'."
            )
        if answer[:1] == theirs.BROKEN:
            told = json.loads(answer[1:])
            i = self._episodes.numbers.index(told["number"])
            taken = np.concatenate([self._episodes.stacked(i), self._shared.action[i : i + 1]])[: told["steps"]]
            broken = BrokenEpisode(told["why"], self._env, told["number"], told["seed"], taken, told["trace"])
            raise broken from (RemoteTraceback(told["trace"]) if told["trace"] else None)
        return answer

    def _note_stranger(self, number: int) -> None:
        self.strangers.append(number)
        self._warn(
            f"environment {number} did not repeat itself when its running episode was replayed: it is not a function"
            " of its seed and actions. The run goes on, but not with the bits of one whose workers live."
        )

    def _give_up_or_warn(self, worker: Worker, message: Message, failures: int, lost: Lost) -> None:
        block = [self._episodes.numbers[i] for i in worker.block]
        who = f"worker {self._workers.index(worker)} (process {worker.pid}, environments {block[0]} to {block[-1]})"
        if failures <= REPLACEMENTS:
            self._warn(f"{who} {lost}. It is replaced, and its running episodes are replayed.")
            return
        raise ProcessLost(
            f"{who} {lost}, for the {failures}th time in a row{self._where(worker, message)}. Step the environments"
            " inside the ranks (`--workers 0`) to see it happen there; a longer time is given by"
            " `layout.worker_timeout_s`."
        )

    def _where(self, worker: Worker, message: Message) -> str:
        """The environment in whose step a worker was lost, if it was in one: the first without a reward.

        Where none has one, they may be stepped together.
        """
        missing = np.flatnonzero(np.isnan(self._rewards(worker)))  # of one row, or of none
        if message.content[:1] != theirs.STEP or not missing.size:
            return ""
        i = worker.block[missing[0]]
        step = len(self._episodes.actions[i]) + 1
        seed, number = self._episodes.seed(i), self._episodes.numbers[i]
        together = " or one that is stepped with it" if 1 < missing.size == len(worker.block) else ""
        return f", at step {step} of the episode with seed {seed} of environment {number}{together}"

    def close(self) -> None:
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.bury()
        self._workers = []
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _blocks(envs: int, workers: int) -> list[range]:
    """Contiguous blocks of environments, of nearly the same size."""
    edges = [envs * k // workers for k in range(workers + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]
