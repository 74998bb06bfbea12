import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy.quantization import Quantized
from reinforce_ada_jax.sampling.page_writes import write_token
from reinforce_ada_jax.sampling.paged_attention import empty_pages, paged_attention

S, N, K, H, PAGE_SIZE, WIDTH, PAGES = 5, 4, 2, 8, 4, 3, 20
attend, jit_write = jax.jit(paged_attention, static_argnames="backend"), jax.jit(write_token)
LENGTHS = np.array([0, 1, 4, 5, 12], np.int32)  # none, one token, a page, one more, the whole table


@pytest.fixture(scope="module")
def case():
    """(query, keys and values [S, T, K, H], their pages, table): pages in any order, rubbish where none looks."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(S, N, H)).astype(np.float32)
    keys, values = rng.normal(size=(2, S, WIDTH * PAGE_SIZE, K, H)).astype(np.float32)
    pools = 100 * rng.normal(size=(2, K, PAGES, PAGE_SIZE, H)).astype(np.float32)
    table = np.zeros((S, WIDTH), np.int32)
    unused = iter(1 + rng.permutation(PAGES - 1))
    for slot, length in enumerate(LENGTHS):
        for token in range(length):
            column, offset = divmod(token, PAGE_SIZE)
            if offset == 0:
                table[slot, column] = next(unused)
            for pool, rows in zip(pools, (keys, values), strict=True):
                pool[:, table[slot, column], offset] = rows[slot, token]
    return query, keys, values, pools, table


def test_equals_softmax_over_contiguous_tokens(case):
    query, keys, values, (key_pages, value_pages), table = case
    mixed = attend(query, key_pages, value_pages, LENGTHS, table, backend="jnp")
    for slot, length in enumerate(LENGTHS):
        for head in range(N):
            kv_head = head // (N // K)  # query heads 0, 1 share the first, 2, 3 the second
            scores = keys[slot, :length, kv_head] @ query[slot, head] / np.sqrt(H)
            weights = np.exp(scores - scores.max(initial=0))
            expected = weights @ values[slot, :length, kv_head] / max(weights.sum(), 1e-30)
            np.testing.assert_allclose(mixed[slot, head], expected, atol=1e-5)


def test_nothing_to_see_gives_zeros(case):
    query, _, _, (key_pages, value_pages), table = case
    mixed = attend(query, key_pages, value_pages, np.zeros(S, np.int32), table, backend="jnp")
    np.testing.assert_array_equal(mixed, 0.0)


def test_an_unknown_backend_is_refused(case):
    query, _, _, (key_pages, value_pages), table = case
    with pytest.raises(ValueError, match="attention backend 'magic' is not one of jnp"):
        paged_attention(*map(jnp.asarray, (query, key_pages, value_pages, LENGTHS, table)), backend="magic")


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f])
def test_write_token_writes_its_place_only(wrap):
    pages = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)  # K pages page_size H
    new = np.array([[[-1, -2], [-3, -4]], [[-5, -6], [-7, -8]]], np.float32)  # S K H
    written = wrap(write_token)(jnp.asarray(pages), jnp.asarray(new), jnp.array([2, 1]), jnp.array([0, 1]))
    expected = pages.copy()
    expected[0, 2, 0], expected[1, 2, 0] = [-1, -2], [-3, -4]
    expected[0, 1, 1], expected[1, 1, 1] = [-5, -6], [-7, -8]
    np.testing.assert_array_equal(written, expected)


def test_write_token_keeps_the_dtype_of_the_pages():
    written = write_token(jnp.zeros((1, 2, 2, 4), jnp.bfloat16), jnp.ones((1, 1, 4)), jnp.array([1]), jnp.array([0]))
    assert written.dtype == jnp.bfloat16


# ---- pages in int8 -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def int8_case(case):
    """The case written token by token into pages of int8, and pages of the numbers that these stand for."""
    query, keys, values, (key_pages, _), table = case
    place = [(slot, *divmod(token, PAGE_SIZE)) for slot, length in enumerate(LENGTHS) for token in range(length)]
    pools, plain = [], []
    for rows in (keys, values):
        pages = empty_pages(key_pages.shape, None)
        for slot, column, offset in place:
            new = rows[slot, column * PAGE_SIZE + offset][None]
            pages = jit_write(pages, jnp.asarray(new), jnp.array([table[slot, column]]), jnp.array([offset]))
        pools.append(pages)
        plain.append(np.asarray(pages.values, np.float32) * np.asarray(pages.scale).swapaxes(2, 3))
    return query, pools, plain, table


def test_a_token_in_int8_has_a_scale_for_each_head():
    new = np.array([[[1.0, -0.5], [4.0, 0.0]], [[0.0, 0.0], [-0.1, 0.05]]], np.float32)  # S K H
    pages = jit_write(empty_pages((2, 3, 2, 2), None), jnp.asarray(new), jnp.array([2, 1]), jnp.array([0, 1]))
    values, scale = np.zeros((2, 3, 2, 2)), np.zeros((2, 3, 1, 2))
    values[0, 2, 0], values[1, 2, 0], values[0, 1, 1], values[1, 1, 1] = [127, -64], [127, 0], [0, 0], [-127, 64]
    scale[0, 2, 0, 0], scale[1, 2, 0, 0], scale[0, 1, 0, 1], scale[1, 1, 0, 1] = 1 / 127, 4 / 127, 0, 0.1 / 127
    np.testing.assert_array_equal(pages.values, values)  # -63.5 and 63.5 round to the even number
    np.testing.assert_allclose(pages.scale, scale, rtol=1e-6)


def test_tokens_of_one_page_in_int8_replace_what_was_there():
    old = Quantized(values=jnp.full((1, 2, 4, 2), 5, jnp.int8), scale=jnp.full((1, 2, 1, 4), jnp.inf))
    new = jnp.array([[[127.0, 0.0]], [[np.nan, 0.0]], [[254.0, 127.0]]])  # S K H
    pages = jit_write(old, new, jnp.array([1, 1, 1]), jnp.array([2, 0, 3]))
    np.testing.assert_array_equal(pages.scale, [[[[np.inf] * 4], [[0, np.inf, 1, 2]]]])  # the NaN is at offset 0
    np.testing.assert_array_equal(pages.values[0, 1, 2:], [[127, 0], [127, 64]])
    again = jit_write(pages, jnp.array([[[127.0, 0.0]]]), jnp.array([1]), jnp.array([0]))
    np.testing.assert_array_equal(again.scale[0, 1, 0], [1, np.inf, 1, 2])


def test_attention_over_int8_is_that_over_the_rounded_numbers(case, int8_case):
    query, pools, plain, table = int8_case
    mixed = attend(query, *pools, LENGTHS, table, backend="jnp")
    np.testing.assert_allclose(mixed, attend(query, *plain, LENGTHS, table, backend="jnp"), atol=1e-5)
    exact = attend(query, *case[3], LENGTHS, table, backend="jnp")
    assert 1e-3 < np.abs(mixed - exact).max() < 0.05
