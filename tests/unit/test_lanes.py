from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import foreign, tree
from lockstep.networks import mlp_apply, mlp_init
from lockstep.parallel import lanes
from lockstep.parallel.comm import Solo
from lockstep.parallel.lanes import LaneBlock

RNG = np.random.default_rng(0)
PARAMS = mlp_init(jax.random.key(0), (17, 8, 8, 1), 1.0)  # small: here a batch over lanes does give other bits
DATA = {
    "x": RNG.normal(size=(4, 32, 17)).astype(np.float32),
    "y": RNG.normal(size=(4, 32, 1)).astype(np.float32),
}


def gradient(params: Any, lane: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.square(mlp_apply(params, lane["x"], jnp.tanh, 3) - lane["y"]).mean()

    return jax.grad(loss)(params)


def held(lanes: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: leaf[np.array(lanes)], DATA)


@jax.jit
def mapped(params: Any, data: Any) -> Any:
    return LaneBlock(data).map(lambda lane: gradient(params, lane)).all()


@jax.jit
def averaged(params: Any, data: Any) -> Any:
    return LaneBlock(data).mean(lambda lane: gradient(params, lane))


@jax.jit
def descended(params: Any, data: Any) -> Any:
    """Two steps in one program: what follows a mean could be fused with what precedes it."""
    lanes = LaneBlock(data)
    for _ in range(2):
        mean = lanes.mean(lambda lane: gradient(params, lane))  # noqa: B023
        params = jax.tree.map(lambda p, g: p - 0.1 * g / (1e-3 + jnp.sqrt(jnp.square(g))), params, mean)
    return params


def one_of(stacked: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), stacked)


@pytest.mark.parametrize("lanes", [(0, 1), (2, 3), (0, 1, 2, 3), (3, 1, 0, 2)])
def test_a_lane_gives_the_same_bits_alone_and_among_others(lanes: tuple[int, ...]) -> None:
    together = mapped(PARAMS, held(lanes))
    for i, lane in enumerate(lanes):
        alone = mapped(PARAMS, held((lane,)))
        assert jax.tree.leaves(alone)[0].shape[0] == 1
        assert tree.digest(one_of(together, i)) == tree.digest(one_of(alone, 0))


def test_the_mean_is_the_pairwise_sum_of_the_lanes_divided_by_their_number() -> None:
    parts = [averaged(PARAMS, held((lane,))) for lane in range(4)]
    expected = jax.tree.map(lambda a, b, c, d: ((a + b) + (c + d)) / np.float32(4), *jax.tree.map(np.asarray, parts))
    assert tree.digest(averaged(PARAMS, DATA)) == tree.digest(expected)
    assert tree.digest(parts[2]) == tree.digest(one_of(mapped(PARAMS, held((2,))), 0))


@pytest.mark.parametrize("copies", [2, 4])
def test_copies_of_a_lane_learn_the_bits_that_it_learns_alone(copies: int) -> None:
    assert tree.digest(descended(PARAMS, held((1,) * copies))) == tree.digest(descended(PARAMS, held((1,))))


def test_five_lanes_are_added_by_pairs_of_neighbours() -> None:
    lanes = np.float32([1e8, 1, -1e8, 1, 1])  # ((0+1)+(2+3))+4 = 1, from left to right it would be 2
    assert jax.jit(lambda x: LaneBlock(x).mean(lambda lane: lane))(lanes) == np.float32(1) / 5


@pytest.mark.parametrize("count", [1, 2, 3])
def test_map_and_mean_are_those_of_numpy_and_padding_is_never_seen(count: int) -> None:
    x = RNG.normal(size=(count, 4)) + 5
    squares = LaneBlock(x).map(lambda lane: {"square": lane**2, "n": jnp.int32(1)})
    np.testing.assert_array_equal(squares.all()["square"], x**2)
    np.testing.assert_allclose(squares.mean(lambda lane: lane["square"]), (x**2).mean(0), rtol=1e-12)
    np.testing.assert_array_equal(LaneBlock(x).all(), x)


def test_a_mean_keeps_the_shapes_and_dtypes_of_a_tree() -> None:
    x = np.arange(6.0).reshape(3, 2)
    mean = LaneBlock(x).mean(lambda lane: (lane[0], {"f": lane.astype(jnp.float32)[None], "d": lane}))
    assert mean[0] == 2.0
    assert (mean[1]["f"].shape, mean[1]["f"].dtype) == ((1, 2), jnp.float32)
    np.testing.assert_array_equal(mean[1]["d"], [2, 3])


def test_one_program_serves_all_lanes() -> None:
    """However many lanes there are, the function is traced a fixed number of times."""

    def traces(count: int) -> int:
        seen = []
        jax.jit(lambda x: LaneBlock(x).mean(lambda lane: seen.append(1) or lane.sum()))(np.ones((count, 3)))
        return len(seen)

    assert traces(1) == traces(2) == traces(7)


