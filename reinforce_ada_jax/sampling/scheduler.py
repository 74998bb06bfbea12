"""The scheduler of one replica: which prompts are open, and which requests the next window starts.

A request waits until its prompt is open, or is ready for the next window, or is in flight. The device assigns slots.
"""

import collections
import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from reinforce_ada_jax.sampling import invariants
from reinforce_ada_jax.sampling.admission import Lengths
from reinforce_ada_jax.sampling.page_budget import PageBudget
from reinforce_ada_jax.sampling.pages import num_pages, own_pages
from reinforce_ada_jax.sampling.prefixes import Prefixes
from reinforce_ada_jax.sampling.routes import ReportedRoutes
from reinforce_ada_jax.sampling.rows import ParkedTurn, Rows
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    TRUNCATED,
    EngineOptions,
    Occupancy,
    Requests,
    SamplingParams,
    WindowInputs,
    WindowOutputs,
)
from reinforce_ada_jax.sampling.window_inputs import OpenedPrompt, window_inputs
from reinforce_ada_jax.types import Prompt, Request, Response

# Requests are kept ready for a fifth of the slots, because slots become free inside a window. Simulated with rounds of
# one draw in 256 slots, four seeds: 0.894 to 0.899 of slot-steps are useful with requests for an eighth of the slots,
# 0.901 to 0.912 with a fifth, 0.899 to 0.911 with a quarter. With more, some start too early and are discarded.
FREED_IN_A_WINDOW = 5
# Prompts that wait, for which a window leaves pages free.
NEXT_PROMPTS = 16


