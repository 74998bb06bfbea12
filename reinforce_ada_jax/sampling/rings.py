"""Places of pages in the pool: those of sliding layers are rings, whose oldest page takes the next tokens.

A sliding layer sees the last tokens of a sequence only. With rings (`EngineOptions.ring_window`) such a layer has a
fixed number of pages for each slot and each prompt row, and none that is allocated: tokens of column c of a page table
are in page c modulo the size of the ring. New tokens are written over those that left the window, so no page is
released. A prompt's ring has room for a window and a chunk, since all keys of a chunk are written before a query reads.
A draw reads the whole pages of its prompt in the prompt's ring, and its own tokens are in the ring of its slot.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import LayerPlace
from reinforce_ada_jax.sampling.state import EngineOptions, Slots


def ring_pages(tokens: int, page_size: int) -> int:
    """Returns the most pages that have a part of this many tokens in a row, at least 2."""
    return (tokens - 2) // page_size + 2


@dataclasses.dataclass(frozen=True)
class Rings:
    """Pages of one sliding layer: NULL, the rings of prompt rows, and those of slots."""

    prompts: int  # rows
    of_prompt: int  # pages of a ring
    slots: int
    of_slot: int

    @property
    def pages(self) -> int:
        """Pages of a layer."""
        return 1 + self.prompts * self.of_prompt + self.slots * self.of_slot

    def prompt_page(self, row: Any, column: Any) -> Any:
        """Returns the page of a column in the ring of a prompt row."""
        return 1 + row * self.of_prompt + column % self.of_prompt

    def slot_page(self, ring: Any, column: Any) -> Any:
        """Returns the page of a column in a slot's ring."""
        return 1 + self.prompts * self.of_prompt + ring * self.of_slot + column % self.of_slot

    def slot_table(self, slots: Slots) -> Int[Array, "S width"]:
        """Returns the pages of slots, by column: whole pages of the prompt first, then a slot's own."""
        column = jnp.arange(slots.table.shape[1])[None]
        of_prompt = self.prompt_page(slots.requests.prompt_row[:, None], column)
        ring = jnp.asarray(slots.ring)[:, None]
        return jnp.where(column < slots.shared[:, None], of_prompt, self.slot_page(ring, column))


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The pages of all layers in the pool."""

    pages: int  # of each layer without rings
    first: Int[np.ndarray, " L"]  # first page of each layer
    slides: np.ndarray  # [L]; True where the layer has rings
    total: int
    rings: Rings | None

    def first_page(self, layer: LayerPlace) -> Any:
        """Returns the first page of a layer."""
        if self.rings is None:
            return layer.number * self.pages
        return jnp.asarray(self.first, jnp.int32)[layer.number]

    def choose(self, layer: LayerPlace, of_pool: Array, of_rings: Array | None) -> Array:
        """Returns a layer's page numbers: `of_rings` if it slides, else `of_pool`."""
        if of_rings is None or layer.slides is None:
            return of_pool
        return jnp.where(layer.slides, of_rings, of_pool)

    def of_layers(self, of_pool: Int[Array, " N"], of_rings: Int[Array, " N"] | None) -> Int[Array, "L N"]:
        """Returns places in the pool, of all layers, for page numbers within a layer."""
        numbers = of_pool[None]
        if of_rings is not None:
            numbers = jnp.where(jnp.asarray(self.slides)[:, None], of_rings[None], numbers)
        return jnp.asarray(self.first, jnp.int32)[:, None] + numbers


def rings(options: EngineOptions) -> Rings | None:
    """Returns the rings of sliding layers; None: all layers have pages of the pool."""
    if not options.ring_window:
        return None
    of_prompt = ring_pages(options.ring_window + options.prefill_tokens, options.page_size)
    of_slot = ring_pages(options.ring_window + options.drafts, options.page_size)
    return Rings(
        options.open_prompts, min(of_prompt, options.prompt_width), options.slots, min(of_slot, options.table_width)
    )


def layout(architecture: Architecture, options: EngineOptions) -> Layout:
    """Returns where the layers of an engine's pool are: one behind the other."""
    own = rings(options)
    slides = np.isin(np.arange(architecture.num_layers), architecture.sliding_layers) & (own is not None)
    sizes = np.where(slides, 0 if own is None else own.pages, options.pages)
    ends = np.cumsum(sizes)
    return Layout(options.pages, ends - sizes, slides, int(ends[-1]), own)


def choose_ring_window(architecture: Architecture, options: EngineOptions) -> int:
    """Returns `EngineOptions.ring_window` of an engine for training: the window, if rings have fewer pages than tables.

    0 where no layer slides, or rings would be no smaller.
    """
    if not architecture.window:
        return 0
    own = rings(dataclasses.replace(options, ring_window=architecture.window))
    return architecture.window if own is not None and own.pages < options.pages else 0
