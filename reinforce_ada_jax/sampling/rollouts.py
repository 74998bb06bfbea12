"""The host's side of sampling: requests in, finished responses out, one thread.

`Rollouts.sampler` gives the `sample_fn` of the collection loop. The host decides only which prompts are open and which
requests stand in the device's queue; slots, pages and tokens are the compiled window's.

The device never waits for the host: a window is dispatched before the outputs of the one before it is read. What the
host knows is therefore one window old, and every decision below is safe whatever that window does.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from reinforce_ada_jax.distributed.mesh import shard_bytes
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling import invariants
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.engine import Engine, prefill_batches
from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.state import (
    ADDRESS_WORDS,
    RUNNING,
    TRUNCATED,
    DecodeState,
    EngineOptions,
    Sampling,
    SamplingParams,
    WindowInputs,
    WindowOutputs,
)
from reinforce_ada_jax.types import Prompt, Request, RequestQueue, Response


@dataclasses.dataclass
class RolloutCounts:
    """What one call of `sample_fn` did, for the metrics.

    Attributes:
      tokens: slot-steps that made a token.
      slot_steps: all slot-steps, idle ones included.
      windows: decode windows.
      prefills: prompts prefilled.
      dispatches: programs started on the device, windows and prefills.
      host_s: seconds from reading a outputs to the next window, where by then nothing was left running on the device.
    """

    tokens: int = 0
    slot_steps: int = 0
    windows: int = 0
    prefills: int = 0
    dispatches: int = 0
    host_s: float = 0.0

    @property
    def slot_utilisation(self) -> float:
        """Share of slot-steps that made a token."""
        return self.tokens / self.slot_steps if self.slot_steps else 0.0


@dataclasses.dataclass(frozen=True)
class Reshard:
    """What it took to hand the weights over to decoding.

    Attributes:
      seconds: from weights that are there, no program running, to weights that can be decoded from.
      bytes: of decoding's copy, on each device; 0 where it reads the learner's arrays.
    """

    seconds: float = 0.0
    bytes: int = 0


class Rollouts:
    """One engine and its decode state, fed from a request queue."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.state: DecodeState | None = engine.init_decode_state()  # None while a session has it
        self.counts = RolloutCounts()
        self.reshard = Reshard()  # for the newest sampler

    def sampler(
        self,
        params: Params,
        *,
        stream: int,
        sampling: SamplingParams | Callable[[Request], SamplingParams],
        prefetch_stream: int | None = None,
        policy_version: int = 0,
    ) -> Callable[[RequestQueue], Iterator[list[Response]]]:
        """A `sample_fn` that draws from `params`.

        Args:
          params: the learner's, as they are.
          stream: the first word of every address (`token.stream`).
          sampling: how responses are drawn, or what says so for each request.
          prefetch_stream: that of requests for the next iteration; None to leave idle slots idle.
          policy_version: `Response.policy_version` of what is drawn.

        Raises:
          ValueError: the engine has no room for responses so long; from `sample_fn` where `sampling` is a function.
        """
        if isinstance(sampling, SamplingParams):
            self._check(sampling)

        def sampling_of(request: Request) -> SamplingParams:
            return sampling if isinstance(sampling, SamplingParams) else self._check(sampling(request))

        terms = _Terms(self._decode_weights(params), stream, prefetch_stream, policy_version, sampling_of)

        def sample_fn(queue: RequestQueue) -> Iterator[list[Response]]:
            self.counts = RolloutCounts()
            # The session has the state to itself: one that is broken off, slots still decoding, leaves none behind.
            session = _Session(self.engine, self.counts, self._take_state(), queue, terms)
            yield from session.run()
            self.state = session.state

        return sample_fn

    def _decode_weights(self, params: Params) -> Params:
        jax.block_until_ready(params)
        begin = time.monotonic()
        weights = jax.block_until_ready(self.engine.decode_weights(params))
        copied = 0 if self.engine.decodes_from(params) else shard_bytes(weights)
        self.reshard = Reshard(time.monotonic() - begin, copied)
        return weights

    def _check(self, sampling: SamplingParams) -> SamplingParams:
        longest = self.engine.options.max_response_tokens
        if sampling.max_tokens > longest:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}; the engine was built for 1 to {longest}. Raise "
                "sampling.max_response_tokens, or ask for less."
            )
        return sampling

    def _take_state(self) -> DecodeState:
        state, self.state = self.state, None
        return self.engine.init_decode_state() if state is None else state


