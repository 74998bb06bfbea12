"""The scheduler of one replica: which prompts are open, and which requests the next window starts.

A request waits until its prompt is open, is ready for the next window, or is in flight. Slots are the device's.
"""

import collections
import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from reinforce_ada_jax.sampling import invariants
from reinforce_ada_jax.sampling.admission import Lengths
from reinforce_ada_jax.sampling.page_budget import PageBudget
from reinforce_ada_jax.sampling.pages import own_pages
from reinforce_ada_jax.sampling.prefixes import Prefixes
from reinforce_ada_jax.sampling.prompt_lengths import check_prompt
from reinforce_ada_jax.sampling.rows import Rows
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    TRUNCATED,
    EngineOptions,
    Occupancy,
    SamplingParams,
    WindowInputs,
    WindowOutputs,
)
from reinforce_ada_jax.sampling.window_inputs import OpenedPrompt, QueueEntry, window_inputs
from reinforce_ada_jax.types import Prompt, Request, Response

# Requests are kept ready for a fifth of the slots, because slots become free inside a window. Simulated with rounds of
# one draw in 256 slots, four seeds: 0.894 to 0.899 of slot-steps are useful with requests for an eighth of the slots,
# 0.901 to 0.912 with a fifth, 0.899 to 0.911 with a quarter. More start too early, and are discarded.
FREED_IN_A_WINDOW = 5
# Prompts that wait, for which a window leaves pages free.
NEXT_PROMPTS = 16


def _no_adapter(prompt: Prompt) -> int:
    del prompt
    return -1


