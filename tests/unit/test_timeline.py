from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.parallel.comm import Solo
from lockstep.run.timeline import Span, Timed, Timeline, Untimed, trace


def nested(events: list[dict[str, Any]]) -> bool:
    """Whether any two spans of a rank are apart or one inside the other."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return all(
        b1 <= a2 or b2 <= a1 or (a1 <= a2 and b2 <= b1) or (a2 <= a1 and b1 <= b2)
        for i, (a1, b1) in enumerate(spans)
        for a2, b2 in spans[i + 1 :]
    )


def test_a_call_is_a_span_also_when_it_fails() -> None:
    timeline = Timeline()
    assert timeline.around("double", lambda x: 2 * x)(4) == 8
    with pytest.raises(ZeroDivisionError):
        timeline.around("fail", lambda: 1 / 0)()
    first, second = timeline.spans
    assert (first.name, second.name) == ("double", "fail")
    assert first.began <= first.ended <= second.began <= second.ended


def test_messages_are_spans_and_what_the_root_does_is_inside_its_own(tmp_path: Path) -> None:
    timeline = Timeline()
    comm = Timed(Solo(), timeline)
    everyones = np.zeros((1, 2))
    comm.gathering(np.arange(2), everyones)()
    np.testing.assert_array_equal(everyones, [[0, 1]])
    comm.adding(np.arange(1, 3), everyones[0])()
    np.testing.assert_array_equal(everyones, [[1, 2]])
    assert comm.on_root(timeline.around("evaluate", lambda: 3)) == 3
    assert comm.seconds == 0.0
    timeline.write(tmp_path, Solo())
    written = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["allgather", "add", "on_root", "evaluate"]
    assert nested(spans)
    assert spans[2]["ts"] <= spans[3]["ts"]


def test_the_format_is_a_process_per_rank_in_microseconds_on_one_clock() -> None:
    ranks = [[Span("inner", 7_000, 8_000), Span("outer", 5_000, 9_500)], [Span("outer", 6_000, 6_500)]]
    assert trace(ranks)["traceEvents"] == [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "rank 1"}},
        {"name": "outer", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 4.5},
        {"name": "inner", "ph": "X", "pid": 0, "tid": 0, "ts": 2.0, "dur": 1.0},
        {"name": "outer", "ph": "X", "pid": 1, "tid": 0, "ts": 1.0, "dur": 0.5},
    ]


def test_one_process_alone_sends_nothing_to_time() -> None:
    solo = Solo()
    assert Timeline().over(solo) is solo


def test_without_a_timeline_everything_stays_what_it_is(tmp_path: Path) -> None:
    comm, work = Solo(), lambda: 1
    assert Untimed().around("work", work) is work
    assert Untimed().over(comm) is comm
    Untimed().write(tmp_path, comm)
    assert not list(tmp_path.iterdir())
