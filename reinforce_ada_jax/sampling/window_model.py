"""The decode window in numpy: decode.py's slots, queue and pages, with prescribed responses in place of a policy.

Window for window it leaves the state that `decode.decode_window` leaves, page for page (tests/sampling). Simulations
put times on it (simulation.py); tests put tokens into its pages.
"""

import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from reinforce_ada_jax.sampling.decode import NARROWER
from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    STOPPED,
    TRUNCATED,
    EngineOptions,
    Outputs,
    PrefillBatch,
    WindowInputs,
    WindowOutputs,
    empty_occupancy,
)

# (address, max_tokens) -> the tokens of the response, and True if max_tokens ended it.
Respond = Callable[[np.ndarray, int], tuple[np.ndarray, bool]]


class WindowModel:
    """One replica: a state that each call changes in place.

    Attributes:
      state: that part of the device's state.
      responses: (tokens, truncated) of each request in the queue or in a slot, by output row.
    """

    def __init__(self, options: EngineOptions, respond: Respond):
        self.options, self._respond = options, respond
        self.state = empty_occupancy(options, np)
        self.responses: dict[int, tuple[np.ndarray, bool]] = {}

    # ---- what a test may look at ---------------------------------------------------------------------------------

    def on_start(self, slot: int, prompt_row: int) -> None:
        """Called when a slot has taken a request of the prompt in a row."""

    def on_advance(self, slots: np.ndarray, num_tokens: int) -> None:
        """Called before these slots decode the given numbers of tokens."""

    def on_end(self, slot: int) -> None:
        """Called when a slot's response has ended, before its pages are released."""

    # ---- programs ------------------------------------------------------------------------------------------------

    def open_prompts(self, batch: PrefillBatch) -> None:
        """Does what `decode.open_prompts` does."""
        prompts = self.state.prompts
        for row, length, tokens in zip(batch.rows.tolist(), batch.length.tolist(), batch.tokens, strict=True):
            if row < self.options.open_prompts:
                pages = self._allocate(num_pages(length - 1, self.options.page_size))
                prompts.table[row] = 0
                prompts.table[row, : len(pages)] = pages
                prompts.length[row], prompts.last_token[row] = length, tokens[length - 1]

    def decode_window(self, inputs: WindowInputs) -> tuple[WindowOutputs, int]:
        """Does what `decode.decode_window` does; also returns the cached tokens that were read, over all steps."""
        o, slots, queue, ended = self.options, self.state.slots, self.state.queue, []
        decode_steps = busy = cached = 0
        self._close_prompts(inputs.closing)
        self._enqueue(inputs)
        self._refill(int(inputs.reserve))

        def starved() -> bool:
            idle = o.slots - slots.active.sum()
            dry = bool(queue.head >= queue.end and idle >= max(1, o.slots // 4))
            return dry and len(ended) >= max(1, o.slots // 8)

        def wanted() -> bool:
            return decode_steps < o.window and bool(slots.active.any()) and not starved()

        def few_left(width: int) -> bool:
            return bool(queue.head >= queue.end and slots.active.sum() <= width)

        def advance() -> None:
            """Decodes until a response ends or the window does: in between nothing can change."""
            nonlocal decode_steps, busy, cached
            active = np.flatnonzero(slots.active)
            left = [len(self.responses[row][0]) for row in slots.output_row[active].tolist()] - slots.count[active]
            num_tokens = min(o.window - decode_steps, int(left.min()))
            decode_steps, busy = decode_steps + num_tokens, busy + num_tokens * len(active)
            cached += num_tokens * int(slots.position[active].sum() + len(active))
            cached += len(active) * num_tokens * (num_tokens - 1) // 2
            self.on_advance(active, num_tokens)
            slots.position[active] += num_tokens
            slots.count[active] += num_tokens
            ended.extend(self._release(active[left == num_tokens]))

        widths = [o.slots // part for part in NARROWER if o.slots >= part]
        while wanted() and not few_left(max(widths, default=0)):
            advance()
            self._refill(int(inputs.reserve))
        for width, next_width in itertools.pairwise((*widths, 0)):
            self._active_first()
            while wanted() and few_left(width) and not few_left(next_width):
                advance()
        return self._outputs(ended, decode_steps, busy), cached

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
        for row in np.flatnonzero(closing).tolist():
            self._free(prompts.table[row, : num_pages(int(prompts.length[row]) - 1, self.options.page_size)])

    def _enqueue(self, inputs: WindowInputs) -> None:
        queue, size = self.state.queue, self.options.output_rows
        assert queue.end - queue.head + inputs.count <= size, "the ring of requests is full"
        for index in range(int(inputs.count)):
            entry, max_tokens = (int(queue.end) + index) % size, int(inputs.sampling.max_tokens[index])
            queue.prompt_row[entry], queue.output_row[entry] = inputs.prompt_row[index], inputs.output_row[index]
            queue.sampling.max_tokens[entry] = max_tokens
            self.responses[int(inputs.output_row[index])] = self._respond(inputs.address[index], max_tokens)
        queue.end[...] += inputs.count

    def _refill(self, reserve: int) -> None:
        """Idle slots take requests from the head of the queue, in order, as long as `reserve` pages stay free."""
        slots, queue, prompts = self.state.slots, self.state.queue, self.state.prompts
        for slot in np.flatnonzero(~slots.active).tolist():
            if queue.head >= queue.end:
                return
            entry = int(queue.head) % self.options.output_rows
            row, max_tokens = int(queue.prompt_row[entry]), int(queue.sampling.max_tokens[entry])
            length = int(prompts.length[row])
            shared = (length - 1) // self.options.page_size
            used = num_pages(length + max_tokens, self.options.page_size)
            if used - shared > self.state.pool.available - reserve:
                return  # no request passes the head of the queue
            queue.head[...] += 1
            slots.table[slot] = 0
            slots.table[slot, :shared] = prompts.table[row, :shared]
            slots.table[slot, shared:used] = self._allocate(used - shared)
            slots.active[slot], slots.position[slot], slots.count[slot] = True, length - 1, 0
            slots.shared[slot], slots.used[slot] = shared, used
            slots.output_row[slot], slots.sampling.max_tokens[slot] = queue.output_row[entry], max_tokens
            self.on_start(slot, row)

    def _release(self, ended: np.ndarray) -> Iterator[int]:
        """Yields the output rows of slots whose responses have ended, and releases their pages."""
        slots = self.state.slots
        for slot in ended.tolist():
            self.on_end(slot)
            self._free(slots.table[slot, slots.shared[slot] : slots.used[slot]])
            slots.active[slot], slots.shared[slot], slots.used[slot] = False, 0, 0
            yield int(slots.output_row[slot])

    def _active_first(self) -> None:
        slots = self.state.slots
        order = np.argsort(~slots.active, kind="stable")
        for array in jax.tree.leaves(slots):
            array[:] = array[order]

    def _outputs(self, ended: list[int], decode_steps: int, busy: int) -> WindowOutputs:
        responses = {row: self.responses.pop(row) for row in ended}
        rows, longest = self.options.output_rows, max((len(tokens) for tokens, _ in responses.values()), default=1)
        outputs = Outputs(
            tokens=np.zeros((rows, longest), np.int32), logprobs=np.zeros((rows, longest), np.float32),
            length=np.zeros(rows, np.int32), status=np.full(rows, RUNNING, np.int32),
        )  # fmt: skip
        for row, (tokens, truncated) in responses.items():
            outputs.tokens[row, : len(tokens)], outputs.length[row] = tokens, len(tokens)
            outputs.status[row] = TRUNCATED if truncated else STOPPED
        queue = self.state.queue
        return WindowOutputs(
            rows=outputs, waiting=np.asarray(queue.end - queue.head), free_pages=self.state.pool.available.copy(),
            busy=np.asarray(busy, np.int32), decode_steps=np.asarray(decode_steps, np.int32),
        )  # fmt: skip
