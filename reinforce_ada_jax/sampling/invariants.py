"""Checks of what holds after every program: pages and rows are conserved, and each request is in one place.

With `sampling.check_invariants` the rollouts make them after every window, so host and device wait for each other. They
serve tests, and find where a page or a request is lost.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from reinforce_ada_jax.sampling.pages import NULL, num_pages
from reinforce_ada_jax.sampling.rows import Rows
from reinforce_ada_jax.sampling.state import RUNNING, EngineOptions, Occupancy, Prompts, Requests, Slots, WindowOutputs


class BrokenInvariant(RuntimeError):
    """The engine and its host do not agree: responses drawn from here on cannot be trusted."""


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenInvariant(f"an invariant of the engine is broken: {broken}.")


def _require_partition(size: int, name: str, **parts: Iterable[int] | np.ndarray) -> None:
    """Requires every number of range(size) in exactly one of the parts, once."""
    numbers = [int(number) for part in parts.values() for number in part]
    if len(numbers) == size and set(numbers) == set(range(size)):
        return
    counts = Counter(numbers)
    twice = sorted(number for number, count in counts.items() if count > 1)
    unknown, lost = sorted(counts.keys() - set(range(size))), sorted(set(range(size)) - counts.keys())
    found = {part: sorted(map(int, numbers)) for part, numbers in parts.items()}
    _require(False, f"{name} {twice} twice, {unknown} unknown, {lost} lost in {found}")


def check_rows(options: EngineOptions, rows: Rows) -> None:
    """Checks the host's rows of one replica: each is free or occupied, and no request is in flight twice."""
    _require_partition(options.open_prompts, "prompt rows", open=rows.prompts.values(),
                       parked=[turn.row for turn in rows.parked.values()], to_be_parked=rows.park_rows.values(),
                       closing=np.flatnonzero(rows.closing), free=rows.free_prompt_rows)  # fmt: skip
    _require_partition(options.output_rows, "output rows", in_flight=rows.in_flight, free=rows.free_output_rows)
    counts = Counter((request.prompt.id, request.draw) for request in rows.in_flight.values())
    twice = [address for address, count in counts.items() if count > 1]
    _require(not twice, f"requests {twice} are in flight twice")


def check_state(
    options: EngineOptions, state: Occupancy, rows: Rows, unread: Sequence[WindowOutputs], guaranteed_free_pages: int
) -> None:
    """Checks one replica's state after the newest window against the host's records.

    `unread` are outputs of windows that the host has not read; it counts on `guaranteed_free_pages`.

    Raises:
      BrokenInvariant: a page is lost or held twice, a request is lost or in two places, a slot is not where its prompt
        and length put it, or fewer pages are free than the host counts on.
    """
    size, head, end = options.output_rows, int(state.queue.head), int(state.queue.end)
    _require(0 <= end - head <= size, f"the queue of {size} reaches from {head} to {end}")
    active = np.flatnonzero(state.slots.active)
    waiting = jax.tree.map(lambda x: x[np.arange(head, end) % size], state.queue.requests)
    running = jax.tree.map(lambda x: x[active], state.slots)
    _check_requests(waiting, running.requests, rows, unread)
    _check_pages(options, state, rows, running)
    available = int(state.pool.available)
    _require(
        available >= guaranteed_free_pages,
        f"{available} pages are free, and the host counts on {guaranteed_free_pages}",
    )
    _check_slots(options, state.prompts, rows, running, active)


def _check_requests(waiting: Requests, running: Requests, rows: Rows, unread: Sequence[WindowOutputs]) -> None:
    """Checks that each request waits for its prompt, is decoded, or has ended in a window that is not read yet."""
    in_flight = rows.in_flight
    ended = [row for outputs in unread for row in np.flatnonzero(outputs.rows.status != RUNNING).tolist()]
    places = Counter([*waiting.output_row.tolist(), *running.output_row.tolist(), *ended])
    if places != dict.fromkeys(in_flight, 1):
        twice = sorted(row for row, count in places.items() if count > 1)
        lost, unknown = sorted(in_flight.keys() - places), sorted(places.keys() - in_flight.keys())
        _require(False, f"requests of output rows {lost} lost, {unknown} unknown, {twice} twice")
    for output_row, row in zip(waiting.output_row.tolist(), waiting.prompt_row.tolist(), strict=True):
        home = rows.prompts.get(in_flight[output_row].prompt.id, -1)
        _require(home == row, f"the request of output row {output_row} waits for prompt row {row}")


