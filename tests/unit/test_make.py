from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.core import ArraySpec, Box, Discrete
from lockstep.envs import testing
from lockstep.envs.make import (
    Env,
    TimeLimited,
    check_finite,
    check_id,
    commands,
    is_finite,
    make,
    one_command,
    spec_of,
    time_limit,
    without_wrappers,
    write_observation,
)
from lockstep.errors import EnvironmentFault, UsageError


def box(low: Any, high: Any, dtype: str = "float32") -> Box:
    return Box(np.asarray(low, dtype), np.asarray(high, dtype), dtype)


@pytest.mark.parametrize(
    ("action", "fit", "chosen", "expected"),
    [
        (box([-2], [2]), "rescale", [[-1], [0], [0.5], [1]], [[-2], [0], [1], [2]]),
        (box([-2], [2]), "rescale", [[-7], [7]], [[-2], [2]]),
        (box([-1], [1]), "rescale", [[-7], [0.5], [7]], [[-1], [0.5], [1]]),
        (box([-1], [1], "float64"), "rescale", [[-7], [0.5], [7]], [[-1], [0.5], [1]]),
        (box([0, -1], [4, 3]), "rescale", [[-1, -1], [0, 0], [1, 1]], [[0, -1], [2, 1], [4, 3]]),
        (box([0, -1], [4, 3]), "clip", [[-1, -2], [0.5, 0.5], [5, 5]], [[0, -1], [0.5, 0.5], [4, 3]]),
        (box([-np.inf], [np.inf]), "rescale", [[-7], [0.5]], [[-7], [0.5]]),
        (box([0, -np.inf], [np.inf, 1]), "rescale", [[-7, -7], [7, 7]], [[0, -7], [7, 1]]),
        (box([0, -np.inf], [np.inf, 1]), "clip", [[-7, -7], [7, 7]], [[0, -7], [7, 1]]),
        (box([-3e38], [3e38]), "rescale", [[-1], [0], [1]], [[-3e38], [0], [3e38]]),
        (box([-100], [100], "int8"), "rescale", [[-1], [0], [1]], [[-100], [0], [100]]),
        (box([[0, 0], [0, 0]], [[2, 2], [2, 4]]), "rescale", [[0, 1, -1, 0]], [[[1, 2], [0, 2]]]),
        (Discrete(3, 0, "int64"), "rescale", [0, 2], [0, 2]),
        (Discrete(3, -1, "int64"), "clip", [0, 2], [-1, 1]),
        (Discrete(3, 5, "int32"), "rescale", [0, 2], [5, 7]),
    ],
)
def test_actions_are_fitted_to_their_space(action: Box | Discrete, fit: str, chosen: list, expected: list) -> None:
    given = np.asarray(chosen, "int32" if isinstance(action, Discrete) else "float32")
    before = given.copy()
    fitted = commands(action, fit)(given)
    assert fitted.dtype == action.dtype
    np.testing.assert_array_equal(fitted, np.asarray(expected, action.dtype))
    np.testing.assert_array_equal(given, before)
    for row, command in zip(given, fitted, strict=True):
        assert np.array_equal(one_command(action, fit, row), command)


@pytest.mark.parametrize("fit", ["rescale", "clip"])
def test_no_command_leaves_the_box_by_rounding(fit: str) -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(size=50).astype(np.float32)
    high = low + rng.random(50, np.float32)
    chosen = np.concatenate([np.full((1, 50), -1), np.full((1, 50), 1), rng.normal(size=(100, 50))]).astype(np.float32)
    fitted = commands(Box(low, high, "float32"), fit)(chosen)
    assert ((low <= fitted) & (fitted <= high)).all()


def test_one_discrete_command_is_a_plain_int() -> None:
    assert type(one_command(Discrete(3, 1, "int64"), "clip", np.int32(1))) is int


ENDS = [("CartPole-v1", 0), ("CartPole-v1", 9), ("Pendulum-v1", 0), ("Hopper-v5", 0), ("Hopper-v5", 12)]


@pytest.mark.parametrize(("env_id", "limit"), ENDS)
def test_without_wrappers_an_environment_steps_bit_for_bit_alike(env_id: str, limit: int) -> None:
    wrapped = gymnasium.make(env_id, max_episode_steps=limit or None, disable_env_checker=True)
    bare = without_wrappers(make(Env(env_id, time_limit=limit)))
    assert isinstance(bare, TimeLimited)
    wrapped.action_space.seed(0)
    endings = []
    for seed in range(4):
        expected, _ = wrapped.reset(seed=seed)
        got, _ = bare.reset(seed=seed)
        assert got.tobytes() == expected.tobytes()
        ended = False
        while not ended:
            action = wrapped.action_space.sample()
            expected, *rest, _ = wrapped.step(action)
            got, *same, _ = bare.step(action)
            assert got.tobytes() == expected.tobytes()
            assert [np.float64(x).tobytes() for x in same] == [np.float64(x).tobytes() for x in rest]
            ended = same[1] or same[2]
        endings.append(same[2])
    assert any(endings) == (limit > 0 or env_id == "Pendulum-v1")
    wrapped.close()
    bare.close()


def test_box2d_is_imported_where_warnings_are_errors() -> None:
    code = "from lockstep.envs.make import Env, make; make(Env('LunarLander-v3')).close()"
    assert subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", code]).returncode == 0


def test_an_environment_with_other_wrappers_keeps_them() -> None:
    clipped = gymnasium.wrappers.ClipAction(make(Env("Pendulum-v1")))
    assert without_wrappers(clipped) is clipped
    inside = gymnasium.wrappers.TimeLimit(gymnasium.wrappers.ClipAction(make(Env("Pendulum-v1")).unwrapped), 5)
    assert without_wrappers(inside) is inside


