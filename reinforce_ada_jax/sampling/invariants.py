"""What holds after every program of the engine: pages and rows conserved, each request in one place.

`sampling.check_invariants` has the rollouts look after every window, which makes host and device wait for each other:
for tests, and for finding out where a pool of pages goes wrong.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from reinforce_ada_jax.sampling.pages import NULL, num_pages
from reinforce_ada_jax.sampling.state import RUNNING, DecodeState, EngineOptions, WindowOutputs
from reinforce_ada_jax.types import Request


class BrokenInvariant(RuntimeError):
    """The engine and its host don't agree: nothing drawn from here on can be trusted."""


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenInvariant(f"an invariant of the engine is broken: {broken}.")


def _parts_of(size: int, what: str, **parts: Iterable[int]) -> None:
    """Every number of range(size) stands in just one of the parts, once."""
    numbers = [int(number) for part in parts.values() for number in part]
    if len(numbers) == size and set(numbers) == set(range(size)):
        return
    counts = Counter(numbers)
    twice = sorted(number for number, count in counts.items() if count > 1)
    strange, lost = sorted(counts.keys() - set(range(size))), sorted(set(range(size)) - counts.keys())
    where = {name: sorted(map(int, part)) for name, part in parts.items()}
    _require(False, f"{what} {twice} twice, {strange} unknown, {lost} lost in {where}")


def check_rows(
    options: EngineOptions,
    *,
    prompt_rows: Mapping[str, int],
    closing: np.ndarray,
    free_prompt_rows: list[int],
    in_flight: Mapping[int, Request],
    free_output_rows: list[int],
) -> None:
    """The host's books of one replica: rows of prompts and outputs are free or occupied, each once.

    Raises:
      BrokenInvariant: they aren't, or a request is in flight twice.
    """
    about_to_close = np.flatnonzero(closing).tolist()
    _parts_of(options.open_prompts, "prompt rows", open=prompt_rows.values(), closing=about_to_close,
              free=free_prompt_rows)  # fmt: skip
    _parts_of(options.output_rows, "output rows", in_flight=in_flight, free=free_output_rows)
    addresses = [(request.prompt.id, request.draw) for request in in_flight.values()]
    if len(set(addresses)) < len(addresses):
        twice = [address for address, count in Counter(addresses).items() if count > 1]
        _require(False, f"requests {twice} are in flight twice")


