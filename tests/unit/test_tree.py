from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lockstep import tree


class Pair(NamedTuple):
    first: object
    second: object


class Term(str):
    """Writes down in which order it was added."""

    def __add__(self, other: str) -> Term:
        return Term(f"({self}+{other})")


NEST = {"b": Pair(np.float32([1, 2]), (np.int32(3), np.zeros((2, 0)))), "a": [np.array(True)]}


def test_paths_name_every_leaf_by_keys_fields_and_positions() -> None:
    assert list(tree.paths(NEST)) == ["a/0", "b/first", "b/second/0", "b/second/1"]
    assert tree.paths(NEST)["b/second/0"] == 3


def test_from_paths_undoes_paths() -> None:
    rebuilt = tree.from_paths(NEST, tree.paths(NEST))
    assert isinstance(rebuilt["b"], Pair)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(NEST)
    assert all(x is y for x, y in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(NEST), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b/first": None}, "array 'b/first' is missing"),
        ({"c": np.zeros(1)}, "array 'c' is not expected"),
        ({"b/first": np.float64([1, 2])}, r"'b/first' should have shape and dtype \(\(2,\), 'float32'\).*float64"),
        ({"b/first": np.float32([1, 2, 3])}, r"'b/first' should have .*not \(\(3,\), 'float32'\)"),
    ],
)
def test_from_paths_names_the_array_that_does_not_fit(change: dict[str, np.ndarray | None], message: str) -> None:
    leaves = {name: leaf for name, leaf in (tree.paths(NEST) | change).items() if leaf is not None}
    with pytest.raises(ValueError, match=message):
        tree.from_paths(NEST, leaves)


@pytest.mark.parametrize(
    ("count", "order"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_neighbours_are_added_by_pairs(count: int, order: str) -> None:
    assert tree.pairwise_sum(np.array([Term(i) for i in range(count)], object)) == order


def test_pairwise_sum_keeps_its_order_when_compiled() -> None:
    stack = np.float32([1e8, 1, -1e8, 1, 1])  # from left to right it would be 2
    assert jax.jit(tree.pairwise_sum)(stack) == 1


@pytest.mark.parametrize("count", [65, 66, 127, 128, 129, 1000])
def test_a_sum_of_many_is_added_by_the_same_pairs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    stack = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32) * np.float32(1e6)
    many = jax.jit(lambda stack: tree.pairwise_sum(stack))(stack)
    monkeypatch.setattr(tree, "UNROLLED", count)
    assert np.asarray(many).tobytes() == tree.pairwise_sum(stack).tobytes()


NUMBERS = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int32, np.bool_]), st.sampled_from([(), (0,), (3,), (2, 3)])
)


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(NUMBERS, NUMBERS), min_size=1))
def test_unpack_undoes_pack_for_mixed_dtypes(nest: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    vectors = tree.pack(nest)
    assert all(vector.ndim == 1 and str(vector.dtype) == dtype for dtype, vector in vectors.items())
    assert tree.digest(tree.unpack(vectors, nest)) == tree.digest(nest)


def test_pack_lays_the_leaves_of_a_dtype_end_to_end() -> None:
    nest = {"b": np.float32([[3, 4], [5, 6]]), "a": np.float32([1, 2]), "n": np.int32(7)}
    packed = tree.pack(nest)
    assert list(packed) == ["float32", "int32"]
    np.testing.assert_array_equal(packed["float32"], [1, 2, 3, 4, 5, 6])


def flipped(array: np.ndarray, bit: int) -> np.ndarray:
    raw = bytearray(array.tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)


LEAF = np.float32([[1, -2, 3], [4, 0, 6]])


@pytest.mark.parametrize(
    "other",
    [
        *({"w": flipped(LEAF, bit)} for bit in (0, 31, 100, 191)),
        {"v": LEAF},
        {"w": LEAF.astype(np.float64)},
        {"w": LEAF.view(np.int32)},
        {"w": LEAF.reshape(3, 2)},
        {"w": LEAF.T},
        {"w": LEAF, "x": np.zeros(0)},
        {"w": np.where(LEAF == 0, np.float32(-0.0), LEAF)},
    ],
)
def test_the_digest_changes_with_one_bit_a_name_a_dtype_or_a_shape(other: dict[str, np.ndarray]) -> None:
    assert tree.digest(other) != tree.digest({"w": LEAF})


def test_the_digest_does_not_depend_on_who_holds_the_array_or_how() -> None:
    assert len({tree.digest({"w": leaf}) for leaf in (LEAF, jnp.asarray(LEAF), np.asfortranarray(LEAF))}) == 1
    assert tree.digest_of_paths({"w/y": LEAF, "w/x": LEAF}) == tree.digest({"w": {"x": LEAF, "y": LEAF}})


@pytest.mark.parametrize(
    ("scope", "exclude", "count"),
    [
        (None, None, 18),
        ("foo", None, 12),
        ("foo/", None, 12),
        ("foo/bar", None, 2),
        ("bar", None, 0),
        ("fo", None, 0),
        (None, ".*", 0),
        (None, "(^|/)foo/.*", 6),
        (None, ".*/bar/.*", 16),
        (None, "bar", 18),
        ("foo", ".*/y", 10),
    ],
)
def test_count_weights_by_scope_and_exclusion(scope: str | None, exclude: str | None, count: int) -> None:
    params = {"a": np.zeros((3, 2)), "foo": {"x": np.zeros((5, 2)), "bar": {"y": np.zeros((1, 2))}}}
    assert tree.count_weights(params, scope, exclude) == count