class Scheduler:
    """Requests of one replica, over its page budget and its rows."""

    def __init__(self, options: EngineOptions, adapter_of: Callable[[Prompt], int] = _no_adapter):
        """Makes a scheduler without requests.

        Args:
          options: of the engine.
          adapter_of: the adapter of a prompt's keys and values; prompts of one adapter share their prefixes.
        """
        self.options, self._adapter_of = options, adapter_of
        self.budget, self.rows, self._prefixes = PageBudget(options), Rows(options), Prefixes(options)
        self._lengths = Lengths(options.table_width)
        self._unopened: dict[str, list[Request]] = {}  # of prompts that wait for a row or for pages, in order
        self._ready: collections.deque[Request] = collections.deque()  # of open prompts
        self._cancelled: set[Request] = set()  # on the device, with the next window
        self.opened: list[OpenedPrompt] = []  # with the next window

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
        """Requests with which all slots would stay busy: for idle slots, and for those that a window sets free."""
        wanted = self.options.slots + self.options.slots // FREED_IN_A_WINDOW
        return max(0, wanted - len(self.rows.in_flight) - len(self._ready))

    @property
    def num_unopened(self) -> int:
        """Prompts that wait for a row or for pages."""
        return len(self._unopened)

    def has(self, prompt_id: str) -> bool:
        """Returns True if the prompt is open here, or waits to be."""
        return prompt_id in self.rows.prompts or prompt_id in self._unopened

    def add(self, request: Request) -> None:
        """Adds a request; its prompt is opened if it is new and there is room."""
        prompt = request.prompt
        if prompt.id in self.rows.prompts or (not self._unopened and self._open(prompt, 1)):
            self._ready.append(request)
        else:
            self._unopened.setdefault(prompt.id, []).append(request)

    def open_waiting(self) -> None:
        """Opens prompts that wait, in order, until one finds no room."""
        for prompt_id, requests in list(self._unopened.items()):
            if not self.capacity or not self._open(requests[0].prompt, len(requests)):
                break
            self._ready.extend(self._unopened.pop(prompt_id))

    def _pages_for_responses(self, more: int = 0) -> int:
        """Returns the pages that started and ready requests, and `more` of them, are expected to hold in slots.

        Without it prompts would take all pages but one response's where pages are few, and most slots would be idle.
        Where nothing has started there is no such limit, so some prompt is always open.
        """
        begun = len(self.rows.in_flight) + len(self._ready)
        running = min(self.options.slots, begun + more) if begun else 0
        return math.ceil(running * self._lengths.mean())

    def _open(self, prompt: Prompt, requests: int) -> bool:
        """Opens a prompt with this number of requests, if there is room."""
        check_prompt(self.options, len(prompt.tokens))
        adapter = self._adapter_of(prompt)
        like, shared = self._prefixes.find(prompt.tokens, adapter)
        for_responses = self._pages_for_responses(requests)
        if not self.rows.free_prompt_rows or not self.budget.fits(prompt, shared, for_responses):
            return False
        row = self.rows.open_prompt(prompt.id)
        self.budget.open_prompt(row, prompt, like, shared)
        self._prefixes.add(row, prompt.tokens, adapter)
        self.opened.append(OpenedPrompt(row, prompt.tokens, like, shared))
        return True

    def close(self, prompt_ids: Sequence[str]) -> None:
        """Closes those of the prompts that are open here, with the next window."""
        for prompt_id in prompt_ids:
            if prompt_id in self.rows.prompts:
                row = self.rows.close_prompt(prompt_id)
                self.budget.close_prompt(row)
                self._prefixes.remove(row)

    def cancel(self, requests: Collection[Request]) -> list[Request]:
        """Ends requests: returns those that never reached the device; others are answered after their next token."""
        dropped = [request for request in self._ready if request in requests]
        self._ready = collections.deque(request for request in self._ready if request not in requests)
        for prompt_id, waiting in list(self._unopened.items()):
            dropped += [request for request in waiting if request in requests]
            self._unopened[prompt_id] = [request for request in waiting if request not in requests]
            if not self._unopened[prompt_id]:
                del self._unopened[prompt_id]
        self._cancelled.update(requests)
        return dropped

    def next_window(
        self, address: Callable[[Request], np.ndarray], sampling: Callable[[Request], SamplingParams]
    ) -> WindowInputs:
        """Starts the requests that are ready: returns the inputs of the next window."""
        waiting = itertools.islice(self._unopened.values(), NEXT_PROMPTS)
        next_prompts = (requests[0].prompt for requests in waiting)
        reserve = self.budget.submit_window(next_prompts, self._pages_for_responses())
        cancelled = [row for row, request in self.rows.in_flight.items() if request in self._cancelled]
        self._cancelled.clear()
        entries = []
        while self._ready and self.rows.free_output_rows:
            request = self._ready.popleft()
            prompt_row, output_row = self.rows.prompts[request.prompt.id], self.rows.start(request)
            entries.append(QueueEntry(prompt_row, output_row, address(request), sampling(request)))
        opened, self.opened = self.opened, []
        closing, survivors = self.rows.take_closing(), self._lengths.survivors()
        return window_inputs(self.options, entries, closing, opened, reserve, survivors, cancelled)

    def process_outputs(self, outputs: WindowOutputs, policy_version: int) -> list[Response]:
        """Returns the responses that ended in the oldest window in flight, by output row.

        Raises:
          RuntimeError: requests wait, and the pool has no room for any of them.
        """
        if self.options.check_invariants:
            invariants.check_outputs(outputs, self.rows.in_flight)
        self.budget.read_window(int(outputs.free_pages))
        if outputs.waiting and not outputs.decode_steps:
            raise RuntimeError(
                f"{outputs.waiting} requests wait and none can start: the pool of {self.options.pages} pages has no "
                "room for one response beside the open prompts. Raise sampling.pages."
            )
        rows, responses = outputs.rows, []
        for row in np.flatnonzero(rows.status != RUNNING).tolist():
            request, length = self.rows.finish(row), int(rows.length[row])
            self._lengths.add(own_pages(len(request.prompt.tokens), length, self.options.page_size))
            responses.append(Response(
                prompt_id=request.prompt.id,
                draw=request.draw,
                tokens=rows.tokens[row, :length].copy(),
                logprobs=rows.logprobs[row, :length].copy(),
                truncated=bool(rows.status[row] == TRUNCATED),
                policy_version=policy_version,
            ))  # fmt: skip
        return responses

    def check(self, state: Occupancy, unread: Sequence[WindowOutputs]) -> None:
        """Raises BrokenInvariant where the scheduler and the state after the newest window do not agree."""
        invariants.check_rows(self.options, self.rows)
        invariants.check_state(self.options, state, self.rows, unread, self.budget.guaranteed_free_pages)