def program(count: int) -> Any:
    return jax.make_jaxpr(averaged.__wrapped__)(PARAMS, held((0,) * count))


def test_a_single_lane_runs_the_loop_of_two() -> None:
    one, two = (next(e for e in program(n).eqns if e.primitive.name == "while") for n in (1, 2))
    assert str(one.params["body_jaxpr"]) == str(two.params["body_jaxpr"])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_compiler_does_not_see_how_many_trips_the_loop_makes(count: int) -> None:
    """Neither of the loop over lanes nor of the one that fences its results: both stay loops."""
    compiled = jax.jit(lambda x: LaneBlock(x).map(jnp.sin).all()).lower(np.ones((count, 3))).compile()
    assert compiled.as_text().count(" while(") == 2
    assert "known_trip_count" not in compiled.as_text()


@pytest.mark.parametrize("weight", [None, lambda lane: lane[0]])
def test_what_follows_a_mean_is_not_fused_with_its_sum(weight: Any) -> None:
    """Products and sums round by what they are fused with: an optimizer must get a finished mean in every layout."""
    compiled = jax.jit(lambda m, x: 0.9 * m + 0.1 * LaneBlock(x).mean(lambda lane: lane, weight))
    program = compiled.lower(np.ones(3, np.float32), np.ones((4, 3), np.float32)).compile().as_text()
    main = program[program.index("ENTRY ") :]
    (last,) = [line for line in main.splitlines() if "ROOT" in line]
    operands = re.findall(r"%[\w.-]+", last.split("fusion(")[1].split(")")[0])
    made_by = [next(line for line in main.splitlines() if f"{name} = " in line) for name in operands]
    assert any("get-tuple-element" in line for line in made_by), made_by
    assert not any("f32[4,3]" in line for line in made_by), made_by


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_weighted_mean_is_that_of_numpy(count: int) -> None:
    x, weights = RNG.normal(size=(count, 5)), RNG.integers(1, 9, size=count)
    found = LaneBlock((x, weights)).mean(lambda lane: {"x": lane[0], "s": lane[0].sum()}, lambda lane: lane[1])
    np.testing.assert_allclose(found["x"], np.average(x, axis=0, weights=weights), rtol=1e-12)
    np.testing.assert_allclose(found["s"], np.average(x.sum(-1), weights=weights), rtol=1e-12)


def test_a_lane_without_weight_does_not_count() -> None:
    x, weights = np.float64([[1.0], [50.0], [3.0]]), np.int64([2, 0, 2])
    assert LaneBlock((x, weights)).mean(lambda lane: lane[0], lambda lane: lane[1])[0] == 2.0


@pytest.mark.parametrize("weight", [None, lambda lane: lane.sum()], ids=["plain", "weighted"])
def test_what_is_done_to_a_lane_is_traced_once(weight: Any) -> None:
    """Loops within loops would multiply what each adds to the time until a run starts."""
    traced = []

    def inner(lane: Any) -> Any:
        traced.append(lane)
        return lane * 2

    def outer(lane: Any) -> Any:
        return LaneBlock(jnp.stack([lane, lane])).mean(inner)

    data = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_allclose(jax.jit(lambda data: LaneBlock(data).map(outer).held())(data), 2 * data)
    assert len(traced) == 1
    jax.jit(lambda data: LaneBlock(data).mean(inner, weight))(data)
    assert len(traced) == 2


class Fake(Solo):
    """Two ranks, of which the other always has `factor` times the same."""

    size = 2

    def __init__(self, factor: float, fails: bool = False) -> None:
        self._factor, self._fails = factor, fails

    def adding(self, array: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        if self._fails:
            self._fails = False
            raise ConnectionError("not there yet")
        return lambda: np.copyto(out, array + self._factor * array)


def test_a_program_meets_over_the_newest_comm_whatever_happened_to_the_one_before() -> None:
    data = np.ones((1, 2), np.float32)
    mean = jax.jit(lambda data: LaneBlock(data, lanes.exchange_over(Fake(0.0))).mean(lambda lane: lane))
    compiled = mean.lower(data).compile()  # it knows no comm
    for comm, expected in ((Fake(3.0), 2.0), (Fake(5.0, fails=True), None), (Fake(7.0), 4.0)):
        lanes.exchange_over(comm)
        found = np.asarray(compiled(data))
        if expected is None:
            with pytest.raises(ConnectionError):
                foreign.reraise()
            found, expected = np.asarray(compiled(data)), 3.0
        foreign.reraise()
        np.testing.assert_array_equal(found, [expected, expected])
