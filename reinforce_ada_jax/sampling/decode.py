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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from reinforce_ada_jax.policy.transformer import Decoder, causal_attend, head_logits, run
from reinforce_ada_jax.sampling import admission, draft_choice
from reinforce_ada_jax.sampling import drafts as drafts_lib
from reinforce_ada_jax.sampling import pages as pages_lib
from reinforce_ada_jax.sampling import slots as slots_lib
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.chunks import missing_tokens, prefill_chunk
from reinforce_ada_jax.sampling.page_writes import Pools, copy_pages, fill_pages, write_tokens
from reinforce_ada_jax.sampling.paged_attention import choose_rowwise, paged_attention
from reinforce_ada_jax.sampling.pages import NULL, num_pages
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    STOPPED,
    TRUNCATED,
    DecodeState,
    EngineOptions,
    NewTokens,
    Occupancy,
    Outputs,
    Prefix,
    Sampling,
    Slots,
    WindowInputs,
    WindowOutputs,
    occupancy,
)


def prefill(model: Decoder, tokens: Int[Array, "B T"], length: Int[Array, " B"], *, dtype: DTypeLike) -> Prefix:
    """Computes keys and values of right-padded prompts; those from `length - 1` on are never read."""

    def attend(query, key, value, layer_index, carry):
        mixed, carry, _ = causal_attend(query, key, value, layer_index, carry)
        return mixed, carry, (key, value)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    _, _, (keys, values) = run(model, tokens, positions, attend, dtype=dtype)
    last = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
    return Prefix(keys=keys, values=values, length=length, last_token=last)


def _pools(state: DecodeState) -> Pools:
    return state.key_pages, state.value_pages


def _with_pools(state: DecodeState, pools: Pools) -> DecodeState:
    return state.replace(key_pages=pools[0], value_pages=pools[1])


def _page_size(state: DecodeState) -> int:
    return state.key_pages.shape[2]


def _change(
    state: DecodeState, wanted: Bool[Array, ""], change: Callable[..., tuple[Occupancy, Any]], other: Any = ()
) -> tuple[DecodeState, Any]:
    """Changes the small records of a state, and `other`, where wanted: (state, other).

    Keys and values stay outside: a branch would copy them. All that only a change needs belongs into it: a window has
    many more tokens than changes.
    """
    small, other = jax.lax.cond(wanted, change, lambda *unchanged: unchanged, occupancy(state), other)
    return state.replace(pool=small.pool, prompts=small.prompts, queue=small.queue, slots=small.slots), other


def release_slots(state: DecodeState, ended: Bool[Array, " S"]) -> DecodeState:
    """Makes slots inactive and releases their own pages."""
    return _change(state, jnp.any(ended), lambda small, other: (slots_lib.release(small, ended), other))[0]


def _end_responses(state: DecodeState, ended: Bool[Array, " S"], park_reserve: Int[Array, ""]) -> DecodeState:
    """Makes slots inactive, and parks their turns or releases their own pages."""
    return _change(state, jnp.any(ended), lambda small, other: (slots_lib.end(small, ended, park_reserve), other))[0]


