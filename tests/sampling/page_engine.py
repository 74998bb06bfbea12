"""An engine in plain Python that keeps slots, queue and pages as decode.py does, page for page, without a model.

It stands where `Rollouts` expects an `Engine`. A page holds the tokens themselves in place of keys and values, and a
response reads its whole context back when it ends: two holders of one page would show. What is "sampled" follows from
the address (`response_to`), so a response under a wrong address shows as well.

`sampling/simulation.py` is another one: it counts pages and seconds, and has any lengths that it is told.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.sampling.decode import NARROWER
from reinforce_ada_jax.sampling.pages import NULL, PagePool, num_pages
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    STOPPED,
    TRUNCATED,
    DecodeState,
    EngineOptions,
    Outputs,
    PrefillBatch,
    Prompts,
    Queue,
    Sampling,
    Slots,
    WindowInputs,
    WindowOutputs,
)

VOCABULARY = 50_000


class HostArray(np.ndarray):
    """A numpy array that answers what the host asks of a device's."""

    def is_ready(self) -> bool:
        return True

    def copy_to_host_async(self) -> None:
        pass


def response_to(words: np.ndarray | tuple[int, ...], limit: int, longest: int) -> tuple[list[int], bool]:
    """Tokens drawn under an address, and whether the limit cut them: what the engine does, for the test to expect."""
    digest = hashlib.blake2b(np.asarray(words, np.uint32).tobytes(), digest_size=8).digest()
    first, length = int.from_bytes(digest[:4]), 1 + int.from_bytes(digest[4:]) % longest
    tokens = [(first + 7 * place) % VOCABULARY for place in range(min(length, limit))]
    return tokens, length > limit


@dataclasses.dataclass
class _Waiting:
    prompt_row: int
    output_row: int
    limit: int
    address: bytes


@dataclasses.dataclass
class _Slot:
    waiting: _Waiting
    token: int
    position: int
    tokens: list[int]  # the response to come
    truncated: bool
    table: list[int]
    shared: int
    used: int
    count: int = 0


@dataclasses.dataclass
class PageState:
    """One replica's."""

    stack: list[int]  # free pages, the next one to go last
    tables: list[list[int]]
    prompts: list[list[int]]  # tokens by row, as prefilled
    queue: collections.deque[_Waiting]
    head: int
    slots: list[_Slot | None]
    cache: list[list[int]]


