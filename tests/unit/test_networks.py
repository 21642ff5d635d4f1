from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from lockstep import tree
from lockstep.core import ArraySpec, Box, Discrete, Spec
from lockstep.distributions import Gaussian
from lockstep.networks import ACTIVATIONS, MLP, mlp_apply, mlp_init, mlp_policy

CONTINUOUS = Spec(ArraySpec((3,), "float32"), Box(-np.ones(2, np.float32), np.ones(2, np.float32), "float32"))
DISCRETE = Spec(ArraySpec((2, 3), "float32"), Discrete(4, 0, "int64"))


@pytest.mark.parametrize("shape", [(7, 7), (3, 8), (9, 2)])
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_kernels_are_orthogonal_and_biases_zero(shape: tuple[int, int], scale: float) -> None:
    params = mlp_init(jax.random.key(0), (5, *shape), scale)
    for name, expected in (("layer0", np.sqrt(2)), ("layer1", scale)):
        kernel = np.asarray(params[name]["kernel"], np.float64)
        narrow = kernel if kernel.shape[0] <= kernel.shape[1] else kernel.T
        np.testing.assert_allclose(narrow @ narrow.T, expected**2 * np.eye(len(narrow)), atol=2e-6 * expected**2)
        assert not params[name]["bias"].any()
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_layers_and_networks_start_differently() -> None:
    params = mlp_policy(MLP(hidden=(4, 4, 4)), Spec(ArraySpec((4,), "float32"), CONTINUOUS.action)).init(
        jax.random.key(0)
    )
    kernels = [np.abs(leaf).tobytes() for name, leaf in tree.paths(params).items() if leaf.shape == (4, 4)]
    assert len(kernels) == len(set(kernels)) == 6


NUMPY = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x * special.expit(x),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_an_mlp_is_affine_maps_with_activations_between(activation: str) -> None:
    rng = np.random.default_rng(0)
    sizes = (3, 5, 4, 2)
    layers = [(rng.normal(size=(n, m)), rng.normal(size=m)) for n, m in itertools.pairwise(sizes)]
    params = {f"layer{i}": {"kernel": jnp.asarray(w), "bias": jnp.asarray(b)} for i, (w, b) in enumerate(layers)}
    x = rng.normal(size=(2, 6, 3))
    (w0, b0), (w1, b1), (w2, b2) = layers
    f = NUMPY[activation]
    expected = f(f(x @ w0 + b0) @ w1 + b1) @ w2 + b2
    np.testing.assert_allclose(mlp_apply(params, jnp.asarray(x), ACTIVATIONS[activation], 3), expected, rtol=1e-10)


def test_a_box_gets_a_gaussian_with_one_log_std_for_all_observations() -> None:
    policy = mlp_policy(MLP(hidden=(8,), log_std=-0.5), CONTINUOUS)
    params = policy.init(jax.random.key(0))
    distribution, state = policy.act(params, jnp.ones((6, 5, 3), jnp.float32), ())
    assert isinstance(distribution, Gaussian)
    assert distribution.mean.shape == distribution.log_std.shape == (6, 5, 2)
    assert (distribution.log_std == -0.5).all()
    assert state == policy.initial_state(5) == ()
    assert policy.distribution.log_prob(distribution, distribution.mean).shape == (6, 5)


def test_a_discrete_space_gets_logits_and_observations_are_flattened() -> None:
    policy = mlp_policy(MLP(hidden=(8,)), DISCRETE)
    params = policy.init(jax.random.key(0))
    observation = jnp.asarray(np.random.default_rng(0).normal(size=(6, 5, 2, 3)), jnp.float32)
    logits, value = policy.evaluate(params, observation, ())
    assert (logits.shape, value.shape) == ((6, 5, 4), (6, 5))
    assert "log_std" not in params["policy"]
    one, _ = policy.act(params, observation[3, 2], ())
    np.testing.assert_allclose(one, logits[3, 2], rtol=1e-5)
    np.testing.assert_allclose(policy.value(params, observation[3, 2], ()), value[3, 2], rtol=1e-5)


def test_a_new_policy_hardly_prefers_any_action() -> None:
    policy = mlp_policy(MLP(), CONTINUOUS)
    observation = jnp.asarray(np.random.default_rng(0).normal(size=(100, 3)), jnp.float32)
    output = policy.evaluate(policy.init(jax.random.key(0)), observation, ())
    assert jnp.abs(output.distribution.mean).max() < 0.1 < jnp.abs(output.value).max()


@pytest.mark.parametrize(("value_hidden", "expected"), [((), [(3, 8), (8, 1)]), ((5, 4), [(3, 5), (5, 4), (4, 1)])])
def test_the_value_network_has_its_own_layers(value_hidden: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    policy = mlp_policy(MLP(hidden=(8,), value_hidden=value_hidden), CONTINUOUS)
    params = policy.init(jax.random.key(0))
    assert [layer["kernel"].shape for layer in params["value"].values()] == expected
    assert params["policy"]["layer0"]["kernel"].shape == (3, 8)


def test_value_and_policy_share_nothing() -> None:
    policy = mlp_policy(MLP(hidden=(8,)), DISCRETE)
    params, observation = policy.init(jax.random.key(0)), jnp.ones((2, 3), jnp.float32)
    by_value = jax.grad(lambda p: policy.value(p, observation, ()))(params)
    by_policy = jax.grad(lambda p: policy.act(p, observation, ())[0][0])(params)
    assert not any(leaf.any() for leaf in jax.tree.leaves((by_value["policy"], by_policy["value"])))
    assert by_value["value"]["layer0"]["kernel"].any()
    assert by_policy["policy"]["layer0"]["kernel"].any()
