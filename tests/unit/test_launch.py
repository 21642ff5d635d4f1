"""What ranks say, and how one that fails ends all."""

from __future__ import annotations

import io

from lockstep.parallel.launch import Prefixed


def test_every_line_has_its_rank() -> None:
    out = io.StringIO()
    told = Prefixed("[rank 1] ", out)
    print("one", 2, file=told)
    told.write("three\nfo")
    told.write("ur\n")
    assert out.getvalue() == "[rank 1] one 2\n[rank 1] three\n[rank 1] four\n"
