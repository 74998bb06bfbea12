"""Slots, queue and page tables of the decode window: which request is in which slot, with which pages.

All arrays are small integers; decode.py has the keys and values.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reinforce_ada_jax.sampling import admission
from reinforce_ada_jax.sampling import pages as pages_lib
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.pages import NULL, num_pages
from reinforce_ada_jax.sampling.rings import Layout
from reinforce_ada_jax.sampling.state import Occupancy, OpenedPrompts, Prompts, Requests, Slots, WindowInputs

State = TypeVar("State", bound=Occupancy)  # of the window, or its small records alone


def close_prompts(state: State, closing: Bool[Array, " R"], page_size: int) -> State:
    """Releases the pages that only these prompts hold; none of their draws may run or wait."""
    prompts = state.prompts
    counts = num_pages(prompts.length - 1, page_size)
    held = jnp.arange(prompts.table.shape[1])[None] < counts[:, None]
    pages = jnp.arange(state.pool.stack.shape[0])

    def held_by(chosen):
        """Returns a mask of the pages that prompts hold; several may hold the same one."""
        some = jnp.where(held & chosen[:, None], prompts.table, NULL)
        return jnp.zeros(pages.shape, bool).at[some].set(True) & (pages != NULL)

    pool = pages_lib.release(state.pool, pages[None], (held_by(closing) & ~held_by(~closing))[None])
    prompts = prompts.replace(
        length=jnp.where(closing, 1, prompts.length), cached=jnp.where(closing, 0, prompts.cached)
    )
    return state.replace(pool=pool, prompts=prompts)


def open_prompts(state: State, opened: OpenedPrompts, page_size: int) -> State:
    """Allocates the pages of prompts, which then wait to be prefilled; the caller ensures that there are enough."""
    old, row, length, shared = state.prompts, opened.row, opened.length, opened.shared
    width = old.table.shape[1]
    is_prompt = row < old.length.shape[0]
    counts = jnp.where(is_prompt, num_pages(length - 1, page_size) - shared, 0)
    pool, own = pages_lib.allocate(state.pool, counts, width)
    column = jnp.arange(width)[None] - shared[:, None]
    own = jnp.where(column >= 0, jnp.take_along_axis(own, jnp.maximum(column, 0), axis=1), NULL)

    def share(index, table):
        """Puts the pages of another prompt, which may be opened in the same window, before a prompt's own.

        A prompt that continues a parked turn begins with the pages of its own row.
        """
        first = jnp.where(column[index] < 0, table[opened.like[index]], own[index])
        return table.at[row[index]].set(first)

    table = jax.lax.fori_loop(0, jnp.sum(is_prompt, dtype=jnp.int32), share, old.table)
    last_token = jnp.take_along_axis(opened.tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
    prompts = Prompts(
        table=table,
        length=old.length.at[row].set(length, mode="drop"),
        last_token=old.last_token.at[row].set(last_token, mode="drop"),
        cached=old.cached.at[row].set(opened.cached, mode="drop"),
        number=old.number.at[row].set(jnp.max(old.number) + 1 + jnp.arange(row.shape[0]), mode="drop"),
    )
    return state.replace(pool=pool, prompts=prompts)


def cancel(state: State, cancelled: Bool[Array, " O"]) -> State:
    """Lowers the limits of the responses in these output rows, so that each ends with its next token.

    They end as any other response does, so that every request is answered and every page released.
    """
    running, waiting = state.slots.requests, state.queue.requests
    max_tokens = running.sampling.max_tokens
    limit = jnp.minimum(max_tokens, state.slots.count + 1)
    of_slots = jnp.where(state.slots.active & cancelled[running.output_row], limit, max_tokens)
    of_queue = jnp.where(cancelled[waiting.output_row], 1, waiting.sampling.max_tokens)
    return state.replace(
        slots=state.slots.replace(requests=running.with_max_tokens(of_slots)),
        queue=state.queue.replace(requests=waiting.with_max_tokens(of_queue)),
    )


def choose_rows(mask: Bool[Array, " S"], new: Slots, old: Slots) -> Slots:
    """Returns the slots of `new` where the mask is True, and those of `old` elsewhere."""
    return jax.tree.map(lambda new, old: jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old), new, old)


def _put(requests: Requests, place: Int[Array, " Q"], new: Requests) -> Requests:
    """Puts requests into the given places; those beyond the end are dropped."""
    return jax.tree.map(lambda old, new: old.at[place].set(new, mode="drop"), requests, new)


def enqueue(state: State, inputs: WindowInputs, seed: Int[Array, ""]) -> State:
    """Appends the host's requests to the queue, which has room for them."""
    queue, size = state.queue, state.queue.requests.prompt_row.shape[0]
    entry = jnp.arange(size)
    place = jnp.where(entry < inputs.count, (queue.end + entry) % size, size)
    new = inputs.requests.replace(key=token_lib.draw_keys(seed, inputs.requests.key))
    requests = _put(queue.requests, place, new)
    return state.replace(queue=queue.replace(requests=requests, end=queue.end + inputs.count))


