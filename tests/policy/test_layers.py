import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy import layers, rotary
from reinforce_ada_jax.policy.architecture import RopeScaling
from tests.policy import recording


def rotary_architecture(**changes):
    return dataclasses.replace(recording.golden("llama")[0], rope_scaling=None, **changes)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f])
def test_rms_norm(wrap):
    # mean(9, 16) = 12.5, 3 / sqrt(12.5) = 0.848528, 4 / sqrt(12.5) = 1.131371; not the layer norm's -1, 1.
    x, scale = jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0])
    normed = wrap(lambda x, scale: layers.rms_norm(x, scale, 0.0))(x, scale)
    np.testing.assert_allclose(normed, [[0.848528, 2.262742]], rtol=1e-6)
    # epsilon stands under the root: 3 / sqrt(12.5 + 3.5) = 0.75.
    np.testing.assert_allclose(layers.rms_norm(x, jnp.ones(2), 3.5), [[0.75, 1.0]], rtol=1e-6)


def test_rms_norm_of_bfloat16_takes_its_mean_in_float32():
    # 1,024 ones: adding them up in bfloat16 stops at 256 (256 + 1 = 256 there), which would give 2, not 1.
    x = jnp.ones((1, 1024), jnp.bfloat16)
    normed = layers.rms_norm(x, jnp.ones(1024), 0.0)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(normed.astype(jnp.float32), 1.0)


def test_rms_norm_of_zeros_has_a_finite_gradient():
    gradient = jax.grad(lambda x: layers.rms_norm(x, jnp.ones(4), 1e-6).sum())(jnp.zeros((1, 4)))
    assert np.isfinite(gradient).all()


def test_rotate_turns_dimension_i_with_i_plus_half():
    # theta 16, H 4: frequencies 16^0 and 16^(-1/2) = 1/4. Unit vector 0 turns into dimension 2 by the angle 1 x 2, unit
    # vector 1 into dimension 3 by 2/4. Interleaved pairs would turn 0 into 1.
    frequencies = layers.rotary_frequencies(rotary_architecture(head_dim=4, rope_theta=16.0))
    np.testing.assert_allclose(frequencies, [1.0, 0.25], rtol=1e-6)
    x = jnp.array([[[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]]])
    turned = rotary.rotate(x, jnp.array([[2]]), frequencies)
    cos, sin = np.cos([2, 0.5]), np.sin([2, 0.5])
    np.testing.assert_allclose(turned[0, 0], [[cos[0], 0, sin[0], 0], [0, cos[1], 0, sin[1]]], atol=1e-6)
    np.testing.assert_array_equal(rotary.rotate(x, jnp.array([[0]]), frequencies), x)


def test_rotated_products_depend_on_distance_only():
    frequencies = layers.rotary_frequencies(rotary_architecture(head_dim=16))
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def product(query_position, key_position):
        turned = rotary.rotate(query, jnp.array([[query_position]]), frequencies)
        return jnp.sum(turned * rotary.rotate(key, jnp.array([[key_position]]), frequencies))

    np.testing.assert_allclose(product(5, 2), product(103, 100), rtol=1e-4)
    assert abs(product(5, 2) - product(2, 5)) > 1e-2


def test_angles_of_bfloat16_are_float32():
    # In bfloat16 position 4,097 rounds to 4,096, whose cosine is -0.64 apart.
    x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    turned = rotary.rotate(x, jnp.array([[4097]]), jnp.ones(1))
    wanted = np.array([np.cos(4097.0) - np.sin(4097.0), np.cos(4097.0) + np.sin(4097.0)])
    np.testing.assert_allclose(turned[0, 0, 0].astype(jnp.float32), wanted, atol=2e-2)


