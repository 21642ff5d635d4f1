from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import config
from lockstep.errors import UsageError, nearest
from lockstep.ranges import Count, Natural, NonNegative, Positive, Range, Seed, Share


@dataclass(frozen=True)
class Inner:
    clip: Share = 0.2
    kind: Literal["fast", "exact"] = "fast"


@dataclass(frozen=True)
class Other:
    delta: Positive = 0.01


@dataclass(frozen=True)
class Settings:
    steps: Count = 10
    warmup: Natural = 0
    rate: Positive = 0.5
    weight: NonNegative = 0.0
    shift: float = 0.0
    hidden: tuple[Count, ...] = (64, 64)
    verbose: bool = False
    name: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    inner: Inner = Inner()


def choose(cls: type, data: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """`Other` where the table `inner` asks for it."""
    if cls is Inner and data.get("which") == "other":
        return Other, {key: value for key, value in data.items() if key != "which"}
    return cls, data


def build(data: dict[str, Any]) -> Settings:
    built = config.build(Settings, data, choose)
    assert isinstance(built, Settings)
    return built


def test_what_is_not_given_has_its_default() -> None:
    assert build({}) == Settings()
    assert build({"inner": {"clip": 0.1}}) == Settings(inner=Inner(clip=0.1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stps": 3}, "unknown setting 'stps'. Did you mean 'steps'?"),
        ({"inner": {"clop": 3}}, "unknown setting 'inner.clop'. Did you mean 'inner.clip'?"),
        ({"inner": {"zzz": 3}}, "unknown setting 'inner.zzz'. It takes inner.clip, inner.kind."),
        ({"inner": {"which": "other", "dleta": 1}}, "unknown setting 'inner.dleta'. Did you mean 'inner.delta'?"),
        ({"inner": {"which": "other", "clip": 1}}, "unknown setting 'inner.clip'. It takes inner.delta."),
        ({"inner": 3}, "'inner' is a group of settings, not 3."),
        ({"inner": {"kind": "exat"}}, "'inner.kind' must be one of fast, exact, not 'exat'. Did you mean 'exact'?"),
        ({"inner": {"clip": 1.5}}, "'inner.clip' must be between 0 and 1, not 1.5."),
        ({"inner": {"clip": math.nan}}, "'inner.clip' must be between 0 and 1, not nan."),
        ({"steps": 0}, "'steps' must be at least 1, not 0."),
        ({"steps": 2.5}, "'steps' must be a whole number, not 2.5."),
        ({"steps": math.inf}, "'steps' must be a whole number, not inf."),
        ({"steps": "3"}, "'steps' must be a whole number, not '3'."),
        ({"steps": True}, "'steps' must be a whole number, not True."),
        ({"warmup": -1}, "'warmup' must be at least 0, not -1."),
        ({"rate": 0}, "'rate' must be above 0, not 0.0."),
        ({"rate": True}, "'rate' must be a number, not True."),
        ({"weight": -0.1}, "'weight' must be at least 0, not -0.1."),
        ({"shift": "much"}, "'shift' must be a number, not 'much'."),
        ({"hidden": 64}, "'hidden' must be a list such as [64, 64], not 64."),
        ({"hidden": [64, 0]}, "'hidden[1]' must be at least 1, not 0."),
        ({"hidden": [64.5]}, "'hidden[0]' must be a whole number, not 64.5."),
        ({"verbose": 1}, "'verbose' must be true or false, not 1."),
        ({"name": 1}, "'name' must be text, not 1."),
        ({"extra": []}, "'extra' must be a table, not []."),
    ],
)
def test_a_problem_names_the_setting_what_it_takes_and_what_came(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(data)
    assert str(caught.value) == message


def test_not_a_number_is_no_number() -> None:
    with pytest.raises(UsageError, match=r"'shift' must be .* not nan"):
        build({"shift": math.nan})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        build({"stps": 1, "rate": -1, "hidden": [0, "x"], "inner": {"clip": 2, "kind": "slow"}})
    named = [line.split("'")[1] for line in str(caught.value).splitlines()]
    assert named == ["stps", "rate", "hidden[0]", "hidden[1]", "inner.clip", "inner.kind"]


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [("steps", 1e6, 1_000_000), ("rate", 1, 1.0), ("hidden", [32, 1e2], (32, 100)), ("hidden", [], ())],
)
def test_whole_floats_are_whole_numbers_and_whole_numbers_are_floats(name: str, given_value: Any, value: Any) -> None:
    built = getattr(build({name: given_value}), name)
    assert built == value
    assert type(built) is type(value)
    if isinstance(value, tuple):
        assert all(type(item) is int for item in built)


@given(
    st.builds(
        Settings,
        steps=st.integers(1, config.LARGEST),
        shift=st.floats(allow_nan=False, allow_infinity=False),
        hidden=st.lists(st.integers(1, config.LARGEST)).map(tuple),
        name=st.text(),
        extra=st.dictionaries(st.text(), st.integers(-config.LARGEST, config.LARGEST)),
        inner=st.builds(Inner, clip=st.floats(0, 1), kind=st.sampled_from(["fast", "exact"])),
    )
)
def test_build_takes_back_what_dump_gives(settings: Settings) -> None:
    assert build(config.dump(settings)) == settings


def test_keys_are_dotted_and_follow_the_choice() -> None:
    assert config.keys(Settings, choose, {})[-3:] == ["extra", "inner.clip", "inner.kind"]
    assert config.keys(Settings, choose, {"inner": {"which": "other"}})[-2:] == ["extra", "inner.delta"]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("algo.clip=0.1", "algo.clip", 0.1),
        (" steps = 1e6 ", "steps", 1e6),
        ("hidden=[32, 32]", "hidden", [32, 32]),
        ("verbose=true", "verbose", True),
        ("env.id=CartPole-v1", "env.id", "CartPole-v1"),
        ('name="a=b"', "name", "a=b"),
        ("name=a=b", "name", "a=b"),
        ("name=", "name", ""),
    ],
)
def test_a_setting_is_read_as_toml_or_else_as_text(text: str, path: str, value: Any) -> None:
    assert config.parse(text) == (path, value)


