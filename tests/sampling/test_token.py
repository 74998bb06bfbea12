import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.token import address, stream

LOGITS = np.array([0.0, 1.0, 2.0, -1.0, 0.5, -3.0, 1.5, 0.0], np.float32)
MANY = 20_000
sample = jax.jit(token_lib.sample, static_argnames="greedy")
draw_keys, perturbed_scores = jax.jit(token_lib.draw_keys), jax.jit(token_lib.perturbed_scores)


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
    tokens, _ = sample(logits, keys_of(), jnp.zeros(MANY, int), temperature, greedy=False)
    assert_softmax(tokens, temperature)


def test_frequencies_over_positions_are_the_softmax():
    keys, logits = jnp.tile(keys_of(draws=1), (MANY, 1)), jnp.tile(LOGITS, (MANY, 1))
    tokens, _ = sample(logits, keys, jnp.arange(MANY), 1.0, greedy=False)
    assert_softmax(tokens, 1.0)


@pytest.mark.parametrize("other", [dict(stream_word=1), dict(prompt_id="q"), dict(seed=1)])
def test_draws_of_another_stream_prompt_or_seed_are_independent(other):
    logits, places = jnp.tile(LOGITS, (MANY, 1)), jnp.zeros(MANY, int)
    one, _ = sample(logits, keys_of(), places, 1.0, greedy=False)
    two, _ = sample(logits, keys_of(**other), places, 1.0, greedy=False)
    # Two independent draws agree with probability sum(p^2).
    weights = np.exp(LOGITS)
    agree = np.sum((weights / weights.sum()) ** 2)
    assert abs(np.mean(one == two) - agree) < 4 * np.sqrt(agree * (1 - agree) / MANY)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_logprob_is_that_of_the_untruncated_distribution(temperature, greedy):
    logits = 3 * jax.random.normal(jax.random.key(0), (64, 8))
    tokens, logprobs = sample(logits, keys_of(draws=64), jnp.arange(64), temperature, greedy=greedy)
    wide = np.asarray(logits, np.float64) / temperature
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[np.arange(64), tokens], atol=1e-5)


def test_greedy_takes_the_most_probable_token():
    logits = jax.random.normal(jax.random.key(0), (64, 8))
    tokens, _ = sample(logits, keys_of(draws=64), jnp.zeros(64, int), 1.0, greedy=True)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))


def test_neither_slot_nor_batch_size_changes_a_draw():
    logits = 2 * jax.random.normal(jax.random.key(0), (64, 8))
    keys, positions = keys_of(draws=64), jnp.arange(64) % 7
    whole = sample(logits, keys, positions, 1.0, greedy=False)
    order = np.random.default_rng(0).permutation(64)
    permuted = sample(logits[order], keys[order], positions[order], 1.0, greedy=False)
    for one, other in zip(whole, permuted, strict=True):
        np.testing.assert_array_equal(one[order], other)
    for slot in range(0, 64, 8):
        alone = slice(slot, slot + 1)
        token, logprob = sample(logits[alone], keys[alone], positions[alone], 1.0, greedy=False)
        assert token[0] == whole[0][slot]
        np.testing.assert_allclose(logprob[0], whole[1][slot], atol=1e-6)
