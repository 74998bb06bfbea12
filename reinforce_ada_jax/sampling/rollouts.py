"""The host's side of sampling: requests in, finished responses out, one thread.

`Rollouts.sample` is the `sample_fn` of the collection loop. The host decides only which prompts are open and which
requests stand in the device's queue; slots, pages and tokens are the compiled window's.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.state import RUNNING, TRUNCATED, DecodeState, Requests
from reinforce_ada_jax.types import Prompt, Request, RequestQueue, Response


@dataclasses.dataclass
class RolloutCounts:
    """What one call of `sample` did, for the metrics."""

    tokens: int = 0  # slot-turns that made a token
    slot_turns: int = 0  # all slot-turns, idle ones included
    windows: int = 0  # dispatches of the decode window
    prefills: int = 0  # prompts prefilled

    @property
    def slot_utilisation(self) -> float:
        """Share of slot-turns that made a token."""
        return self.tokens / self.slot_turns if self.slot_turns else 0.0


class Rollouts:
    """One engine and its decode state, fed from a request queue."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.state: DecodeState | None = engine.init_decode_state()  # None while a session has it
        self.counts = RolloutCounts()

    def sampler(self, params: Params, *, stream: int, limit: int) -> Callable[[RequestQueue], Iterator[list[Response]]]:
        """A `sample_fn` that draws from `params`.

        Args:
          params: the learner's, as they are.
          stream: the first word of every address (`token.stream`).
          limit: response tokens at most.

        Raises:
          ValueError: the engine has no room for responses of `limit` tokens.
        """
        longest = self.engine.options.max_response_tokens
        if not 1 <= limit <= longest:
            raise ValueError(
                f"responses of up to {limit} tokens are asked for; the engine was built for 1 to {longest}."
            )
        weights = self.engine.decode_weights(params)

        def sample_fn(queue: RequestQueue) -> Iterator[list[Response]]:
            self.counts = RolloutCounts()
            # The session has the state to itself: one that is broken off, slots still decoding, leaves none behind.
            session = _Session(self, self._take_state(), weights, queue, stream, limit)
            yield from session.run()
            self.state = session.state

        return sample_fn

    def _take_state(self) -> DecodeState:
        state, self.state = self.state, None
        return self.engine.init_decode_state() if state is None else state


