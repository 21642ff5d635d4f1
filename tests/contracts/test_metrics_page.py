"""What docs/metrics.md says of the columns is what algorithms and reports make."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.algorithms import REGISTRY
from lockstep.algorithms.actor_critic import Normalize, Setup
from lockstep.parallel.lanes import LaneBlock
from lockstep.run.metrics import FIRST, LAST
from lockstep.run.report import _tag
from tests import linear

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = dict(
    re.findall(r"^## (.*?)/?\n(.*?)(?=^## |\Z)", (DOCS / "metrics.md").read_text(), re.DOTALL | re.MULTILINE)
)
SHAPE = LANES, STEPS, ENVS = 4, 32, 2


def columns(section: str) -> dict[str, list[str]]:
    """The columns of a table, with the cells that follow."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return {name: cells for first, *cells in rows for name in re.findall(r"`(\w+)`", first)}


def emitted(name: str) -> set[str]:
    """The metrics of an update with the default settings; nothing is computed."""
    entry = REGISTRY[name]
    padded = "steps" not in entry.collects
    setup = Setup(linear.linear_policy(), linear.SPEC, Normalize(), 10_000, LANES, STEPS * ENVS, padded)
    algorithm = entry.make(entry.config(), setup)
    data = linear.trajectory(SHAPE, [], [], real=np.ones(SHAPE, bool) if padded else ())
    learner = jax.eval_shape(algorithm.init, jax.random.key(0))
    _, metrics = jax.eval_shape(
        lambda le, d, key: algorithm.update(le, LaneBlock(d), key), learner, data, jax.random.key(1)
    )
    return set(metrics)


@pytest.mark.parametrize("name", REGISTRY)
def test_an_algorithms_metrics_are_those_that_the_page_gives_it(name: str) -> None:
    said = {
        column
        for column, (_, of, _) in columns("learn").items()
        if of.strip().startswith("all") or name.upper() in of.replace(" ", "").split(",")
    }
    assert emitted(name) == said


def test_every_column_stands_under_its_tag() -> None:
    for group in ("episode", "learn", "time"):
        for column in columns(group):
            assert _tag(column) == f"{group}/{column.removeprefix('time_')}"
    page = {column for section in SECTIONS for column in columns(section)}
    assert {*FIRST, *LAST} <= page


def test_the_code_that_the_page_points_to_exists() -> None:
    links = re.findall(r"\[`.*?`\]\((.*?)\)", (DOCS / "metrics.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not (DOCS / link).is_file()] == []