class Scheduler:
    """Requests of one replica, over its page budget and its rows."""

    def __init__(self, options: EngineOptions, adapter_of: Callable[[Prompt], int] = lambda _: -1):
        """Makes a scheduler without requests; prompts for which `adapter_of` gives one adapter share their prefixes."""
        self.options, self._adapter_of = options, adapter_of
        self.budget, self.rows, self._prefixes = PageBudget(options), Rows(options), Prefixes(options)
        self._routes = ReportedRoutes(options) if options.records_experts else None
        self._lengths = Lengths(options.table_width)
        self._rest: dict[str, int] = {}  # most pages that a response which goes on still needs, by its prompt's id
        self._unopened: dict[str, list[Request]] = {}  # of prompts that wait for a row or for pages, in order
        self._ready: collections.deque[Request] = collections.deque()  # of open prompts
        self._cancelled: set[Request] = set()  # on the device, with the next window
        self.opened: list[OpenedPrompt] = []  # with the next window
        self._has_turns = False  # prompts may wait for the end of a trajectory whose next turn waits for them
        self._next_turns: set[str] = set()  # open prompts that go on where a turn was parked

    @property
    def busy(self) -> bool:
        """True if a window has work: responses, or closing prompts for those that wait."""
        return bool(self.rows.in_flight or self._ready or (self._unopened and self.rows.closing.any()))

    @property
    def load(self) -> int:
        """Responses that are not finished."""
        return len(self.rows.in_flight) + len(self._ready) + sum(map(len, self._unopened.values()))

    @property
    def capacity(self) -> int:
        """Requests that the next window could start beside those that are ready."""
        return max(0, len(self.rows.free_output_rows) - len(self._ready))

    @property
    def idle_slots(self) -> int:
        """Slots for which no request is ready."""
        return 0 if self._unopened else max(0, self.options.slots - len(self.rows.in_flight) - len(self._ready))

    @property
    def missing_requests(self) -> int:
        """Requests that keep all slots busy: for idle slots, and for those that a window frees."""
        wanted = self.options.slots + self.options.slots // FREED_IN_A_WINDOW
        return max(0, wanted - len(self.rows.in_flight) - len(self._ready))

    @property
    def num_unopened(self) -> int:
        """Prompts that wait for a row or for pages."""
        return len(self._unopened)

    def has(self, prompt_id: str) -> bool:
        """Returns True if the prompt is open here, waits to be, or follows a turn that is parked here."""
        return prompt_id in self.rows.prompts or prompt_id in self._unopened or prompt_id in self.rows.parked

    def add(self, request: Request) -> None:
        """Adds a request; its prompt is opened if it is new and there is room."""
        prompt = request.prompt
        self._has_turns |= bool(request.continues)
        if request.begun is not None and self.options.finishes:
            rest = self.options.max_response_tokens - len(request.begun.tokens)
            self._rest[prompt.id] = own_pages(len(prompt.tokens), rest, self.options.page_size)
        if prompt.id in self.rows.prompts or (not self._unopened and self._open(prompt, 1)):
            self._ready.append(request)
        else:
            self._unopened.setdefault(prompt.id, []).append(request)

    def open_waiting(self) -> None:
        """Opens prompts that wait, in order, until one finds no room."""
        for prompt_id, requests in list(self._unopened.items()):
            if not self.capacity:
                break
            if not self._open(requests[0].prompt, len(requests)):
                self._make_way(requests[0].prompt, len(requests))
                break
            self._ready.extend(self._unopened.pop(prompt_id))

    def _pages_for_responses(self, more: int = 0, prompt_id: str = "") -> int:
        """Returns the pages that started and ready requests, and `more` of a prompt, are expected to hold in slots.

        Without this limit prompts would take all pages but those of one response where pages are few, and most slots
        would be idle. There is no limit where nothing has started, so some prompt is always open.
        """
        started = len(self.rows.in_flight) + len(self._ready)
        running, mean = min(self.options.slots, started + more) if started else 0, self._lengths.mean()
        if not self._rest:
            return math.ceil(running * mean)
        ids = [request.prompt.id for request in (*self.rows.in_flight.values(), *self._ready)] + more * [prompt_id]
        expected = sorted((min(mean, self._rest.get(each, mean)) for each in ids), reverse=True)
        return math.ceil(sum(expected[:running]))

    def _open(self, prompt: Prompt, requests: int) -> bool:
        """Opens a prompt with this number of requests, if there is room."""
        self.options.check_prompt(len(prompt.tokens))
        opened = self._to_open(prompt)
        if len(self.opened) == self.options.opened_rows or not self._fits(prompt, opened, requests):
            return False
        if opened.row >= 0:
            del self.rows.parked[prompt.id]
            self._next_turns.add(prompt.id)
        else:
            opened = opened._replace(row=self.rows.free_prompt_rows.pop())
        self.rows.prompts[prompt.id] = opened.row
        self.budget.open_prompt(opened.row, prompt, opened.like, opened.shared)
        self._prefixes.add(opened.row, prompt.tokens, self._adapter_of(prompt))
        self.opened.append(opened)
        return True

    def _to_open(self, prompt: Prompt) -> OpenedPrompt:
        """Returns a prompt with its tokens in the cache; its row is that of a parked turn, or -1 for any free one."""
        page_size, turn = self.options.page_size, self.rows.parked.get(prompt.id)
        if turn is not None and np.array_equal(turn.tokens, prompt.tokens[: len(turn.tokens)]):
            cached = len(turn.tokens) - 1
            return OpenedPrompt(turn.row, prompt.tokens, turn.row, num_pages(cached, page_size), cached)
        like, shared = 0, 0
        if not self.options.ring_window:  # a ring has only what its prompt's last tokens see, so it cannot be shared
            like, shared = self._prefixes.find(prompt.tokens, self._adapter_of(prompt))
        return OpenedPrompt(-1, prompt.tokens, like, shared, shared * page_size)

    def _fits(self, prompt: Prompt, opened: OpenedPrompt, requests: int, *, after_closing: bool = False) -> bool:
        """Returns True if the prompt finds a row and pages; also those that the next window releases if asked."""
        has_row = opened.row >= 0 or bool(self.rows.free_prompt_rows)
        has_row |= after_closing and bool(self.rows.closing.any())
        for_responses = self._pages_for_responses(requests, prompt.id)
        return has_row and self.budget.fits(prompt, opened.shared, for_responses, after_closing=after_closing)

    def _make_way(self, prompt: Prompt, requests: int) -> None:
        """Closes what is open only to save work until a waiting prompt fits, if prompts may wait for each other.

        A prompt stays open for the turns that begin with it, and these need rows and pages of their own. So without
        this a few prompts could hold all of them, and none would end. Closed prompts are prefilled again.
        """
        while self._has_turns and not self._fits(prompt, self._to_open(prompt), requests, after_closing=True):
            if not self._give_up():
                break

    def _give_up(self, *, parked: bool = True) -> bool:
        """Closes one prompt or parked turn that nothing on the device needs; returns False if there is none.

        It takes the oldest prompt without requests, else the oldest parked turn, else a turn whose next turn waits.
        """
        in_use = {opened.like for opened in self.opened if opened.shared}
        busy = {request.prompt.id for request in (*self.rows.in_flight.values(), *self._ready)}
        for prompt_id, row in self.rows.prompts.items():
            if prompt_id not in busy and row not in in_use:
                self._close_prompt(prompt_id)
                return True
        free = [next_id for next_id, turn in self.rows.parked.items() if parked and turn.row not in in_use]
        if free:
            self._close_parked(min(free, key=lambda next_id: next_id in self._unopened))
        return bool(free)

    def _end_turn(self, output_row: int, request: Request, response: Response, outputs: WindowOutputs) -> None:
        """Records a turn that the window has parked, and closes a prompt that no other request can have."""
        prompt, page_size = request.prompt, self.options.page_size
        row = self.rows.park_rows.pop(output_row, None)
        if row is not None and outputs.prompt_length[row] > 1:
            if request.continues in self.rows.parked:
                self._close_parked(request.continues)
            tokens = np.concatenate([prompt.tokens, response.tokens])
            if self._routes is not None:
                assert response.experts is not None
                self._routes.park(row, response.experts)
            self.rows.parked[request.continues] = ParkedTurn(row, prompt.id, tokens)
            of_prompt = self.rows.prompts[prompt.id], (len(prompt.tokens) - 1) // page_size
            self.budget.park(row, num_pages(len(tokens) - 1, page_size), *of_prompt)
            self._prefixes.add(row, tokens, self._adapter_of(prompt))
        elif row is not None:
            self.rows.free_prompt_rows.append(row)
        if prompt.id in self._next_turns:
            self._close_prompt(prompt.id)

    def _close_prompt(self, prompt_id: str) -> None:
        self._next_turns.discard(prompt_id)
        self._rest.pop(prompt_id, None)
        self._close_row(self.rows.prompts.pop(prompt_id))

    def _close_parked(self, next_id: str) -> None:
        self._close_row(self.rows.parked.pop(next_id).row)

    def _close_row(self, row: int) -> None:
        self.rows.closing[row] = True
        self.budget.close_prompt(row)
        self._prefixes.remove(row)

    def close(self, prompt_ids: Collection[str]) -> None:
        """Closes, with the next window, those prompts that are open here, and turns parked before or after them."""
        closed = set(prompt_ids)
        for prompt_id in prompt_ids:
            if prompt_id in self.rows.prompts:
                self._close_prompt(prompt_id)
        for next_id, turn in list(self.rows.parked.items()):
            if next_id in closed or turn.prompt_id in closed:
                self._close_parked(next_id)

    def close_all(self) -> None:
        """Closes all prompts and parked turns, with the next window."""
        self.close([*self.rows.prompts, *self.rows.parked])

    def cancel_all(self) -> list[Request]:
        """Ends all requests, as `cancel` does."""
        waiting = itertools.chain(*self._unopened.values())
        return self.cancel({*self.rows.in_flight.values(), *self._ready, *waiting})

    def cancel(self, requests: Collection[Request]) -> list[Request]:
        """Ends requests: returns those that never reached the device; others are answered after their next token."""
        waiting = itertools.chain(self._ready, *self._unopened.values())
        dropped = [request for request in waiting if request in requests]
        self._ready = collections.deque(request for request in self._ready if request not in requests)
        for prompt_id, waiting in list(self._unopened.items()):
            if left := [request for request in waiting if request not in requests]:
                self._unopened[prompt_id] = left
            else:
                del self._unopened[prompt_id]
        self._cancelled.update(requests)
        return dropped

    def next_window(
        self, address: Callable[[Request], np.ndarray], sampling: Callable[[Request], SamplingParams]
    ) -> WindowInputs:
        """Starts the requests that are ready: returns the inputs of the next window."""
        for_responses = self._pages_for_responses()
        num_turns = sum(bool(request.continues) for request in self._ready)
        while num_turns > len(self.rows.free_prompt_rows) + self.rows.closing.sum():
            if not self._give_up(parked=False):
                break
        closing = self.rows.take_closing()
        cancelled = [row for row, request in self.rows.in_flight.items() if request in self._cancelled]
        self._cancelled.clear()
        entries = []
        while self._ready and self.rows.free_output_rows:
            request = self._ready.popleft()
            params = sampling(request)
            output_row = self.rows.start(request, params.max_tokens)
            entries.append(Requests(
                prompt_row=self.rows.prompts[request.prompt.id],
                output_row=output_row,
                park_row=self.rows.park_rows.get(output_row, self.options.open_prompts),
                sampling=params.as_arrays,
                key=address(request),
                begun=0 if request.begun is None else len(request.begun.tokens),
            ))  # fmt: skip
        self.budget.parkable_turns = len(self.rows.park_rows)
        waiting = itertools.islice(self._unopened.values(), NEXT_PROMPTS)
        reserve = self.budget.submit_window((requests[0].prompt for requests in waiting), for_responses)
        park_reserve = reserve + max(self.options.table_width, for_responses)
        opened, self.opened = self.opened, []
        if self._routes is not None:
            self._routes.submit_window(opened)
        survivors = self._lengths.survivors()
        return window_inputs(self.options, entries, closing, opened, reserve, survivors, cancelled, park_reserve)

    def process_outputs(self, outputs: WindowOutputs, policy_version: int) -> list[Response]:
        """Returns the responses that ended in the oldest window in flight, by output row.

        Raises RuntimeError where requests wait, and the pool has no room for any of them.
        """
        if self.options.check_invariants:
            invariants.check_outputs(outputs, self.rows)
        has_prefilled = outputs.routes is not None and outputs.routes.count > 0
        if outputs.waiting and not (outputs.counts.decode_steps or has_prefilled):
            raise RuntimeError(
                f"{outputs.waiting} requests wait and none can start: the pool of {self.options.pages} pages has no "
                "room for one response beside the open prompts. Raise sampling.pages."
            )
        self.rows.write(outputs.rows)
        if self._routes is not None:
            self._routes.read_window(outputs)
        responses = []
        status = outputs.rows.status
        for row in np.flatnonzero(status != RUNNING).tolist():
            truncated = bool(status[row] == TRUNCATED)
            is_cut = truncated and bool(self.rows.length[row] < self.rows.limit[row])  # it was cancelled
            response = self._response(row, policy_version, truncated=truncated and not is_cut, is_cut=is_cut)
            request = self.rows.in_flight.pop(row)
            self.rows.free_output_rows.append(row)
            self._lengths.add(own_pages(len(request.prompt.tokens), len(response.tokens), self.options.page_size))
            responses.append(response)
            self._end_turn(row, request, response, outputs)
        self.budget.parkable_turns = len(self.rows.park_rows)
        self.budget.read_window(int(outputs.free_pages))
        return responses

    def begun(self, policy_version: int) -> list[Response]:
        """Returns the tokens so far of the responses in flight."""
        return [self._response(row, policy_version, truncated=False, is_cut=True) for row in self.rows.begun()]

    def _response(self, row: int, policy_version: int, *, truncated: bool, is_cut: bool) -> Response:
        request, (tokens, logprobs) = self.rows.in_flight[row], self.rows.response(row)
        experts = None
        if self._routes is not None and not is_cut:  # what is cut is prefilled again before it goes on
            experts = self._routes.response(self.rows.prompts[request.prompt.id], row, len(tokens))
        return Response(
            prompt_id=request.prompt.id, draw=request.draw, tokens=tokens.copy(), logprobs=logprobs.copy(),
            truncated=truncated, policy_version=policy_version, is_cut=is_cut, experts=experts,
        )  # fmt: skip

    def check(self, state: Occupancy, unread: Sequence[WindowOutputs]) -> None:
        """Raises BrokenInvariant where the scheduler and the state after the newest window do not agree."""
        invariants.check_rows(self.options, self.rows)
        invariants.check_state(self.options, state, self.rows, unread, self.budget.guaranteed_free_pages)
