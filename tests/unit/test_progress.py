from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.collect import Episode
from lockstep.run.progress import RECENT, Progress


@given(st.integers(1, 50), st.integers(1, 70))
def test_a_multiple_is_crossed_exactly_when_the_update_stepped_on_or_over_it(batch: int, every: int) -> None:
    progress, crossed = Progress(), 0
    for _ in range(40):
        progress = progress.after(batch, [], 0.0)
        stepped_on = range(progress.steps - batch + 1, progress.steps + 1)
        assert progress.crossed(every, batch) == any(step % every == 0 for step in stepped_on)
        crossed += progress.crossed(every, batch)
    assert crossed == (40 * batch // every if batch <= every else 40)


def test_updates_that_cross_ten_in_steps_of_four() -> None:
    assert [steps for steps in range(4, 44, 4) if Progress(steps=steps).crossed(10, 4)] == [12, 20, 32, 40]


def test_nothing_crosses_never() -> None:
    assert not any(Progress(steps=steps).crossed(0, 4) for steps in range(0, 40, 4))


def test_evaluations_are_due_at_every_crossing_and_at_the_end_of_the_budget() -> None:
    steps = range(4, 48, 4)
    assert [n for n in steps if Progress(steps=n).evaluation_due(10, 4, budget=35)] == [12, 20, 32, 36, 40, 44]
    assert not any(Progress(steps=n).evaluation_due(0, 4, budget=35) for n in steps)


def test_only_a_better_evaluation_is_the_best() -> None:
    progress, verdicts = Progress(steps=5), []
    for score in (None, -3.0, -3.0, -4.0, None, -2.5):
        progress, best = progress.scored(score)
        verdicts.append((best, progress.best))
    assert verdicts == [(False, None), (True, -3.0), (False, -3.0), (False, -3.0), (False, -3.0), (True, -2.5)]
    assert progress.steps == 5


def test_an_update_adds_up() -> None:
    before = Progress(updates=3, steps=30, episodes=7, seconds=1.5, recent=((1.0, 5),), best=9.0)
    after = before.after(10, [Episode(1, 2, 6, -1.0), Episode(5, 0, 4, 3.0)], 1.75)
    assert after == Progress(4, 40, 9, 1.75, ((1.0, 5), (-1.0, 6), (3.0, 4)), 9.0)
    assert before.steps == 30


def test_returns_are_of_the_newest_hundred_episodes() -> None:
    totals = np.random.default_rng(0).normal(size=150)
    progress = Progress()
    for start in range(0, 150, 30):
        episodes = [Episode(i, 0, start + i, total) for i, total in enumerate(totals[start : start + 30])]
        progress = progress.after(1, episodes, 0.0)
    assert len(progress.recent) == RECENT == 100
    newest = totals[50:]
    mean, std, length = progress.returns
    np.testing.assert_allclose(
        [mean, std], [newest.mean(), np.sqrt(np.mean((newest - newest.mean()) ** 2))], rtol=1e-12
    )
    assert length == np.mean(range(50, 150))


def test_there_is_no_return_before_the_first_episode() -> None:
    assert all(math.isnan(number) for number in Progress().returns)


def test_progress_comes_back_from_json_as_it_was() -> None:
    for progress in (Progress(), Progress(3, 30, 2, 0.1 + 0.2, ((1e-300, 5), (-0.1, 6)), 1 / 3)):
        assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
