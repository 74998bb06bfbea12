"""Attention of one new token per slot over pages of keys and values: one signature, several backends.

Keys and values of all layers share one pool [K, L * pages, page_size, padded_H], with padded_H from
`padded_head_dim`: page p of layer l is l * pages + p. In int8 the pool is `Quantized`, and each token has a scale for
each head, [K, L * pages, 1, page_size]: it is multiplied into scores and weights, which are fewer than keys and values.
Backends are chosen by name (`BACKENDS`). `jnp` runs on any device; the kernels for TPU and GPU are in
pallas_attention.py. All of them read live pages only: those that hold tokens of active slots.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.policy import invariant
from reinforce_ada_jax.policy.quantization import Quantized
from reinforce_ada_jax.policy.transformer import FULL_LAYER, LayerPlace, Rowwise, all_rows
from reinforce_ada_jax.sampling.pages import num_pages

Pages = Float[Array, "K pages page_size padded_H"] | Quantized
Pools = tuple[Pages, Pages]  # pages of keys, pages of values
BACKENDS = ("jnp", "invariant", "pallas_tpu", "pallas_gpu")
FOR_PLATFORM = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
# Keys and values that the jnp backend reads at a time: they stay in a core's own cache (L2 of 1 or 2 MiB).
BATCH_BYTES = 2**19


class Softmax(NamedTuple):
    """Limits of the softmax of a layer."""

    start: Int[Array | np.ndarray, " S"] | None = None  # first token that each slot sees, in its first page; None: 0
    sinks: Float[Array | np.ndarray, " N"] | None = None  # as `LayerPlace.sinks`


FULL_SOFTMAX = Softmax()


def choose_backend(name: str, numerics: str = "fast") -> str:
    """Returns `name`, or for "auto" the backend of the platform; with invariant numerics "invariant".

    Raises:
      ValueError: invariant numerics on devices that are no CPUs.
    """
    if numerics == "invariant":
        invariant.check_platform(jax.default_backend())
        return "invariant"
    return FOR_PLATFORM.get(jax.default_backend(), "jnp") if name == "auto" else name


def empty_pages(shape: tuple[int, int, int, int], dtype: DTypeLike | None) -> Pages:
    """Returns pages [K, pages, page_size, padded_H] of zeros; without a dtype, pages in int8."""
    if dtype is not None:
        return jnp.zeros(shape, dtype)
    heads, pages, page_size, _ = shape
    return Quantized(values=jnp.zeros(shape, jnp.int8), scale=jnp.zeros((heads, pages, 1, page_size), jnp.float32))


def paged_attention(
    query: Float[Array | np.ndarray, "S N H"],
    key_pages: Pages | np.ndarray,
    value_pages: Pages | np.ndarray,
    lengths: Int[Array | np.ndarray, " S"],
    table: Int[Array | np.ndarray, "S width"],
    *,
    backend: str,
    mesh: Mesh | None = None,
    layer: LayerPlace = FULL_LAYER,
) -> Float[Array, "S N H"]:
    """Computes softmax(q k / sqrt(H)) v over the first `lengths[s]` tokens of slot s; zeros where the length is 0.

    Args:
      query: the new token's, rotated.
      key_pages: the pool, the new token's key already written; entries beyond H are zero (`padded_head_dim`).
      value_pages: likewise.
      lengths: tokens that each slot may see, the new one included; at most width * page_size.
      table: physical pages of each slot in order; entries beyond its length must be valid page numbers.
      backend: one of `BACKENDS`.
      mesh: where heads are split over `tensor`; the kernels need it, XLA finds out for itself.
      layer: a slot sees only its last tokens within the reach of the layer; its sinks are scores of keys without value.
    """
    if backend == "invariant":
        return _by_tiles(query, key_pages, value_pages, lengths, table, layer)
    start = None
    if (reach := layer.reach) is not None:
        lengths, table, start = seen_pages(lengths, table, key_pages.shape[2], reach)
    softmax = Softmax(start, layer.sinks)
    if backend == "jnp":
        return _live_pages(query, key_pages, value_pages, lengths, table, softmax)
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is not one of {', '.join(BACKENDS)}.")
    if mesh is None:
        raise ValueError(f"attention backend {backend!r} needs the mesh that its heads are split over.")
    from reinforce_ada_jax.sampling import pallas_attention  # noqa: PLC0415  (importing Pallas takes a fifth of a second)

    kernels = {"pallas_tpu": pallas_attention.pallas_tpu, "pallas_gpu": pallas_attention.pallas_gpu}
    return kernels[backend](query, key_pages, value_pages, lengths, table, softmax, mesh=mesh)


def seen_pages(
    lengths: Int[Array | np.ndarray, " S"],
    table: Int[Array | np.ndarray, "S width"],
    page_size: int,
    reach: Int[Array, ""],
) -> tuple[Int[Array, " S"], Int[Array, "S width"], Int[Array, " S"]]:
    """Returns what slots see of their last `reach` tokens: (lengths, table, start).

    The table begins with the first page in which a token is seen; lengths and `start`, the first token that is seen,
    count from there. So pages before the window are not read.
    """
    start = jnp.maximum(lengths - reach, 0)
    first = start // page_size
    column = jnp.minimum(first[:, None] + jnp.arange(table.shape[1])[None], table.shape[1] - 1)
    before = first * page_size
    return jnp.asarray(lengths - before), jnp.take_along_axis(jnp.asarray(table), column, axis=1), start - before


def _live_pages(query, key_pages, value_pages, lengths, table, softmax):
    """Puts the live pages of all slots into one row, and computes a batch of them at a time.

    Each page gives a softmax of its own (largest score, sum, weighted values); those of a slot are joined at the end.
    Gathering every slot's whole table instead took 10 times as long at 64 slots with room for 320 tokens.
    """
    num_slots, num_heads, head_dim = query.shape
    kv_heads, _, page_size, padded_dim = key_pages.shape
    width, group = table.shape[1], num_heads // kv_heads
    dtype = query.dtype if isinstance(key_pages, Quantized) else key_pages.dtype
    page_bytes = 2 * kv_heads * page_size * padded_dim * query.dtype.itemsize
    at_a_time = max(1, min(BATCH_BYTES // page_bytes, num_slots * width))
    most = num_slots * width + -(num_slots * width) % at_a_time

    counts = num_pages(lengths, page_size)
    first = jnp.cumsum(counts) - counts
    slot = jnp.repeat(jnp.arange(num_slots), counts, total_repeat_length=most)
    column = jnp.clip(jnp.arange(most) - first[slot], 0, width - 1)
    page, tokens = table[slot, column], lengths[slot] - column * page_size
    unseen = None if softmax.start is None else softmax.start[slot] - column * page_size
    # K first, as in the pages: otherwise XLA would transpose the pages, which are many times as large.
    grouped = pad_head_dim(query * head_dim**-0.5, key_pages)
    grouped = grouped.reshape(num_slots, kv_heads, group, padded_dim).swapaxes(0, 1)

    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one_batch(index, partial):
        def these(row):
            return jax.lax.dynamic_slice(row, (index * at_a_time,), (at_a_time,))

        pages = these(page)
        keys, values = (jax.tree.map(lambda x: x[:, pages], pool) for pool in (key_pages, value_pages))
        scores = product("KCGH,KCTH->KCGT", grouped[:, these(slot)], numbers(keys, dtype))
        if isinstance(keys, Quantized):
            scores = scores * keys.scale
        seen = jnp.arange(page_size)[None] < these(tokens)[:, None]
        if unseen is not None:
            seen = seen & (jnp.arange(page_size)[None] >= these(unseen)[:, None])
        scores = jnp.where(seen[None, :, None], scores, -jnp.inf)
        # Beyond the last live page the scores belong to another page, or are all -inf; nothing reads them.
        largest = jnp.maximum(scores.max(-1), jnp.finfo(jnp.float32).min)
        weights = jnp.exp(scores - largest[..., None])
        scaled = weights * values.scale if isinstance(values, Quantized) else weights
        mixed = product("KCGT,KCTH->KCGH", scaled.astype(dtype), numbers(values, dtype))
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, new, index * at_a_time, axis=1)
            for whole, new in zip(partial, (largest, weights.sum(-1), mixed), strict=True)
        )

    partial = (
        jnp.zeros((kv_heads, most, group), jnp.float32),
        jnp.zeros((kv_heads, most, group), jnp.float32),
        jnp.zeros((kv_heads, most, group, padded_dim), jnp.float32),
    )
    num_batches = num_pages(jnp.sum(counts), at_a_time)
    largest, total, values = jax.lax.fori_loop(0, num_batches, one_batch, partial)

    of_slot = jnp.minimum(first[:, None] + jnp.arange(width)[None], most - 1)
    live = (jnp.arange(width)[None] < counts[:, None])[None, ..., None]  # 1 S width 1
    largest = jnp.where(live, largest[:, of_slot], -jnp.inf)
    overall = jnp.maximum(largest.max(2, keepdims=True), jnp.finfo(jnp.float32).min)
    sinks = None if softmax.sinks is None else softmax.sinks.reshape(kv_heads, 1, 1, group)
    overall = overall if sinks is None else jnp.maximum(overall, sinks)
    scale = jnp.exp(largest - overall)  # K S width G; 0 where not live
    mixed = jnp.sum(scale[..., None] * values[:, of_slot], axis=2)
    total = jnp.sum(scale * total[:, of_slot], axis=2)
    total = total if sinks is None else total + jnp.exp(sinks - overall)[:, :, 0]
    mixed = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return mixed[..., :head_dim].transpose(1, 0, 2, 3).reshape(query.shape).astype(query.dtype)


def _by_tiles(query, key_pages, value_pages, lengths, table, layer):
    """Computes `invariant.attention` by tiles of slots; keys are gathered by token, so the page size has no effect."""
    kv_heads, _, page_size, _ = key_pages.shape
    capacity = table.shape[1] * page_size

    def one_tile(query, lengths, table):
        def read(tile):
            token = jnp.minimum(tile * invariant.KEYS + jnp.arange(invariant.KEYS), capacity - 1)
            page, offset = table[:, token // page_size], (token % page_size)[None]
            return key_pages[:, page, offset], value_pages[:, page, offset]

        return invariant.attention(query, lengths, kv_heads, read, layer)

    return choose_rowwise("invariant", lengths > 0)(one_tile, query, lengths, table)


def choose_rowwise(backend: str, wanted: Bool[Array, " S"]) -> Rowwise:
    """Returns how `transformer.run` computes rows outside of attention; rows that are not wanted may be zeros."""
    if backend != "invariant":
        return all_rows
    return invariant.by_tiles(jnp.max(jnp.where(wanted, 1 + jnp.arange(wanted.shape[0]), 0)))


def numbers(pages: Pages, dtype: DTypeLike) -> Array:
    """Returns the numbers in pages, not multiplied by their scales."""
    return pages.values.astype(dtype) if isinstance(pages, Quantized) else pages


def pad_head_dim(new: Float[Array, "... H"], pages: Pages) -> Float[Array, "... padded_H"]:
    """Returns keys or values, padded with zeros to the width of the pages."""
    missing = pages.shape[-1] - new.shape[-1]
    return jnp.pad(new, [(0, 0)] * (new.ndim - 1) + [(0, missing)]) if missing else new