@pytest.mark.parametrize("text", ["steps", "=3", " =3"])
def test_a_setting_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--set takes KEY=VALUE, such as .*; got '{text}'"):
        config.parse(text)


def test_tables_are_laid_over_each_other_and_stay_as_they_were() -> None:
    base = {"a": 1, "t": {"x": 1, "y": 2}}
    assert config.merged(base, {"t": {"y": 3, "z": 4}}) == {"a": 1, "t": {"x": 1, "y": 3, "z": 4}}
    assert config.merged(base, {"t": 5, "a": {"n": 0}}) == {"a": 1, "t": 5}, "no table hides a value"
    assert config.assign(base, "t.y", 7) == {"a": 1, "t": {"x": 1, "y": 7}}
    assert config.assign(base, "u.v.w", 7) == {**base, "u": {"v": {"w": 7}}}
    assert base == {"a": 1, "t": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "text"),
    [
        (Range(0, 1), (0, 1, 0.5), (-1e-9, 1.001, math.nan), "between 0 and 1"),
        (Range(low=0, above=True), (1e-300, 1e300), (0, -0.0, -1), "above 0"),
        (Range(low=2), (2, 3), (1.9,), "at least 2"),
    ],
)
def test_a_range_says_what_it_holds(allowed: Range, inside: tuple, outside: tuple, text: str) -> None:
    assert all(number in allowed for number in inside)
    assert not any(number in allowed for number in outside)
    assert str(allowed) == text


def test_nearest_does_not_mind_case_and_says_nothing_of_strangers() -> None:
    assert nearest("pendulum-V1", ["Pendulum-v1", "CartPole-v1"]) == " Did you mean 'Pendulum-v1'?"
    assert nearest("zzz", ["Pendulum-v1", "CartPole-v1"]) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = \xff", "not TOML: 'utf-8' codec can't decode byte 0xff in position 4"),
        (b"a = ", "not TOML: Invalid value"),
        (b"a = " + b"[" * 5000, "tables or lists nest more than 32 deep."),
        (b"a = " + b"[" * 33 + b"]" * 33, "tables or lists nest more than 32 deep."),
        (b"a." * 33 + b"a = 1", "tables or lists nest more than 32 deep."),
        (b"a." * 100_000 + b"a = 1", "tables or lists nest more than 32 deep."),
        (b"a = " + b"9" * 5000, "a number is too long to be read."),
    ],
)
def test_what_is_not_toml_says_why(content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        config.read(content)


def test_what_nests_a_little_is_read() -> None:
    assert config.read(b"a = " + b"[" * 31 + b"]" * 31)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": 2**63}, "'steps' must be at most 9223372036854775807, not 9223372036854775808."),
        ({"steps": 1e30}, "'steps' must be at most 9223372036854775807, not 1000000000000000019884624838656."),
        ({"steps": 10**5000}, "'steps' must be at most 9223372036854775807, not a number of thousands of digits."),
        ({"rate": 10**400}, "'rate' must be a number, not 1000000000"),
        ({"hidden": [2**64]}, "'hidden[0]' must be at most"),
        (
            {"inner": {"kind": 10**5000}},
            "'inner.kind' must be one of fast, exact, not a number of thousands of digits.",
        ),
        ({"extra": {"a": [2**63]}}, "'extra.a' must be a number of at most 64 bits"),
        ({"name": ["y" * 10_000]}, "'name' must be text, not ['yyy"),
    ],
)
def test_a_number_beyond_64_bits_is_refused_and_messages_stay_short(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(data)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400


def test_a_seed_has_128_bits() -> None:
    """As many as NumPy's documentation tells people to draw."""
    assert 2**128 - 1 in Seed.__metadata__[0]
    assert 2**128 not in Seed.__metadata__[0]


@pytest.mark.parametrize("text", ["x=" + "[" * 5000, "x=" + "9" * 5000])
def test_a_setting_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--set x: (tables or lists nest|a number is too long)"):
        config.parse(text)


def test_a_setting_is_utf_8() -> None:
    """What else was typed could not be written into config.toml."""
    with pytest.raises(UsageError, match=r"--set env\.kwargs\.name: its value is not UTF-8"):
        config.parse("env.kwargs.name=caf\udce9")
    for value in (["caf\udce9"], {"caf\udce9": 1}, {3: 1}):
        with pytest.raises(UsageError, match=r"'extra\.name' must be a number"):
            build({"extra": {"name": value}})


def test_a_setting_has_one_value() -> None:
    """What stood on a second line was dropped."""
    assert config.parse("seed=1\nlanes=2") == ("seed", "1\nlanes=2")