class PageEngine:
    """See the module. `options.stop_ids` means nothing here: lengths follow from addresses."""

    def __init__(self, options: EngineOptions, replicas: int = 1):
        self.options, self.replicas = options, replicas

    def decodes_from(self, params: None) -> bool:
        """There are no weights."""
        return True

    def decode_weights(self, params: None) -> None:
        """There are none."""

    def init_decode_state(self) -> list[PageState]:
        o = self.options
        return [
            PageState(
                stack=list(range(o.pages - 1, 0, -1)),
                tables=[[] for _ in range(o.open_prompts)],
                prompts=[[0] for _ in range(o.open_prompts)],
                queue=collections.deque(),
                head=0,
                slots=[None] * o.slots,
                cache=[[0] * o.page_size for _ in range(o.pages)],
            )
            for _ in range(self.replicas)
        ]

    # ---- programs ------------------------------------------------------------------------------------------------

    def open_prompts(self, params: None, states: list[PageState], batches: Sequence[PrefillBatch]) -> list[PageState]:
        """decode.open_prompts."""
        for state, batch in zip(states, batches, strict=True):
            for row, length, tokens in zip(batch.rows.tolist(), batch.length.tolist(), batch.tokens, strict=True):
                if row < self.options.open_prompts:
                    prompt = tokens[:length].tolist()
                    table = self._allocate(state, num_pages(length - 1, self.options.page_size))
                    state.prompts[row], state.tables[row] = prompt, table
                    for position, token in enumerate(prompt[:-1]):
                        self._write(state, table, position, token)
        return states

    def decode_window(
        self, params: None, states: list[PageState], all_inputs: Sequence[WindowInputs]
    ) -> tuple[list[PageState], WindowOutputs]:
        """decode.decode_window on every replica."""
        all_outputs = [self._window(state, inputs) for state, inputs in zip(states, all_inputs, strict=True)]
        first = all_outputs[0]
        if self.replicas == 1:
            return states, _mapped(lambda x: np.asarray(x).view(HostArray), first)
        return states, _mapped(lambda *x: np.stack(x).view(HostArray), *all_outputs)

    def fetch_outputs(self, outputs: WindowOutputs) -> list[WindowOutputs]:
        if self.replicas == 1:
            return [outputs]
        return [_mapped(lambda x, at=replica: x[at], outputs) for replica in range(self.replicas)]

    def fetch(self, states: list[PageState]) -> list[DecodeState]:
        return [self._fetch(state) for state in states]

    # ---- one replica ---------------------------------------------------------------------------------------------

    def _allocate(self, state: PageState, count: int) -> list[int]:
        assert count <= len(state.stack), "a program took more pages than are free"
        return [state.stack.pop() for _ in range(count)]

    def _write(self, state: PageState, table: list[int], position: int, token: int) -> None:
        page = table[position // self.options.page_size]
        assert page != NULL
        state.cache[page][position % self.options.page_size] = token

    def _context(self, state: PageState, slot: _Slot) -> list[int]:
        size = self.options.page_size
        return [state.cache[slot.table[place // size]][place % size] for place in range(slot.position)]

    def _window(self, state: PageState, inputs: WindowInputs) -> WindowOutputs:
        options, reserve = self.options, int(inputs.reserve)
        for row in np.flatnonzero(inputs.closing).tolist():
            state.stack += state.tables[row]
            state.tables[row] = []
        for index in range(int(inputs.count)):
            state.queue.append(_Waiting(
                int(inputs.prompt_row[index]), int(inputs.output_row[index]), int(inputs.sampling.max_tokens[index]),
                inputs.address[index].tobytes(),
            ))  # fmt: skip
        assert len(state.queue) <= options.output_rows, "the ring of requests is full"
        ended: list[_Slot] = []
        decode_steps = busy = 0
        many_idle, many_ended = max(1, options.slots // 4), max(1, options.slots // 8)
        self._refill(state, reserve)

        def active() -> int:
            return sum(slot is not None for slot in state.slots)

        def wanted() -> bool:
            starved = not state.queue and options.slots - active() >= many_idle and len(ended) >= many_ended
            return decode_steps < options.window and active() > 0 and not starved

        def few_left(width: int) -> bool:
            return not state.queue and active() <= width

        widths = [options.slots // part for part in NARROWER if options.slots >= part]
        while wanted() and not few_left(max(widths, default=0)):
            decode_steps, busy = decode_steps + 1, busy + active()
            ended += self._decode_step(state)
            self._refill(state, reserve)
        for width, next_width in itertools.pairwise((*widths, 0)):
            state.slots.sort(key=lambda slot: slot is None)
            while wanted() and few_left(width) and not few_left(next_width):
                decode_steps, busy = decode_steps + 1, busy + active()
                ended += self._decode_step(state)
        return self._outputs(state, ended, decode_steps, busy)

    def _refill(self, state: PageState, reserve: int) -> None:
        size = self.options.page_size
        for number, slot in enumerate(state.slots):
            if slot is not None or not state.queue:
                continue
            request = state.queue[0]
            prompt, table = state.prompts[request.prompt_row], state.tables[request.prompt_row]
            shared = (len(prompt) - 1) // size
            used = num_pages(len(prompt) + request.limit, size)
            if used - shared > len(state.stack) - reserve:
                break  # nobody passes the head of the queue
            state.queue.popleft()
            state.head += 1
            own = self._allocate(state, used - shared)
            if (len(prompt) - 1) % size:
                state.cache[own[0]] = list(state.cache[table[shared]])
            tokens, truncated = response_to(
                np.frombuffer(request.address, np.uint32), request.limit, self.options.max_response_tokens
            )
            state.slots[number] = _Slot(
                request, prompt[-1], len(prompt) - 1, tokens, truncated, table[:shared] + own, shared, used
            )

    def _decode_step(self, state: PageState) -> list[_Slot]:
        ended = []
        for number, slot in enumerate(state.slots):
            if slot is None:
                continue
            self._write(state, slot.table, slot.position, slot.token)
            slot.token = slot.tokens[slot.count]
            slot.position, slot.count = slot.position + 1, slot.count + 1
            if slot.count == len(slot.tokens):
                prompt = state.prompts[slot.waiting.prompt_row]
                assert self._context(state, slot) == prompt + slot.tokens[:-1], "a page was written by somebody else"
                state.stack += slot.table[slot.shared : slot.used]
                state.slots[number] = None
                ended.append(slot)
        return ended

    def _outputs(self, state: PageState, ended: list[_Slot], decode_steps: int, busy: int) -> WindowOutputs:
        rows, longest = self.options.output_rows, self.options.max_response_tokens
        outputs = Outputs(
            tokens=np.zeros((rows, longest), np.int32), logprobs=np.zeros((rows, longest), np.float32),
            length=np.zeros(rows, np.int32), status=np.full(rows, RUNNING, np.int32),
        )  # fmt: skip
        for slot in ended:
            row = slot.waiting.output_row
            outputs.tokens[row, : slot.count], outputs.length[row] = slot.tokens, slot.count
            outputs.status[row] = TRUNCATED if slot.truncated else STOPPED
        waiting, free, decode_steps, busy = map(np.int32, (len(state.queue), len(state.stack), decode_steps, busy))
        return WindowOutputs(rows=outputs, waiting=waiting, free_pages=free, busy=busy, decode_steps=decode_steps)

    def _fetch(self, state: PageState) -> DecodeState:
        """The same as decode.py's arrays; inactive slots and used up entries of the queue are zeros."""
        o = self.options
        tables = np.zeros((o.open_prompts, o.prompt_width), np.int32)
        for row, pages in enumerate(state.tables):
            tables[row, : len(pages)] = pages
        slots = [(number, slot) for number, slot in enumerate(state.slots) if slot is not None]
        numbers = [number for number, _ in slots]

        def column(values, size, at):
            array = np.zeros(size, np.int32)
            array[at] = values
            return array

        def of_slots(value):
            return column([value(slot) for _, slot in slots], o.slots, numbers)

        places = [(state.head + place) % o.output_rows for place in range(len(state.queue))]

        def of_queue(value):
            return column([value(waiting) for waiting in state.queue], o.output_rows, places)

        table = np.zeros((o.slots, o.table_width), np.int32)
        for number, slot in slots:
            table[number, : slot.used] = slot.table
        active = np.zeros(o.slots, bool)
        active[numbers] = True
        unused = dict(temperature=None, top_k=None, top_p=None)
        return DecodeState(
            key_pages=None, value_pages=None, outputs=None, seed=None, stop_ids=None, busy=None, decode_steps=None,
            pool=PagePool(
                stack=np.array(state.stack + [0] * (o.pages - len(state.stack)), np.int32),
                available=np.int32(len(state.stack)),
            ),
            prompts=Prompts(
                table=tables,
                length=np.array([len(prompt) for prompt in state.prompts], np.int32),
                last_token=np.array([prompt[-1] for prompt in state.prompts], np.int32),
            ),
            queue=Queue(
                prompt_row=of_queue(lambda waiting: waiting.prompt_row),
                output_row=of_queue(lambda waiting: waiting.output_row),
                sampling=Sampling(max_tokens=of_queue(lambda waiting: waiting.limit), **unused),
                key=None, head=np.int32(state.head), end=np.int32(state.head + len(state.queue)),
            ),
            slots=Slots(
                active=active,
                token=of_slots(lambda slot: slot.token),
                position=of_slots(lambda slot: slot.position),
                count=of_slots(lambda slot: slot.count),
                sampling=Sampling(max_tokens=of_slots(lambda slot: slot.waiting.limit), **unused),
                key=None,
                output_row=of_slots(lambda slot: slot.waiting.output_row),
                table=table,
                shared=of_slots(lambda slot: slot.shared),
                used=of_slots(lambda slot: slot.used),
            ),
        )  # fmt: skip


def _mapped(change, *all_outputs: WindowOutputs) -> WindowOutputs:
    """`jax.tree.map`, which takes longer than all else here."""
    outputs = {
        name: change(*(getattr(outputs.rows, name) for outputs in all_outputs))
        for name in ("tokens", "logprobs", "length", "status")
    }
    rest = {
        name: change(*(getattr(outputs, name) for outputs in all_outputs))
        for name in ("waiting", "free_pages", "busy", "decode_steps")
    }
    return WindowOutputs(rows=Outputs(**outputs), **rest)
