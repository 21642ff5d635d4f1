"""What holds on any number of ranks: `python ranks_script.py NPROCS` runs every law below on all of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lockstep.parallel import comm
from lockstep.parallel.entries import Disagreement
from lockstep.ranks import Ranks, start

LAWS: dict[str, Callable[[Ranks], None]] = {}


def law(check: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    LAWS[check.__name__] = check
    return check


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Step:
    observation: Any
    note: str


def same(got: Any, expected: Any) -> None:
    """Equal in kind, dtype, shape and every bit."""
    assert type(got) is type(expected), (type(got), type(expected))
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            same(ours, theirs)
    elif isinstance(expected, Step):
        same((got.observation, got.note), (expected.observation, expected.note))
    elif isinstance(expected, str | int | float | None):
        assert got == expected
    else:
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def tree_of(rank: int) -> dict[str, Any]:
    """A nest whose content, lengths and dtypes tell whose it is."""
    rng = np.random.default_rng(rank)
    return {
        "zeta": rng.normal(size=(rank + 1, 3)),
        "actions": [rng.integers(0, 9, (2, 2)), (rng.random(4) < 0.5, "word")],
        "pair": Pair(np.float32(rank), {"bytes": rng.integers(0, 255, (0, 5), np.uint8)}),
        "step": Step(np.asfortranarray(rng.normal(size=(3, 4)).astype(np.float16)), f"of rank {rank}"),
        "big": 2**70 + rank,
        "none": None,
    }


def arrived(tree: dict[str, Any]) -> dict[str, Any]:
    """A NumPy scalar travels as an array without axes."""
    return {**tree, "pair": tree["pair"]._replace(left=np.asarray(tree["pair"].left))}


@law
def every_rank_is_here(ranks: Ranks) -> None:
    assert 0 <= ranks.rank < ranks.size == int(sys.argv[1])
    assert ("mpi4py" in sys.modules) == (ranks.size > 1)


@law
def gather_keeps_rank_order_and_bits(ranks: Ranks) -> None:
    got = ranks.gather(tree_of(ranks.rank))
    if ranks.rank:
        assert got is None
    else:
        assert got is not None
        same([arrived(tree) for tree in got], [arrived(tree_of(rank)) for rank in range(ranks.size)])


@law
def broadcast_gives_the_roots_tree_whatever_the_others_have(ranks: Ranks) -> None:
    same(arrived(ranks.broadcast(tree_of(ranks.rank))), arrived(tree_of(0)))
    same(ranks.broadcast([1, "two"] if ranks.rank == 0 else None), [1, "two"])


@law
def scatter_gives_each_its_own(ranks: Ranks) -> None:
    trees = [tree_of(rank) for rank in range(ranks.size)] if ranks.rank == 0 else None
    same(arrived(ranks.scatter(trees)), arrived(tree_of(ranks.rank)))


@law
def messages_are_told_apart_by_their_tags(ranks: Ranks) -> None:
    neighbour, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for tag in (0, 7, 1):
        ranks.send({"tag": tag, "from": np.full(3, ranks.rank)}, neighbour, tag)
    ranks.gather(np.zeros(5))  # a message of another kind overtakes those that wait
    for tag in (1, 0, 7):
        same(ranks.recv(source, tag), {"tag": tag, "from": np.full(3, source)})


@law
def messages_with_one_tag_keep_their_order(ranks: Ranks) -> None:
    for number in range(5):
        ranks.send(np.full(number, number), (ranks.rank + 1) % ranks.size)
    for number in range(5):
        same(ranks.recv((ranks.rank - 1) % ranks.size), np.full(number, number))


@law
def what_is_sent_may_be_changed_afterwards(ranks: Ranks) -> None:
    array = np.zeros(3)
    ranks.send(array, (ranks.rank + 1) % ranks.size)
    array += 1
    same(ranks.recv((ranks.rank - 1) % ranks.size), np.zeros(3))


@law
def batches_are_one_batch_in_rank_order(ranks: Ranks) -> None:
    def batch(rank: int) -> dict[str, Any]:
        rng = np.random.default_rng(rank)
        length = (3, 0, 5, 1, 2)[rank]  # one rank has nothing
        return {
            "image": rng.integers(0, 255, (length, 4, 4, 3), np.uint8),
            "other": (rng.random(length) < 0.5, [rng.normal(size=(length, 2))]),
            "episodes": length,
            "return": np.float32(rank),
            "state": None,
        }

    got = ranks.gather_batches(batch(ranks.rank))
    if ranks.rank:
        assert got is None
        return
    parts = [batch(rank) for rank in range(ranks.size)]
    expected = {
        "image": np.concatenate([part["image"] for part in parts]),
        "other": (
            np.concatenate([part["other"][0] for part in parts]),
            [np.concatenate([part["other"][1][0] for part in parts])],
        ),
        "episodes": np.array([part["episodes"] for part in parts]),
        "return": np.array([part["return"] for part in parts]),
        "state": None,
    }
    same(got, expected)


def pairwise(parts: list[Any]) -> Any:
    """The fixed order of addition, restated."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return pairwise(parts[:half]) + pairwise(parts[half:])


