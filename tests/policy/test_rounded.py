"""Products in bfloat16 between activations in float32, held to the formulas and to float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy import rounded, transformer
from reinforce_ada_jax.policy.quantization import SUMMED_AXES
from tests import standins
from tests.policy import recording

SHAPES = [((5, 6), (7,), 1), ((5, 6), (2, 4), 1), ((5, 2, 3), (7,), 2)]


def arrays(*shapes):
    return [jax.random.normal(jax.random.key(number), shape) for number, shape in enumerate(shapes)]


def round_to_bfloat16(x):
    return np.asarray(x.astype(jnp.bfloat16), np.float64)


@pytest.mark.parametrize(("x_shape", "outputs", "num_inputs"), SHAPES)
def test_a_product_rounds_both_sides_and_sums_in_float32(x_shape, outputs, num_inputs):
    x, matrix = arrays(x_shape, (*x_shape[1:], *outputs))
    found = rounded.product(x, rounded.Rounded(matrix), num_inputs)
    expected = np.tensordot(round_to_bfloat16(x), round_to_bfloat16(matrix), num_inputs)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(matrix, np.float64), num_inputs)
    assert np.abs(found - exact).max() > 1e-3  # what rounding costs is far above the tolerance


@pytest.mark.parametrize(("x_shape", "outputs", "num_inputs"), SHAPES)
def test_gradients_are_products_of_the_same_kind(x_shape, outputs, num_inputs):
    x, matrix, of_result = arrays(x_shape, (*x_shape[1:], *outputs), (x_shape[0], *outputs))
    _, pull_back = jax.vjp(lambda x, matrix: rounded.product(x, rounded.Rounded(matrix), num_inputs), x, matrix)
    of_x, of_matrix = jax.jit(pull_back)(of_result)
    rows = [round_to_bfloat16(array).reshape(len(x), -1) for array in (x, of_result)]
    weights = round_to_bfloat16(matrix).reshape(rows[0].shape[1], -1)
    np.testing.assert_allclose(of_x, (rows[1] @ weights.T).reshape(x.shape), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_matrix, (rows[0].T @ rows[1]).reshape(matrix.shape), rtol=1e-5, atol=1e-5)


def test_bits_are_the_matrix_rounded_to_bfloat16_and_other_weights_stay():
    matrix, norm = arrays((4, 6), (4,))
    stored = rounded.as_bits({"layers.mlp.up": matrix, "final_norm": norm})
    assert stored["layers.mlp.up"].values.dtype == jnp.uint16
    np.testing.assert_array_equal(stored["layers.mlp.up"].matrix, matrix.astype(jnp.bfloat16))
    np.testing.assert_array_equal(stored["final_norm"], norm)


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "olmo2"))]
)
def test_a_model_of_stored_bits_computes_what_the_learner_does(family):
    """Decoding reads bits, the learner rounds float32 weights; what rounding changes is far more than they differ."""
    architecture, params, _ = recording.golden(family)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, architecture.vocab_size)
    bits = transformer.nest(rounded.as_bits(transformer.flatten(params)))

    def logits(params, rounds):
        model = transformer.merge(architecture, params)
        hidden = transformer.hidden_states(model, tokens, execution=transformer.Execution(jnp.float32, rounds))
        return np.asarray(transformer.head_logits(model, hidden))

    learner, sampler, exact = logits(params, True), logits(bits, True), logits(params, False)
    change = np.abs(learner - exact).mean()
    assert np.abs(learner - sampler).mean() < 0.3 * change
    assert 1e-4 < change < 0.05 * np.abs(exact).mean()


def test_every_matrix_of_a_dense_layer_is_rounded():
    """A matrix that is left out would be multiplied in float32, at a third of the speed."""
    _, params, _ = recording.golden("qwen2")
    marked = transformer.flatten(rounded.rounding(params["layers"]))
    names = {f"layers.{name}" for name, leaf in marked.items() if isinstance(leaf, rounded.Rounded)}
    assert names == {name for name in SUMMED_AXES if name.startswith("layers.")}


def test_a_processor_on_which_xla_cannot_run_such_products_is_not_faster(monkeypatch):
    error = jax.errors.JaxRuntimeError("INTERNAL: Unsupported element type")
    standins.failing(monkeypatch, rounded, "_of_rows", error)
    assert not rounded.is_faster.__wrapped__()
