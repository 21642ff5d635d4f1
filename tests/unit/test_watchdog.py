"""A rank that hangs is found, and one that waits is not taken for one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lockstep.parallel import watchdog
from lockstep.parallel.watchdog import ASKED, HERE, RollCall, Watchdog


def test_a_rank_that_makes_no_step_is_found_with_its_stack() -> None:
    dog, found, heard = Watchdog(), [], threading.Event()

    def stuck(message: str) -> None:
        found.append(message)
        heard.set()

    with dog.watching(0.05, stuck):
        dog.beat("collecting for update 7")
        assert heard.wait(30)
    assert "hangs" in found[0]
    assert "while collecting for update 7" in found[0]
    assert "heard.wait(30)" in found[0]


def test_a_rank_that_waits_does_not_hang() -> None:
    dog, found = Watchdog(), []
    with dog.waiting(), dog.watching(0.05, found.append):
        time.sleep(0.3)
    assert found == []


def test_a_limit_of_zero_watches_nothing() -> None:
    before = threading.active_count()
    with Watchdog().watching(0, pytest.fail):
        assert threading.active_count() == before


class Post:
    """A communicator among three ranks, of which this is rank 0; `inbox` holds (tag, sender)."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.inbox: list[tuple[int, int]] = []
        self.sent: list[tuple[int, int]] = []

    def isend(self, value: None, rank: int, tag: int) -> None:
        self.sent.append((tag, rank))

    def iprobe(self, tag: int, status: Any) -> bool:
        sender = next((sender for kind, sender in self.inbox if kind == tag), None)
        if sender is not None:
            status.source = sender
        return sender is not None

    def recv(self, source: int, tag: int) -> None:
        self.inbox.remove((tag, source))


def test_who_waits_answers_the_roll() -> None:
    post = Post()
    post.inbox = [(ASKED, 2)]
    assert RollCall(post).attend(is_overdue=False) is None
    assert post.sent == [(HERE, 2)]


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
    post = Post()
    roll = RollCall(post)
    assert roll.attend(is_overdue=True) is None
    assert sorted(post.sent) == [(ASKED, 1), (ASKED, 2)]
    post.inbox = [(HERE, 2)]
    verdict = roll.attend(is_overdue=True)
    assert verdict is not None
    assert verdict.startswith("rank 1 does not answer")


def test_ranks_that_all_answer_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
    post = Post()
    roll = RollCall(post)
    roll.attend(is_overdue=True)
    post.inbox = [(HERE, 1), (HERE, 2)]
    assert roll.attend(is_overdue=True) == "all ranks wait for each other. This must not happen."
