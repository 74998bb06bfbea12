"""The limit within which two programs may differ, on recordings of transformers: right ones pass, wrong ones fail."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from bench import inputs, models, options
from reinforce_ada_jax.policy import transformer
from tests.policy import recording

FAMILIES = ("llama", "qwen2", "qwen3")


def theirs(found) -> list[np.ndarray]:
    """Log-probability of each token after the first, from recorded logits."""
    table = np.asarray(jax.nn.log_softmax(found["logits"].astype(np.float64), axis=-1))
    return [row[np.arange(len(tokens) - 1), tokens[1:]] for row, tokens in zip(table, found["tokens"], strict=True)]


def units(architecture, params, found) -> float:
    return models.check_logprobs(architecture, params, list(found["tokens"]), theirs(found), "transformers")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] * (family != "qwen2")) for family in FAMILIES]
)
def test_the_right_model_passes(family):
    assert units(*recording.golden(family)) < 1.5


def with_weight(params, name, change):
    """The weights with one array changed; "layers" stack along its first axis."""
    flat = transformer.flatten(params)
    return transformer.nest(flat | {name: change(flat[name])})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [{"rope_theta": 10010.0}, {"norm_epsilon": 2e-5}])
def test_a_wrong_configuration_is_refused(family, change):
    architecture, params, found = recording.golden(family)
    with pytest.raises(ValueError, match="in units of rounding"):
        units(dataclasses.replace(architecture, **change), params, found)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_bias_that_one_layer_lacks_is_refused(name):
    architecture, params, found = recording.golden("qwen2")
    wrong = with_weight(params, f"layers.attention.{name}_bias", lambda bias: bias.at[1].set(0))
    with pytest.raises(ValueError, match="in units of rounding"):
        units(architecture, wrong, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_of_one_layer_that_are_rotated_too_far_are_refused(family):
    # By a thousandth of a position: cos x - sin y, sin x + cos y of the two halves of a head.
    architecture, params, found = recording.golden(family)
    angle = 1e-3 * architecture.rope_theta ** -(np.arange(0, architecture.head_dim, 2) / architecture.head_dim)

    cos, sin = np.cos(angle), np.sin(angle)

    def rotated(query):
        changed = np.array(query)
        first, second = np.split(changed[0], 2, axis=-1)
        changed[0] = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.asarray(changed)

    with pytest.raises(ValueError, match="in units of rounding"):
        units(architecture, with_weight(params, "layers.attention.query", rotated), found)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("layers.attention.query_bias", 0), ("layers.attention.value_bias", 0), ("layers.mlp_norm", 1)],
)
def test_with_random_weights_a_bias_or_a_norms_scale_that_one_layer_lacks_is_refused(name, left_out):
    """With biases of 0 and scales of 1 a program without them would pass."""
    values = options.define_flags(flags.FlagValues())
    values(["bench", "--shape=32x2"])
    architecture = models.shaped("32x2")
    params = inputs.random_weights(values, architecture, "float32")
    tokens = np.random.default_rng(0).integers(0, architecture.vocab_size, 32).astype(np.int32)
    expected = models.logprobs(architecture, params, tokens)
    assert models.check_logprobs(architecture, params, [tokens], [expected], "itself") == 0
    wrong = with_weight(params, name, lambda x: x.at[1].set(left_out))
    with pytest.raises(ValueError, match="in units of rounding"):
        models.check_logprobs(architecture, wrong, [tokens], [expected], "a program without it")


def test_one_wrong_token_of_many_is_refused_and_units_follow_the_model():
    random = np.random.default_rng(0)
    ours = -10 * random.random(2000).astype(np.float32)
    for scale in (1e-6, 1e-4):
        moved, other = (ours + scale * random.standard_normal(2000) for _ in range(2))
        right = models.rounding_units(ours, moved, other)
        assert 0.5 < right < 1.5
        other[7] += 300 * scale
        assert models.rounding_units(ours, moved, other) > models.MOST_UNITS
    # A change that happens to be 0 makes no unit of 0, and float32 itself has steps.
    moved[3] = ours[3]
    assert np.isfinite(models.rounding_units(ours, moved, other))
    assert models.rounding_units(ours, ours, ours + np.spacing(np.abs(ours))) == pytest.approx(1)