def start(state: Occupancy, page_size: int, reserve: Int[Array, ""], survivors: Int[Array, " width"]) -> Occupancy:
    """Moves requests from the head of the queue to idle slots, in order, each with the page of its first token.

    A request whose prompt is not prefilled yet delays those behind it: its prompt is next, and takes a few steps.
    `reserve` pages stay free; `survivors` is from `admission.Lengths`.
    """
    slots, queue, prompts = state.slots, state.queue, state.prompts
    width = slots.table.shape[1]
    held = slots.used - slots.shared
    room = state.pool.available + jnp.sum(held) - reserve
    number = queue.head + jnp.cumsum(~slots.active) - 1
    entry = number % queue.requests.prompt_row.shape[0]
    waiting = jax.tree.map(lambda x: x[entry], queue.requests)
    row = jnp.where(slots.active, slots.requests.prompt_row, waiting.prompt_row)
    length = prompts.length[row]
    shared = (length - 1) // page_size
    max_tokens = jnp.where(slots.active, slots.requests.sampling.max_tokens, waiting.sampling.max_tokens)
    limit = pages_lib.own_pages(length, max_tokens, page_size)
    ready = slots.active | ((number < queue.end) & (prompts.cached[row] >= length - 1))
    limit = jnp.where(slots.active | (jnp.cumsum(~ready) == 0), limit, 0)
    taken = admission.admissible(survivors, held, limit, room)
    pool, own = pages_lib.allocate(state.pool, taken.astype(jnp.int32), 1)

    column = jnp.arange(width)[None]
    prompt_table = jnp.pad(prompts.table, ((0, 0), (0, max(0, width - prompts.table.shape[1]))))[row][:, :width]
    table = jnp.where(column < shared[:, None], prompt_table, jnp.where(column == shared[:, None], own, NULL))
    started = Slots(
        active=True, requests=waiting, token=prompts.last_token[row], position=length - 1, count=0,
        table=table, shared=shared, used=shared + 1, ring=slots.ring,
    )  # fmt: skip
    queue = queue.replace(head=queue.head + jnp.sum(taken, dtype=jnp.int32))
    return state.replace(pool=pool, slots=choose_rows(taken, started, slots), queue=queue)


def first_pages(
    state: Occupancy, started: Bool[Array, " S"], page_size: int, layout: Layout
) -> tuple[Int[Array, "L S"], Int[Array, "L S"], Int[Array, ""]]:
    """Returns the pages to copy for started slots, at the front: (sources, targets, number of copies).

    A prompt's last page, if it is partly filled, is copied to the slot's first own page.
    """
    slots, prompts = state.slots, state.prompts
    partly_filled = slots.active & started & (slots.position % page_size > 0)
    last_page = prompts.table[slots.requests.prompt_row, jnp.minimum(slots.shared, prompts.table.shape[1] - 1)]
    first_own = jnp.take_along_axis(slots.table, slots.shared[:, None], axis=1)[:, 0]
    place = jnp.where(partly_filled, jnp.cumsum(partly_filled) - 1, partly_filled.shape[0])

    def at_the_front(pages):
        return jnp.zeros_like(pages).at[place].set(pages, mode="drop")

    last_in_ring = first_in_ring = None
    if layout.rings is not None:
        last_in_ring = at_the_front(layout.rings.prompt_page(slots.requests.prompt_row, slots.shared))
        first_in_ring = at_the_front(layout.rings.slot_page(slots.ring, slots.shared))
    source = layout.of_layers(at_the_front(last_page), last_in_ring)
    target = layout.of_layers(at_the_front(first_own), first_in_ring)
    return source, target, jnp.sum(partly_filled, dtype=jnp.int32)