@law
def average_is_the_pairwise_sum_divided_by_the_number(ranks: Ranks) -> None:
    parts = [np.random.default_rng(rank).normal(size=1000).astype(np.float32) for rank in range(ranks.size)]
    expected = pairwise(parts) / np.float32(ranks.size)
    same(ranks.average({"w": [parts[ranks.rank]]}), {"w": [expected]})


@law
def average_is_weighted_by_counts(ranks: Ranks) -> None:
    counts = [(3, 0, 5, 1, 2)[rank] for rank in range(ranks.size)]
    values = [np.full(2, rank + 1.0) if counts[rank] else np.full(2, np.nan) for rank in range(ranks.size)]
    expected = np.full(2, sum(count * (rank + 1.0) for rank, count in enumerate(counts)) / sum(counts))
    same(ranks.average(values[ranks.rank], counts[ranks.rank]), expected)


@law
def none_is_zeros_unless_all_have_none(ranks: Ranks) -> None:
    last = ranks.size - 1
    mine = {"some": np.full((2, 2), 6.0) if ranks.rank == last else None, "all": None, "loss": float(ranks.rank)}
    expected = {"some": np.full((2, 2), 6.0 / ranks.size), "all": None, "loss": last / 2}
    same(ranks.average(mine), expected)


@law
def average_keeps_float_types_and_makes_whole_numbers_double(ranks: Ranks) -> None:
    mine = {
        "half": np.full(2, 60000, np.float16),  # the sum would not fit
        "single": np.ones((), np.float32),
        "complex": np.full(1, 1j * ranks.rank, np.complex64),
        "int": np.full(1, ranks.rank),
        "bool": np.array([ranks.rank == 0]),
    }
    expected = {
        "half": np.full(2, 60000, np.float16),
        "single": np.ones((), np.float32),
        "complex": np.full(1, 1j * (ranks.size - 1) / 2, np.complex64),
        "int": np.full(1, (ranks.size - 1) / 2),
        "bool": np.full(1, 1 / ranks.size),
    }
    same(ranks.average(mine), expected)


@law
def long_messages_travel_in_pieces(ranks: Ranks) -> None:
    before = comm.PIECE, comm.LARGE
    comm.PIECE, comm.LARGE = 7, 50
    try:
        gather_keeps_rank_order_and_bits(ranks)
        broadcast_gives_the_roots_tree_whatever_the_others_have(ranks)
        scatter_gives_each_its_own(ranks)
        messages_are_told_apart_by_their_tags(ranks)
        batches_are_one_batch_in_rank_order(ranks)
        average_is_the_pairwise_sum_divided_by_the_number(ranks)
    finally:
        comm.PIECE, comm.LARGE = before


def refusal(work: Callable[[], Any]) -> Disagreement | None:
    try:
        work()
    except Disagreement as error:
        return error
    return None


def refused(work: Callable[[], Any], *words: str) -> None:
    error = refusal(work)
    assert error is not None, f"not refused: {words}"
    assert all(word in str(error) for word in words), error


@law
def trees_that_differ_are_refused_on_every_rank(ranks: Ranks) -> None:
    if ranks.size == 1:
        return
    last = ranks.size - 1
    me = ranks.rank == last
    shapes = {"a": {"b": np.ones((2, 4 if me else 3))}}
    refused(lambda: ranks.average(shapes), "'a/b' is float64[2, 3] on rank 0, but float64[2, 4] on rank")
    refused(lambda: ranks.gather_batches(shapes), "'a/b' is float64[2, 3] on rank 0, but float64[2, 4] on rank")
    dtypes = [np.ones(3, np.float32 if me else np.float64)]
    refused(lambda: ranks.average(dtypes), f"'0' is float64[3] on rank 0, but float32[3] on rank {last}")
    refused(lambda: ranks.gather_batches(dtypes), f"'0' is float64[3] on rank 0, but float32[3] on rank {last}")
    extra = {"w": np.ones(1), **({"bias": np.ones(1)} if me else {})}
    refused(lambda: ranks.average(extra), f"rank {last} has 'bias', rank 0 does not")
    missing = {"w": None if me else np.ones(1)}
    refused(lambda: ranks.gather_batches(missing), f"rank 0 has 'w', rank {last} does not")
    refused(lambda: ranks.average(1.0, count=-1 if me else 1), "counts of 0 or more", "-1.0")
    refused(lambda: ranks.scatter([1]), f"one tree for each of the {ranks.size} ranks, not 1")
    refused(lambda: ranks.gather(1) if me else ranks.average(1), f"rank 0 is at average, rank {last} at gather", "same")


