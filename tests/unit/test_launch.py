"""What ranks say, and how one that fails ends all."""

from __future__ import annotations

import io

import pytest

from lockstep.errors import EnvironmentFault
from lockstep.parallel.comm import Solo
from lockstep.parallel.launch import Prefixed, together


def test_every_line_has_its_rank() -> None:
    out = io.StringIO()
    told = Prefixed("[rank 1] ", out)
    print("one", 2, file=told)
    told.write("three\nfo")
    told.write("ur\n")
    assert out.getvalue() == "[rank 1] one 2\n[rank 1] three\n[rank 1] four\n"


class Told(Solo):
    """Remembers how it failed."""

    def fail(self, status: int, message: str) -> None:
        self.failed = status, message.splitlines()[0]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EnvironmentFault("it fell over."), (3, "it fell over.")),
        (KeyboardInterrupt(), (130, "stopped by Ctrl-C.")),
        (ZeroDivisionError(), (1, "failed:")),
    ],
    ids=["of lockstep", "Ctrl-C", "any other"],
)
def test_ranks_are_told_what_ended_one(error: BaseException, told: tuple[int, str]) -> None:
    comm = Told()
    with pytest.raises(type(error)), together(comm):
        raise error
    assert comm.failed == told
