import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.layers import project
from reinforce_ada_jax.policy.quantization import SUMMED_AXES, Quantized, quantize, quantized_weights
from tests.policy import recording
from tests.sampling import tiny


def rounded(made, axes):
    """The float32 tensor that a quantised one stands for."""
    return np.asarray(made.values, np.float32) * np.expand_dims(made.scale, axes)


def test_the_largest_magnitude_of_each_output_is_127():
    # Inputs are the first axis: columns have the scales 2 / 127, 0.5 / 127, and none for zeros.
    weight = jnp.array([[2.0, -0.5, 0.0], [-1.0, 0.25, 0.0], [0.01, 0.001, 0.0]])
    made = quantize(weight, (0,))
    assert (made.values.dtype, made.scale.dtype) == (jnp.int8, jnp.float32)
    np.testing.assert_array_equal(made.values, [[127, -127, 0], [-64, 64, 0], [1, 0, 0]])  # 63.5 rounds to even
    np.testing.assert_allclose(made.scale, [2 / 127, 0.5 / 127, 0], rtol=1e-6)


def test_an_entry_is_off_by_at_most_half_a_scale():
    x = jax.random.normal(jax.random.key(0), (6, 5, 4)) * jnp.logspace(-6, 6, 4)[None, None]
    made = quantize(x, (0, 1))
    assert made.scale.shape == (4,)
    error = np.abs(rounded(made, (0, 1)) - np.asarray(x))
    assert np.all(error <= np.asarray(made.scale) * 0.5001)
    assert np.all(error.max(axis=(0, 1)) > np.asarray(made.scale) * 0.4)  # it rounds, and to 255 values


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_seen_in_the_scale(bad):
    made = quantize(jnp.array([[1.0, bad], [1.0, 2.0]]), (1,))
    np.testing.assert_array_equal(np.isfinite(made.scale), [False, True])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_with_the_rounded_matrix(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8), dtype)  # B T *in
    made = quantize(jax.random.normal(jax.random.key(1), (4, 8, 6)), (0, 1))
    expected = np.einsum("BTNH,NHD->BTD", np.asarray(x, np.float32), rounded(made, (0, 1)))
    product = project(x, made, num_inputs=2)
    assert product.dtype == dtype
    np.testing.assert_allclose(np.asarray(product, np.float32), expected, rtol=1e-5 if dtype == "float32" else 2e-2)


def check_rounded_matrices(architecture, params, atol):
    """Compares logits of int8 with those of the rounded matrices, and returns the mean change by int8."""
    weights = transformer.flatten(params)
    made = quantized_weights(weights, "float32")
    matrices = {name for name, weight in made.items() if isinstance(weight, Quantized)}
    assert matrices == {name for name in SUMMED_AXES if name in weights}
    plain = {name: rounded(made[name], SUMMED_AXES[name]) if name in matrices else made[name] for name in made}
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    logits = [transformer.logits(architecture, transformer.nest(params), tokens) for params in (made, plain, weights)]
    np.testing.assert_allclose(logits[0], logits[1], atol=atol)
    return np.abs(logits[0] - logits[2]).mean()


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_quantised_policy_is_the_policy_of_its_rounded_matrices(tied):
    architecture = dataclasses.replace(tiny.ARCHITECTURE, tied_embedding=tied)
    weights = transformer.init(architecture, jax.random.key(2))
    assert 1e-3 < check_rounded_matrices(architecture, weights, 1e-5) < 0.05


# The weights of other families are the same matrices; those with experts are refused (test_experts.py).
DENSE = ("qwen2", "qwen3", "llama", "mistral", "mistral_window", "smollm3", "olmo2", "olmo3", "phi3")


@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(family, marks=pytest.mark.slow) for family in DENSE)])
def test_so_it_is_in_each_dense_family(family):
    architecture, weights, _ = recording.golden(family)
    # Of the goldens' larger weights, logits vary by some 3.
    assert 1e-3 < check_rounded_matrices(architecture, weights, 1e-4) < 0.5
