"""Noise of an address: distinct streams, the softmax's frequencies, and truncation by row."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.state import Sampling, SamplingParams
from reinforce_ada_jax.sampling.token import address, stream

LOGITS = np.array([0.0, 1.0, 2.0, -1.0, 0.5, -3.0, 1.5, 0.0], np.float32)
MANY = 20_000
draw_keys, perturbed_scores = jax.jit(token_lib.draw_keys), jax.jit(token_lib.perturbed_scores)


def sampling_of(rows, temperature=1.0, top_k=0, top_p=1.0):
    """The same sampling for each of the rows."""
    return Sampling(
        max_tokens=np.ones(rows, np.int32), temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32), top_p=np.full(rows, top_p, np.float32),
    )  # fmt: skip


@jax.jit
def _sample(logits, keys, positions, sampling):
    return token_lib.sample(token_lib.next_logprobs(logits, sampling.temperature), keys, positions, sampling)


def sample(logits, keys, positions, temperature, *, top_k=0, top_p=1.0):
    """Samples from logits, with the same sampling for every row."""
    return _sample(logits, keys, positions, sampling_of(len(logits), temperature, top_k, top_p))


def keys_of(stream_word=0, prompt_id="p", draws=MANY, seed=0):
    """Keys of the first draws of a prompt."""
    addresses = np.tile(address(stream_word, prompt_id, 0), (draws, 1))
    addresses[:, 3] = np.arange(draws)
    return draw_keys(jnp.int32(seed), jnp.asarray(addresses))


def assert_softmax(tokens, temperature):
    """Each token's count within 4 sigma of the binomial around its probability."""
    weights = np.exp(LOGITS / temperature)
    probability = weights / weights.sum()
    counts = np.bincount(tokens, minlength=len(LOGITS))
    sigma = np.sqrt(len(tokens) * probability * (1 - probability))
    assert (np.abs(counts - len(tokens) * probability) < 4 * sigma).all()


def test_the_streams_of_a_run_are_distinct():
    # Training and evaluation of iterations 0, 1, 2. With evaluation as "iteration + 1", 1 and 2 would come twice.
    assert [stream(i, evaluation) for i in range(3) for evaluation in (False, True)] == [0, 1, 2, 3, 4, 5]


def test_addresses_are_literally_these():
    # What a run can be reproduced from: between stream and draw, `printf p | b2sum -l 64`, little-endian.
    assert address(5, "p", 9).tolist() == [5, 3184882189, 527037321, 9]
    assert address(5, "p", 9).dtype == np.uint32


def test_addresses_and_keys_are_distinct():
    ids = ["", "0", "1", "10", "train-0001", "heldout-0001", "я"]
    addresses = np.array([address(*words) for words in itertools.product(range(6), ids, range(40))])
    assert len(np.unique(addresses, axis=0)) == 6 * 7 * 40
    both_seeds = np.concatenate([draw_keys(jnp.int32(seed), jnp.asarray(addresses)) for seed in (0, 1)])
    assert len(np.unique(both_seeds, axis=0)) == 2 * 6 * 7 * 40


def test_a_word_counts_where_it_stands():
    # Words folded in with "+" or "^" would give draw 1 of stream 0 and draw 0 of stream 1 one key.
    words = jnp.array([[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], jnp.uint32)
    assert len(np.unique(draw_keys(jnp.int32(0), words), axis=0)) == 5


def test_positions_have_noise_of_their_own():
    positions = jnp.arange(50)
    noise = perturbed_scores(jnp.zeros((50, 8)), jnp.tile(keys_of(draws=1), (50, 1)), positions)
    assert len(np.unique(noise)) == 50 * 8


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_over_draws_are_the_softmax(temperature):
    logits = jnp.tile(LOGITS, (MANY, 1))
    tokens, _ = sample(logits, keys_of(), jnp.zeros(MANY, int), temperature)
    assert_softmax(tokens, temperature)


def test_frequencies_over_positions_are_the_softmax():
    keys, logits = jnp.tile(keys_of(draws=1), (MANY, 1)), jnp.tile(LOGITS, (MANY, 1))
    tokens, _ = sample(logits, keys, jnp.arange(MANY), 1.0)
    assert_softmax(tokens, 1.0)


@pytest.mark.parametrize("other", [dict(stream_word=1), dict(prompt_id="q"), dict(seed=1)])
def test_draws_of_another_stream_prompt_or_seed_are_independent(other):
    logits, places = jnp.tile(LOGITS, (MANY, 1)), jnp.zeros(MANY, int)
    one, _ = sample(logits, keys_of(), places, 1.0)
    two, _ = sample(logits, keys_of(**other), places, 1.0)
    # Two independent draws agree with probability sum(p^2).
    weights = np.exp(LOGITS)
    agree = np.sum((weights / weights.sum()) ** 2)
    assert abs(np.mean(one == two) - agree) < 4 * np.sqrt(agree * (1 - agree) / MANY)


@pytest.mark.parametrize("cut", [{}, dict(top_k=3), dict(top_p=0.5)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_logprob_is_that_of_the_untruncated_distribution(temperature, cut):
    logits = 3 * jax.random.normal(jax.random.key(0), (64, 8))
    tokens, logprobs = sample(logits, keys_of(draws=64), jnp.arange(64), temperature, **cut)
    wide = np.asarray(logits, np.float64) / (temperature or 1.0)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[np.arange(64), tokens], atol=1e-5)


def test_temperature_0_takes_the_most_probable_token_and_the_first_of_equals():
    logits = jax.random.normal(jax.random.key(0), (64, 8)).at[0].set(1.0)
    tokens, _ = sample(logits, keys_of(draws=64), jnp.zeros(64, int), 0.0)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    assert tokens[0] == 0


# Probabilities by token, and which of them a cut leaves. p counts what k left: 0.4 and 0.3 are 4/7 and 3/7 of k = 2.
PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32)
CUTS = [
    (dict(top_k=1), [1]),
    (dict(top_k=2), [1, 3]),
    (dict(top_k=5), [0, 1, 2, 3, 4]),
    (dict(top_k=9), [0, 1, 2, 3, 4]),
    (dict(top_p=0.01), [1]),
    (dict(top_p=0.39), [1]),
    (dict(top_p=0.41), [1, 3]),
    (dict(top_p=0.71), [1, 3, 4]),
    (dict(top_p=0.96), [0, 1, 2, 3, 4]),
    (dict(top_k=2, top_p=0.56), [1]),
    (dict(top_k=2, top_p=0.58), [1, 3]),
]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-10, 1e-30, 1e-40, 1e-46])
def test_a_tiny_temperature_takes_the_most_probable_token(temperature):
    """Without a bound the error of logits / temperature is above 1, and the exponential of it infinite."""
    logits = np.random.default_rng(0).normal(size=(8, 50), scale=6).astype(np.float32)
    given = SamplingParams(1, temperature=temperature).as_arrays.temperature
    tokens, logprobs = sample(logits, keys_of(draws=8), np.arange(8), given)
    assert tokens.tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(logprobs, 0, atol=1e-2)


