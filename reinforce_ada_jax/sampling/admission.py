"""Admission of draws: how many may start, so that there are enough pages for them and the active ones.

A draw takes its pages one by one as it grows, and it is not known at the start how many it will take. The forecast uses
the responses seen so far: among those that needed at least h pages, the share that needed h + j. It is computed in
integers, so that all devices, and the model of the window in bench/, decide alike.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from reinforce_ada_jax.sampling.pages import ArrayLike

# A forecast counts pages in units of 1 / FRACTION.
FRACTION = 256
# Responses at which the counts are halved: older ones count less, and products stay within int32.
MOST_SEEN = 2**14


class Lengths:
    """Numbers of pages that the responses of a session needed, in addition to those of their prompts."""

    def __init__(self, width: int):
        """Starts with one response of `width` pages: until others are seen, every draw is taken to be the longest."""
        self._ended = np.zeros(width + 1, np.int64)
        self._ended[width] = 1

    def add(self, num_pages: int) -> None:
        """Adds a finished response that held this number of pages of its own."""
        self._ended[num_pages] += 1
        if self._ended.sum() >= MOST_SEEN:
            self._ended[:-1] //= 2
            self._ended[-1] = max(1, self._ended[-1] // 2)

    def mean(self) -> float:
        return float(self._ended @ np.arange(self._ended.size) / self._ended.sum())

    def survivors(self) -> Int[np.ndarray, " width"]:
        """Returns for h = 1, 2, ... pages how many responses needed at least h."""
        return self._ended[::-1].cumsum()[::-1][1:].astype(np.int32)


def expected_pages(survivors: Int[ArrayLike, " width"], pages: Int[ArrayLike, " S"]) -> Int[ArrayLike, "S ahead"]:
    """Returns the pages that draws are expected to hold when they have grown by j from `pages` own pages.

    The unit is 1 / FRACTION of a page. A draw that ends before it has grown by j holds none. Draws have at least one
    page. Only the rows of slots are
    computed: a table with a row for each number of pages has 4 million entries where responses have 65,536 tokens and
    pages 32, and took 7 to 13 ms of each window on a CPU.
    """
    width = survivors.shape[0]
    later = pages[:, None] + jnp.arange(width)[None]
    reached = jnp.where(later <= width, survivors[jnp.minimum(later, width) - 1], 0)
    return (reached * FRACTION // jnp.maximum(survivors[pages - 1], 1)[:, None] * later).astype(jnp.int32)


def admissible(
    survivors: Int[ArrayLike, " width"],
    held: Int[ArrayLike, " S"],
    limit: Int[ArrayLike, " S"],
    room: Int[ArrayLike, ""],
) -> Bool[ArrayLike, " S"]:
    """Returns True for idle slots whose draws may start: with them the forecast stays within `room` at all times.

    No draw overtakes an earlier one that may not start. With all slots idle the first one always may: it fits alone.
    `survivors` is from `Lengths`; `held` are the own pages of each slot, 0 for idle ones; `limit` is the most
    that its draw needs, or the draw that it would start; 0: there is none. Slots may hold `room` pages in all.
    """
    idle = held == 0
    pages = jnp.maximum(held, 1)
    in_reach = pages[:, None] + jnp.arange(survivors.shape[0])[None] <= limit[:, None]
    needed = jnp.where(in_reach, expected_pages(survivors, pages), 0)
    new = jnp.where(idle[:, None], needed, 0)
    spare = room * FRACTION - (needed - new).sum(0)
    # A draw needs no room at a time when it is expected to have ended.
    fits = ((new.cumsum(0) <= spare[None]) | (new == 0)).all(1)
    return idle & (limit > 0) & ((~fits).cumsum() == 0)
