"""Pages are counted, taken and given back: none is lost or has two holders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_ada_jax.sampling.pages import NULL, allocate, make_pool, num_pages, release

PAGES, ROWS, WIDTH = 12, 3, 4
COMPILED = jax.jit(allocate, static_argnums=2), jax.jit(release)


def free_pages(pool):
    return np.asarray(pool.stack)[: int(pool.available)].tolist()


def test_num_pages_rounds_up():
    assert [num_pages(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("allocate, release", [COMPILED, (allocate, release)], ids=["jit", "eager"])
def test_allocate_and_release_by_hand(allocate, release):
    pool = make_pool(6)
    assert free_pages(pool) == [5, 4, 3, 2, 1]
    pool, pages = allocate(pool, jnp.array([2, 0, 1]), WIDTH)
    assert pages.tolist() == [[1, 2, NULL, NULL], [NULL] * 4, [3, NULL, NULL, NULL]]
    assert free_pages(pool) == [5, 4]
    # Page 2 alone goes back, and is the next to be handed out; what isn't marked as held isn't touched.
    pool = release(pool, pages, jnp.array([[False, True, False, False], [False] * 4, [False] * 4]))
    assert free_pages(pool) == [5, 4, 2]
    # The last page can go too.
    pool, pages = allocate(pool, jnp.array([1, 2, 0]), WIDTH)
    assert pages.tolist() == [[2, NULL, NULL, NULL], [4, 5, NULL, NULL], [NULL] * 4]
    assert free_pages(pool) == []


@settings(max_examples=40)
@given(data=st.data(), decode_steps=st.integers(1, 12))
def test_pages_are_conserved(data, decode_steps):
    """Random rows are released, random rows allocated: no page is held twice, lost, or the null page."""
    allocate, release = COMPILED
    pool = make_pool(PAGES)
    rows: list[list[int]] = []
    for _ in range(decode_steps):
        leaving = [row for row in rows if data.draw(st.booleans())][:ROWS]
        rows = [row for row in rows if row not in leaving]
        pages = np.zeros((ROWS, WIDTH), np.int32)
        for index, row in enumerate(leaving):
            pages[index, : len(row)] = row
        pool = release(pool, pages, pages != NULL)

        wanted = np.array(data.draw(st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS)))
        counts = np.where(np.cumsum(wanted) <= int(pool.available), wanted, 0)  # what the caller has to see to
        pool, pages = allocate(pool, counts, WIDTH)
        for row, count in zip(np.asarray(pages), counts, strict=True):
            assert (row[count:] == NULL).all()
            rows += [row[:count].tolist()] if count else []
        assert sorted(sum(rows, free_pages(pool))) == list(range(1, PAGES))