def check_state(
    options: EngineOptions,
    state: DecodeState,
    *,
    prompt_rows: Mapping[str, int],
    in_flight: Mapping[int, Request],
    unread: Iterable[WindowOutputs],
    guaranteed_free_pages: int,
) -> None:
    """One replica's state after the newest window, against the host's books.

    Args:
      options: of the engine.
      state: its pool, prompts, queue and slots, on the host.
      prompt_rows: of the prompts that are open.
      in_flight: requests handed over and not heard of, by output row.
      unread: all_outputs of windows that the host has not read.
      guaranteed_free_pages: free at least, as the host believes.

    Raises:
      BrokenInvariant: a page is lost or held twice, a request is lost or in two places, or fewer pages are free than
        the host counts on.
    """
    pool, prompts, queue, slots = state.pool, state.prompts, state.queue, state.slots
    # ---- requests: each waits, is decoded, or has ended in a window that is not read yet.
    size = len(queue.prompt_row)
    head, end = int(queue.head), int(queue.end)
    _require(0 <= end - head <= size, f"the queue of {size} reaches from {head} to {end}")
    waiting = np.arange(head, end) % size
    active = np.flatnonzero(slots.active)
    ended = [row for outputs in unread for row in np.flatnonzero(outputs.rows.status != RUNNING).tolist()]
    places = [*queue.output_row[waiting].tolist(), *slots.output_row[active].tolist(), *ended]
    if len(places) != len(in_flight) or set(places) != in_flight.keys():
        twice = sorted(row for row, count in Counter(places).items() if count > 1)
        lost, unknown = sorted(in_flight.keys() - set(places)), sorted(set(places) - in_flight.keys())
        _require(False, f"requests of output rows {lost} lost, {unknown} unknown, {twice} twice")
    # ---- pages: each is free, a prompt's, or a slot's own.
    available = int(pool.available)
    _require(0 <= available <= options.pages - 1, f"{available} of {options.pages - 1} pages are free")
    rows = np.array(list(prompt_rows.values()), np.int64)
    counts = num_pages(prompts.length[rows] - 1, options.page_size)
    column = np.arange(prompts.table.shape[1])
    prompt_pages = prompts.table[rows][column < counts[:, None]]
    table, shared, used = slots.table[active], slots.shared[active], slots.used[active]
    column = np.arange(table.shape[1])
    own_pages = table[(column >= shared[:, None]) & (column < used[:, None])]
    free = pool.stack[:available]
    _parts_of(options.pages, "pages", null=[NULL], free=free.tolist(), prompts=prompt_pages.tolist(),
              slots=own_pages.tolist())  # fmt: skip
    _require(
        available >= guaranteed_free_pages,
        f"{available} pages are free, where the host counts on {guaranteed_free_pages}",
    )
    # ---- slots: at home in their prompt's pages, with room for the next token and for the last one.
    row_of = {row: prompt_rows.get(request.prompt.id, -1) for row, request in in_flight.items()}
    for output_row, row in zip(queue.output_row[waiting].tolist(), queue.prompt_row[waiting].tolist(), strict=True):
        _require(row_of[output_row] == row, f"the request of output row {output_row} waits for prompt row {row}")
    home = np.array([row_of[row] for row in slots.output_row[active].tolist()], np.int64)
    _require(bool((home >= 0).all()), f"slots {active[home < 0].tolist()} decode for prompts that are closed")
    length = prompts.length[home]
    limit, count, position = slots.sampling.max_tokens[active], slots.count[active], slots.position[active]
    right = (
        (position == length - 1 + count)
        & (count < limit)
        & (shared == (length - 1) // options.page_size)
        & (used == num_pages(length + limit, options.page_size))
    )
    _require(bool(right.all()), f"slots {active[~right].tolist()} are not where their prompts and lengths put them")
    of_prompt = np.arange(min(table.shape[1], prompts.table.shape[1])) < shared[:, None]
    width = of_prompt.shape[1]
    same = (table[:, :width] == prompts.table[home][:, :width]) | ~of_prompt
    _require(bool(same.all()), f"slots {active[~same.all(1)].tolist()} read other pages than their prompts'")


def check_outputs(outputs: WindowOutputs, in_flight: Mapping[int, Request]) -> None:
    """What a window says that it finished was asked for, and not answered before.

    Raises:
      BrokenInvariant: an output row ended that nobody waits for, or without a token.
    """
    ended = np.flatnonzero(outputs.rows.status != RUNNING)
    strange = [row for row in ended.tolist() if row not in in_flight]
    _require(not strange, f"output rows {strange} ended, and nothing was asked of them or it was answered already")
    lengths = outputs.rows.length[ended]
    _require(bool((lengths >= 1).all()), f"output rows {ended[lengths < 1].tolist()} ended without a token")


def check_idle(options: EngineOptions, state: DecodeState) -> None:
    """After a session one replica holds nothing.

    Raises:
      BrokenInvariant: a slot decodes, a request waits, or a page is not free.
    """
    active = np.flatnonzero(state.slots.active).tolist()
    _require(not active, f"slots {active} still decode after the session")
    waiting = int(state.queue.end - state.queue.head)
    _require(waiting == 0, f"{waiting} requests still wait after the session")
    free = state.pool.stack[: int(state.pool.available)]
    _parts_of(options.pages, "after the session, pages", null=[NULL], free=free.tolist())
