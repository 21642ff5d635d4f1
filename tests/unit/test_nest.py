from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.parallel import entries
from lockstep.parallel.nest import Slot, array_of, kind_of, leaves, put_together, slots, take_apart, walk


class Pair(NamedTuple):
    left: Any
    right: Any


class Twin(Pair):
    """A named tuple of one's own."""


@dataclass(frozen=True)
class Step:
    observation: Any
    note: str = ""


NESTS = st.recursive(
    st.integers() | st.text() | st.none() | st.builds(np.arange, st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Step, inner)
    ),
    max_leaves=8,
)


@given(NESTS)
def test_what_is_taken_apart_is_put_together_again(tree: Any) -> None:
    skeleton, arrays = take_apart(tree)
    assert repr(put_together(skeleton, arrays)) == repr(tree)
    assert [slot.shape for slot in slots(skeleton)] == [array.shape for array in arrays]
    assert not any(isinstance(leaf, np.ndarray) for leaf in leaves(skeleton).values())


def test_paths_are_readable_and_ordered_by_name() -> None:
    tree = {"b": [1, (2,)], "a": Pair(3, Step(4, "x")), 0: None}
    assert leaves(tree) == {
        "0": None,
        "a/left": 3,
        "a/right/observation": 4,
        "a/right/note": "x",
        "b/0": 1,
        "b/1/0": 2,
    }
    assert list(leaves(tree)) == list(leaves({key: tree[key] for key in reversed(tree)}))
    assert list(walk(lambda path, leaf: leaf, tree)) == ["b", "a", 0]
    assert leaves(5) == {"": 5}


def test_mappings_come_back_as_dicts_and_named_tuples_as_what_they_were() -> None:
    counts: defaultdict[str, int] = defaultdict(int, x=1)
    got = walk(lambda path, leaf: leaf + 1, [OrderedDict(b=1, a=2), counts, Twin(3, 4), ()])
    assert repr(got) == "[{'b': 2, 'a': 3}, {'x': 2}, Twin(left=4, right=5), ()]"


def test_whose_array_it_is() -> None:
    assert [kind_of(leaf) for leaf in (np.zeros(1), np.float32(1), jnp.zeros(1), 1, 1.0, True, 1j)] == [
        "numpy",
        "numpy",
        "jax",
        "number",
        "number",
        "number",
        "number",
    ]
    assert [kind_of(leaf) for leaf in (None, "x", [], jnp)] == ["", "", "", ""]


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, np.complex64, ">f4", "M8[s]", "U3"]
)
def test_an_array_keeps_its_type_and_its_order(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).T.astype(dtype)
    skeleton, (taken,) = take_apart([array])
    assert taken.flags.c_contiguous
    assert skeleton == [Slot("numpy", (3, 2), np.dtype(dtype))]
    np.testing.assert_array_equal(taken, array)


def test_an_array_without_axes_keeps_none() -> None:
    assert take_apart(np.array(3.0))[1][0].shape == ()
    assert take_apart(jnp.array(3.0))[1][0].shape == ()


def test_objects_cannot_travel_as_buffers() -> None:
    with pytest.raises(UsageError, match="'x' is an array of Python objects"):
        array_of("x", np.array([None, "y"]))


def test_jax_arrays_are_put_back_as_jax_arrays() -> None:
    got = put_together(*take_apart({"x": jnp.full(2, 1.5, jnp.bfloat16)}))["x"]
    assert isinstance(got, jax.Array)
    assert (got.dtype, got.tolist()) == (jnp.bfloat16, [1.5, 1.5])


def test_numpy_needs_neither_jax_nor_torch() -> None:
    code = (
        "import sys, numpy as np; from lockstep.parallel import nest;"
        "nest.put_together(*nest.take_apart([np.zeros(2), 3])); sys.exit(bool({'jax', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def slot(*shape: int, dtype: Any = np.float32) -> Slot:
    return Slot("numpy", shape, np.dtype(dtype))


@pytest.mark.parametrize(
    ("everyone", "match"),
    [
        ([{"a": slot()}, {"a": slot()}, {}], "rank 0 has 'a', rank 2 does not"),
        ([{}, {"a": slot()}], "rank 1 has 'a', rank 0 does not"),
        ([{"": slot(2)}, {"": slot(3)}], r"the tree is float32\[2\] on rank 0, but float32\[3\] on rank 1"),
        ([{"a": None}, {"a": slot(2)}, {"a": slot(3)}], r"'a' is float32\[2\] on rank 1, but float32\[3\] on rank 2"),
        ([{"a": slot(2)}, {"a": slot(2, dtype=int)}], r"float32\[2\] on rank 0, but int64\[2\] on rank 1"),
    ],
)
def test_a_disagreement_names_the_path_and_both_ranks(everyone: list[dict[str, Slot | None]], match: str) -> None:
    with pytest.raises(entries.Disagreement, match=match):
        entries.agree(everyone, lambda slot: (slot.shape, slot.dtype))


def test_entries_are_weighted_end_to_end_and_cut_again() -> None:
    kinds = {"a": slot(2, 2), "b": None, "c": slot(dtype=int), "d": slot(3, dtype=np.float16)}
    tree = {"a": np.ones((2, 2), np.float32), "b": None, "c": np.array(2), "d": None}
    vectors = entries.weighted(kinds, tree, 3)
    assert {name: vector.tolist() for name, vector in vectors.items()} == {"float32": [3] * 4 + [0] * 3, "float64": [6]}
    got = entries.cut(kinds, vectors)
    assert {path: (array.shape, str(array.dtype)) for path, array in got.items()} == {
        "a": ((2, 2), "float32"),
        "c": ((), "float64"),
        "d": ((3,), "float16"),
    }