def insert(
    state: DecodeState,
    prefix: Prefix,
    slot: Int[Array, ""],
    address: UInt32[Array, " 4"],
    sampling: Sampling,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Starts one response in a given slot with pages of its own, whatever the slot held before.

    The caller keeps count of pages: this is the way of an orchestrator that owns the slots, one prompt for each. The
    response goes to the output row of the slot's number.
    """
    num_slots, width = state.slots.table.shape
    here = jnp.arange(num_slots) == slot
    state = release_slots(state, here)
    length = prefix.length[0]
    used = num_pages(length + sampling.max_tokens, _page_size(state))
    pool, table = pages_lib.allocate(state.pool, used[None], width)
    old = state.slots
    slots = Slots(
        active=old.active | here,
        token=jnp.where(here, prefix.last_token, old.token),
        position=jnp.where(here, length - 1, old.position),
        count=jnp.where(here, 0, old.count),
        sampling=jax.tree.map(lambda new, old: jnp.where(here, new, old), sampling, old.sampling),
        key=jnp.where(here[:, None], token_lib.draw_keys(state.seed, address[None]), old.key),
        prompt_row=old.prompt_row,
        output_row=jnp.where(here, slot, old.output_row),
        park_row=old.park_row,
        table=jnp.where(here[:, None], table, old.table),
        shared=jnp.where(here, 0, old.shared),
        used=jnp.where(here, used, old.used),
    )
    return _with_pools(state.replace(pool=pool, slots=slots), fill_pages(_pools(state), prefix, table, mesh))


def refill(
    state: DecodeState, reserve: Int[Array, ""], expected: Int[Array, "rows ahead"], mesh: Mesh | None = None
) -> DecodeState:
    """Starts requests from the head of the queue in idle slots, in order, as many as are admissible.

    Args:
      state: of the engine.
      reserve: pages that stay free.
      expected: pages that draws are expected to need (`admission.expected_pages`).
      mesh: where heads are split over `tensor`.
    """
    before, page_size = state.slots.active, _page_size(state)
    wanted = (state.queue.head < state.queue.end) & ~jnp.all(before)

    def start(small, _):
        small = slots_lib.start(small, page_size, reserve, expected)
        return small, slots_lib.first_pages(small, ~before, page_size)

    nothing = jnp.zeros_like(state.slots.shared)
    state, (source, target, count) = _change(state, wanted, start, (nothing, nothing, jnp.int32(0)))
    pages_per_layer = state.pool.stack.shape[0]
    return _with_pools(state, copy_pages(_pools(state), pages_per_layer, source, target, count, mesh))


def take_pages(state: DecodeState, floor: Int[Array, ""], wanted: Bool[Array, ""]) -> DecodeState:
    """Gives each slot the page of its next token, where wanted; evicts slots if fewer are free beyond `floor`."""
    needs_page = slots_lib.needs_page(state.slots, _page_size(state))

    def evict(small, redone, start, length):
        before = small.slots
        small = slots_lib.evict(small, needs_page, floor)
        evicted = before.active & ~small.slots.active
        redone = redone + jnp.sum(jnp.where(evicted, before.count, 0), dtype=jnp.int32)
        # All tokens are reported again, because programs of some shapes round otherwise, and so draw others.
        row = jnp.where(evicted, before.output_row, length.shape[0])
        return small, redone, start.at[row].set(0, mode="drop"), length.at[row].set(0, mode="drop")

    def change(small, other):
        short = jnp.sum(needs_page, dtype=jnp.int32) > small.pool.available - floor
        small, *other = jax.lax.cond(short, evict, lambda *unchanged: unchanged, small, *other)
        return slots_lib.grow(small, needs_page & small.slots.active), tuple(other)

    outputs = state.outputs
    other = state.redone, outputs.start, outputs.length
    state, (redone, start, length) = _change(state, wanted & jnp.any(needs_page), change, other)
    return state.replace(redone=redone, outputs=outputs.replace(start=start, length=length))


def _forward(
    model: Decoder,
    slots: Slots,
    pools: Pools,
    pages_per_layer: int,
    adapters: Int[Array, " R"],
    *,
    dtype: DTypeLike,
    backend: str,
    mesh: Mesh | None,
) -> tuple[Pools, Float[Array, "S V"]]:
    """Computes log-probabilities of the next token of some slots; keys and values of the last one go into the pools."""
    page_size = pools[0].shape[2]
    page = jnp.take_along_axis(slots.table, (slots.position // page_size)[:, None], axis=1)[:, 0]
    page = jnp.where(slots.active, page, NULL)
    lengths = jnp.where(slots.active, slots.position + 1, 0)
    attention = functools.partial(paged_attention, backend=backend, mesh=mesh)

    def attend(query, key, value, layer_index, pools):
        first = layer_index * pages_per_layer
        pools = write_tokens(pools, key[:, 0], value[:, 0], first + page, slots.position % page_size, mesh)
        mixed = attention(query[:, 0], *pools, lengths, first + slots.table)
        return mixed[:, None], pools, None

    tokens, positions = slots.token[:, None], slots.position[:, None]
    rowwise, adapter = choose_rowwise(backend, slots.active), jnp.where(slots.active, adapters[slots.prompt_row], -1)

    def next_logprobs(hidden, temperature):
        return token_lib.next_logprobs(head_logits(model, hidden)[:, 0], temperature)

    hidden, pools, _ = run(model, tokens, positions, attend, pools, dtype=dtype, adapter=adapter, rowwise=rowwise)
    return pools, rowwise(next_logprobs, hidden, slots.sampling.temperature)


def _append_tokens(
    state: DecodeState,
    logprobs: Float[Array, "S V"],
    width: Int[Array, ""] | int,
    at_a_time: int,
    mesh: Mesh | None,
) -> tuple[DecodeState, Bool[Array, " S"]]:
    """Samples a token for every active slot, into its output row; also returns which responses ended with it.

    The active slots are among the first `width`, whose log-probabilities are given; 0 changes nothing.
    """
    slots, outputs = state.slots, state.outputs
    active = slots.active & (width > 0)
    tokens, logprobs = token_lib.sample(logprobs, slots.key, slots.count, slots.sampling, width, at_a_time, mesh)

    count = slots.count + 1
    stopped = active & jnp.any(tokens[:, None] == state.terms.stop_ids[slots.prompt_row], axis=1)
    ended = stopped | (active & (count >= slots.sampling.max_tokens))
    row = jnp.where(active, slots.output_row, outputs.length.shape[0])
    status = jnp.where(stopped, STOPPED, jnp.where(ended, TRUNCATED, RUNNING))
    outputs = outputs.replace(
        tokens=outputs.tokens.at[row, slots.count].set(tokens, mode="drop"),
        logprobs=outputs.logprobs.at[row, slots.count].set(logprobs, mode="drop"),
        length=outputs.length.at[row].set(count, mode="drop"),
        status=outputs.status.at[row].set(status, mode="drop"),
    )
    slots = slots.replace(
        token=jnp.where(active, tokens, slots.token),
        position=jnp.where(active, slots.position + 1, slots.position),
        count=jnp.where(active, count, slots.count),
    )
    state = state.replace(
        slots=slots,
        outputs=outputs,
        busy=state.busy + jnp.sum(active, dtype=jnp.int32),
        decode_steps=state.decode_steps + jnp.asarray(width > 0, jnp.int32),
    )
    return state, ended


def decode_token(
    model: Decoder, state: DecodeState, *, dtype: DTypeLike, backend: str, mesh: Mesh | None = None
) -> tuple[DecodeState, Bool[Array, " S"]]:
    """Decodes one token in every active slot, into its output row; also returns which responses ended with it."""
    num_slots, pools = state.slots.active.shape[0], _pools(state)
    pages_per_layer, adapters = state.pool.stack.shape[0], state.terms.adapter
    pools, logprobs = _forward(
        model, state.slots, pools, pages_per_layer, adapters, dtype=dtype, backend=backend, mesh=mesh
    )
    state = _with_pools(state, pools)
    return _append_tokens(state, logprobs, num_slots, _at_a_time(num_slots, backend), mesh)


def _at_a_time(num_slots: int, backend: str) -> int:
    """Returns for how many slots to sample at a time: on accelerators all, whose loops cost more than their width."""
    return token_lib.ROWS if backend in {"jnp", "invariant"} else num_slots


def _active_first(slots: Slots) -> Slots:
    order = jnp.argsort(~slots.active)
    return jax.tree.map(lambda x: x[order], slots)


def _begin_window(state: DecodeState, inputs: WindowInputs, keep_drafts: bool) -> DecodeState:
    """Closes and opens prompts, cancels and queues requests, and clears what the last window counted and finished."""
    state = slots_lib.close_prompts(state, inputs.closing, _page_size(state))
    state = slots_lib.open_prompts(state, inputs.opened, _page_size(state))
    prompt_tokens = state.prompt_tokens.at[inputs.opened.row].set(inputs.opened.tokens, mode="drop")
    state = state.replace(prompt_tokens=prompt_tokens)
    state = slots_lib.enqueue(slots_lib.cancel(state, inputs.cancelled), inputs, state.seed)
    if state.drafts is not None:
        state = state.replace(drafts=drafts_lib.begin_window(state.drafts, inputs.opened, keep_drafts))
    outputs, size, zero = state.outputs, state.outputs.length.shape[0], jnp.int32(0)
    new = jnp.where(jnp.arange(size) < inputs.count, inputs.output_row, size)
    length = outputs.length.at[new].set(0, mode="drop")
    outputs = outputs.replace(start=length, length=length, status=jnp.full_like(outputs.status, RUNNING))
    return state.replace(outputs=outputs, busy=zero, decode_steps=zero, redone=zero)


def _queue_is_empty(state: DecodeState) -> Bool[Array, ""]:
    return state.queue.head >= state.queue.end


def _choose_work(state: DecodeState, window: int) -> tuple[Bool[Array, ""], Bool[Array, ""], Bool[Array, ""]]:
    """Returns whether a window goes on, prefills and decodes (`decode_window`)."""
    num_slots, queue, missing = state.slots.active.shape[0], state.queue, missing_tokens(state.prompts)
    active, finished = jnp.sum(state.slots.active), jnp.sum(state.outputs.status != RUNNING)
    many_idle = num_slots - active >= max(1, num_slots // 4)
    starved = _queue_is_empty(state) & many_idle & (finished >= max(1, num_slots // 8))
    prefilling = jnp.any(missing > 0)
    go_on = (state.decode_steps < window) & ((active > 0) | prefilling) & ~starved
    next_row = queue.prompt_row[queue.head % queue.prompt_row.shape[0]]
    held_up = many_idle & ~_queue_is_empty(state) & (missing[next_row] > 0)
    return go_on, go_on & prefilling, go_on & (active > 0) & ~held_up


def _choose_width(state: DecodeState, widths: tuple[int, ...]) -> Int[Array, ""]:
    """Returns all slots; in the tail, with nothing left to refill from, ever fewer, the active ones among them."""
    active, width = jnp.sum(state.slots.active), jnp.int32(widths[0])
    for narrower in widths[1:]:
        width = jnp.where(_queue_is_empty(state) & (active <= narrower), narrower, width)
    return width


def decode_window(
    model: Decoder,
    state: DecodeState,
    inputs: WindowInputs,
    *,
    options: EngineOptions,
    dtype: DTypeLike,
    backend: str,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, WindowOutputs]:
    """Takes up to `options.window` decode steps of all slots, which are refilled from the queue as they become free.

    Before each decode step up to `options.prefill_tokens` tokens of new prompts are prefilled. Where a quarter of the
    slots is idle because the next request's prompt is not ready, decoding waits: steps of few slots cost as much as of
    many. With `options.drafts` a slot may decode several tokens in a step (drafts.py).

    It ends earlier when nothing is left to decode, or when the queue is empty, a quarter of the slots idle and as many
    responses ended as an eighth of the slots: the host then has new requests sooner. With the queue empty and few slots
    active (`options.widths`), only these are computed.
    """
    num_slots, pages_per_layer = state.slots.active.shape[0], state.pool.stack.shape[0]
    widths, step_sizes = options.widths, draft_choice.step_sizes(options)
    forward = functools.partial(
        _forward, pages_per_layer=pages_per_layer, adapters=state.terms.adapter, dtype=dtype, backend=backend, mesh=mesh
    )
    state = _begin_window(state, inputs, options.keep_drafts)
    # Prompts about to be opened count on `reserve` pages, or on as many as are free by now.
    floor = jnp.minimum(inputs.reserve, state.pool.available)
    expected = admission.expected_pages(inputs.survivors)

    def compute_logprobs(index, carry, num_rows, rows):
        """Computes the first `num_rows` rows; a slice that the index moves keeps all of it inside of the loop."""
        pools, logprobs = carry
        first = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * num_rows, num_rows), rows)
        pools, new = forward(model, first, pools)
        return pools, jax.lax.dynamic_update_slice_in_dim(logprobs, new, index * num_rows, axis=0)

    def prefill(_, carry, prompts, prompt_tokens):
        pools, cached = carry
        prompts = prompts.replace(cached=cached)
        arrays, sizes = (prompts, prompt_tokens, pools, state.terms.adapter), (options.prefill_tokens, pages_per_layer)
        return prefill_chunk(model, *arrays, *sizes, dtype=dtype, backend=backend, mesh=mesh)

    def decode_step(carry):
        state, logprobs, last_width, _ = carry
        state = refill(state, inputs.reserve, expected, mesh)
        go_on, prefilling, decoding = _choose_work(state, options.window)
        state = take_pages(state, floor, decoding)
        width = jnp.where(go_on, _choose_width(state, widths), widths[-1])
        slots = jax.lax.cond(width < last_width, _active_first, lambda slots: slots, state.slots)
        # Loops of one iteration, or none: conditionals would copy all pages.
        one_chunk = functools.partial(prefill, prompts=state.prompts, prompt_tokens=state.prompt_tokens)
        pools, cached = _pools(state), state.prompts.cached
        pools, cached = jax.lax.fori_loop(0, prefilling.astype(jnp.int32), one_chunk, (pools, cached))
        drafted, num_rows = None, width
        if state.drafts is not None:
            drafted = drafts_lib.draft_rows(state.replace(slots=slots), options)
            num_rows = drafted.size
        computed = pools, logprobs
        for each in reversed(step_sizes):
            one_pass = functools.partial(compute_logprobs, num_rows=each, rows=drafted.slots if drafted else slots)
            computed = jax.lax.fori_loop(0, (decoding & (num_rows == each)).astype(jnp.int32), one_pass, computed)
        pools, logprobs = computed
        state = _with_pools(state.replace(slots=slots, prompts=state.prompts.replace(cached=cached)), pools)
        at_a_time = _at_a_time(len(logprobs), backend)
        if drafted:
            state, ended = drafts_lib.append_tokens(state, drafted, logprobs, decoding, at_a_time, mesh)
        else:
            state, ended = _append_tokens(state, logprobs, jnp.where(decoding, width, 0), at_a_time, mesh)
        return _end_responses(state, ended, inputs.park_reserve), logprobs, width, go_on

    # The last iteration refills and decodes nothing. So refilling, the choice of a width and all that does not depend
    # on it exist once in the program: compiling takes longer than anything else at a start.
    logprobs = jnp.zeros((step_sizes[-1], model.architecture.vocab_size), jnp.float32)
    state = jax.lax.while_loop(
        lambda carry: carry[-1], decode_step, (state, logprobs, jnp.int32(num_slots), jnp.bool(True))
    )[0]
    return state, _window_outputs(state, options.most_new_tokens)


def _new_tokens(outputs: Outputs, most: int) -> NewTokens:
    """Returns the tokens from `start` on, of which no row has more than `most`."""
    place = outputs.start[:, None] + jnp.arange(most)[None]
    tokens, logprobs = (jnp.take_along_axis(x, place, axis=1, mode="clip") for x in (outputs.tokens, outputs.logprobs))
    return NewTokens(
        tokens=tokens, logprobs=logprobs, start=outputs.start, length=outputs.length, status=outputs.status
    )


def _window_outputs(state: DecodeState, most_new_tokens: int) -> WindowOutputs:
    return WindowOutputs(
        rows=_new_tokens(state.outputs, most_new_tokens),
        waiting=state.queue.end - state.queue.head,
        free_pages=state.pool.available,
        prompt_length=state.prompts.length,
        busy=state.busy,
        decode_steps=state.decode_steps,
        redone=state.redone,
        drafts=drafts_lib.counts(state.drafts),
    )
