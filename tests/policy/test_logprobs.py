import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy import logprobs, transformer
from tests.policy import recording

B, T, V = 2, 11, 96
HIDDEN = jax.random.normal(jax.random.key(1), (B, T, 32))
TARGETS = jax.random.randint(jax.random.key(2), (B, T), 0, V)


def model_of(family):
    architecture, params, _ = recording.golden(family)
    return transformer.merge(architecture, params)


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def chunked(model, hidden, *, temperature=1.0, chunk=4):
    return logprobs.token_logprobs(model, hidden, TARGETS, temperature=temperature, chunk=chunk)


def plain(model, hidden, temperature):
    distribution = jax.nn.log_softmax(transformer.head_logits(model, hidden) / temperature)
    picked = jnp.stack([jnp.stack([distribution[b, t, TARGETS[b, t]] for t in range(T)]) for b in range(B)])
    return picked, -(jnp.exp(distribution) * distribution).sum(axis=-1)


def test_literal_distribution():
    # Logits ln(1, 2, 1) at temperature 1: probabilities 1/4, 1/2, 1/4; at 1/2 they are squared: 1/6, 4/6, 1/6.
    logits = jnp.log(jnp.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(jnp.exp(logprobs.distribution(logits, 1.0)), [0.25, 0.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(logprobs.distribution(logits, 0.5)), [1 / 6, 4 / 6, 1 / 6], rtol=1e-6)
    assert logprobs.distribution(logits.astype(jnp.bfloat16), 1.0).dtype == jnp.float32


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # tied and untied
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_equals_log_softmax(family, temperature):
    model = model_of(family)
    picked, entropy = chunked(model, HIDDEN, temperature=temperature)
    wanted_picked, wanted_entropy = plain(model, HIDDEN, temperature)
    np.testing.assert_allclose(picked, wanted_picked, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)
    assert (entropy > 0).all() and (entropy < np.log(V)).all()


def test_temperature_divides_logits_not_logprobs():
    # A temperature left out, or put on the log-probabilities without normalising again, would sum to something else.
    model = model_of("qwen2")
    every = jnp.exp(logprobs.distribution(transformer.head_logits(model, HIDDEN), 0.6)).sum(axis=-1)
    np.testing.assert_allclose(every, 1.0, rtol=1e-5)
    assert (jnp.abs(chunked(model, HIDDEN, temperature=0.6)[0] - chunked(model, HIDDEN)[0]) > 1e-3).any()


@pytest.mark.parametrize("chunk", [1, 3, 10, 11, 500])  # 11 positions: dividing, not dividing, one over, beyond
def test_chunk_sizes_agree(chunk):
    model = model_of("qwen2")
    for ours, wanted in zip(chunked(model, HIDDEN, chunk=chunk), plain(model, HIDDEN, 1.0), strict=True):
        assert ours.shape == (B, T)
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)


def test_jit_equals_eager():
    model = model_of("qwen2")
    eager = logprobs.token_logprobs(model, HIDDEN, TARGETS, temperature=0.8, chunk=4)
    for ours, wanted in zip(chunked(model, HIDDEN, temperature=0.8), eager, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gradients_equal_the_naive_ones(family):
    architecture, params, _ = recording.golden(family)
    weights = jax.random.normal(
        jax.random.key(4), (2, B, T)
    )  # so that no position's gradient can stand in for another's

    def loss(function, params, hidden):
        picked, entropy = function(transformer.merge(architecture, params), hidden)
        return jnp.sum(weights[0] * picked) + jnp.sum(weights[1] * entropy)

    ours = jax.grad(functools.partial(loss, functools.partial(chunked, temperature=0.7)), argnums=(0, 1))
    naive = jax.grad(functools.partial(loss, functools.partial(plain, temperature=0.7)), argnums=(0, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        ours(params, HIDDEN), naive(params, HIDDEN),
    )  # fmt: skip


def test_the_whole_vocabulary_for_all_positions_never_exists():
    architecture, params, _ = recording.golden("qwen2")
    hidden, targets = jnp.zeros((B, 64, 32)), jnp.zeros((B, 64), jnp.int32)

    def loss(params, chunk):
        model = transformer.merge(architecture, params)
        picked, entropy = logprobs.token_logprobs(model, hidden, targets, temperature=1.0, chunk=chunk)
        return jnp.sum(picked) + jnp.sum(entropy)

    def largest(chunk):
        text = jax.jit(jax.grad(loss), static_argnums=1).lower(params, chunk).compile().as_text()
        return max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text))

    assert largest(64) >= B * 64 * V
    assert largest(4) < B * 64 * V / 2
