"""Draws from blocks of a vocabulary have the probabilities of the softmax, whatever the blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.sampling import blocks as blocks_lib
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.blocks import Blocks
from reinforce_ada_jax.sampling.token import address
from tests.sampling.test_token import sampling_of

MANY = 40_000
# 22 tokens in two groups of 11. Blocks of the first are {0, 4, 8}, {1, 5, 9}, {2, 6, 10} and {3, 7}.
SPLIT = Blocks(groups=2, group_size=11, stride=4)
LOGITS = np.array([0.3 * (7 * token % 22) - 3 for token in range(22)], np.float32)
FIRST_BLOCKS = [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]


@functools.cache
def all_keys():
    """Keys of the first draws of a prompt."""
    addresses = np.tile(address(0, "p", 0), (MANY, 1))
    addresses[:, 3] = np.arange(MANY)
    return jax.jit(token_lib.draw_keys)(jnp.int32(0), jnp.asarray(addresses))


def keys_of(draws):
    return all_keys()[:draws]


@jax.jit(static_argnames="blocks")
def _sample(logits, keys, positions, sampling, count, blocks):
    logprobs = token_lib.next_logprobs(logits, sampling.temperature)
    return token_lib.sample(logprobs, keys, positions, sampling, count, blocks=blocks), logprobs


def sample(logits, positions, sampling, blocks=SPLIT):
    """Samples the first rows, in the program that all tests share; also returns all log-probabilities."""
    rows = len(logits)
    logits, positions = np.resize(logits, (MANY, 22)), np.resize(positions, MANY)
    sampling = jax.tree.map(lambda x: np.resize(x, MANY), sampling)
    (tokens, chosen), logprobs = _sample(logits, all_keys(), positions, sampling, rows, blocks)
    return np.asarray(tokens)[:rows], np.asarray(chosen)[:rows], np.asarray(logprobs)[:rows]


def draws_of(logits, temperature=1.0, blocks=SPLIT, **cut):
    """Draws of the first positions of many responses, all from the same logits."""
    tokens, _, _ = sample(np.tile(logits, (MANY, 1)), [0], sampling_of(MANY, temperature, **cut), blocks)
    return tokens


def chi_square(tokens, weights):
    """Returns the statistic and its degrees of freedom; tokens of weight 0 must not occur."""
    possible = np.flatnonzero(weights)
    counts = np.bincount(tokens, minlength=len(weights))
    assert counts.sum() == counts[possible].sum()
    expected = len(tokens) * weights[possible] / weights.sum()
    return ((counts[possible] - expected) ** 2 / expected).sum(), len(possible) - 1


def assert_drawn_from(tokens, logits, temperature=1.0):
    """The statistic within 4 standard deviations of its mean: chi-square of d degrees has mean d, variance 2 d."""
    statistic, degrees = chi_square(tokens, np.exp(np.asarray(logits, np.float64) / temperature))
    assert abs(statistic - degrees) < 4 * np.sqrt(2 * degrees) + 1e-9


def without(*tokens):
    return np.where(np.isin(np.arange(22), tokens), -np.inf, LOGITS).astype(np.float32)


def only(*tokens):
    return without(*(set(range(22)) - set(tokens)))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_have_the_probabilities_of_the_softmax(temperature):
    assert_drawn_from(draws_of(LOGITS, temperature), LOGITS, temperature)


@pytest.mark.parametrize(
    "logits", [
        without(0, 4, 8),  # a block without mass
        without(3, 12, 21),
        only(2, 6, 10),  # all mass in one block
        only(10, 21),  # the last token of each group
        only(13),
    ], ids=["no block 0", "no 3 12 21", "block 2 alone", "10 and 21", "13 alone"],
)  # fmt: skip
def test_tokens_without_probability_are_never_drawn(logits):
    assert_drawn_from(draws_of(logits), logits)


@pytest.mark.parametrize("blocks", [Blocks(1, 22, 22), Blocks(2, 11, 16)], ids=["a token each", "some empty"])
def test_any_blocks_give_the_same_distribution(blocks):
    assert_drawn_from(draws_of(LOGITS, blocks=blocks), LOGITS)


def test_probabilities_far_apart():
    # Block 0 has 1e-30 of the mass and none of the draws; in float32 the others lose nothing by it.
    logits = LOGITS.copy()
    logits[FIRST_BLOCKS[0]] -= 69
    tokens = draws_of(logits)
    assert not np.isin(tokens, FIRST_BLOCKS[0]).any()
    assert_drawn_from(tokens, np.where(np.isin(np.arange(22), FIRST_BLOCKS[0]), -np.inf, logits))


def test_a_token_is_that_of_its_noise():
    # The noise of a position is one draw: a number for each block, then one for each place in the block.
    logits, positions = np.random.default_rng(0).normal(size=(200, 22)).astype(np.float32), np.arange(200) % 7
    tokens, _, logprobs = sample(logits, positions, sampling_of(200))
    noise = np.asarray(token_lib.perturbed_scores(jnp.zeros((200, 8 + 3)), keys_of(200), jnp.asarray(positions)))
    members = [[t for t in range(22) if t // 11 * 4 + t % 11 % 4 == block] for block in range(8)]
    assert members[:4] == FIRST_BLOCKS
    for row, of_row in enumerate(noise):
        mass = [np.exp(logprobs[row, block].astype(np.float64)).sum() for block in members]
        block = members[np.argmax(np.log(mass) + of_row[:8])]
        assert tokens[row] == block[np.argmax(logprobs[row, block] + of_row[8 : 8 + len(block)])]


def test_the_logprob_has_the_bits_of_the_distribution():
    logits = np.random.default_rng(0).normal(size=(64, 22)).astype(np.float32)
    for temperature in (0.0, 0.7):
        tokens, chosen, logprobs = sample(logits, np.arange(64), sampling_of(64, temperature))
        np.testing.assert_array_equal(chosen, logprobs[np.arange(64), tokens])


def test_temperature_0_takes_the_first_of_the_most_probable_tokens():
    # Token 3 is in the fourth block, and 4 in the first.
    logits = np.tile(LOGITS, (3, 1))
    logits[0, [3, 4]] = logits[1, [4, 15]] = logits[2, [0, 21]] = 9
    tokens, _, _ = sample(logits, [0], sampling_of(3, 0.0))
    assert tokens.tolist() == [3, 4, 0]


@pytest.mark.parametrize(("cut", "left"), [(dict(top_k=3), 3), (dict(top_k=2, top_p=0.4), 1), (dict(top_p=0.5), 3)])
def test_cut_tokens_are_never_drawn(cut, left):
    # Each token has exp(-0.3) of the one before in this order: the first three have 0.26, 0.19 and 0.14.
    kept = np.argsort(-LOGITS)[:left]
    assert_drawn_from(draws_of(LOGITS, **cut), only(*kept))


def test_the_sampling_of_other_slots_changes_nothing():
    rows, logits, plain = np.arange(64), np.tile(LOGITS, (64, 1)), sampling_of(64)
    alone, _, _ = sample(logits, rows, plain)
    mixed = plain.replace(
        temperature=np.where(rows % 4 == 1, 0, 1).astype(np.float32),
        top_k=np.where(rows % 4 == 2, 2, 0).astype(np.int32),
        top_p=np.where(rows % 4 == 3, 0.3, 1).astype(np.float32),
    )
    tokens, _, _ = sample(logits, rows, mixed)
    np.testing.assert_array_equal(tokens[::4], alone[::4])
    assert (tokens[1::4] == np.argmax(LOGITS)).all()


@pytest.mark.parametrize("num_slots", [3, 11])
def test_neither_slot_nor_number_of_slots_changes_a_draw(num_slots):
    logits, positions = np.random.default_rng(0).normal(size=(64, 22)).astype(np.float32), np.arange(64) % 7
    whole, _, logprobs = sample(logits, positions, sampling_of(64))
    some = np.random.default_rng(1).permutation(64)[:num_slots]
    tokens, _ = jax.jit(token_lib.sample, static_argnames="blocks")(
        logprobs[some], keys_of(64)[some], positions[some], sampling_of(num_slots), blocks=SPLIT
    )
    np.testing.assert_array_equal(tokens, whole[some])


def alone_and_on_two_devices(blocks):
    """Returns samples drawn on one device, those drawn on two along `tensor`, and the program's text for two."""
    mesh, rows = make_mesh(tensor=2), (keys_of(256), jnp.arange(256))
    logprobs = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), (256, 24)))
    alone = jax.jit(blocks_lib.sample, static_argnums=3)(logprobs, *rows, blocks)
    split = jax.device_put(logprobs, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    program = jax.jit(blocks_lib.sample, static_argnums=(3, 4)).lower(split, *rows, blocks, mesh).compile()
    return alone, program(split, *rows), program.as_text() or ""


def test_devices_along_tensor_change_nothing():
    alone, together, program = alone_and_on_two_devices(Blocks(groups=4, group_size=6, stride=4))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert program.count(" all-gather(") == 1


def test_devices_that_do_not_divide_the_groups_change_nothing():
    alone, together, _ = alone_and_on_two_devices(Blocks(groups=1, group_size=24, stride=4))
    np.testing.assert_array_equal(alone[0], together[0])


def test_where_nothing_is_a_number_there_is_a_token_without_a_logprob():
    token, logprob = blocks_lib.sample(jnp.full((1, 22), jnp.nan), keys_of(1), jnp.zeros(1, int), SPLIT)
    assert 0 <= token[0] < 22
    assert np.isnan(logprob[0])


@pytest.mark.parametrize(
    ("vocabulary", "blocks"),
    [(151936, (8, 18992, 512)), (128256, (8, 16032, 512)), (32002, (2, 16001, 512)), (50257, (1, 50257, 512))],
)
def test_groups_divide_the_vocabulary(vocabulary, blocks):
    assert blocks_lib.split(vocabulary) == blocks


def test_noise_of_a_token():
    # 8 * 512 blocks, and 18,992 / 512 = 37.1 tokens in the largest.
    blocks = blocks_lib.split(151936)
    assert (blocks.num_blocks, blocks.size) == (4096, 38)


@pytest.mark.parametrize(("vocabulary", "levels"), [(8192, 1), (8193, 2)])
def test_large_vocabularies_take_two_levels(vocabulary, levels):
    logprobs = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (16, vocabulary)))
    rows = keys_of(16), jnp.arange(16)
    tokens, _ = token_lib.sample(logprobs, *rows, sampling_of(16))
    if levels == 1:
        expected = jnp.argmax(token_lib.perturbed_scores(logprobs, *rows), axis=1)
    else:
        expected, _ = jax.jit(blocks_lib.sample, static_argnums=3)(logprobs, *rows, Blocks(1, 8193, 512))
    np.testing.assert_array_equal(tokens, expected)
