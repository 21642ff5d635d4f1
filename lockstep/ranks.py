"""The pieces of parallelism for somebody else's algorithm: start processes, move nests of arrays, average, time.

NumPy, JAX and PyTorch arrays come back as what they were. One process needs no MPI: everything here works alone.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.address import Purpose, integer
from lockstep.core import Tree
from lockstep.errors import UsageError
from lockstep.parallel import entries, nest
from lockstep.parallel.comm import Peers
from lockstep.parallel.entries import Disagreement
from lockstep.parallel.launch import is_launched, join, run_ranks
from lockstep.parallel.nest import Slot
from lockstep.threads import PINNED

OURS = 0  # the tag of messages that belong to no `send`; those of `send` are one higher than their user says


def start(nprocs: int = 1) -> Ranks:
    """Run this script on `nprocs` processes, from its first line; returns in each of them.

    Call it early: the first process, which starts the others, ends here with their exit status. Under `mpiexec` or a
    scheduler the ranks it started are joined, however many they are. A rank that fails ends all of them.
    """
    if nprocs < 1:
        raise UsageError(f"nprocs must be 1 or more, not {nprocs}.")
    if nprocs > 1 and not is_launched():
        for name, value in PINNED.items():
            os.environ.setdefault(name, value)
        ended = run_ranks(nprocs, _this_command())
        raise SystemExit(ended.launcher if ended.told is None else ended.told)
    comm = join()
    ranks = Ranks(comm)
    if comm.size > 1:
        atexit.register(ranks.leave)
    if comm.rank == 0 and nprocs not in (1, comm.size):
        print(f"lockstep: the launcher's {comm.size} ranks are used, not nprocs={nprocs}.", file=sys.stderr)
    return ranks


class Ranks:
    """The processes that run this script: this one is `rank` of `size`, and rank 0 is the root.

    All ranks must call the same methods in the same order, except `send`, `recv`, `print0`, `section` and `env_seeds`.
    """

    def __init__(self, comm: Peers) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.times: dict[str, float] = {}  # seconds per section so far, on this rank
        self._comm = comm
        self._to_itself: defaultdict[int, deque[Tree]] = defaultdict(deque)

    def env_seeds(self, seed: int, envs_per_rank: int) -> list[int]:
        """Seeds of this rank's environments: no two alike over all ranks.

        Environment i has the same seed however many ranks share the environments.
        """
        first = self.rank * envs_per_rank
        return [integer(seed, Purpose.RESET, env) for env in range(first, first + envs_per_rank)]

    def print0(self, *values: object) -> None:
        """`print`, on the root only."""
        if self.rank == 0:
            print(*values, flush=True)

    def broadcast(self, tree: Tree = None) -> Tree:
        """The root's tree, on every rank; what the others give is not looked at."""
        skeleton, arrays = nest.take_apart(tree if self.rank == 0 else None)
        skeleton = self._meet("broadcast", skeleton)[0]
        if self.rank:
            arrays = [slot.empty() for slot in nest.slots(skeleton)]
        self._comm.fill(arrays)
        return nest.put_together(skeleton, arrays) if self.rank else tree

    def scatter(self, trees: Sequence[Tree] | None = None) -> Tree:
        """One of the root's trees for each rank, in rank order."""
        mine = list(trees or ()) if self.rank == 0 else []
        parts = [nest.take_apart(tree) for tree in mine]
        skeletons = self._meet("scatter", [skeleton for skeleton, _ in parts])[0]
        if len(skeletons) != self.size:
            raise Disagreement(f"scatter needs one tree for each of the {self.size} ranks, not {len(skeletons)}.")
        if self.rank == 0:
            for rank in range(1, self.size):
                self._comm.send(parts[rank][1], rank, OURS)
            return mine[0]
        return self._receive(skeletons[self.rank], 0, OURS)

    def gather(self, tree: Tree) -> list[Tree] | None:
        """Every rank's tree, in rank order, on the root; None elsewhere. The trees may differ in any way."""
        skeleton, arrays = nest.take_apart(tree)
        skeletons = self._meet("gather", skeleton)
        if self.rank:
            self._comm.send(arrays, 0, OURS)
            return None
        return [tree, *(self._receive(skeletons[rank], rank, OURS) for rank in range(1, self.size))]

    def gather_batches(self, tree: Tree) -> Tree | None:
        """One batch on the root, made of every rank's: arrays end to end along their first axis, in rank order.

        Lengths may differ, everything else must agree. An array without axes, or a number, is a batch of one.
        None on the other ranks.
        """
        mine = {path: np.atleast_1d(nest.array_of(path, leaf)) for path, leaf in entries.of(tree) if leaf is not None}
        everyone = self._meet("gather_batches", {path: Slot("", rows.shape, rows.dtype) for path, rows in mine.items()})
        entries.agree(everyone, lambda slot: (slot.shape[1:], slot.dtype))
        if self.rank:
            self._comm.send(list(mine.values()), 0, OURS)
            return None
        whole, parts = {}, {}
        for path, rows in mine.items():
            ends = np.cumsum([slots[path].shape[0] for slots in everyone])
            whole[path] = np.empty((ends[-1], *rows.shape[1:]), rows.dtype)
            parts[path] = np.split(whole[path], ends[:-1])
            parts[path][0][...] = rows
        for rank in range(1, self.size):
            self._comm.receive([parts[path][rank] for path in parts], rank, OURS)
        return nest.walk(lambda path, leaf: None if leaf is None else entries.batch_like(leaf, whole[path]), tree)

    def send(self, tree: Tree, to: int, tag: int = 0) -> None:
        """A tree to another rank, which must `recv` it. Large ones wait for that; a rank's own are kept for it."""
        self._check_address(to, tag)
        skeleton, arrays = nest.take_apart(tree)
        if to == self.rank:
            self._to_itself[tag].append(nest.put_together(skeleton, [array.copy() for array in arrays]))
            return
        header = np.frombuffer(pickle.dumps(skeleton), np.uint8)
        self._comm.send([np.array([header.size]), header, *arrays], to, tag + 1)

    def recv(self, source: int, tag: int = 0) -> Tree:
        """The next tree that `source` sent with this tag; messages with other tags wait for their own `recv`."""
        self._check_address(source, tag)
        if source == self.rank:
            if not self._to_itself[tag]:
                raise UsageError(f"rank {source} waits for a message of its own with tag {tag}: send it first.")
            return self._to_itself[tag].popleft()
        size = np.empty(1, np.int64)
        self._comm.receive([size], source, tag + 1)
        header = np.empty(int(size[0]), np.uint8)
        self._comm.receive([header], source, tag + 1)
        return self._receive(pickle.loads(header.tobytes()), source, tag + 1)

    def average(self, tree: Tree, count: float = 1) -> Tree:
        """The mean over ranks, weighted by each rank's `count`; the same bits on every rank.

        Added by pairs of neighbours, ((0+1)+(2+3))+4, whatever arrives first. An entry that is None on some ranks
        counts as zeros there; one that is None everywhere stays None.
        """
        mine = {path: None if leaf is None else entries.number_slot(path, leaf) for path, leaf in entries.of(tree)}
        met = self._meet("average", (mine, float(count)))
        everyone, counts = [slots for slots, _ in met], [count for _, count in met]
        entries.agree(everyone, lambda slot: (slot.shape, slot.dtype))
        if not (min(counts) >= 0 and 0 < sum(counts) < math.inf):
            raise Disagreement(f"average needs counts of 0 or more, not all of them 0. They are, by rank: {counts}.")
        slots = {path: next((theirs[path] for theirs in everyone if theirs[path]), None) for path in mine}
        sums = entries.weighted(slots, dict(entries.of(tree)), count)
        self._add_up(sums)
        for vector in sums.values():
            vector /= sum(counts)
        self._comm.fill(list(sums.values()))
        means = entries.cut(slots, sums)
        return nest.walk(lambda path, _: entries.put_back(mine[path] or slots[path], means.get(path)), tree)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the seconds spent inside under this name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - began

    def print_times(self) -> None:
        """A table on the root: seconds per section and rank. Sending and waiting for others are `communicate`."""
        by_rank = self._meet("print_times", {**self.times, "communicate": self._comm.seconds})
        names = list(dict.fromkeys(name for times in by_rank for name in times))
        width = max(map(len, names))
        heads = [f"rank {rank}" for rank in range(self.size)]
        lines = [[f"{times[name]:.3f}" if name in times else "-" for times in by_rank] for name in names]
        for name, cells in zip(["seconds", *names], [heads, *lines], strict=True):
            self.print0(f"{name:<{width}}", *(f"{cell:>9}" for cell in cells))

    def leave(self) -> None:
        """Wait for the other ranks at the end of the script. One that still needs this one learns that it has gone."""
        with contextlib.suppress(Disagreement):
            self._meet("the end of the script", None)

    def _meet(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, in rank order, once all ranks have called the same thing."""
        met = self._comm.share((name, value))
        names = [theirs for theirs, _ in met]
        if other := next((rank for rank in range(self.size) if names[rank] != names[0]), None):
            raise Disagreement(
                f"ranks must do the same things: rank 0 is at {names[0]}, rank {other} at {names[other]}."
            )
        return [value for _, value in met]

    def _receive(self, skeleton: Tree, source: int, tag: int) -> Tree:
        arrays = [slot.empty() for slot in nest.slots(skeleton)]
        self._comm.receive(arrays, source, tag)
        return nest.put_together(skeleton, arrays)

    def _add_up(self, sums: Mapping[str, np.ndarray]) -> None:
        """The sums over all ranks, on the root: at every level of the tree the right of a pair sends to the left."""
        step = 1
        while step < self.size:
            if self.rank % (2 * step):
                return self._comm.send(list(sums.values()), self.rank - step, OURS)
            if self.rank + step < self.size:
                right = {dtype: np.empty_like(vector) for dtype, vector in sums.items()}
                self._comm.receive(list(right.values()), self.rank + step, OURS)
                for dtype, vector in sums.items():
                    vector += right[dtype]
            step *= 2

    def _check_address(self, rank: int, tag: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}: they are 0 to {self.size - 1}.")
        if tag < 0:
            raise UsageError(f"a tag is a whole number, 0 or more, not {tag}.")


def _this_command() -> list[str]:
    """What Python was started with, its own options, `-m` and `-c` included."""
    if sys.argv[0] in ("", "-"):
        raise UsageError("start(nprocs) runs a script again on every rank: put this into a file, or use nprocs=1.")
    return [sys.executable, *sys.orig_argv[1:]]
