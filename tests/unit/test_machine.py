"""Ranks that can't go together are named, with what differs."""

from __future__ import annotations

from lockstep.run.machine import compared

HERE = {"versions": {"jax": "1", "python": "3.11.7"}, "kernels": "a", "simulation": "b"}


def test_equal_ranks_go_together() -> None:
    assert compared([HERE, HERE, HERE]) == ([], [])


def test_other_versions_are_refused_with_rank_and_package() -> None:
    refused, doubtful = compared([HERE, HERE, HERE | {"versions": {"jax": "2", "python": "3.11.7"}, "kernels": "c"}])
    assert refused == ["rank 2 has other versions than rank 0: jax 1 -> 2. Install the same."]
    assert doubtful == []


def test_other_arithmetic_is_a_doubt() -> None:
    refused, doubtful = compared([HERE, HERE | {"kernels": "x"}])
    assert refused == []
    assert doubtful == ["rank 1 differs from rank 0 in the arithmetic of this CPU."]