@pytest.mark.parametrize(("limit", "expected"), [(0, 200), (7, 7)])
def test_the_time_limit_is_the_environments_own_unless_set(limit: int, expected: int) -> None:
    environment = make(Env("Pendulum-v1", time_limit=limit))
    assert time_limit(environment) == expected
    environment.reset(seed=0)
    ends = [environment.step(np.zeros(1, np.float32))[3] for _ in range(expected)]
    assert ends == [False] * (expected - 1) + [True]


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Pendulm-v1", "unknown environment 'Pendulm-v1'. Did you mean 'Pendulum-v1'"),
        ("CartPole", "unknown environment 'CartPole'. Did you mean 'CartPole-v1'"),
        ("wlaker", "unknown environment 'wlaker'. Did you mean 'walker'"),
        ("no_such_module:X-v0", "the module 'no_such_module' is not imported"),
        ("lockstep.envs.testing:Nam-v0", "unknown environment 'lockstep.envs.testing:Nam-v0'"),
        (":Pendulum-v1", "':Pendulum-v1'"),
        (".testing:Nan-v0", "'.testing:Nan-v0'"),
        ("", "unknown environment ''"),
    ],
)
def test_an_unknown_id_is_refused_with_a_hint(env_id: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_id(env_id, ["walker"])
    assert message in str(caught.value)


def test_an_id_is_what_an_imported_module_registered() -> None:
    assert make(Env(f"{testing.__name__}:Nan-v0")).spec.kwargs["what"] == "nan"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Env("Pendulum-v1", kwargs={"gravity": 3}), "'Pendulum-v1' does not take env.kwargs.*gravity"),
        (Env("Hopper-v5", kwargs={"xml_file": "none.xml"}), "'Hopper-v5'.*none.xml"),
        (Env("Hopper-v3"), "'Hopper-v3' needs a package that is not installed"),
    ],
)
def test_an_environment_that_cannot_be_made_says_why(env: Env, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(env)


class Spaces(gymnasium.Env):
    def __init__(self, observation: spaces.Space, action: spaces.Space) -> None:
        self.observation_space, self.action_space = observation, action


LINE, TWO = spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(2, start=1)


def test_a_spec_is_the_spaces_with_observations_in_float32() -> None:
    spec = spec_of(Spaces(LINE, TWO), "x")
    assert spec.observation == ArraySpec((3,), "float32")
    assert spec.action == Discrete(2, 1, "int64")
    spec = spec_of(Spaces(spaces.Box(0, 255, (4, 5), np.uint8), LINE), "x")
    assert spec.observation == ArraySpec((4, 5), "uint8")
    assert (spec.action.low.tolist(), spec.action.high.tolist(), spec.action.dtype) == ([-1] * 3, [1] * 3, "float64")


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Dict({"a": LINE}), TWO, "'x' has Dict observations; only Box"),
        (LINE, spaces.MultiBinary(3), "'x' has MultiBinary actions; only Box and Discrete"),
    ],
)
def test_a_space_of_another_kind_is_refused(observation: spaces.Space, action: spaces.Space, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(Spaces(observation, action), "x")


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(2), r"shape \(2,\), its space says \(3,\)"),
        (np.zeros((1, 3)), r"shape \(1, 3\), its space says \(3,\)"),
        (np.array(["a", "b", "c"]), "dtype <U1, its space says float32"),
        (np.zeros(3, complex), "dtype complex128, its space says float32"),
        ([None, None, None], "dtype object, its space says float32"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused(observation: Any, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        write_observation(ArraySpec((3,), "float32"), np.zeros(3, np.float32), observation)


def test_an_observation_is_copied_and_converted() -> None:
    into = np.zeros(3, np.float32)
    for observation in ([1, 2, 3], np.arange(3), np.array([True, False, True]), np.float64([0.1, 0.2, 0.3])):
        write_observation(ArraySpec((3,), "float32"), into, observation)
        np.testing.assert_array_equal(into, np.asarray(observation, np.float32))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([0, np.nan, np.inf]), "the reward is nan at index 1$"),
        (np.array([[0, 1], [2, -np.inf]]), r"the reward is -inf at index \(1, 1\)$"),
        (np.float64(np.inf), "the reward is inf$"),
    ],
)
def test_what_is_not_finite_is_named(array: np.ndarray, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        check_finite(array, "reward")
    check_finite(np.zeros_like(array), "reward")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_very_large_numbers_are_finite(dtype: str) -> None:
    large = np.full((2, 3), np.finfo(dtype).max, dtype)
    assert is_finite(large)
    for wrong in (np.nan, np.inf, -np.inf):
        large[1, 2] = wrong
        assert not is_finite(large)


def test_the_time_feature_counts_from_the_reset() -> None:
    plain, timed = make(Env("Pendulum-v1")), make(Env("Pendulum-v1", time_feature=0.5))
    assert spec_of(timed, "Pendulum-v1").observation == ArraySpec((4,), "float32")
    for _ in range(2):
        expected, found = plain.reset(seed=3)[0], timed.reset(seed=3)[0]
        for step in range(3):
            np.testing.assert_array_equal(found, np.append(expected, 0.5 * step).astype(np.float32))
            expected, found = plain.step(np.zeros(1))[0], timed.step(np.zeros(1))[0]


def test_the_time_feature_needs_a_vector() -> None:
    with pytest.raises(UsageError, match=r"env\.time_feature needs observations that are a vector"):
        make(Env("Blackjack-v1", time_feature=1.0))