@pytest.mark.parametrize(("cut", "left"), CUTS, ids=str)
def test_a_cut_leaves_these_tokens_in_their_proportions(cut, left):
    logits = jnp.tile(np.log(PROBABILITIES), (MANY, 1))
    tokens, _ = sample(logits, keys_of(), jnp.zeros(MANY, int), 1.0, **cut)
    counts = np.bincount(tokens, minlength=5)
    assert np.flatnonzero(counts).tolist() == left
    expected = PROBABILITIES[left] / PROBABILITIES[left].sum()
    sigma = np.sqrt(MANY * expected * (1 - expected))
    assert (np.abs(counts[left] - MANY * expected) <= 4 * sigma).all()


def test_the_temperature_comes_before_the_cut():
    # At temperature 2 the square roots: 0.268 0.232 0.164 0.134 0.095 over 1. p = 0.45 takes two; at 1 it takes two as
    # well, and 0.51 two at 1 and three at 2.
    logits = jnp.tile(np.log(PROBABILITIES), (MANY, 1))
    kept = [
        np.unique(sample(logits, keys_of(), jnp.zeros(MANY, int), temperature, top_p=0.62)[0]).tolist()
        for temperature in (1.0, 2.0)
    ]
    assert kept == [[1, 3], [1, 3, 4]]


def test_each_row_has_its_own_sampling():
    logits = jnp.tile(np.log(PROBABILITIES), (MANY, 1))
    rows = np.arange(MANY) % 3
    sampling = Sampling(
        max_tokens=np.ones(MANY, np.int32), temperature=np.where(rows == 0, 0.0, 1.0).astype(np.float32),
        top_k=np.where(rows == 1, 2, 0).astype(np.int32), top_p=np.ones(MANY, np.float32),
    )  # fmt: skip
    tokens, _ = _sample(logits, keys_of(), jnp.zeros(MANY, int), sampling)
    assert [np.unique(tokens[rows == row]).tolist() for row in range(3)] == [[1], [1, 3], [0, 1, 2, 3, 4]]


def test_neither_slot_nor_batch_size_changes_a_draw():
    logits = 2 * jax.random.normal(jax.random.key(0), (64, 8))
    keys, positions = keys_of(draws=64), jnp.arange(64) % 7
    whole = sample(logits, keys, positions, 1.0)
    order = np.random.default_rng(0).permutation(64)
    permuted = sample(logits[order], keys[order], positions[order], 1.0)
    for one, other in zip(whole, permuted, strict=True):
        np.testing.assert_array_equal(one[order], other)
    for slot in range(0, 64, 8):
        alone = slice(slot, slot + 1)
        token, logprob = sample(logits[alone], keys[alone], positions[alone], 1.0)
        assert token[0] == whole[0][slot]
        np.testing.assert_allclose(logprob[0], whole[1][slot], atol=1e-6)


@pytest.mark.parametrize("count", [0, 3, 8, 9])
def test_only_the_first_rows_are_sampled(count):
    # 13 rows, 8 at a time: the last 8 begin at row 5.
    logprobs = token_lib.next_logprobs(jax.random.normal(jax.random.key(0), (13, 8)), jnp.ones(13))
    keys, sampling = keys_of(draws=13), Sampling(
        max_tokens=np.ones(13, np.int32), temperature=np.ones(13, np.float32),
        top_k=np.zeros(13, np.int32), top_p=np.ones(13, np.float32),
    )  # fmt: skip
    some = jax.jit(token_lib.sample)
    tokens, chosen = some(logprobs, keys, jnp.zeros(13, int), sampling, 13)
    np.testing.assert_array_equal(chosen, logprobs[np.arange(13), tokens])
    first, _ = some(logprobs, keys, jnp.zeros(13, int), sampling, count)
    np.testing.assert_array_equal(first[:count], tokens[:count])
