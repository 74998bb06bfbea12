"""Prefill inside the decode window: tokens of the prompts that wait, a fixed number in one forward pass.

A chunk may hold the end of one prompt, several whole ones and the beginning of another. All its keys and values are
written before any of its queries reads, so a token sees those before it, in the chunk and in the cache alike.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt

from reinforce_ada_jax.policy import experts
from reinforce_ada_jax.policy.quantization import Quantized
from reinforce_ada_jax.policy.transformer import FULL_LAYER, Decoder, Execution, LayerPlace, run
from reinforce_ada_jax.sampling import rings as rings_lib
from reinforce_ada_jax.sampling.page_writes import write_tokens
from reinforce_ada_jax.sampling.paged_attention import (
    Pages,
    Pools,
    choose_rowwise,
    numbers,
    pad_head_dim,
    paged_attention,
)
from reinforce_ada_jax.sampling.pages import NULL, num_pages
from reinforce_ada_jax.sampling.state import EngineOptions, Prompts, Routes

# Cached tokens that all queries of a chunk attend to at a time.
TOKENS_AT_A_TIME = 256
# Entries of page tables that are searched for visible pages at a time.
ENTRIES_AT_A_TIME = 2**15


class Chunk(NamedTuple):
    """Prompt tokens of one forward pass."""

    row: Int[Array, " C"]  # of the prompt
    position: Int[Array, " C"]  # in the prompt
    wanted: Bool[Array, " C"]  # False: padding


class VisiblePages(NamedTuple):
    """Pages that queries see, each once, at the front; a page has the same column in every table that holds it."""

    page: Int[Array, " U"]
    column: Int[Array, " U"]
    num_pages: Int[Array, ""]


def next_chunk(prompts: Prompts, num_tokens: int) -> tuple[Chunk, Int[Array, " R"]]:
    """Returns the next tokens to prefill, in the order in which prompts were opened, and `cached` after them."""
    missing = prompts.missing
    order = jnp.argsort(jnp.where(missing > 0, prompts.number, jnp.iinfo(jnp.int32).max))
    end = jnp.cumsum(missing[order])
    begin, place = end - missing[order], jnp.arange(num_tokens)
    index = jnp.minimum(jnp.sum(end[None] <= place[:, None], axis=1), order.shape[0] - 1)
    wanted = place < end[-1]
    position = jnp.where(wanted, prompts.cached[order[index]] + place - begin[index], 0)
    taken = jnp.clip(num_tokens - begin, 0, missing[order])
    return Chunk(row=order[index], position=position, wanted=wanted), prompts.cached.at[order].add(taken)


def visible_pages(
    table: Int[Array, "C width"],
    lengths: Int[Array, " C"],
    page_size: int,
    pages: int,
    start: Int[Array, " C"] | None = None,
    row: Int[Array, " C"] | None = None,
) -> VisiblePages:
    """Returns the pages of the first `lengths[c]` tokens of each table; `pages` is their number in the pool.

    With `start` they are the pages of tokens from `start` on, and the pages of a table may be a ring. They are in the
    order of the tables: page numbers depend on history, and sums must not.

    Queries with the same `row` have the same table, and are next to each other by increasing lengths. Only the table
    of the last one is searched: a chunk of 128 tokens of one prompt of 65,536 would search 262,000 entries otherwise.
    Without `row` every table is searched.
    """
    num_queries, width = table.shape
    query = jnp.arange(num_queries)
    row = query if row is None else row
    start = jnp.zeros_like(lengths) if start is None else start
    is_other = row[1:] != row[:-1]
    is_last = jnp.append(is_other | (lengths[1:] == 0), True) & (lengths > 0)
    first = jax.lax.cummax(jnp.where(jnp.append(True, is_other), query, 0))
    at_a_time = max(1, min(num_queries, ENTRIES_AT_A_TIME // width))
    # `last` has the last query of each row at its front; the entries behind them see nothing.
    last = jnp.full(num_pages(num_queries, at_a_time) * at_a_time, num_queries)
    last = last.at[jnp.where(is_last, jnp.cumsum(is_last) - 1, last.shape[0])].set(query, mode="drop")
    most = min(pages, num_queries * width)

    def some_tables(index, found):
        page_of, column_of, is_found, count = found
        chosen = jax.lax.dynamic_slice(last, (index * at_a_time,), (at_a_time,))
        end = num_pages(lengths, page_size).at[chosen].get(mode="fill", fill_value=0)
        begin = (start[first] // page_size).at[chosen].get(mode="fill", fill_value=0)
        column = jnp.broadcast_to(jnp.arange(width)[None], (at_a_time, width))
        is_seen = (column >= begin[:, None]) & (column < end[:, None])
        page = jnp.where(is_seen, table.at[chosen].get(mode="clip"), NULL).reshape(-1)
        place = jnp.arange(page.shape[0])
        first_place = jnp.full(pages, page.shape[0]).at[page].min(place)
        is_new = (page != NULL) & ~is_found[page] & (first_place[page] == place)
        target = jnp.where(is_new, count + jnp.cumsum(is_new) - 1, most)
        return (
            page_of.at[target].set(page, mode="drop"),
            column_of.at[target].set(column.reshape(-1), mode="drop"),
            is_found.at[page].set(True),
            count + jnp.sum(is_new, dtype=jnp.int32),
        )

    nothing = jnp.zeros(most, jnp.int32)
    found = nothing, nothing, jnp.zeros(pages, bool), jnp.int32(0)
    num_batches = num_pages(jnp.sum(is_last), at_a_time)
    page, column, _, count = jax.lax.fori_loop(0, num_batches, some_tables, found)
    return VisiblePages(page=page, column=column, num_pages=count)


def chunk_attention(
    query: Float[Array, "C N H"],
    key_pages: Pages,
    value_pages: Pages,
    lengths: Int[Array, " C"],
    table: Int[Array, "C width"],
    visible: VisiblePages,
    first_page: Int[Array, ""] | int = 0,
    layer: LayerPlace = FULL_LAYER,
) -> Float[Array, "C N H"]:
    """Computes `paged_attention` for queries that share most of their pages: each page is read once for all queries.

    Pages are those of all layers, and `first_page` the first of this layer. The table has the numbers within a layer;
    `visible` is from `visible_pages`.
    """
    num_queries, num_heads, head_dim = query.shape
    kv_heads, _, page_size, padded_dim = key_pages.shape
    group, at_a_time = num_heads // kv_heads, max(1, TOKENS_AT_A_TIME // page_size)
    dtype = query.dtype if isinstance(key_pages, Quantized) else key_pages.dtype
    padding = (0, -visible.page.shape[0] % at_a_time)
    page, column = jnp.pad(visible.page, padding), jnp.pad(visible.column, padding)
    # K Q H, with the query heads of a kv head in the axis of queries: one matrix product for each kv head.
    grouped = pad_head_dim(query * head_dim**-0.5, key_pages).reshape(num_queries, kv_heads, group, padded_dim)
    grouped = grouped.swapaxes(0, 1).reshape(kv_heads, num_queries * group, padded_dim)

    def in_one_row(pages):
        return numbers(pages, dtype).reshape(kv_heads, -1, padded_dim)

    def one_batch(index, partial):
        largest, total, mixed = partial
        pages, columns = (jax.lax.dynamic_slice(x, (index * at_a_time,), (at_a_time,)) for x in (page, column))
        keys, values = (jax.tree.map(lambda x: x[:, first_page + pages], pool) for pool in (key_pages, value_pages))
        own = ((table[:, columns] == pages[None]) & (pages != NULL)[None])[..., None]
        token = (columns[:, None] * page_size + jnp.arange(page_size)[None])[None]
        seen = layer.sees(token, lengths[:, None, None])
        seen = jnp.repeat((own & seen).reshape(num_queries, -1), group, axis=0)
        scores = jnp.einsum("KQH,KTH->KQT", grouped, in_one_row(keys), preferred_element_type=jnp.float32)
        if isinstance(keys, Quantized):
            scores = scores * keys.scale.reshape(kv_heads, 1, -1)
        scores = jnp.where(seen[None], scores, -jnp.inf)
        overall = jnp.maximum(largest, scores.max(-1))
        weights, scale = jnp.exp(scores - overall[..., None]), jnp.exp(largest - overall)
        scaled = weights * values.scale.reshape(kv_heads, 1, -1) if isinstance(values, Quantized) else weights
        new = jnp.einsum("KQT,KTH->KQH", scaled.astype(dtype), in_one_row(values), preferred_element_type=jnp.float32)
        return overall, total * scale + weights.sum(-1), mixed * scale[..., None] + new

    none = jnp.zeros(grouped.shape[:2], jnp.float32)
    smallest = jnp.full_like(none, jnp.finfo(jnp.float32).min)
    partial = (smallest, none, jnp.zeros(grouped.shape, jnp.float32))
    if layer.sinks is not None:
        partial = (jnp.tile(layer.sinks.reshape(kv_heads, group), num_queries), none + 1, partial[2])
    _, total, mixed = jax.lax.fori_loop(0, num_pages(visible.num_pages, at_a_time), one_batch, partial)
    mixed = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    mixed = mixed.reshape(kv_heads, num_queries, group, padded_dim).swapaxes(0, 1)
    return mixed[..., :head_dim].reshape(query.shape).astype(query.dtype)


def prefill_chunk(
    model: Decoder,
    prompts: Prompts,
    prompt_tokens: Int[Array, "R max_prompt"],
    pools: Pools,
    routes: Routes | None,
    adapters: Int[Array, " R"],
    options: EngineOptions,
    mesh: Mesh,
) -> tuple[Pools, Routes | None, Int[Array, " R"]]:
    """Prefills up to `options.prefill_tokens` tokens of prompts; returns pages, routes and the new `Prompts.cached`."""
    chunk, cached = next_chunk(prompts, options.prefill_tokens)
    backend, page_size, table = options.attention, options.page_size, prompts.table[chunk.row]
    layout, lengths = rings_lib.layout(model.architecture, options), jnp.where(chunk.wanted, chunk.position + 1, 0)

    def page_of(table):
        page = jnp.take_along_axis(table, (chunk.position // page_size)[:, None], axis=1)[:, 0]
        return jnp.where(chunk.wanted, page, NULL)

    of_pool = table, page_of(table), visible_pages(table, lengths, page_size, options.pages, row=chunk.row)
    of_rings = None
    if layout.rings is not None:
        in_rings = layout.rings.prompt_page(chunk.row[:, None], jnp.arange(table.shape[1])[None])
        start = jnp.maximum(lengths - options.ring_window, 0)
        visible = visible_pages(in_rings, lengths, page_size, layout.rings.pages, start, chunk.row)
        of_rings = in_rings, page_of(in_rings), visible

    def attend(query, key, value, layer, pools):
        first, (table, page, visible) = layout.first_page(layer), of_pool
        if of_rings is not None:
            table, page, visible = jax.tree.map(functools.partial(_choose_padded, layer.slides), of_rings, of_pool)
        pools = write_tokens(pools, key[:, 0], value[:, 0], first + page, chunk.position % page_size, mesh)
        if backend == "invariant":  # as in decoding
            mixed = paged_attention(query[:, 0], *pools, lengths, first + table, backend=backend, layer=layer)
        else:
            mixed = chunk_attention(query[:, 0], *pools, lengths, table, visible, first, layer)
        return mixed[:, None], pools, None

    tokens, positions = prompt_tokens[chunk.row, chunk.position][:, None], chunk.position[:, None]
    execution = Execution(options.activations, options.rounds, mesh=mesh, rowwise=choose_rowwise(backend, chunk.wanted))
    adapter = jnp.where(chunk.wanted, adapters[chunk.row], -1)
    _, pools, values = run(
        model, tokens, positions, attend, pools,
        execution=execution, adapter=adapter, routing=experts.Routing(records=options.records_experts),
    )  # fmt: skip
    if routes is not None and values.chosen is not None:
        routes = _with_chunk(routes, chunk, experts.record(model.architecture, values.chosen)[:, 0])
    return pools, routes, cached


def _choose_padded(wanted: Bool[Array, ""], one: Array, other: Array) -> Array:
    """Returns one of two arrays, which may have different lengths: both are padded with 0."""
    size = max(len(one), len(other)) if one.ndim else 0
    one, other = (jnp.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1)) if size else x for x in (one, other))
    return jnp.where(wanted, one, other)


def _with_chunk(routes: Routes, chunk: Chunk, recorded: UInt[Array, "C LC"]) -> Routes:
    """Adds the experts of a chunk's tokens to the routes of a window, which have room for them."""
    new = recorded, jnp.where(chunk.wanted, chunk.row, jnp.iinfo(jnp.int32).max), chunk.position
    of_prompts, row, position = (
        jax.lax.dynamic_update_slice_in_dim(x, part, routes.count, axis=0)
        for x, part in zip((routes.of_prompts, routes.row, routes.position), new, strict=True)
    )
    return routes.replace(of_prompts=of_prompts, row=row, position=position, count=routes.count + len(chunk.row))
