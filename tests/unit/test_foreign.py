"""Functions that compiled programs call by name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import foreign
from lockstep.foreign import Buffers

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES += ("float16", "float32", "float64")
SHAPES = ((), (3,), (2, 0), (2, 3, 4))


def backwards(given: Buffers, wanted: Buffers) -> None:
    """The last argument is the first result."""
    for buffer, into in zip(reversed(given), wanted, strict=True):
        assert (into.dtype, into.shape) == (buffer.dtype, buffer.shape)
        into[...] = buffer


def moody(given: Buffers, wanted: Buffers) -> None:
    """Raises where the first argument says so."""
    if given[0]:
        raise KeyError("mood")
    wanted[0][:] = 7


def register(name: str, function: Callable[[Buffers, Buffers], None]) -> None:
    foreign.register(f"lockstep_test_{name}", lambda *buffers: partial(function, *buffers))


register("backwards", backwards)
register("moody", moody)


def call(name: str, results: Any) -> Callable[..., Any]:
    return jax.ffi.ffi_call(f"lockstep_test_{name}", results, has_side_effect=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_are_the_arguments_and_results(dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 2, shape).astype(dtype) for shape in SHAPES]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in reversed(arrays)]
    for got, sent in zip(jax.jit(call("backwards", results))(*arrays), reversed(arrays), strict=True):
        assert got.dtype == sent.dtype
        np.testing.assert_array_equal(got, sent)


def test_a_loop_calls_in_its_order() -> None:
    seen = []

    def count(given: Buffers, wanted: Buffers) -> None:
        seen.append(given[0].item())
        wanted[0][...] = seen[-1] + 3

    register("count", count)
    step = call("count", jax.ShapeDtypeStruct((), jnp.int32))
    assert jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: step(x), x))(jnp.asarray(5, jnp.int32)) == 17
    assert seen == [5, 8, 11, 14]


def test_a_function_is_bound_to_the_buffers_of_a_loop_once_and_anew_to_others() -> None:
    shapes = []

    def bind(given: Buffers, wanted: Buffers) -> Callable[[], None]:
        shapes.append(given[0].shape)
        return partial(np.add, given[0], 1, wanted[0])

    foreign.register("lockstep_test_bound", bind)

    @jax.jit
    def ten_more(x: Any) -> Any:
        step = call("bound", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return jax.lax.fori_loop(0, 10, lambda _, x: step(x), x)

    for size in (3, 5):
        np.testing.assert_array_equal(ten_more(np.zeros(size, np.float32)), np.full(size, 10.0))
    foreign.reraise()
    assert sorted(set(shapes)) == [(3,), (5,)]
    assert len(shapes) <= 4  # loops use two buffers in turn


def test_what_binding_raises_is_raised_too() -> None:
    def bind(given: Buffers, wanted: Buffers) -> Callable[[], None]:
        raise KeyError("bound")

    foreign.register("lockstep_test_unbound", bind)
    program = jax.jit(call("unbound", jax.ShapeDtypeStruct((2,), jnp.float32)))
    assert np.asarray(program(np.ones(3, np.float32))).tolist() == [0, 0]
    with pytest.raises(KeyError, match="bound"):
        foreign.reraise()


def test_a_signal_where_a_program_enters_python_is_raised_after_the_program() -> None:
    """Elsewhere it is raised at once, which `answer` catches."""
    calls = []

    def bind(given: Buffers, wanted: Buffers) -> Callable[[], None]:
        with pytest.raises(KeyboardInterrupt):
            foreign.raise_from_signal(KeyboardInterrupt(), sys._getframe())
        foreign.raise_from_signal(KeyboardInterrupt(), sys._getframe(1))
        return partial(calls.append, None)

    foreign.register("lockstep_test_entered", bind)
    program = jax.jit(call("entered", jax.ShapeDtypeStruct((2,), jnp.float32)))
    assert np.asarray(program(np.ones(2, np.float32))).tolist() == [0, 0]
    with pytest.raises(KeyboardInterrupt):
        foreign.reraise()
    assert not calls


def test_what_a_function_raises_is_raised_after_the_program() -> None:
    three = call("moody", jax.ShapeDtypeStruct((3,), jnp.uint8))
    program = jax.jit(lambda moods: [three(mood) for mood in moods])
    calm, angry = np.zeros((), np.uint8), np.ones((), np.uint8)
    assert [np.asarray(answer).tolist() for answer in program([angry, angry])] == [[0, 0, 0], [0, 0, 0]]
    with pytest.raises(KeyError, match="mood"):
        foreign.reraise()
    foreign.reraise()  # once: after the first nothing is called
    assert np.asarray(program([calm])[0]).tolist() == [7, 7, 7]
    foreign.reraise()


def test_what_a_function_raises_in_one_thread_is_none_of_anothers_business() -> None:
    """Threads may collect beside each other: an error ends the program that it is of."""
    program = jax.jit(call("moody", jax.ShapeDtypeStruct((3,), jnp.uint8)))
    calm, angry = np.zeros((), np.uint8), np.ones((), np.uint8)
    other = threading.Thread(target=lambda: jax.block_until_ready(program(angry)))
    other.start()
    other.join()
    assert np.asarray(program(calm)).tolist() == [7, 7, 7]
    foreign.reraise(threading.get_ident())
    with pytest.raises(KeyError, match="mood"):
        foreign.reraise()


def test_a_program_that_calls_one_is_kept_on_disk() -> None:
    told: list[str] = []

    def listen(name: str, **_: object) -> None:
        told.append(name.rpartition("/")[2])

    def compiled() -> Callable[[Any], Any]:
        def program(x: Any) -> Any:
            return call("backwards", [jax.ShapeDtypeStruct((5,), jnp.float32)])(x)

        return jax.jit(program)

    compiled()(np.ones(5, np.float32))
    jax.monitoring.register_event_listener(listen)
    try:
        compiled()(np.ones(5, np.float32))
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert "cache_hits" in told
    assert "cache_misses" not in told
