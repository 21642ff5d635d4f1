"""What travels between ranks arrives as it was, whatever its shape, dtype and size."""

from __future__ import annotations

import pytest

from tests.laws.process import on_ranks

MESSAGES = """
import sys
from lockstep.runtime import start_jax
start_jax()
import numpy as np
from lockstep.parallel import board, comm as module
from lockstep.parallel.launch import join
from lockstep.tree import pairwise_sum
module.PIECE, module.LARGE = int(sys.argv[1]), int(sys.argv[2])
if sys.argv[3] == "apart":
    board.ROOM = 0
comm = join()

def made(rank):
    rng = np.random.default_rng(rank)
    return {
        "scalar": np.float64(rng.random()),
        "empty": np.zeros((0, 3), np.float32),
        "flags": rng.random((5, 1)) < 0.5,
        "many": rng.random((3, 7, 11)).astype(np.float32),
        "turned": rng.random((4, 6)).T,
        "nested": [np.arange(9, dtype=np.int8) + rank, (np.int32(rank),)],
    }

def same(a, b):
    import jax
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in pairs:
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), (x.dtype, x.shape, y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()

everyone = [made(rank) for rank in range(comm.size)]
gathered = comm.gather(made(comm.rank))
if comm.rank == 0:
    same(gathered, everyone)
else:
    assert gathered is None
same(comm.broadcast(made(comm.rank)), everyone[0])
mine, out = made(comm.rank)["many"], np.empty((comm.size, 3, 7, 11), np.float32)
gathering = comm.gathering(mine, out)
for times in (1, 2):  # what is there when it is called
    gathering()
    same(out, times * np.stack([rank["many"] for rank in everyone]))
    mine *= 2
mine, out = made(comm.rank)["many"], np.empty((3, 7, 11), np.float32)
adding = comm.adding(mine, out)
for times in (1, 2):
    adding()
    same(out, times * np.asarray(pairwise_sum(np.stack([rank["many"] for rank in everyone]))))
    mine *= 2
assert comm.share(list(range(comm.rank * 400))) == [list(range(rank * 400)) for rank in range(comm.size)]
assert comm.on_root(lambda: ("from", comm.rank)) == ("from", 0)
"""

BOARD = """
import time
import numpy as np
from mpi4py import MPI
from lockstep.parallel import board as module
world, module.ROOM = MPI.COMM_WORLD, 5000
board = module.Board(world)
mine, everyones = np.random.default_rng(world.rank), np.random.default_rng(9)
for turn in range(1500):
    size = everyones.integers(board.room)
    late = mine.integers(40)
    time.sleep(0.001 if late == 0 else 0)
    message = np.full(size, (turn + world.rank) % 256, np.uint8)
    board.write(message)
    while not board.is_full():
        time.sleep(0)
    time.sleep(0.001 if late == 1 else 0)
    rows = np.empty((world.size, size), np.uint8)
    rows[world.rank] = message
    board.read(rows)
    if (rows != (turn + np.arange(world.size)[:, None]) % 256).any():
        world.Abort(1)
"""

MEANS = """
from lockstep.runtime import start_jax
start_jax()
import jax, numpy as np
from lockstep.parallel.lanes import LaneBlock, alone, exchange_over
from lockstep.parallel.launch import join
comm, rng = join(), np.random.default_rng(0)
exchange = exchange_over(comm)
mine, out = np.arange(3.0), np.zeros(3)
comm.adding(mine, out)()
assert (out == comm.size * mine).all()
for each in (1, 2, 3, 4):  # lanes of a rank; three are no whole subtree of the addition
    for weight in (None, lambda lane: lane[2]):
        def mean(data, exchange=alone):
            found = LaneBlock(data, exchange).mean(lambda lane: lane[:2], weight)
            return jax.tree.map(lambda leaf: 3 * leaf + leaf * leaf, found)
        of_all, of_mine = jax.jit(mean), jax.jit(lambda data: mean(data, exchange))
        for smallest in (1.0, 1e-37):  # numbers that programs round to zero
            numbers = rng.normal(size=(each * comm.size, 101)) * smallest
            lanes = numbers.astype(np.float32), numbers, rng.integers(1, 9, len(numbers))
            mine = jax.tree.map(lambda leaf: leaf[comm.rank * each : (comm.rank + 1) * each], lanes)
            for a, b in zip(of_all(lanes), of_mine(mine), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (each, smallest, weight)
"""

INSIDE_A_PROGRAM = """
from lockstep.runtime import start_jax
start_jax()
import jax, numpy as np
from lockstep.parallel.lanes import LaneBlock, exchange_over
from lockstep.parallel.launch import join
comm = join()
data = np.full((2, 1_500_000), comm.rank, np.float32)
mean = jax.jit(lambda data: LaneBlock(data, exchange_over(comm)).mean(lambda lane: (lane, lane[0])))
for _ in range(5):
    whole, first = mean(data)
assert (np.asarray(whole) == 0.5).all() and float(first) == 0.5
"""


@pytest.mark.parametrize(
    ("piece", "large", "ranks"),
    [(2**30, 2**18, "together"), (2**30, 2**18, "apart"), (50, 0, "apart"), (7, 100, "together")],
)
def test_messages_arrive_as_they_were_in_pieces_of_any_size(piece: int, large: int, ranks: str) -> None:
    done = on_ranks(7, "-c", MESSAGES, str(piece), str(large), ranks)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_mean_over_ranks_has_the_bits_of_one_process(ranks: int) -> None:
    done = on_ranks(ranks, "-c", MEANS)
    assert done.returncode == 0, done.stderr


def test_nothing_on_the_board_is_overwritten_before_all_have_read_it() -> None:
    done = on_ranks(4, "-c", BOARD)
    assert done.returncode == 0, done.stderr


def test_messages_of_megabytes_cross_inside_a_compiled_program() -> None:
    done = on_ranks(2, "-c", INSIDE_A_PROGRAM)
    assert done.returncode == 0, done.stderr
