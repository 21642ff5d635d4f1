"""Whatever a file or the command line holds, the answer is a message and an exit status."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fuzz

QUICK = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
THOROUGH = settings(QUICK, max_examples=1000)
RANDOM = st.randoms(use_true_random=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> fuzz.Place:
    return fuzz.Place(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("site", fuzz.SITES)
def test_what_once_broke_something_is_told(place: fuzz.Place, site: str) -> None:
    place.renew()
    verdict = fuzz.judge(fuzz.SITES[site](place))
    assert verdict.kind == "ok", verdict.told


@pytest.mark.parametrize("reader", fuzz.READERS)
@QUICK
@given(rng=RANDOM)
def test_damaged_input_is_told(place: fuzz.Place, reader: str, rng: Random) -> None:
    verdict = fuzz.attempt(place, reader, rng)
    assert verdict.kind == "ok", verdict.told


@pytest.mark.slow
@pytest.mark.parametrize("reader", fuzz.READERS)
@THOROUGH
@given(rng=RANDOM)
def test_damaged_input_is_told_a_thousand_times(place: fuzz.Place, reader: str, rng: Random) -> None:
    verdict = fuzz.attempt(place, reader, rng)
    assert verdict.kind == "ok", verdict.told