@dataclasses.dataclass(frozen=True, eq=False)
class _Terms:
    """What a session draws from, and how; see `Rollouts.sampler`."""

    weights: Params
    stream: int
    prefetch_stream: int | None
    policy_version: int
    sampling_of: Callable[[Request], SamplingParams]

    def address(self, request: Request) -> np.ndarray:
        stream = self.prefetch_stream if request.prefetch else self.stream
        return token_lib.address(stream, request.prompt.id, request.draw)


class _Replica:
    """The bookkeeping of one replica: rows of prompts and outputs by who occupies them, and pages that are surely
    free.
    """

    def __init__(self, options: EngineOptions):
        self.options = options
        self.prompt_rows: dict[str, int] = {}
        self.prompt_pages: dict[str, int] = {}
        self.free_prompt_rows = list(range(options.open_prompts))[::-1]
        self.free_output_rows = list(range(options.output_rows))[::-1]
        self.in_flight: dict[int, Request] = {}  # by output row
        self.ready: collections.deque[Request] = collections.deque()  # of open prompts, not handed over yet
        self.unopened: dict[str, list[Request]] = {}  # of prompts that wait for a row or for pages, in order
        self.opened: list[tuple[int, np.ndarray]] = []  # rows and tokens of prompts to be prefilled
        self.closing = np.zeros(options.open_prompts, bool)
        self.guaranteed_free_pages = (
            options.pages - 1
        )  # free when the next program runs, whatever the windows under way do
        # Of each window under way: pages closed less pages opened since the one before, and its reserve.
        self.in_flight_windows: collections.deque[tuple[int, int]] = collections.deque()
        self.closed_pages = self.opened_pages = 0  # since the newest window began

    # ---- what it has and can take --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a window has something to do: responses, or giving up prompts for those that wait."""
        return bool(self.in_flight or self.ready or (self.unopened and self.closing.any()))

    @property
    def load(self) -> int:
        """Responses that it has to make."""
        return len(self.in_flight) + len(self.ready) + sum(map(len, self.unopened.values()))

    @property
    def wanted(self) -> int:
        """Requests that it could hand over now."""
        return max(0, len(self.free_output_rows) - len(self.ready))

    @property
    def idle_slots(self) -> int:
        """Slots that will find nothing to do."""
        return 0 if self.unopened else max(0, self.options.slots - len(self.in_flight) - len(self.ready))

    def has(self, prompt_id: str) -> bool:
        """Whether the prompt is open here, or waits to be."""
        return prompt_id in self.prompt_rows or prompt_id in self.unopened

    # ---- prompts -------------------------------------------------------------------------------------------------

    def close(self, prompt_ids: Sequence[str]) -> None:
        """The next window gives these prompts up."""
        for prompt_id in prompt_ids:
            if prompt_id in self.prompt_rows:
                self.closing[self.prompt_rows.pop(prompt_id)] = True
                self.closed_pages += self.prompt_pages.pop(prompt_id)

    def _room_for_prompts(self) -> int:
        """Pages that open prompts may hold beside a response: one must always fit, or nothing would ever move on."""
        return self.options.pages - 1 - self.options.table_width - sum(self.prompt_pages.values())

    def _pages(self, prompt: Prompt) -> int:
        return num_pages(len(prompt.tokens) - 1, self.options.page_size)

    def _open(self, prompt: Prompt) -> bool:
        """Gives a prompt a row and pages; False where it has to wait for them."""
        pages = self._pages(prompt)
        if not self.free_prompt_rows or pages > min(self._room_for_prompts(), self.guaranteed_free_pages):
            return False
        self.prompt_rows[prompt.id] = row = self.free_prompt_rows.pop()
        self.prompt_pages[prompt.id] = pages
        self.guaranteed_free_pages -= pages
        self.opened_pages += pages
        self.opened.append((row, prompt.tokens))
        return True

    def open_waiting(self) -> None:
        """Opens prompts that had to wait, in order, as far as they find room."""
        for prompt_id, requests in list(self.unopened.items()):
            if not self.wanted or not self._open(requests[0].prompt):
                break
            self.ready.extend(self.unopened.pop(prompt_id))

    def place(self, request: Request) -> None:
        """Takes a request: it is ready, or its prompt waits."""
        prompt = request.prompt
        if prompt.id in self.prompt_rows or (not self.unopened and self._open(prompt)):
            self.ready.append(request)
        else:
            self.unopened.setdefault(prompt.id, []).append(request)

    # ---- windows -------------------------------------------------------------------------------------------------

    def make_inputs(self, terms: _Terms) -> WindowInputs:
        """The requests that are ready, as the device takes them, and the prompts to give up."""
        next_prompts = itertools.islice(self.unopened.values(), self.options.prefill_rows)
        wanted = sum(self._pages(requests[0].prompt) for requests in next_prompts)
        reserve = max(0, min(wanted, self._room_for_prompts()))
        size = self.options.output_rows
        prompt_row, output_row, limit, top_k = (np.zeros(size, np.int32) for _ in range(4))
        temperature, top_p = (np.ones(size, np.float32) for _ in range(2))
        address = np.zeros((size, ADDRESS_WORDS), np.uint32)
        count = 0
        while self.ready and self.free_output_rows:
            request, row = self.ready.popleft(), self.free_output_rows.pop()
            self.in_flight[row] = request
            sampling = terms.sampling_of(request)
            prompt_row[count], output_row[count] = self.prompt_rows[request.prompt.id], row
            address[count] = terms.address(request)
            limit[count], temperature[count] = sampling.max_tokens, sampling.temperature
            top_k[count], top_p[count] = sampling.top_k, sampling.top_p
            count += 1
        closing, self.closing = self.closing, np.zeros_like(self.closing)
        # Not before: a prompt opened by now would have stood in a row that this window is to give up.
        self.free_prompt_rows += np.flatnonzero(closing).tolist()
        self.in_flight_windows.append((self.closed_pages - self.opened_pages, reserve))
        self.guaranteed_free_pages = self._guaranteed_free(self.guaranteed_free_pages + self.closed_pages, reserve)
        self.closed_pages = self.opened_pages = 0
        return WindowInputs(
            prompt_row=prompt_row, output_row=output_row, address=address,
            sampling=Sampling(max_tokens=limit, temperature=temperature, top_k=top_k, top_p=top_p),
            count=np.int32(count), closing=closing, reserve=np.int32(reserve),
        )  # fmt: skip

    def _guaranteed_free(self, free_pages: int, reserve: int) -> int:
        """Pages free after a window that began with at least `free_pages`: slots may take all but `reserve`, and
        never more than their tables hold."""
        held_by_slots = self.options.slots * self.options.table_width
        rest = self.options.pages - 1 - sum(self.prompt_pages.values()) - held_by_slots
        return max(min(free_pages, reserve), rest)

    def check(self, state: DecodeState, unread: Sequence[WindowOutputs]) -> None:
        """Raises `BrokenInvariant` where its books don't fit the state after the newest window."""
        invariants.check_rows(
            self.options, prompt_rows=self.prompt_rows, closing=self.closing, free_prompt_rows=self.free_prompt_rows,
            in_flight=self.in_flight, free_output_rows=self.free_output_rows,
        )  # fmt: skip
        invariants.check_state(
            self.options, state, prompt_rows=self.prompt_rows, in_flight=self.in_flight, unread=unread,
            guaranteed_free_pages=self.guaranteed_free_pages,
        )  # fmt: skip

    def process_outputs(self, outputs: WindowOutputs, policy_version: int) -> list[Response]:
        """The responses that ended in the oldest window under way, by output row."""
        if self.options.check_invariants:
            invariants.check_outputs(outputs, self.in_flight)
        self.in_flight_windows.popleft()
        self.guaranteed_free_pages = int(outputs.free_pages)
        for page_change, reserve in self.in_flight_windows:  # at most one
            self.guaranteed_free_pages = self._guaranteed_free(self.guaranteed_free_pages + page_change, reserve)
        if outputs.waiting and not outputs.decode_steps:
            raise RuntimeError(
                f"{outputs.waiting} requests wait and none can start: a pool of {self.options.pages} pages has no room "
                "for one response beside the open prompts."
            )
        outputs, responses = outputs.rows, []
        for row in np.flatnonzero(outputs.status != RUNNING).tolist():
            request, length = self.in_flight.pop(row), outputs.length[row]
            self.free_output_rows.append(row)
            responses.append(Response(
                prompt_id=request.prompt.id,
                draw=request.draw,
                tokens=outputs.tokens[row, :length].copy(),
                logprobs=outputs.logprobs[row, :length].copy(),
                truncated=bool(outputs.status[row] == TRUNCATED),
                policy_version=policy_version,
            ))  # fmt: skip
        return responses