def test_llama3_scaling_keeps_bends_and_stretches():
    # theta 4096, H 6: frequencies 1, 1/16, 1/256; wavelengths 6.28, 100.5, 1608. With original length 256, low 1 and
    # high 4, those under 64 stay and those over 256 are divided by 8. Between: share (256 / 100.53 - 1) / 3 = 0.515493,
    # and 0.515493 / 16 + 0.484507 / 16 / 8 = 0.0360035.
    scaling = RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=256
    )  # fmt: skip
    architecture = rotary_architecture(head_dim=6, rope_theta=4096.0)
    frequencies = layers.rotary_frequencies(dataclasses.replace(architecture, rope_scaling=scaling))
    np.testing.assert_allclose(frequencies, [1.0, 0.0360035, 1 / 256 / 8], rtol=1e-5)


def test_linear_scaling_divides_all_frequencies():
    architecture = rotary_architecture(head_dim=4, rope_theta=16.0)
    scaled = dataclasses.replace(architecture, rope_scaling=RopeScaling(8.0, kind="linear"))
    np.testing.assert_allclose(layers.rotary_frequencies(scaled), [1 / 8, 1 / 32], rtol=1e-6)
    assert layers.rotary_factor(scaled) == 1.0


def test_yarn_interpolates_by_index_and_scales_queries_and_keys():
    # theta 10^4, H 16: 10^(-i/2) for i = 0 to 7. Over 2 pi x 1000 positions frequency i turns 1000 x 10^(-i/2) times:
    # 31.6 times at i = 3, so i = 2 is the last with more than 32 and floor gives 2; once at i = 6. So 0 to 2 stay,
    # 6 and 7 are divided by 4, and 3, 4, 5 keep 3/4, 1/2 and 1/4 of the frequency.
    scaling = RopeScaling(4.0, 1.0, 32.0, round(2000 * np.pi), "yarn", 1.5)
    architecture = rotary_architecture(head_dim=16, rope_theta=1e4)
    yarn = dataclasses.replace(architecture, rope_scaling=scaling, sliding_theta=1e4)
    plain = 10.0 ** (-np.arange(8) / 2)
    kept = np.array([1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    np.testing.assert_allclose(layers.rotary_frequencies(yarn), plain * (kept + (1 - kept) / 4), rtol=1e-5)
    x, position = jnp.ones((1, 1, 1, 16)), jnp.array([[0]])
    turned = rotary.rotate(x, position, layers.rotary_frequencies(yarn), layers.rotary_factor(yarn))
    np.testing.assert_array_equal(turned, 1.5)
    # Without whole numbers the indices are 2.98966 and 6: 3, 4, 5 keep 0.99657, 0.66438, 0.33219.
    exact = dataclasses.replace(yarn, rope_scaling=dataclasses.replace(scaling, truncates=False))
    kept = np.array([1, 1, 1, 0.99657, 0.66438, 0.33219, 0, 0])
    np.testing.assert_allclose(layers.rotary_frequencies(exact), plain * (kept + (1 - kept) / 4), rtol=1e-4)
    # A sliding layer has neither.
    slides = jnp.bool(True)
    np.testing.assert_allclose(layers.rotary_frequencies(yarn, slides), plain, rtol=1e-5)
    assert layers.rotary_factor(yarn, slides) == 1.0 and layers.rotary_factor(yarn, ~slides) == 1.5


def test_declared_weights():
    declare = layers.Declare(jax.random.key(0), jnp.bfloat16, layers=3)
    first = declare((64, 32), ("embed", "mlp"), fan_in=64)
    second = declare((64, 32), ("embed", "mlp"), fan_in=64)
    norm = declare((64,), ("embed",), constant=1.0)
    assert first[...].shape == (3, 64, 32) and first[...].dtype == jnp.bfloat16
    assert first.get_metadata("axes") == ("layers", "embed", "mlp")
    np.testing.assert_allclose(first[...].astype(jnp.float32).std(), 1 / 8, rtol=0.05)
    assert (first[...] != second[...]).mean() > 0.9
    assert (first[...][0] != first[...][1]).mean() > 0.9
    np.testing.assert_array_equal(norm[...].astype(jnp.float32), np.ones((3, 64)))
