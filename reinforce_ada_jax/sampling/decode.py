"""Prefill and the decode window: pure functions from one state pytree to the next.

A prompt's keys and values are computed once, into pages that all its draws share (chunks.py). A draw starts with
the prompt's *last token* as its first input: its first decode step gives the first token of the response, so no
logits need to be kept, and only the partly filled last page of the prompt is copied for it.

`decode_window` is one compiled program: every slot decodes up to `window` tokens; inside it new prompts are prefilled,
and a slot whose response has ended gives its pages back and takes the next request from the queue. The host sees none
of that until the window ends.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from reinforce_ada_jax.policy import experts
from reinforce_ada_jax.policy.transformer import Decoder, Execution, causal_attend, head_logits, run
from reinforce_ada_jax.sampling import draft_choice
from reinforce_ada_jax.sampling import drafts as drafts_lib
from reinforce_ada_jax.sampling import pages as pages_lib
from reinforce_ada_jax.sampling import rings as rings_lib
from reinforce_ada_jax.sampling import slots as slots_lib
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.chunks import prefill_chunk
from reinforce_ada_jax.sampling.page_writes import copy_pages, fill_pages, write_tokens
from reinforce_ada_jax.sampling.paged_attention import Pools, choose_rowwise, paged_attention
from reinforce_ada_jax.sampling.pages import NULL, num_pages
from reinforce_ada_jax.sampling.rings import Layout
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    STOPPED,
    TRUNCATED,
    DecodeState,
    EngineOptions,
    Occupancy,
    Prefix,
    Sampling,
    Slots,
    WindowInputs,
    WindowOutputs,
    occupancy,
)


def prefill(model: Decoder, tokens: Int[Array, "B T"], length: Int[Array, " B"], *, execution: Execution) -> Prefix:
    """Computes keys and values of right-padded prompts; those from `length - 1` on are never read."""

    def attend(query, key, value, layer, carry):
        return causal_attend(query, key, value, layer), carry, (key, value)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    _, _, values = run(model, tokens, positions, attend, execution=execution)
    keys, values = values.of_attention
    last = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
    return Prefix(keys=keys, values=values, length=length, last_token=last)


def _change(
    state: DecodeState, wanted: Bool[Array, ""], change: Callable[..., tuple[Occupancy, Any]], other: Any = ()
) -> tuple[DecodeState, Any]:
    """Applies `change` to the small records of a state and to `other` if `wanted`; returns (state, other).

    Keys and values stay outside: a branch would copy them. Work that only a change needs belongs in `change`.
    """
    small, other = jax.lax.cond(wanted, change, lambda *unchanged: unchanged, occupancy(state), other)
    return state.replace(pool=small.pool, prompts=small.prompts, queue=small.queue, slots=small.slots), other


def release_slots(state: DecodeState, ended: Bool[Array, " S"]) -> DecodeState:
    """Makes slots inactive and releases their own pages."""
    return _change(state, jnp.any(ended), lambda small, other: (slots_lib.release(small, ended), other))[0]


def insert(
    state: DecodeState,
    prefix: Prefix,
    slot: Int[Array, ""],
    address: UInt32[Array, " 4"],
    sampling: Sampling,
    *,
    options: EngineOptions,
    mesh: Mesh,
) -> DecodeState:
    """Starts one response in a given slot with pages of its own, whatever the slot held before.

    The caller owns the slots and counts the pages. The response goes to the output row of the slot's number.
    """
    here = jnp.arange(options.slots) == slot
    state = release_slots(state, here)
    length = prefix.length[0]
    used = num_pages(length + sampling.max_tokens, options.page_size)
    pool, table = pages_lib.allocate(state.pool, used[None], options.table_width)
    key = token_lib.draw_keys(state.seed, address[None])
    started = Slots(
        active=True, requests=state.slots.requests.replace(output_row=slot, sampling=sampling, key=key),
        token=prefix.last_token, position=length - 1, count=0, table=table, shared=0, used=used,
    )  # fmt: skip
    slots = slots_lib.choose_rows(here, started, state.slots)
    return state.replace(pool=pool, slots=slots, pools=fill_pages(state.pools, prefix, table, mesh))


def _refill(
    state: DecodeState,
    reserve: Int[Array, ""],
    survivors: Int[Array, " width"],
    layout: Layout,
    options: EngineOptions,
    mesh: Mesh,
) -> DecodeState:
    """Starts requests from the head of the queue in idle slots, as `slots.start` does."""
    before = state.slots.active
    wanted = (state.queue.head < state.queue.end) & ~jnp.all(before)

    def start(small, _):
        small = slots_lib.start(small, options.page_size, reserve, survivors)
        return small, slots_lib.first_pages(small, ~before, options.page_size, layout)

    nothing = jnp.zeros((len(layout.first), options.slots), jnp.int32)
    state, (source, target, count) = _change(state, wanted, start, (nothing, nothing, jnp.int32(0)))
    return state.replace(pools=copy_pages(state.pools, source, target, count, mesh))


def _take_pages(
    state: DecodeState, floor: Int[Array, ""], wanted: Bool[Array, ""], options: EngineOptions
) -> DecodeState:
    """Gives each slot the page of its next token, where wanted; evicts slots if too few are free beyond `floor`."""
    needs_page = slots_lib.needs_page(state.slots, options.page_size)

    def evict(small, redone, start, length):
        before = small.slots
        small = slots_lib.evict(small, needs_page, floor)
        evicted = before.active & ~small.slots.active
        redone = redone + jnp.sum(jnp.where(evicted, before.count, 0), dtype=jnp.int32)
        # All tokens are reported again: programs of other shapes may round differently, and so draw other tokens.
        row = jnp.where(evicted, before.requests.output_row, length.shape[0])
        return small, redone, start.at[row].set(0, mode="drop"), length.at[row].set(0, mode="drop")

    def change(small, other):
        short = jnp.sum(needs_page, dtype=jnp.int32) > small.pool.available - floor
        small, *other = jax.lax.cond(short, evict, lambda *unchanged: unchanged, small, *other)
        return slots_lib.grow(small, needs_page & small.slots.active), tuple(other)

    other = state.counts.redone, state.outputs.start, state.outputs.length
    state, (redone, start, length) = _change(state, wanted & jnp.any(needs_page), change, other)
    outputs = state.outputs.replace(start=start, length=length)
    return state.replace(counts=state.counts.replace(redone=redone), outputs=outputs)


class Computed(NamedTuple):
    """Results of a forward pass for some rows."""

    logprobs: Float[Array, "rows V"]  # of the next token
    routes: UInt[Array, "rows LC"] | None = None  # experts of the input, where they are recorded


def _forward(
    model: Decoder, slots: Slots, pools: Pools, adapters: Int[Array, " R"], options: EngineOptions, mesh: Mesh
) -> tuple[Pools, Computed]:
    """Computes log-probabilities of the next token of some slots; keys and values of the last one go into the pools."""
    page_size, layout = options.page_size, rings_lib.layout(model.architecture, options)

    def page_of(table):
        page = jnp.take_along_axis(table, (slots.position // page_size)[:, None], axis=1)[:, 0]
        return jnp.where(slots.active, page, NULL)

    in_rings = None if layout.rings is None else layout.rings.slot_table(slots)
    page, ring_page = page_of(slots.table), None if in_rings is None else page_of(in_rings)
    lengths = jnp.where(slots.active, slots.position + 1, 0)
    adapter = jnp.where(slots.active, adapters[slots.requests.prompt_row], -1)
    rowwise = choose_rowwise(options.attention, slots.active)

    def attend(query, key, value, layer, pools):
        first = layout.first_page(layer)
        written = first + layout.choose(layer, page, ring_page)
        pools = write_tokens(pools, key[:, 0], value[:, 0], written, slots.position % page_size, mesh)
        table = first + layout.choose(layer, slots.table, in_rings)
        mixed = paged_attention(query[:, 0], *pools, lengths, table, backend=options.attention, mesh=mesh, layer=layer)
        return mixed[:, None], pools, None

    def next_logprobs(hidden, temperature):
        return token_lib.next_logprobs(head_logits(model, hidden)[:, 0], temperature)

    tokens, positions = slots.token[:, None], slots.position[:, None]
    execution = Execution(options.activations, options.rounds, mesh=mesh, rowwise=rowwise)
    routing = experts.Routing(records=options.records_experts)
    hidden, pools, values = run(
        model, tokens, positions, attend, pools, execution=execution, adapter=adapter, routing=routing
    )
    routes = None if values.chosen is None else experts.record(model.architecture, values.chosen)[:, 0]
    return pools, Computed(rowwise(next_logprobs, hidden, slots.requests.sampling.temperature), routes)


def _append_tokens(
    state: DecodeState,
    computed: Computed,
    decoding: Bool[Array, ""] | bool,
    num_rows: Int[Array, ""] | int,
    options: EngineOptions,
    mesh: Mesh,
    drafted: drafts_lib.Rows | None = None,
) -> tuple[DecodeState, Bool[Array, " S"]]:
    """Samples a token for every active slot, and one after each right guess, into its output row.

    `computed` has a row for each slot, or for each row of `drafted`, whose guesses are verified. The active rows are
    among the first `num_rows`. Without `decoding` nothing changes. Returns the state, and which responses ended.
    """
    slots, requests, outputs, logprobs = state.slots, state.slots.requests, state.outputs, computed.logprobs
    rows = slots if drafted is None else drafted.slots
    # On accelerators all rows are drawn at once: a loop would cost more than the wider step.
    at_a_time = token_lib.ROWS if options.attention in {"jnp", "invariant"} else len(logprobs)
    # Noise is addressed by the place of a token in its response.
    number = rows.count if rows.requests.begun is None else rows.count + rows.requests.begun
    drawn = token_lib.sample(logprobs, rows.requests.key, number, rows.requests.sampling, num_rows, at_a_time, mesh)
    row_of = None if drafted is None else jnp.minimum(drafted.row_of, len(logprobs) - 1)

    def of_slots(x):
        """Returns values of rows as [slot, input]; without guesses each slot has one row."""
        return x[:, None] if row_of is None else x[row_of]

    tokens, logprobs = map(of_slots, drawn)
    is_stop = jnp.any(tokens[..., None] == state.terms.stop_ids[requests.prompt_row][:, None], axis=-1)
    active = slots.active & decoding
    right = jnp.zeros_like(slots.count)
    if drafted is not None:
        state, right = drafts_lib.verify(state, drafted, tokens, is_stop, active)

    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    appended = active[:, None] & (place <= right[:, None])
    count = slots.count + 1 + right
    stopped = jnp.any(appended & is_stop, axis=1)
    ended = stopped | (active & (count >= requests.sampling.max_tokens))
    status = jnp.where(stopped, STOPPED, jnp.where(ended, TRUNCATED, RUNNING))
    row = jnp.where(appended, requests.output_row[:, None], outputs.length.shape[0])
    at = slots.count[:, None] + place
    if state.routes is not None:
        since = at - outputs.start[requests.output_row][:, None]
        routes = state.routes.of_responses.at[row, since].set(of_slots(computed.routes), mode="drop")
        state = state.replace(routes=state.routes.replace(of_responses=routes))
    outputs = outputs.replace(
        tokens=outputs.tokens.at[row, at].set(tokens, mode="drop"),
        logprobs=outputs.logprobs.at[row, at].set(logprobs, mode="drop"),
        length=outputs.length.at[row[:, 0]].set(count, mode="drop"),
        status=outputs.status.at[row[:, 0]].set(status, mode="drop"),
    )
    last = jnp.sum(jnp.where(place == right[:, None], tokens, 0), axis=1, dtype=jnp.int32)
    slots = slots.replace(
        token=jnp.where(active, last, slots.token),
        position=jnp.where(active, slots.position + 1 + right, slots.position),
        count=jnp.where(active, count, slots.count),
    )
    counts = state.counts.replace(
        busy=state.counts.busy + jnp.sum(active, dtype=jnp.int32),
        decode_steps=state.counts.decode_steps + jnp.asarray(decoding, jnp.int32),
    )
    return state.replace(slots=slots, outputs=outputs, counts=counts), ended


def decode_token(
    model: Decoder, state: DecodeState, *, options: EngineOptions, mesh: Mesh
) -> tuple[DecodeState, Bool[Array, " S"]]:
    """Decodes one token in every active slot, into its output row; also returns which responses ended with it."""
    pools, computed = _forward(model, state.slots, state.pools, state.terms.adapter, options, mesh)
    return _append_tokens(state.replace(pools=pools), computed, True, options.slots, options, mesh)


def _begin_window(state: DecodeState, inputs: WindowInputs, options: EngineOptions) -> DecodeState:
    """Closes and opens prompts, cancels and queues requests, and clears what the last window counted and finished."""
    opened = inputs.opened
    num_opened = jnp.sum(opened.row < options.open_prompts, dtype=jnp.int32)

    def change(small, other):
        small = slots_lib.close_prompts(small, inputs.closing, options.page_size)
        return slots_lib.open_prompts(small, opened, options.page_size), other

    state, _ = _change(state, jnp.any(inputs.closing) | (num_opened > 0), change)
    # One row after the other: most windows open few prompts, and rows may have 65,536 tokens.
    prompt_tokens = jax.lax.fori_loop(
        0, num_opened, lambda index, tokens: tokens.at[opened.row[index]].set(opened.tokens[index]), state.prompt_tokens
    )
    state = state.replace(prompt_tokens=prompt_tokens)
    state = slots_lib.enqueue(slots_lib.cancel(state, inputs.cancelled), inputs, state.seed)
    if state.drafts is not None:
        state = state.replace(drafts=drafts_lib.begin_window(state.drafts, opened, options.keep_drafts))
    size = options.output_rows
    new = jnp.where(jnp.arange(size) < inputs.count, inputs.requests.output_row, size)
    length = state.outputs.length.at[new].set(0, mode="drop")
    outputs = state.outputs.replace(start=length, length=length, status=jnp.full_like(state.outputs.status, RUNNING))
    routes = None if state.routes is None else state.routes.replace(count=jnp.int32(0))
    return state.replace(outputs=outputs, routes=routes, counts=jax.tree.map(jnp.zeros_like, state.counts))


def decode_window(
    model: Decoder, state: DecodeState, inputs: WindowInputs, *, options: EngineOptions, mesh: Mesh
) -> tuple[DecodeState, WindowOutputs]:
    """Takes up to `options.window` decode steps of all slots, which are refilled from the queue as they become free.

    Before each decode step up to `options.prefill_tokens` tokens of new prompts are prefilled. Where a quarter of the
    slots is idle because the next request's prompt is not ready, decoding waits: a step of few slots costs as much as
    one of many. With `options.drafts` a slot may decode several tokens in a step (drafts.py).

    The window ends earlier when nothing is left to decode. If it records experts, it also ends before a chunk whose
    record would not fit. And it ends when the queue is empty, a quarter of the slots is idle, and responses of an
    eighth of the slots have ended: the host can then send new requests sooner. With the queue empty and few slots
    active (`options.widths`), only these are computed.
    """
    widths, step_sizes, adapters = options.widths, draft_choice.step_sizes(options), state.terms.adapter
    layout = rings_lib.layout(model.architecture, options)
    state = _begin_window(state, inputs, options)
    # Prompts about to be opened count on `reserve` pages, or on as many as are free by now.
    floor = jnp.minimum(inputs.reserve, state.pool.available)

    def compute_logprobs(index, carry, num_rows, rows):
        """Computes the first `num_rows` rows; slicing by the loop's index keeps all of it inside the loop."""
        pools, computed = carry
        first = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * num_rows, num_rows), rows)
        pools, new = _forward(model, first, pools, adapters, options, mesh)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index * num_rows, axis=0)
        return pools, jax.tree.map(put, computed, new)

    def prefill(_, carry, prompts, prompt_tokens):
        pools, routes, cached = carry
        prompts = prompts.replace(cached=cached)
        return prefill_chunk(model, prompts, prompt_tokens, pools, routes, adapters, options, mesh)

    def decode_step(carry):
        state, computed, last_width, _ = carry
        state = _refill(state, inputs.reserve, inputs.survivors, layout, options, mesh)
        num_ended = jnp.sum(state.outputs.status != RUNNING)
        go_on, prefilling, decoding = slots_lib.choose_work(state, state.counts.decode_steps, num_ended, options.window)
        if state.routes is not None:  # the window ends before a chunk for whose routes it has no room
            has_room = ~prefilling | (state.routes.count < options.most_prefilled)
            go_on, prefilling, decoding = (each & has_room for each in (go_on, prefilling, decoding))
        state = _take_pages(state, floor, decoding, options)
        width = jnp.where(go_on, slots_lib.choose_width(state, widths), widths[-1])
        slots = jax.lax.cond(width < last_width, slots_lib.active_first, lambda slots: slots, state.slots)
        # Loops of one iteration, or none: conditionals would copy all pages.
        one_chunk = functools.partial(prefill, prompts=state.prompts, prompt_tokens=state.prompt_tokens)
        prefilled = state.pools, state.routes, state.prompts.cached
        pools, routes, cached = jax.lax.fori_loop(0, prefilling.astype(jnp.int32), one_chunk, prefilled)
        drafted, rows, size, num_rows = None, slots, width, width
        if state.drafts is not None:
            drafted = drafts_lib.draft_rows(state.replace(slots=slots), options)
            rows, size = drafted.slots, drafted.size
            num_rows = jnp.sum(rows.active, dtype=jnp.int32)
        for each in reversed(step_sizes):
            one_pass = functools.partial(compute_logprobs, num_rows=each, rows=rows)
            wanted = (decoding & (size == each)).astype(jnp.int32)
            pools, computed = jax.lax.fori_loop(0, wanted, one_pass, (pools, computed))
        state = state.replace(slots=slots, prompts=state.prompts.replace(cached=cached), pools=pools, routes=routes)
        num_rows = jnp.where(decoding, num_rows, 0)
        state, ended = _append_tokens(state, computed, decoding, num_rows, options, mesh, drafted)
        state, _ = _change(
            state, jnp.any(ended), lambda small, other: (slots_lib.end(small, ended, inputs.park_reserve), other)
        )
        return state, computed, width, go_on

    # The last iteration refills slots and decodes nothing. So the code that refills and chooses a width is in the
    # program once. Compiling it takes most of the time of a start.
    most_rows, architecture = step_sizes[-1], model.architecture
    routes = jnp.asarray(experts.empty_record(architecture, most_rows)) if options.records_experts else None
    computed = Computed(jnp.zeros((most_rows, architecture.vocab_size), jnp.float32), routes)
    state = jax.lax.while_loop(
        lambda carry: carry[-1], decode_step, (state, computed, jnp.int32(options.slots), jnp.bool(True))
    )[0]
    return state, _window_outputs(state, options.most_new_tokens)


def _window_outputs(state: DecodeState, most_new_tokens: int) -> WindowOutputs:
    """Copies the new tokens of each row, at most `most_new_tokens` from `start` on."""
    outputs = state.outputs
    place = outputs.start[:, None] + jnp.arange(most_new_tokens)[None]
    tokens, logprobs = (jnp.take_along_axis(x, place, axis=1, mode="clip") for x in (outputs.tokens, outputs.logprobs))
    return WindowOutputs(
        rows=outputs.replace(tokens=tokens, logprobs=logprobs),
        waiting=state.queue.end - state.queue.head,
        free_pages=state.pool.available,
        prompt_length=state.prompts.length,
        counts=state.counts,
        routes=state.routes,
    )