class _Session:
    """One call of `sample_fn`: windows for all replicas, one ahead of what is read."""

    def __init__(self, engine: Engine, counts: RolloutCounts, state: DecodeState, queue: RequestQueue, terms: _Terms):
        self.engine, self.counts, self.state, self.queue, self.terms = engine, counts, state, queue, terms
        self.replicas = [_Replica(engine.options) for _ in range(engine.replicas)]
        self.windows: collections.deque[WindowOutputs] = collections.deque()  # under way, not read
        self.begun_ahead: set[str] = set()  # prompts of the next iteration
        self.decode_steps = np.zeros(engine.replicas, np.int64)
        self.read_at = time.monotonic()

    def run(self) -> Iterator[list[Response]]:
        """Windows until the queue is dry and nothing is in flight."""
        while True:
            self._feed()
            if self._busy:
                self._dispatch()
                if len(self.windows) == 1:
                    continue
            elif not self.windows:
                if self._can_open_more():
                    continue
                break
            yield self._read()
        waiting = sum(len(replica.unopened) for replica in self.replicas)
        if waiting:
            raise RuntimeError(
                f"{waiting} prompts wait and none can be opened, with nothing in flight: prompts that need nothing "
                "more were never closed, or a barrier keeps all of them open and sampling.open_prompts is smaller "
                "than their number."
            )
        for replica in self.replicas:
            replica.close(list(replica.prompt_rows))
        if any(replica.closing.any() for replica in self.replicas):
            self._dispatch()  # a window of no decode_steps, in which the last pages are given back
        if self.engine.options.check_invariants:
            for state in self.engine.fetch(self.state):
                invariants.check_idle(self.engine.options, state)

    def _can_open_more(self) -> bool:
        """With nothing in flight and prompts that wait for room: whether some may be made."""
        if not any(replica.unopened for replica in self.replicas):
            return False
        heard = self.queue.wait()  # verdicts close prompts
        self._close(self.queue.closed())  # also those of which the last `take` heard
        if not heard and not self._busy:
            # What waits was begun for the next iteration, and so were the prompts that are in its way: they stay open
            # until the end, and have nothing more to do in this one.
            self._close(sorted(self.begun_ahead))
        return heard or self._busy

    @property
    def _busy(self) -> bool:
        return any(replica.busy for replica in self.replicas)

    def _close(self, prompt_ids: Sequence[str]) -> None:
        for replica in self.replicas:
            replica.close(prompt_ids)

    def _home(self, prompt_id: str) -> _Replica:
        """The replica where a prompt is open; for a new one, that with the least to do."""
        for replica in self.replicas:
            if replica.has(prompt_id):
                return replica
        return min(self.replicas, key=lambda replica: replica.load)

    def _feed(self) -> None:
        """Takes as many requests as can be handed over, and opens the prompts that are new."""
        self._close(self.queue.closed())
        for replica in self.replicas:
            replica.open_waiting()
        # Behind those that have to wait may stand requests of open prompts: only by these do prompts close.
        while (wanted := sum(replica.wanted for replica in self.replicas)) and (taken := self.queue.take(wanted)):
            for request in taken:
                self._home(request.prompt.id).place(request)
        idle_slots = sum(replica.idle_slots for replica in self.replicas)
        if self.terms.prefetch_stream is not None and idle_slots:
            for request in self.queue.take_prefetch(idle_slots):
                self.begun_ahead.add(request.prompt.id)
                self._home(request.prompt.id).place(request)
        opened = [replica.opened for replica in self.replicas]
        for batches in prefill_batches(self.engine.options, opened):
            self.state = self.engine.open_prompts(self.terms.weights, self.state, batches)
            self.counts.dispatches += 1
        self.counts.prefills += sum(map(len, opened))
        for replica in self.replicas:
            replica.opened = []

    def _dispatch(self) -> None:
        """Hands over what is ready and starts a window."""
        all_inputs = [replica.make_inputs(self.terms) for replica in self.replicas]
        if self.windows and self.windows[-1].decode_steps.is_ready():
            self.counts.host_s += time.monotonic() - self.read_at
        self.state, outputs = self.engine.decode_window(self.terms.weights, self.state, all_inputs)
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        self.windows.append(outputs)
        self.counts.dispatches += 1
        if self.engine.options.check_invariants:
            self._check()

    def _check(self) -> None:
        """Looks at every replica's state after the window just dispatched, which it waits for (`invariants`)."""
        unread = [self.engine.fetch_outputs(outputs) for outputs in self.windows]
        for number, (replica, state) in enumerate(zip(self.replicas, self.engine.fetch(self.state), strict=True)):
            replica.check(state, [all_outputs[number] for all_outputs in unread])

    def _read(self) -> list[Response]:
        """Waits for the oldest window; the responses that ended in it, by replica and output row."""
        all_outputs = self.engine.fetch_outputs(self.windows.popleft())
        self.read_at = time.monotonic()
        self.counts.windows += 1
        self.counts.tokens += sum(int(outputs.busy) for outputs in all_outputs)
        self.decode_steps += [int(outputs.decode_steps) for outputs in all_outputs]
        # A replica that takes fewer decode_steps than another one idles meanwhile.
        self.counts.slot_steps = int(self.decode_steps.max()) * self.engine.options.slots * len(all_outputs)
        return [
            response
            for replica, outputs in zip(self.replicas, all_outputs, strict=True)
            for response in replica.process_outputs(outputs, self.terms.policy_version)
        ]
