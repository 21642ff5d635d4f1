from __future__ import annotations

import io
import math
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from lockstep.run import report
from lockstep.run.progress import Progress
from lockstep.run.report import Events, Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    return now


def test_the_screen_counts_down_from_the_pace_since_the_first_update(clock: list[float]) -> None:
    out = io.StringIO()
    screen = Screen(10_000, out)
    clock[0] += 77  # the first update compiles
    screen.show(Progress(steps=4_000), 1.0)
    clock[0] += 3_725
    screen.show(Progress(steps=5_000, episodes=3, recent=((1.5, 7), (2.5, 7))), 123.4)
    clock[0] += 100
    screen.show(Progress(steps=10_000), 123.4)
    first, second, last = (" ".join(line.split()) for line in out.getvalue().splitlines())
    assert first == "4,000 / 10,000 steps 1 steps/s return - 0 episodes"
    assert second == "5,000 / 10,000 steps 123 steps/s return 2.00 3 episodes ETA 5:10:25"
    assert last.endswith("ETA 0:00:00")


@pytest.mark.parametrize(("out", "pause"), [(io.StringIO(), 10.0), (Terminal(), 0.2)])
def test_the_screen_shows_a_line_now_and_then_and_always_the_last(
    clock: list[float], out: io.StringIO, pause: float
) -> None:
    screen = Screen(100, out)
    shown = []
    for steps, passed in ((10, 0), (20, 0.9 * pause), (30, 0.2 * pause), (40, 0.01), (100, 0.01)):
        clock[0] += passed
        before = len(out.getvalue())
        screen.show(Progress(steps=steps), 1.0)
        if len(out.getvalue()) > before:
            shown.append(steps)
    assert shown == [10, 30, 100]
    screen.say("stopped")
    screen.close()
    assert "stopped\n" in out.getvalue()
    assert out.getvalue().endswith("\n")
    assert ("\x1b" in out.getvalue()) == out.isatty()


def test_a_line_that_is_too_long_loses_what_matters_least() -> None:
    parts = {"steps": "   10 / 200 steps", "pace": "  5 steps/s", "return": "return   1.50", "episodes": "3 episodes"}
    for columns in range(1, 120):
        line = report._fitted({**parts, "left": "ETA 0:00:07"}, columns)
        assert len(line) <= columns
        words = ["10 / 200 steps", "return", "ETA", "steps/s", "episodes"]
        assert [word for word in words if word in line] == words[: sum(columns >= n for n in (14, 27, 40, 51, 63))]


def test_tensorboard_gets_every_finite_number_in_its_group(tmp_path: Path) -> None:
    events = Events(tmp_path, 1000, None)
    numbers = {"kl": 0.5, "return_mean": 2.0, "eval_return": math.nan, "time_update": 1.5, "episodes": 3}
    events.scalars({"update": 4, "steps": 40, "digest": "ab", "seconds": np.float64(2), **numbers})
    events.close()
    points = scalars(tmp_path)
    assert sorted(points) == [
        ("episode/episodes", 3, 40),
        ("episode/return_mean", 2.0, 40),
        ("learn/kl", 0.5, 40),
        ("time/seconds", 2.0, 40),
        ("time/update", 1.5, 40),
    ]


def test_tensorboard_gets_no_more_points_than_it_can_show(tmp_path: Path) -> None:
    events = Events(tmp_path, 500_000, None)
    for steps in range(100, 2100, 100):
        events.scalars({"steps": steps, "kl": 1.0, "eval_return": 5.0 if steps == 1300 else math.nan})
    events.close()
    assert [step for tag, _, step in scalars(tmp_path) if tag == "learn/kl"] == [500, 1000, 1300, 1500, 2000]


def scalars(run: Path) -> list[tuple[str, float, int]]:
    """All scalars that TensorBoard's own reader shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown = EventAccumulator(str(run)).Reload()
    return [(tag, point.value, point.step) for tag in shown.Tags()["scalars"] for point in shown.Scalars(tag)]


@pytest.mark.parametrize("resumed_at", [0, 2])
def test_points_after_the_checkpoint_are_hidden_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed_at: int
) -> None:
    now = iter(range(1000, 2000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))  # event files are read in the order of their times
    for start, resumed in ((0, None), (resumed_at, resumed_at)):
        events = Events(tmp_path, 1000, resumed)
        for steps in range(start + 1, 5):
            events.scalars({"steps": steps, "kl": float(10 * start + steps)})
        events.close()
    steps = [step for _, _, step in scalars(tmp_path)]
    assert steps == [1, 2, 3, 4]
