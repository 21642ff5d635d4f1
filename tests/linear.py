"""A linear Gaussian policy and a linear value function in NumPy: what algorithms' steps are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lockstep.algorithms.actor_critic import Normalize
from lockstep.core import ArraySpec, Box, Policy, Spec, Trajectory
from lockstep.networks import MLP, mlp_policy

INPUTS, ACTIONS = 4, 2
SPEC = Spec(ArraySpec((INPUTS,), "float32"), Box(-np.ones(ACTIONS), np.ones(ACTIONS), "float32"))
OFF = Normalize(observation=False, reward=False)

Weights = dict[str, np.ndarray]  # w, b, s: the policy's kernel, bias and log-std; v, c: the value's kernel and bias
Place = tuple[int, int, int]  # lane, time, environment


def linear_policy() -> Policy:
    return mlp_policy(MLP(hidden=(), log_std=-0.3, last_scale=1.0), SPEC)


def named(params: Any) -> Weights:
    policy, values = params["policy"], params["value"]
    arrays = {
        **{"w": policy["layer0"]["kernel"], "b": policy["layer0"]["bias"], "s": policy["log_std"]},
        **{"v": values["layer0"]["kernel"][:, 0], "c": values["layer0"]["bias"]},
    }
    return {name: np.array(array, float) for name, array in arrays.items()}


def log_prob(weights: Weights, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    z = (action - observation @ weights["w"] - weights["b"]) / np.exp(weights["s"])
    return (-0.5 * z**2 - weights["s"] - 0.5 * np.log(2 * np.pi)).sum(-1)


def entropy(weights: Weights) -> float:
    return (weights["s"] + 0.5 * np.log(2 * np.pi * np.e)).sum()


def divergence(old: Weights, new: Weights, observation: np.ndarray) -> np.ndarray:
    """KL(old || new) at each observation."""
    shift = observation @ (old["w"] - new["w"]) + old["b"] - new["b"]
    ratio = (np.exp(2 * old["s"]) + shift**2) / np.exp(2 * new["s"])
    return (new["s"] - old["s"] + 0.5 * (ratio - 1)).sum(-1)


def value(weights: Weights, observation: np.ndarray) -> np.ndarray:
    return observation.astype(float) @ weights["v"] + weights["c"]


def advantages(weights: Weights, data: Trajectory, discount: float, trace: float) -> np.ndarray:
    now, then = value(weights, data.observation), value(weights, data.next_observation)
    delta = data.reward + discount * then * ~data.terminated - now
    out, following = np.zeros_like(delta), np.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        goes_on = ~(data.terminated | data.truncated)[:, t]
        following = out[:, t] = delta[:, t] + discount * trace * goes_on * following
    return out


def normalised(history: list[Trajectory]) -> Trajectory:
    """The newest of all trajectories so far as an algorithm sees it.

    Observations are scaled by those of the ones before it, rewards by the discounted returns of it too.
    """
    counts = [np.ones(data.reward.shape, bool) if isinstance(data.real, tuple) else data.real for data in history]
    new, mean, scale = history[-1], np.zeros(INPUTS), np.ones(INPUTS)
    if history[:-1]:
        rows = np.concatenate([data.observation[real] for data, real in zip(history[:-1], counts, strict=False)])
        mean, scale = rows.mean(0, dtype=float), rows.std(0, dtype=float)
    returns = np.concatenate([data.discounted_return[real] for data, real in zip(history, counts, strict=True)])
    return new._replace(
        observation=(new.observation - mean) / scale,
        next_observation=(new.next_observation - mean) / scale,
        reward=new.reward / returns.std(),
    )


def gradient(loss: Callable[[Weights], float], weights: Weights) -> Weights:
    """By finite differences."""
    found, weights = {}, {name: array.copy() for name, array in weights.items()}
    for name, array in weights.items():
        found[name] = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + 1e-5
            above = loss(weights)
            array[index] = kept - 1e-5
            found[name][index] = (above - loss(weights)) / 2e-5
            array[index] = kept
    return found


def norm(slope: Weights) -> float:
    return float(np.sqrt(sum((g**2).sum() for g in slope.values())))


def clipped(slope: Weights, bound: float) -> Weights:
    return {name: g * min(1.0, bound / norm(slope)) for name, g in slope.items()}


def distance(one: Weights, other: Weights) -> float:
    return norm({name: other[name] - array for name, array in one.items()})


def explained(target: np.ndarray, found: np.ndarray) -> float:
    return float(1 - (target - found).var() / target.var())


class Adam(NamedTuple):
    """The optimizer's memory; empty before its first step."""

    mean: Mapping[str, np.ndarray] = {}
    square: Mapping[str, np.ndarray] = {}
    steps: int = 0

    def step(self, weights: Weights, slope: Weights, rate: float, epsilon: float) -> tuple[Weights, Adam]:
        """The weights after a step, those that have no slope as they were."""
        mean = {name: 0.9 * self.mean.get(name, 0.0) + 0.1 * g for name, g in slope.items()}
        square = {name: 0.999 * self.square.get(name, 0.0) + 0.001 * g**2 for name, g in slope.items()}
        made, moved = Adam(mean, square, self.steps + 1), {}
        for name in slope:
            root = np.sqrt(square[name] / (1 - 0.999**made.steps))
            moved[name] = weights[name] - rate * mean[name] / (1 - 0.9**made.steps) / (root + epsilon)
        return {**weights, **moved}, made


def trajectory(
    shape: tuple[int, int, int], terminated: list[Place], truncated: list[Place], seed: int = 5, real: Any = ()
) -> Trajectory:
    """Noise of so many lanes, steps and environments, with episodes that end at these places."""
    draw, (lanes, steps, envs) = np.random.default_rng(seed), shape
    ended, cut = np.zeros((2, *shape), bool)
    for ends, places in ((ended, terminated), (cut, truncated)):
        for place in places:
            ends[place] = True
    seen = draw.normal(size=(lanes, steps + 1, envs, INPUTS)).astype(np.float32)
    following = seen[:, 1:].copy()
    following[ended | cut] = draw.normal(size=(len(terminated) + len(truncated), INPUTS))
    return Trajectory(
        lane=np.arange(lanes, dtype=np.int32),
        observation=seen[:, :-1],
        action=draw.normal(size=(*shape, ACTIONS)).astype(np.float32),
        reward=draw.normal(size=shape).astype(np.float32),
        terminated=ended,
        truncated=cut,
        next_observation=following,
        discounted_return=draw.normal(size=shape),
        policy_state=(),
        real=real,
    )


def whole_episodes(seed: int = 5) -> Trajectory:
    """Three lanes of two environments, one episode in each, of 1 to 6 steps; noise also where no step was made."""
    lengths = np.array([[6, 5], [2, 1], [4, 1]])
    places = [(lane, int(length) - 1, env) for (lane, env), length in np.ndenumerate(lengths)]
    real = np.arange(6)[None, :, None] < lengths[:, None]
    return trajectory((3, 6, 2), places[::2], places[1::2], seed, real)
