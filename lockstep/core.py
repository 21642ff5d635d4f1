"""The nouns. Everything else in the package is verbs on these; this module imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

Tree = Any  # a nest of arrays: dicts, tuples and named tuples with arrays as leaves
Array = Any  # a NumPy or JAX array; JAX itself is not imported here, nor by anything that steps environments
Key = Any  # a JAX random key


class ArraySpec(NamedTuple):
    """Shape and dtype of one array of a single step of a single environment."""

    shape: tuple[int, ...]
    dtype: str


class Box(NamedTuple):
    """Real-valued actions between `low` and `high`, which may be infinite."""

    low: np.ndarray
    high: np.ndarray
    dtype: str


class Discrete(NamedTuple):
    """One of `n` actions, numbered for the environment from `start`."""

    n: int
    start: int
    dtype: str


class Spec(NamedTuple):
    """What an environment looks like to a policy."""

    observation: Tree  # of ArraySpec
    action: Box | Discrete


class Trajectory(NamedTuple):
    """What one lane's environments did in one update. Time first: `reward[t]` belongs to `action[t]`.

    Stacked over lanes, every leaf has one more axis in front.
    """

    lane: Array  # the lane's number in the experiment
    observation: Tree  # [T, E, ...] what the policy saw
    action: Tree  # [T, E, ...] what the policy chose, before it is fitted to the environment's box
    reward: Array  # [T, E]
    terminated: Array  # [T, E] the episode ended; there is no future
    truncated: Array  # [T, E] the episode was cut; its future is worth the value of `next_observation`
    next_observation: Tree  # [T, E, ...] what followed; the true final observation where an episode ended
    discounted_return: Array  # [T, E] discounted sum of the episode's rewards up to and including this one
    policy_state: Tree  # [E, ...] the policy's carried state before the first step
    real: Tree = ()  # [T, E] whether this step was made; () where all were. Whole episodes are padded


class Moments(NamedTuple):
    """Count, mean and summed squared deviation, in float64."""

    count: Array
    mean: Array
    squares: Array


class Learner(NamedTuple):
    """Everything that learning changes: what is saved, broadcast and hashed."""

    params: Tree
    optimizer: Tree  # whatever the algorithm keeps between updates
    observation: Tree  # Moments of the observations seen
    reward: Moments  # of the discounted returns seen
    steps: Array  # environment steps learnt from
    updates: Array


class Output(NamedTuple):
    """What a policy says about a batch of observations."""

    distribution: Tree  # the action distribution's parameters
    value: Array


class Distribution(NamedTuple):
    """A family of action distributions as functions of its parameters (a tree of arrays)."""

    noise: Callable[[Key, tuple[int, ...]], Array]  # what `sample` needs, drawn by address
    sample: Callable[[Tree, Array], Array]
    mode: Callable[[Tree], Array]
    log_prob: Callable[[Tree, Array], Array]
    entropy: Callable[[Tree], Array]
    kl: Callable[[Tree, Tree], Array]  # KL(first || second)
    fisher: Callable[[Tree, Tree], Tree]  # the Fisher matrix of the parameters, times a tangent: a cotangent


class Policy(NamedTuple):
    """Actor and critic. `state` is what a policy carries from step to step; `()` when it carries nothing."""

    init: Callable[[Key], Tree]
    initial_state: Callable[[int], Tree]  # for that many environments
    # params, of which it needs those under `policy` alone, observation, state -> distribution, state
    act: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    evaluate: Callable[[Tree, Tree, Tree], Output]  # params, observation, state -> distribution and value
    value: Callable[[Tree, Tree, Tree], Array]
    tapped: Callable[[Tree, Tree, Tree, Tree], tuple[Output, Tree]]
    # `evaluate` with a shift added to every layer's output (params, shifts, observation, state), and beside it every
    # layer's input. Both are named like the parameters; a vector of parameters is a layer without inputs.
    distribution: Distribution


Metrics = dict[str, Array]


class Lanes(Protocol):
    """The data of an update, seen lane by lane. Where the other lanes are is nobody's business."""

    def map(self, fn: Callable[[Any], Any]) -> Lanes:
        """`fn` for each lane; the results stay lanes."""

    def mean(self, fn: Callable[[Any], Any], weight: Callable[[Any], Any] | None = None) -> Any:
        """`fn` for each lane, then the mean over all lanes of the experiment, in one fixed order.

        With `weight`, a number for each lane, lanes count by it: sum(weight fn) / sum(weight).
        """

    def all(self) -> Any:
        """Every lane's data, stacked in lane order, on every process. For small things."""


class Algorithm(NamedTuple):
    """A way to learn: two pure functions that never know the layout."""

    init: Callable[[Key], Learner]
    update: Callable[[Learner, Lanes, Key], tuple[Learner, Metrics]]
