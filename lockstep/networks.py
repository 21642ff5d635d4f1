"""Networks and the policies made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from lockstep.core import Array, Box, Key, Output, Policy, Spec, Tree
from lockstep.distributions import Gaussian, categorical, gaussian
from lockstep.ranges import Count, Positive

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}


def mlp_init(key: Key, sizes: tuple[int, ...], last_scale: float) -> Tree:
    """Orthogonal kernels, scale sqrt(2) inside and `last_scale` at the end; zero biases."""
    layers = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        scale = last_scale if i == len(sizes) - 2 else math.sqrt(2)
        kernel = scale * _orthogonal(jax.random.fold_in(key, i), n_in, n_out)
        layers[f"layer{i}"] = {"kernel": kernel, "bias": jnp.zeros(n_out, jnp.float32)}
    return layers


@partial(jax.jit, static_argnums=(1, 2))
def _orthogonal(key: Key, n_in: int, n_out: int) -> Array:
    """A program of its own, compiled once for a shape, whatever network and algorithm it is for."""
    return jax.nn.initializers.orthogonal()(key, (n_in, n_out), jnp.float32)


def affine(layer: Tree, x: Array) -> Array:
    return x @ layer["kernel"] + jnp.expand_dims(layer["bias"], tuple(range(x.ndim - 1)))


def mlp_apply(params: Tree, x: Array, activation: Callable[[Array], Array], depth: int) -> Array:
    for i in range(depth):
        x = affine(params[f"layer{i}"], x)
        if i < depth - 1:
            x = activation(x)
    return x


def mlp_tapped(
    params: Tree, shifts: Tree, x: Array, activation: Callable[[Array], Array], depth: int
) -> tuple[Array, dict[str, Array]]:
    """`mlp_apply` with a shift added to every layer's output, and every layer's input beside the result."""
    inputs = {}
    for i in range(depth):
        name = f"layer{i}"
        inputs[name] = x
        x = affine(params[name], x) + shifts[name]
        if i < depth - 1:
            x = activation(x)
    return x, inputs


@dataclass(frozen=True)
class MLP:
    """Separate fully connected networks for policy and value."""

    hidden: tuple[Count, ...] = (64, 64)  # units of each hidden layer
    value_hidden: tuple[Count, ...] = ()  # the value network's; empty: the same as `hidden`
    # the layers as given above, or three whose widths go from inputs to outputs in equal ratios (Coady 2017)
    widths: Literal["given", "dimensions"] = "given"
    activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = "tanh"
    log_std: float = 0.0  # initial log standard deviation of a Gaussian policy
    last_scale: Positive = 0.01  # scale of the policy's last layer (Andrychowicz et al. 2021: small)


def from_dimensions(n_in: int, last: int) -> tuple[int, int, int]:
    """Ten units per input, `last` at the end, and between them their geometric mean."""
    first = 10 * n_in
    return first, int(math.sqrt(first * last)), last


def mlp_policy(config: MLP, spec: Spec) -> Policy:
    """A Gaussian policy with a state-independent log-std for a Box, a categorical one for Discrete."""
    activation = ACTIVATIONS[config.activation]
    n_in = math.prod(spec.observation.shape)
    continuous = isinstance(spec.action, Box)
    n_out = math.prod(spec.action.low.shape) if isinstance(spec.action, Box) else spec.action.n
    hidden, value_hidden = config.hidden, config.value_hidden or config.hidden
    if config.widths == "dimensions":
        hidden, value_hidden = from_dimensions(n_in, 10 * n_out), from_dimensions(n_in, 5)
    policy_sizes, value_sizes = (n_in, *hidden, n_out), (n_in, *value_hidden, 1)
    lead = len(spec.observation.shape)

    def flat(observation: Array) -> Array:
        return observation.reshape(*observation.shape[: observation.ndim - lead], n_in)

    def init(key: Key) -> Tree:
        policy = mlp_init(jax.random.fold_in(key, 0), policy_sizes, config.last_scale)
        if continuous:
            policy["log_std"] = jnp.full(n_out, config.log_std, jnp.float32)
        return {"policy": policy, "value": mlp_init(jax.random.fold_in(key, 1), value_sizes, 1.0)}

    def act(params: Tree, observation: Tree, state: Tree) -> tuple[Tree, Tree]:
        out = mlp_apply(params["policy"], flat(observation), activation, len(policy_sizes) - 1)
        if continuous:
            return Gaussian(out, jnp.broadcast_to(params["policy"]["log_std"], out.shape)), state
        return out, state

    def value(params: Tree, observation: Tree, state: Tree) -> Array:
        return mlp_apply(params["value"], flat(observation), activation, len(value_sizes) - 1)[..., 0]

    def evaluate(params: Tree, observation: Tree, state: Tree) -> Output:
        return Output(act(params, observation, state)[0], value(params, observation, state))

    def tapped(params: Tree, shifts: Tree, observation: Tree, state: Tree) -> tuple[Output, Tree]:
        x, depths = flat(observation), (len(policy_sizes) - 1, len(value_sizes) - 1)
        out, inputs = mlp_tapped(params["policy"], shifts["policy"], x, activation, depths[0])
        values, value_inputs = mlp_tapped(params["value"], shifts["value"], x, activation, depths[1])
        if continuous:
            inputs["log_std"] = x[..., :0]
            log_std = jnp.broadcast_to(params["policy"]["log_std"], out.shape)
            out = Gaussian(out, log_std + shifts["policy"]["log_std"])
        return Output(out, values[..., 0]), {"policy": inputs, "value": value_inputs}

    return Policy(
        init=init,
        initial_state=lambda envs: (),
        act=act,
        evaluate=evaluate,
        value=value,
        tapped=tapped,
        distribution=gaussian(n_out) if continuous else categorical(n_out),
    )
