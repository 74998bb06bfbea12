"""The decode window in numpy: decode.py's slots, queue and pages, with prescribed responses in place of a policy.

After each window its state is that of `decode.decode_window`, page for page (tests/sampling). Simulations add times to
it (simulation.py); tests put tokens into its pages.
"""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from bench.draft_model import DraftModel
from reinforce_ada_jax.sampling import admission
from reinforce_ada_jax.sampling import slots as slots_lib
from reinforce_ada_jax.sampling.pages import num_pages, own_pages
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    STOPPED,
    TRUNCATED,
    EngineOptions,
    OpenedPrompts,
    Outputs,
    Requests,
    WindowCounts,
    WindowInputs,
    WindowOutputs,
    empty_occupancy,
)

# The forecast is the engine's own function.
admissible = jax.jit(admission.admissible)
# (address, max_tokens) -> the tokens of the response, and True if max_tokens ended it.
Respond = Callable[[np.ndarray, int], tuple[np.ndarray, bool]]


def _put(requests: Requests, place: int, new: Requests, index: int) -> None:
    """Copies entry `index` of the new requests to `place`. Keys and temperatures have no meaning here."""
    requests.prompt_row[place] = new.prompt_row[index]
    requests.output_row[place] = new.output_row[index]
    requests.park_row[place] = new.park_row[index]
    requests.sampling.max_tokens[place] = new.sampling.max_tokens[index]