def choose_work(state: Occupancy, decode_steps: Any, num_ended: Any, window: int) -> tuple[Any, Any, Any]:
    """Returns three flags: the window goes on, prefills, decodes (`decode.decode_window`). Arrays are JAX's or numpy's.

    `decode_steps` were taken and `num_ended` responses ended in this window, which takes at most `window` steps.
    """
    slots, queue, missing = state.slots, state.queue, state.prompts.missing
    num_slots, active, is_waiting = len(slots.active), slots.active.sum(), queue.head < queue.end
    many_idle = num_slots - active >= max(1, num_slots // 4)
    starved = ~is_waiting & many_idle & (num_ended >= max(1, num_slots // 8))
    prefilling = (missing > 0).any()
    go_on = (decode_steps < window) & ((active > 0) | prefilling) & ~starved
    next_row = queue.requests.prompt_row[queue.head % len(queue.requests.prompt_row)]
    held_up = many_idle & is_waiting & (missing[next_row] > 0)
    return go_on, go_on & prefilling, go_on & (active > 0) & ~held_up


def choose_width(state: Occupancy, widths: tuple[int, ...]) -> Int[Array, ""]:
    """Returns the number of slots to compute: all; with an empty queue the smallest width that has the active ones."""
    active = jnp.sum(state.slots.active)
    width = jnp.int32(widths[0])
    for narrower in widths[1:]:
        width = jnp.where((state.queue.head >= state.queue.end) & (active <= narrower), narrower, width)
    return width


def active_first(slots: Slots) -> Slots:
    """Returns the slots in another order: the active ones first."""
    order = jnp.argsort(~slots.active)
    return jax.tree.map(lambda x: x[order], slots)


def needs_page(slots: Slots, page_size: int) -> Bool[Array, " S"]:
    """Returns True for slots whose next token starts a page that they do not hold."""
    return slots.active & (slots.position // page_size >= slots.used)


def grow(state: Occupancy, needs_page: Bool[Array, " S"]) -> Occupancy:
    """Gives slots the page of their next token; the caller ensures that there are enough."""
    slots = state.slots
    counts = needs_page.astype(jnp.int32)
    pool, page = pages_lib.allocate(state.pool, counts, 1)
    place = jnp.where(needs_page, slots.used, slots.table.shape[1])
    table = slots.table.at[jnp.arange(place.shape[0]), place].set(page[:, 0], mode="drop")
    return state.replace(pool=pool, slots=slots.replace(table=table, used=slots.used + counts))


def evict(state: Occupancy, needs_page: Bool[Array, " S"], floor: Int[Array, ""]) -> Occupancy:
    """Evicts slots, those with the fewest tokens first, until the others find their pages beyond `floor`.

    The requests return to the head of the queue, the one with the most tokens first. Drawn again at its address, a
    response is the same. The slot with the most tokens always stays, so every response ends at some time.
    """
    slots, queue = state.slots, state.queue
    order = jnp.argsort(jnp.where(slots.active, slots.count, jnp.iinfo(jnp.int32).max))
    gained = (slots.used - slots.shared + needs_page.astype(jnp.int32))[order]
    missing = jnp.sum(needs_page, dtype=jnp.int32) - (state.pool.available - floor) - (jnp.cumsum(gained) - gained)
    evicted = jnp.zeros_like(slots.active).at[order].set(missing > 0)
    size = queue.requests.prompt_row.shape[0]
    before_head = (queue.head - 1 - jnp.arange(order.shape[0])) % size
    place = jnp.zeros_like(order).at[order].set(jnp.where(missing > 0, before_head, size))
    requests = _put(queue.requests, place, slots.requests)
    queue = queue.replace(requests=requests, head=queue.head - jnp.sum(evicted, dtype=jnp.int32))
    return release(state.replace(queue=queue), evicted)


def end(state: Occupancy, ended: Bool[Array, " S"], park_reserve: Int[Array, ""]) -> Occupancy:
    """Ends responses: the turns of trajectories are parked where pages allow it, and other pages are released.

    A parked turn is an open prompt: the sequence of prompt and response, whose tokens but the last are in the cache.
    The next turn is opened in its row. Whole pages of the prompt belong to both rows, as pages of a common beginning
    do. Parked turns leave `park_reserve` pages to responses and to prompts about to be opened.
    """
    slots, prompts = state.slots, state.prompts
    num_rows, width = prompts.table.shape
    own = slots.used - slots.shared
    wanted = ended & (slots.requests.park_row < num_rows) & (slots.used <= width)
    room = state.pool.available + jnp.sum(own) - park_reserve
    parked = wanted & (jnp.cumsum(jnp.where(wanted, own, 0)) <= room)
    row = jnp.where(parked, slots.requests.park_row, num_rows)
    table = jnp.pad(slots.table, ((0, 0), (0, max(0, width - slots.table.shape[1]))))[:, :width]
    prompts = prompts.replace(
        table=prompts.table.at[row].set(table, mode="drop"),
        length=prompts.length.at[row].set(slots.position + 1, mode="drop"),
        last_token=prompts.last_token.at[row].set(slots.token, mode="drop"),
        cached=prompts.cached.at[row].set(slots.position, mode="drop"),
    )
    slots = slots.replace(shared=jnp.where(parked, slots.used, slots.shared))  # no page is a slot's own any more
    return release(state.replace(prompts=prompts, slots=slots), ended)


def release(state: State, ended: Bool[Array, " S"]) -> State:
    """Makes slots inactive and releases their own pages."""
    slots = state.slots
    column = jnp.arange(slots.table.shape[1])[None]
    own = (column >= slots.shared[:, None]) & (column < slots.used[:, None])
    slots = slots.replace(
        active=slots.active & ~ended,
        shared=jnp.where(ended, 0, slots.shared),
        used=jnp.where(ended, 0, slots.used),
    )
    pool = pages_lib.release(state.pool, state.slots.table, own & ended[:, None])
    return state.replace(pool=pool, slots=slots)
