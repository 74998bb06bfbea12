"""The pool of cache pages, allocated and released inside compiled programs.

A page holds the keys and values of `page_size` tokens for every layer. Free pages are on a stack; allocation pops,
release pushes, and both are vectorised over rows, so that a compiled program can do them in the middle of decoding.
Page `NULL` is never handed out: idle slots and padding write there, and unused table entries point there.

Which physical page a row gets depends on history; what is computed from it does not.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from reinforce_ada_jax.policy.record import Record

NULL = 0
# Triton multiplies matrices with at least this many rows and columns.
TRITON_TILE = 16
# The same records hold device arrays in programs and numpy arrays on the host: for a type checker, either.
if TYPE_CHECKING:
    ArrayLike = Any
else:
    ArrayLike = Array | np.ndarray
Tokens = TypeVar("Tokens", int, Array, np.ndarray)


def padded_head_dim(head_dim: int, backend: str) -> int:
    """Returns how many numbers a page holds for a token and head: `head_dim` are used, the others stay zero.

    The TPU kernel reads lanes of 128, Triton blocks of a power of two. Padding the pages at every step would copy the
    whole cache, so they are allocated that wide. The zeros change neither scores nor what is mixed.
    """
    if backend == "pallas_tpu":
        return -(-head_dim // 128) * 128
    if backend == "pallas_gpu":
        return max(TRITON_TILE, 1 << (head_dim - 1).bit_length())
    return head_dim


class PagePool(Record):
    """Pool of pages: those in `stack[:available]` are free, and the last of these is allocated next."""

    stack: Int[ArrayLike, " pages"]
    available: Int[ArrayLike, ""]


def make_pool(num_pages: int) -> PagePool:
    """Returns a pool of `num_pages` pages with all but `NULL` free."""
    stack = jnp.concatenate([jnp.arange(num_pages - 1, 0, -1), jnp.zeros(1, int)]).astype(jnp.int32)
    return PagePool(stack=stack, available=jnp.asarray(num_pages - 1, jnp.int32))


def allocate(pool: PagePool, counts: Int[Array, " R"], width: int) -> tuple[PagePool, Int[Array, "R width"]]:
    """Allocates `counts[r]` pages for each row r; entries beyond a row's count are `NULL`.

    The caller ensures sum(counts) <= pool.available and counts <= width.
    """
    before = jnp.cumsum(counts) - counts
    column = jnp.arange(width)[None]
    index = pool.available - 1 - (before[:, None] + column)
    pages = jnp.where(column < counts[:, None], pool.stack[jnp.maximum(index, 0)], NULL)
    return pool.replace(available=pool.available - jnp.sum(counts)), pages


def release(pool: PagePool, pages: Int[Array, "R width"], held: Bool[Array, "R width"]) -> PagePool:
    """Releases those of `pages` that are marked as held."""
    pages, held = pages.reshape(-1), held.reshape(-1)
    out_of_range = pool.stack.shape[0]
    place = jnp.where(held, pool.available + jnp.cumsum(held) - 1, out_of_range)
    return PagePool(
        stack=pool.stack.at[place].set(pages, mode="drop"),
        available=pool.available + jnp.sum(held, dtype=jnp.int32),
    )


def num_pages(tokens: Tokens, page_size: int) -> Tokens:
    """Returns the number of pages that hold this many tokens."""
    return (tokens + page_size - 1) // page_size


def own_pages(prompt: Tokens, response: Tokens, page_size: int) -> Tokens:
    """Returns the pages that a response needs in addition to its prompt's; lengths in tokens, at least 1.

    The prompt's last token starts the first of them, and the response's last token is never stored.
    """
    return (prompt + response - 2) // page_size - (prompt - 1) // page_size + 1
