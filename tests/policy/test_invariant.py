"""Tiles of rows and of keys: the order of sums, and what must not change a bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy import invariant
from reinforce_ada_jax.policy.invariant import KEYS, ROWS
from reinforce_ada_jax.policy.transformer import LayerPlace


@jax.jit
def attend(query, keys, values, lengths):
    """Attention of a tile of rows, each with keys and values of its own: [K, ROWS, T, H]."""

    def read(tile):
        return tuple(jax.lax.dynamic_slice_in_dim(x, tile * KEYS, KEYS, axis=2) for x in (keys, values))

    return invariant.attention(query, lengths, keys.shape[0], read)


def test_tiles_of_keys_are_summed_in_ascending_order():
    # Equal scores, and one value in each of three tiles: (1 + 1e8) - 1e8 is 0 in float32, and in any order in which 1
    # comes last it is 1.
    values = np.zeros((1, ROWS, 3 * KEYS, 1), np.float32)
    values[:, :, [0, KEYS, 2 * KEYS], 0] = 1.0, 1e8, -1e8
    query, lengths = np.ones((ROWS, 1, 1), np.float32), np.full(ROWS, 3 * KEYS, np.int32)
    assert np.all(attend(query, np.zeros_like(values), values, lengths) == 0)
    values[:, :, [0, KEYS, 2 * KEYS], 0] = 1e8, -1e8, 1.0
    np.testing.assert_array_equal(
        attend(query, np.zeros_like(values), values, lengths), np.full((ROWS, 1, 1), np.float32(1 / 96))
    )


def test_attention_is_a_softmax_over_each_rows_own_length():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(ROWS, 4, 8)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, ROWS, 3 * KEYS, 8)).astype(np.float32)
    lengths = np.array([0, 1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 5, 7, 40, 50, 90], np.int32)
    mixed = attend(query, keys, values, lengths)
    for row, length in enumerate(lengths):
        scores = np.einsum("kgh,kth->kgt", query[row].reshape(2, 2, 8), keys[:, row, :length]) / np.sqrt(8)
        weights = np.exp(scores)
        wanted = np.einsum("kgt,kth->kgh", weights, values[:, row, :length]) / np.maximum(
            weights.sum(-1, keepdims=True), 1e-30
        )
        np.testing.assert_allclose(mixed[row], wanted.reshape(4, 8), atol=1e-5)
    # Longer rows beside it, and what nobody may see, change no bit of a row.
    alone = attend(query, keys, values, np.where(np.arange(ROWS) == 3, lengths, 0))
    np.testing.assert_array_equal(alone[3], mixed[3])
    assert not alone[:3].any()
    spoiled = np.where(np.arange(3 * KEYS)[None, None, :, None] < 31, values, np.nan)
    np.testing.assert_array_equal(attend(query, keys, spoiled, np.minimum(lengths, 31))[3], mixed[3])


def test_a_sink_takes_its_share_and_has_no_value():
    # All scores are 0 and all values 1, so a head has n / (n + exp(sink)) with n tokens; without its sink it has 1.
    sinks = jnp.log(jnp.array([1.0, 2.0, 60.0, 1e-9]))
    keys, values = jnp.zeros((2, ROWS, 2 * KEYS, 1)), jnp.ones((2, ROWS, 2 * KEYS, 1))

    @jax.jit
    def attended(lengths):
        def read(tile):
            return tuple(jax.lax.dynamic_slice_in_dim(x, tile * KEYS, KEYS, axis=2) for x in (keys, values))

        return invariant.attention(jnp.ones((ROWS, 4, 1)), lengths, 2, read, LayerPlace(0, sinks=sinks))

    mixed = attended(jnp.array([3, 40] + [0] * (ROWS - 2)))[..., 0]
    np.testing.assert_allclose(mixed[:2], [[3 / 4, 3 / 5, 3 / 63, 1], [40 / 41, 40 / 42, 40 / 100, 1]], rtol=1e-5)
    assert not mixed[2:].any()  # a row without tokens


def test_a_row_has_the_same_bits_at_any_place_of_any_array():
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(40, 48)).astype(np.float32), rng.normal(size=(48, 100)).astype(np.float32)

    @jax.jit
    def computed(x, count):
        return invariant.by_tiles(count)(lambda x: jax.nn.log_softmax(x @ weights), x)

    all_rows = computed(x, 40)
    np.testing.assert_allclose(all_rows, jax.nn.log_softmax(x @ weights), atol=1e-4)
    np.testing.assert_array_equal(computed(x[::-1], 40)[::-1], all_rows)
    np.testing.assert_array_equal(computed(x[7:8], 1)[0], all_rows[7])
    np.testing.assert_array_equal(computed(x[5:22], 17), all_rows[5:22])
    # Of 40 rows the first 16 are computed, and the others are 0.
    np.testing.assert_array_equal(computed(x, 16), jnp.where(jnp.arange(40)[:, None] < 16, all_rows, 0))


def test_other_platforms_are_refused():
    invariant.check_platform("cpu")
    with pytest.raises(ValueError, match="devices are of the platform tpu: .* JAX_PLATFORMS=cpu"):
        invariant.check_platform("tpu")