class WindowModel:
    """One replica: a state that each call changes in place.

    Attributes:
      state: the `Occupancy` of the device's state.
      responses: (tokens, truncated) of each request in the queue or in a slot, by output row.
      start, length: fields of `Outputs`.
    """

    def __init__(self, options: EngineOptions, respond: Respond):
        self.options, self._respond = options, respond
        self.state = jax.tree.map(np.array, empty_occupancy(options))
        self.responses: dict[int, tuple[np.ndarray, bool]] = {}
        self.start, self.length = np.zeros((2, options.output_rows), np.int32)
        self._drafts = DraftModel(options)

    # ---- what a test may look at ---------------------------------------------------------------------------------

    def on_prefill(self, prompt_row: int, begin: int, num_tokens: int) -> None:
        """Called when `num_tokens` tokens of the prompt in a row, from `begin` on, are first put into its pages."""

    def on_start(self, slot: int, prompt_row: int) -> None:
        """Called when a slot has taken a request of the prompt in a row."""

    def on_advance(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Called before these slots decode the given numbers of tokens."""

    def on_end(self, slot: int) -> None:
        """Called when a slot's response has ended, before its pages are released."""

    def on_evict(self, slot: int) -> None:
        """Called when a slot is evicted, before its pages are released."""

    # ---- programs ------------------------------------------------------------------------------------------------

    def decode_window(self, inputs: WindowInputs) -> tuple[WindowOutputs, int, int]:
        """Does what `decode.decode_window` does.

        Returns:
          Its outputs, the cached tokens that all decode steps read, and the chunks of prompts that were prefilled.
        """
        o, slots, queue, ended = self.options, self.state.slots, self.state.queue, []
        decode_steps = busy = cached = redone = chunks = 0
        self._close_prompts(inputs.closing)
        self._open_prompts(inputs.opened)
        self._cancel(inputs.cancelled)
        self._enqueue(inputs)
        reserve, survivors = int(inputs.reserve), inputs.survivors
        floor = min(reserve, int(self.state.pool.available))

        def choose_width() -> int:
            few = queue.head >= queue.end
            return min(width for width in widths if width == o.slots or (few and slots.active.sum() <= width))

        def advance(changed: bool, prefilling: bool) -> None:
            """Decodes one step or, if nothing can change in between, until a response ends or needs a page."""
            nonlocal decode_steps, busy, cached
            active = np.flatnonzero(slots.active)
            left = self._tokens_left(active)
            to_page_end = o.page_size - slots.position[active] % o.page_size
            steps = min(o.window - decode_steps, int(left.min()), int(to_page_end.min()))
            # One step: another chunk or other rows follow, or requests may be admissible, because other pages are held.
            if prefilling or o.drafts or (changed and len(active) < o.slots and queue.head < queue.end):
                steps = 1
            rows = num_tokens = np.full(len(active), steps)
            if o.drafts:
                guesses, right = self._drafts.step(slots, self.state.prompts, self.responses)
                rows, num_tokens = 1 + guesses, 1 + right
            decode_steps, busy = decode_steps + steps, busy + steps * len(active)
            cached += int((rows * (slots.position[active] + 1) + rows * (rows - 1) // 2).sum())
            self.on_advance(active, num_tokens)
            slots.position[active] += num_tokens
            slots.count[active] += num_tokens
            self.length[slots.requests.output_row[active]] = slots.count[active]
            ended.extend(self._end(active[left == num_tokens], int(inputs.park_reserve)))

        widths, last_width = o.widths, o.slots
        while True:
            self._refill(reserve, survivors)
            chosen = slots_lib.choose_work(self.state, decode_steps, len(ended), o.window)
            go_on, prefilling, decoding = map(bool, chosen)
            used = slots.used.copy()
            if decoding:
                redone += self._take_pages(floor)
            changed, width = bool((slots.used != used).any()), choose_width() if go_on else widths[-1]
            if width < last_width:
                self._active_first()
            last_width = width
            if not go_on:
                break
            if prefilling:
                self._prefill_chunk()
                chunks += 1
            if decoding:
                advance(changed, prefilling)
        return self._outputs(ended, decode_steps, busy, redone), cached, chunks

    def _tokens_left(self, active: np.ndarray) -> np.ndarray:
        """Returns the tokens that these slots will still decode."""
        slots = self.state.slots
        rows = slots.requests.output_row[active].tolist()
        return [len(self.responses[row][0]) for row in rows] - slots.count[active]

    # ---- parts of a window ---------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> np.ndarray:
        pool = self.state.pool
        end = int(pool.available)
        assert count <= end, "a program took more pages than are free"
        pool.available[...] = end - count
        return pool.stack[end - count : end][::-1]

    def _free(self, pages: np.ndarray) -> None:
        pool = self.state.pool
        begin = int(pool.available)
        pool.stack[begin : begin + len(pages)] = pages
        pool.available[...] = begin + len(pages)

    def _close_prompts(self, closing: np.ndarray) -> None:
        prompts = self.state.prompts
        counts = num_pages(prompts.length - 1, self.options.page_size)
        held = np.arange(prompts.table.shape[1])[None] < counts[:, None]
        self._free(np.setdiff1d(prompts.table[held & closing[:, None]], prompts.table[held & ~closing[:, None]]))
        prompts.length[closing], prompts.cached[closing] = 1, 0

    def _open_prompts(self, opened: OpenedPrompts) -> None:
        prompts, first = self.state.prompts, int(self.state.prompts.number.max()) + 1
        for index in np.flatnonzero(opened.row < self.options.open_prompts).tolist():
            row, length, shared = int(opened.row[index]), int(opened.length[index]), int(opened.shared[index])
            pages = self._allocate(num_pages(length - 1, self.options.page_size) - shared)
            prompts.table[row, :shared] = prompts.table[opened.like[index], :shared]
            prompts.table[row, shared:] = 0
            prompts.table[row, shared : shared + len(pages)] = pages
            prompts.length[row], prompts.last_token[row] = length, opened.tokens[index, length - 1]
            prompts.cached[row], prompts.number[row] = opened.cached[index], first + index
            self._drafts.open_prompt(row, opened.tokens[index], length)

    def _prefill_chunk(self) -> None:
        prompts, missing, left = self.state.prompts, self.state.prompts.missing, self.options.prefill_tokens
        for row in sorted(np.flatnonzero(missing).tolist(), key=lambda row: prompts.number[row]):
            taken = min(left, int(missing[row]))
            self.on_prefill(row, int(prompts.cached[row]), taken)
            prompts.cached[row] += taken
            left -= taken

    def _cancel(self, cancelled: np.ndarray) -> None:
        slots, running, waiting = self.state.slots, self.state.slots.requests, self.state.queue.requests
        limits = {int(running.output_row[slot]): int(slots.count[slot]) + 1 for slot in np.flatnonzero(slots.active)}
        for row in np.flatnonzero(cancelled).tolist():
            if row in self.responses:  # else it has ended
                tokens, truncated = self.responses[row]
                limit = limits.get(row, 1)
                self.responses[row] = tokens[:limit], truncated or limit < len(tokens)
        of_slots, max_tokens = slots.active & cancelled[running.output_row], running.sampling.max_tokens
        max_tokens[of_slots] = np.minimum(max_tokens, slots.count + 1)[of_slots]
        waiting.sampling.max_tokens[cancelled[waiting.output_row]] = 1

    def _enqueue(self, inputs: WindowInputs) -> None:
        queue, size, new = self.state.queue, self.options.output_rows, inputs.requests
        assert queue.end - queue.head + inputs.count <= size, "the ring of requests is full"
        for index in range(int(inputs.count)):
            _put(queue.requests, (int(queue.end) + index) % size, new, index)
            row, max_tokens = int(new.output_row[index]), int(new.sampling.max_tokens[index])
            # Tokens of the response that are in its prompt are not drawn again.
            begun = 0 if new.begun is None else int(new.begun[index])
            tokens, truncated = self._respond(new.key[index], begun + max_tokens)
            self.responses[row] = tokens[begun:], truncated
            self.length[row] = 0
        self.start = self.length.copy()
        queue.end[...] += inputs.count

    def _refill(self, reserve: int, survivors: np.ndarray) -> None:
        """Idle slots take requests from the head of the queue, in order, as many as are admissible."""
        slots, queue, prompts = self.state.slots, self.state.queue, self.state.prompts
        page_size = self.options.page_size
        num_waiting, idle = int(queue.end - queue.head), ~slots.active
        if not num_waiting or not idle.any():
            return
        number = idle.cumsum() - 1
        entry = (queue.head + number) % self.options.output_rows
        running, waiting = slots.requests, queue.requests
        row = np.where(idle, waiting.prompt_row[entry], running.prompt_row)
        max_tokens = np.where(idle, waiting.sampling.max_tokens[entry], running.sampling.max_tokens)
        limit = own_pages(prompts.length[row], max_tokens, page_size)
        limit[idle & (number >= num_waiting)] = 0
        unready = idle & (prompts.missing[row] > 0)
        limit[idle & (unready.cumsum() > 0)] = 0
        held = slots.used - slots.shared
        room = np.asarray(self.state.pool.available + held.sum() - reserve)
        for slot in np.flatnonzero(admissible(survivors, held, limit, room)).tolist():
            length = int(prompts.length[row[slot]])
            shared = (length - 1) // page_size
            queue.head[...] += 1
            slots.table[slot] = 0
            slots.table[slot, :shared] = prompts.table[row[slot], :shared]
            slots.table[slot, shared] = self._allocate(1)[0]
            slots.active[slot], slots.position[slot], slots.count[slot] = True, length - 1, 0
            slots.shared[slot], slots.used[slot] = shared, shared + 1
            _put(running, slot, waiting, int(entry[slot]))
            self.on_start(slot, int(row[slot]))

    def _take_pages(self, floor: int) -> int:
        """Gives each slot the page of its next token; evicts slots if too few are free, and returns their tokens."""
        slots, redone = self.state.slots, 0
        needs = slots.active & (slots.position // self.options.page_size >= slots.used)
        free = int(self.state.pool.available) - floor
        if needs.sum() > free:
            redone = self._evict(needs, free)
        growing = np.flatnonzero(needs & slots.active)
        slots.table[growing, slots.used[growing]] = self._allocate(len(growing))
        slots.used[growing] += 1
        return redone

    def _evict(self, needs: np.ndarray, free: int) -> int:
        """Evicts the slots with the fewest tokens until the others find their pages; returns the tokens given up."""
        slots, queue = self.state.slots, self.state.queue
        own, missing, evicted = slots.used - slots.shared, int(needs.sum()) - free, []
        by_tokens = np.argsort(np.where(slots.active, slots.count, np.iinfo(np.int32).max), kind="stable")
        for slot in by_tokens.tolist():
            if missing <= 0:
                break
            missing -= int(own[slot]) + int(needs[slot])
            evicted.append(slot)
        for slot in evicted:  # the one with the most tokens comes to the front
            queue.head[...] -= 1
            _put(queue.requests, int(queue.head) % self.options.output_rows, slots.requests, slot)
        rows = slots.requests.output_row[evicted]
        self.start[rows] = self.length[rows] = 0
        for slot in sorted(evicted):
            self.on_evict(slot)
            self._give_up(slot)
        return int(slots.count[evicted].sum())

    def _end(self, ended: np.ndarray, park_reserve: int) -> Iterator[int]:
        """Yields the output rows of slots whose responses have ended; parks their turns, or releases their pages."""
        slots, prompts = self.state.slots, self.state.prompts
        num_rows, width = prompts.table.shape
        own, wanted = slots.used - slots.shared, np.zeros(len(slots.used), bool)
        wanted[ended] = ((slots.requests.park_row < num_rows) & (slots.used <= width))[ended]
        room = int(self.state.pool.available) + own.sum() - park_reserve
        parked = wanted & (np.where(wanted, own, 0).cumsum() <= room)
        for slot in ended.tolist():
            self.on_end(slot)
            if parked[slot]:
                row, position, used = slots.requests.park_row[slot], slots.position[slot], slots.used[slot]
                prompts.table[row, :used] = slots.table[slot, :used]
                prompts.length[row], prompts.cached[row] = position + 1, position
                slots.shared[slot] = used
            self._give_up(slot)
            yield int(slots.requests.output_row[slot])

    def _give_up(self, slot: int) -> None:
        slots = self.state.slots
        self._free(slots.table[slot, slots.shared[slot] : slots.used[slot]])
        slots.active[slot], slots.shared[slot], slots.used[slot] = False, 0, 0

    def _active_first(self) -> None:
        slots = self.state.slots
        order = np.argsort(~slots.active, kind="stable")
        for array in jax.tree.leaves(slots):
            array[:] = array[order]

    def _outputs(self, ended: list[int], decode_steps: int, busy: int, redone: int) -> WindowOutputs:
        queue, size = self.state.queue, (self.options.output_rows, self.options.most_new_tokens)
        new = Outputs(
            tokens=np.zeros(size, np.int32), logprobs=np.zeros(size, np.float32),
            start=self.start, length=self.length.copy(), status=np.full(size[0], RUNNING, np.int32),
        )  # fmt: skip
        for row in np.flatnonzero(new.length > new.start).tolist():
            begin, end = int(new.start[row]), int(new.length[row])
            new.tokens[row, : end - begin] = self.responses[row][0][begin:end]
        for row in ended:
            new.status[row] = TRUNCATED if self.responses.pop(row)[1] else STOPPED
        return WindowOutputs(
            rows=new, waiting=np.asarray(queue.end - queue.head), free_pages=self.state.pool.available.copy(),
            prompt_length=self.state.prompts.length.copy(),
            counts=WindowCounts(
                decode_steps=np.asarray(decode_steps, np.int32), busy=np.asarray(busy, np.int32),
                redone=np.asarray(redone, np.int32), **self._drafts.take_counts(),
            ),
        )  # fmt: skip