class _Session:
    """The bookkeeping of one call: rows of prompts and outputs by who occupies them."""

    def __init__(
        self, rollouts: Rollouts, state: DecodeState, weights: Params, queue: RequestQueue, stream: int, limit: int
    ):
        self.engine, self.counts = rollouts.engine, rollouts.counts
        self.state, self.weights, self.queue, self.stream, self.limit = state, weights, queue, stream, limit
        options = self.engine.options
        self.prompt_rows: dict[str, int] = {}
        self.free_prompt_rows = list(range(options.open_prompts))[::-1]
        self.prompt_pages: dict[str, int] = {}
        self.free_pages = int(state.pool.available)
        self.free_output_rows = list(range(options.output_rows))[::-1]
        self.in_flight: dict[int, Request] = {}  # by output row
        self.queued: list[int] = []  # output rows whose requests the device hasn't taken yet, in order
        self.unopened: list[Request] = []  # taken, but no row or pages are free for them yet

    def run(self) -> Iterator[list[Response]]:
        """Windows until the queue is dry and nothing is in flight."""
        while True:
            self._close_prompts(self.queue.closed())
            self._take_requests()
            if not self.in_flight and not self.unopened:
                break
            yield self._decode()
        self._close_prompts(list(self.prompt_rows))

    def _close_prompts(self, prompt_ids: list[str]) -> None:
        closing = np.zeros(self.engine.options.open_prompts, bool)
        for prompt_id in prompt_ids:
            if prompt_id in self.prompt_rows:
                row = self.prompt_rows.pop(prompt_id)
                self.free_pages += self.prompt_pages.pop(prompt_id)
                closing[row] = True
                self.free_prompt_rows.append(row)
        if closing.any():
            self.state = self.engine.close_prompts(self.state, closing)

    def _can_open(self, pages: int) -> bool:
        """One response must always find room beside the open prompts, or nothing would ever move on."""
        options = self.engine.options
        room = options.pages - 1 - options.table_width - sum(self.prompt_pages.values())
        return bool(self.free_prompt_rows) and pages <= min(room, self.free_pages)

    def _take_requests(self) -> None:
        """Moves requests onto the device's queue; opens the prompts that are new."""
        taken = self.queue.take(len(self.free_output_rows))
        # Further rounds of open prompts come before prompts that had to wait, and those before new ones.
        further = [request for request in taken if request.prompt.id in self.prompt_rows]
        new = [request for request in taken if request.prompt.id not in self.prompt_rows]
        waiting, self.unopened = [*further, *self.unopened, *new], []
        opened: list[Prompt] = []
        while waiting:
            self.unopened += [request for request in waiting if not self._place(request, opened)]
            # Behind those that have to wait may stand requests of open prompts: only by these do the prompts close.
            waiting = self.queue.take(len(self.free_output_rows))
        if opened:
            self.counts.prefills += len(opened)
            rows, tokens = [self.prompt_rows[prompt.id] for prompt in opened], [prompt.tokens for prompt in opened]
            self.state = self.engine.open_prompts(self.weights, self.state, rows, tokens)

    def _place(self, request: Request, opened: list[Prompt]) -> bool:
        """Gives a request an output row, and its prompt a row if it is new; False where it has to wait for one."""
        prompt = request.prompt
        if not self.free_output_rows:
            return False
        if prompt.id not in self.prompt_rows:
            pages = num_pages(len(prompt.tokens) - 1, self.engine.options.page_size)
            if not self._can_open(pages):
                return False
            self.prompt_rows[prompt.id] = self.free_prompt_rows.pop()
            self.prompt_pages[prompt.id] = pages
            self.free_pages -= pages
            opened.append(prompt)
        output_row = self.free_output_rows.pop()
        self.in_flight[output_row] = request
        self.queued.append(output_row)
        return True

    def _requests(self) -> Requests:
        """The waiting requests as the device's queue."""
        size = self.engine.options.output_rows
        prompt_row, output_row, limit = (np.zeros(size, np.int32) for _ in range(3))
        address = np.zeros((size, token_lib.ADDRESS_WORDS), np.uint32)
        for index, row in enumerate(self.queued):
            request = self.in_flight[row]
            prompt_row[index] = self.prompt_rows[request.prompt.id]
            output_row[index] = row
            address[index] = token_lib.address(self.stream, request.prompt.id, request.draw)
            limit[index] = self.limit
        return Requests(
            prompt_row=prompt_row, output_row=output_row, address=address, key=np.zeros((size, 2), np.uint32),
            limit=limit, head=np.int32(0), end=np.int32(len(self.queued)),
        )  # fmt: skip

    def _decode(self) -> list[Response]:
        """One window; the responses that ended in it, by output row."""
        state = self.state = self.engine.decode_window(self.weights, self.state, self._requests())
        status, head, busy, turns, free_pages = jax.device_get(
            (state.outputs.status, state.requests.head, state.busy, state.turns, state.pool.available)
        )
        self.free_pages = int(free_pages)
        self.queued = self.queued[int(head) :]
        counts = self.counts
        counts.windows += 1
        counts.tokens += int(busy)
        counts.slot_turns += int(turns) * self.engine.options.slots
        if turns == 0:
            raise RuntimeError(
                f"{len(self.in_flight) + len(self.unopened)} requests wait and none can start: a pool of "
                f"{self.engine.options.pages} pages has no room for one more prompt with one response, or prompts "
                "of which nothing is in flight were never closed."
            )
        finished = np.flatnonzero(status != RUNNING)
        responses = []
        if finished.size:
            tokens, logprobs, length = jax.device_get(
                (state.outputs.tokens, state.outputs.logprobs, state.outputs.length)
            )
            for row in map(int, finished):
                request = self.in_flight.pop(row)
                self.free_output_rows.append(row)
                responses.append(Response(
                    prompt_id=request.prompt.id,
                    draw=request.draw,
                    tokens=tokens[row, : length[row]].copy(),
                    logprobs=logprobs[row, : length[row]].copy(),
                    truncated=bool(status[row] == TRUNCATED),
                ))  # fmt: skip
        return responses
