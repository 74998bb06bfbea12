"""Prefill in chunks: which tokens come next, which pages they see, and attention that reads each page once."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy.transformer import LayerPlace
from reinforce_ada_jax.sampling import chunks
from reinforce_ada_jax.sampling.chunks import chunk_attention, next_chunk, visible_pages
from reinforce_ada_jax.sampling.page_writes import write_pages
from reinforce_ada_jax.sampling.paged_attention import empty_pages, paged_attention
from reinforce_ada_jax.sampling.state import empty_occupancy
from tests import standins
from tests.sampling import tiny


def prompts(length, cached, number):
    options = dataclasses.replace(tiny.OPTIONS, open_prompts=len(length))
    return empty_occupancy(options).prompts.replace(
        length=jnp.array(length), cached=jnp.array(cached), number=jnp.array(number)
    )


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.jit(f, static_argnums=1)])
def test_prompts_are_prefilled_in_the_order_in_which_they_were_opened(wrap):
    # Row 3 was opened first: 2 of its 5 stored tokens are there. Then row 0, with 4, and row 1, with 6. Row 2 is free.
    open_prompts = prompts(length=[5, 7, 1, 6], cached=[0, 0, 0, 2], number=[8, 9, 3, 7])
    chunk, cached = wrap(next_chunk)(open_prompts, 10)
    assert chunk.row.tolist() == [3] * 3 + [0] * 4 + [1] * 3
    assert chunk.position.tolist() == [2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert chunk.wanted.all() and cached.tolist() == [4, 3, 0, 5]
    chunk, cached = wrap(next_chunk)(open_prompts.replace(cached=cached), 10)
    assert chunk.row[:3].tolist() == [1] * 3 and chunk.position[:3].tolist() == [3, 4, 5]
    assert chunk.wanted.tolist() == [True] * 3 + [False] * 7 and cached.tolist() == [4, 6, 0, 5]
    chunk, cached = wrap(next_chunk)(open_prompts.replace(cached=cached), 10)
    assert not chunk.wanted.any() and cached.tolist() == [4, 6, 0, 5]


def test_visible_pages_are_in_the_order_of_the_tables():
    # Two tables share pages 7 and 2; the second one's last page has not been reached. Pages of 4 tokens.
    table = jnp.array([[7, 2, 9], [7, 2, 5], [3, 0, 0]])
    pages = visible_pages(table, jnp.array([9, 8, 1]), 4, 11)
    assert pages.page.tolist()[:4] == [7, 2, 9, 3] and pages.column.tolist()[:4] == [0, 1, 2, 0]
    assert int(pages.num_pages) == 4 and not pages.page[4:].any()
    assert int(visible_pages(table, jnp.zeros(3, jnp.int32), 4, 11).num_pages) == 0


@pytest.mark.parametrize("entries", [4, 8, 2**15])  # one, two and all tables at a time
def test_only_the_last_token_of_a_prompt_has_its_table_searched(entries, monkeypatch):
    """A chunk of three prompts: the second one begins with two pages of the first. Pages of 4 tokens."""
    standins.constants(monkeypatch, chunks, ENTRIES_AT_A_TIME=entries)
    prompts = jnp.array([[7, 2, 9, 4], [7, 2, 5, 0], [3, 8, 0, 0]])
    row, lengths = jnp.array([0, 0, 0, 1, 1, 2, 2, 2]), jnp.array([11, 12, 13, 9, 10, 1, 0, 0])
    pages = visible_pages(prompts[row], lengths, 4, 11, row=row)
    alone = visible_pages(prompts[row], lengths, 4, 11)
    assert int(pages.num_pages) == 6
    assert pages.page.tolist()[:6] == [7, 2, 9, 4, 5, 3] and pages.column.tolist()[:6] == [0, 1, 2, 3, 2, 0]
    jax.tree.map(np.testing.assert_array_equal, pages, alone)
    # Of rings those of the last six tokens: the first query of a prompt sees the oldest of them.
    start = jnp.maximum(lengths - 6, 0)
    pages = visible_pages(prompts[row], lengths, 4, 11, start, row)
    assert pages.page.tolist()[:5] == [2, 9, 4, 7, 5]
    jax.tree.map(np.testing.assert_array_equal, pages, visible_pages(prompts[row], lengths, 4, 11, start))


# Several pages in a batch, and several batches. Each three settings' values are in one of the fast cases.
@pytest.mark.parametrize(
    ("page_size", "pages", "dtype", "reach", "has_sinks"),
    [
        pytest.param(*pages, dtype, reach, sinks, marks=[pytest.mark.slow] * (number.bit_count() % 2))
        for number, (pages, dtype, reach, sinks) in enumerate(
            itertools.product([(4, 40), (100, 12)], [jnp.float32, None], [None, 6], [False, True])
        )
    ],
    ids=lambda value: "float32" if value is jnp.float32 else None,
)
def test_attention_is_that_of_the_decode_step(page_size, pages, dtype, reach, has_sinks):
    rng = np.random.default_rng(0)
    key_pages, value_pages = rng.normal(size=(2, 2, 2 * pages, page_size, 8)).astype(np.float32)  # K L*pages page H
    table = np.zeros((7, 5), np.int32)
    table[:4], table[4:6, :3], table[6, 0] = [1, 2, 3, 4, 5], [6, 7, 8], 9
    table[5, 0] = 1  # the first page of another prompt, shared
    lengths = (np.array([4.5, 4.5, 0.2, 3, 2.6, 2.5, 0]) * page_size).astype(np.int32)
    lengths[1] += 1
    query = rng.normal(size=(7, 4, 8)).astype(np.float32)
    slides, sinks = None if reach is None else jnp.bool(True), jnp.linspace(-9.0, 9.0, 4) if has_sinks else None
    layer = LayerPlace(1, reach or 0, slides, sinks)

    @jax.jit
    def both(query, lengths, table, *contents):
        """By a prefill and by a decode step, in the second layer."""
        visible = visible_pages(table, lengths, page_size, pages)
        heads, page = jnp.arange(2)[:, None], jnp.arange(2 * pages)[None]
        pools = [write_pages(empty_pages(x.shape, dtype), x, heads, page) for x in contents]
        mixed = chunk_attention(query, *pools, lengths, table, visible, pages, layer)
        return mixed, paged_attention(query, *pools, lengths, pages + table, backend="jnp", layer=layer)

    mixed, expected = both(query, lengths, table, key_pages, value_pages)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
    assert not mixed[6].any()