def _check_pages(options: EngineOptions, state: Occupancy, rows: Rows, running: Slots) -> None:
    """Checks that each page is in one state: free, held by prompts and parked turns, or owned by one slot."""
    pool, prompts = state.pool, state.prompts
    available = int(pool.available)
    _require(0 <= available <= options.pages - 1, f"{available} of {options.pages - 1} pages are free")
    parked = [turn.row for turn in rows.parked.values()]
    open_rows = np.array([*rows.prompts.values(), *parked, *rows.park_rows.values()], np.int64)
    counts = num_pages(prompts.length[open_rows] - 1, options.page_size)
    prompt_pages = prompts.table[open_rows][np.arange(prompts.table.shape[1]) < counts[:, None]]
    column = np.arange(running.table.shape[1])
    own = (column >= running.shared[:, None]) & (column < running.used[:, None])
    _require_partition(options.pages, "pages", null=[NULL], free=pool.stack[:available],
                       prompts=np.unique(prompt_pages), slots=running.table[own])  # fmt: skip


def _check_slots(options: EngineOptions, prompts: Prompts, rows: Rows, running: Slots, active: np.ndarray) -> None:
    """Checks that the active slots read their own prompts' pages, with a page for each token."""
    of_slots = running.requests.output_row.tolist()
    requests = [rows.in_flight[row] for row in of_slots]
    home = np.array([rows.prompts.get(request.prompt.id, -1) for request in requests], np.int64)
    _require(bool((home >= 0).all()), f"slots {active[home < 0].tolist()} decode for prompts that are closed")
    length = prompts.length[home]
    park_row = np.array([rows.park_rows.get(row, options.open_prompts) for row in of_slots], np.int64)
    right = (
        (running.requests.prompt_row == home)
        & (running.requests.park_row == park_row)
        & (running.position == length - 1 + running.count)
        & (running.count < running.requests.sampling.max_tokens)
        & (running.shared == (length - 1) // options.page_size)
        & (running.used == np.maximum(running.position - 1, length - 1) // options.page_size + 1)
    )
    _require(bool(right.all()), f"slots {active[~right].tolist()} are not where their prompts and lengths put them")
    width = min(running.table.shape[1], prompts.table.shape[1])
    same = running.table[:, :width] == prompts.table[home][:, :width]
    same |= np.arange(width) >= running.shared[:, None]
    _require(bool(same.all()), f"slots {active[~same.all(1)].tolist()} read other pages than their prompts'")


def check_outputs(outputs: WindowOutputs, rows: Rows) -> None:
    """Checks that what a window wrote was requested and not answered before, and follows what the host has."""
    new = outputs.rows
    has_new, ended = new.length > new.start, np.flatnonzero(new.status != RUNNING)
    strange = [row for row in np.flatnonzero(has_new).tolist() if row not in rows.in_flight]
    _require(not strange, f"output rows {strange} got tokens, and no request is in flight for them")
    _require(bool(has_new[ended].all()), f"output rows {ended[~has_new[ended]].tolist()} ended without a token")
    gap = np.flatnonzero((new.start > new.length) | (has_new & (new.start > 0) & (new.start != rows.length)))
    _require(not gap.size, f"new tokens of output rows {gap.tolist()} do not follow those before")


def check_idle(options: EngineOptions, state: Occupancy) -> None:
    """Checks that a replica holds nothing after a session: no slot, no request, and no page but NULL."""
    active = np.flatnonzero(state.slots.active).tolist()
    _require(not active, f"slots {active} still decode after the session")
    waiting = int(state.queue.end - state.queue.head)
    _require(waiting == 0, f"{waiting} requests still wait after the session")
    free = state.pool.stack[: int(state.pool.available)]
    _require_partition(options.pages, "after the session, pages", null=[NULL], free=free)