@law
def environments_have_one_seed_each_however_they_are_spread(ranks: Ranks) -> None:
    everyone = ranks.gather(ranks.env_seeds(3, envs_per_rank=30 // ranks.size))
    if everyone is not None:
        alone = Ranks.env_seeds(ranks, 3, 30)
        assert [seed for seeds in everyone for seed in seeds] == alone
        assert len(set(alone)) == 30


@law
def neither_jax_nor_torch_is_imported_for_numpy(ranks: Ranks) -> None:
    assert not {"jax", "torch"} & sys.modules.keys()


@law
def jax_arrays_come_back_as_jax_arrays(ranks: Ranks) -> None:
    import jax.numpy as jnp

    def tree(rank: int) -> dict[str, Any]:
        return {"w": jnp.full((2, 3), rank, jnp.float32), "h": jnp.full(2, rank, jnp.bfloat16), "n": jnp.int32(rank)}

    every_kind_of_message(ranks, tree, jnp.concatenate, lambda x: x.reshape(1))
    mean = (ranks.size - 1) / 2
    same(ranks.average({"h": tree(ranks.rank)["h"]}), {"h": jnp.full(2, mean, jnp.bfloat16)})


def torch_tensors_come_back_as_torch_tensors(ranks: Ranks) -> None:
    import torch

    def tree(rank: int) -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.full((3, 2), float(rank)))
        return {"w": parameter.t(), "n": torch.tensor(rank), "b": torch.arange(rank) > 1}

    every_kind_of_message(ranks, tree, torch.cat, lambda x: x.reshape(1))
    half = torch.full((2,), float(ranks.rank), dtype=torch.bfloat16)
    got = ranks.average([half, None if ranks.rank else torch.ones(1)])
    assert torch.equal(got[0], torch.full((2,), (ranks.size - 1) / 2, dtype=torch.bfloat16))
    assert torch.equal(got[1], torch.ones(1) / ranks.size)
    received = ranks.broadcast(half)
    assert (received.dtype, float(received[0]), received.requires_grad) == (torch.bfloat16, 0.0, False)


if importlib.util.find_spec("torch") is not None:
    law(torch_tensors_come_back_as_torch_tensors)


def every_kind_of_message(
    ranks: Ranks, tree: Callable[[int], dict[str, Any]], concatenate: Any, one_row: Callable[[Any], Any]
) -> None:
    """Of three arrays: `w` of two axes and equal on all ranks, `n` without axes."""

    def check(got: Any, expected: Any) -> None:
        assert type(got) is type(expected * 1)
        same(np.asarray(got.tolist()), np.asarray(expected.tolist()))
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)

    def check_tree(got: dict[str, Any], rank: int) -> None:
        for name, expected in tree(rank).items():
            check(got[name], expected)

    check_tree(ranks.scatter([tree(rank) for rank in range(ranks.size)]), ranks.rank)
    ranks.send(tree(ranks.rank), (ranks.rank + 1) % ranks.size)
    check_tree(ranks.recv((ranks.rank - 1) % ranks.size), (ranks.rank - 1) % ranks.size)
    if ranks.rank:
        check_tree(ranks.broadcast(), 0)
    else:
        ranks.broadcast(tree(0))
    batch, parts = ranks.gather_batches(tree(ranks.rank)), [tree(rank) for rank in range(ranks.size)]
    if batch is not None:
        check(batch["w"], concatenate([part["w"] for part in parts]))
        check(batch["n"], concatenate([one_row(part["n"]) for part in parts]))
    mean = ranks.average({"w": tree(ranks.rank)["w"]})["w"]
    check(mean, tree(0)["w"] + (ranks.size - 1) / 2)


def main() -> None:
    ranks = start(int(sys.argv[1]))
    for name, check in LAWS.items():
        check(ranks)
        if all(done == name for done in ranks.gather(name) or []):
            ranks.print0("held:", name)


if __name__ == "__main__":
    main()
