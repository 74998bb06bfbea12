"""An engine in virtual time: decode.py's slots, queue and pages, with prescribed lengths and costs in place of a model.

`SimulatedEngine` stands where `Rollouts` expects an `Engine`. So the host's side, the collection loop and its strategy
are the real ones, and only what a compiled program would do on the device is modelled here. Step for step it does what
`decode.decode_window` does (tests/sampling/test_simulation.py); the seconds are as good as the costs put in.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from reinforce_ada_jax.sampling import token as token_lib
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
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds that the programs of an engine take on some machine.

    Attributes:
      decode_step: one decode step, whatever the slots hold: above all, reading the weights.
      cached_token: on top of that, for each token whose keys and values are read in a step.
      window: starting a decode window.
      prefill: starting a prefill.
      prefill_token: each token of a prefill, padding included.
      host: the host's work between reading a outputs and dispatching the next window; the device only waits for it
        where it has run out of windows.
    """

    decode_step: float = 0.0
    cached_token: float = 0.0
    window: float = 0.0
    prefill: float = 0.0
    prefill_token: float = 0.0
    host: float = 0.0


@dataclasses.dataclass
class _Slot:
    """A response under way.

    Attributes:
      output_row: which it fills.
      length: of the whole response.
      left: tokens still to come.
      cached: tokens that the next step sees, its own input included.
      pages: its own ones, the prompt's shared pages aside.
      status: what it ends with.
    """

    output_row: int
    length: int
    left: int
    cached: int
    pages: int
    status: int


class SimulatedEngine:
    """What `Rollouts` asks of an engine, without a device. Its clock runs on from session to session."""

    def __init__(self, options: EngineOptions, cost: Cost, lengths: Mapping[tuple[str, int], int]):
        """`lengths`: tokens of the response (prompt id, draw); its sampling limit cuts it off, as it would."""
        # It has counts of pages, and no pages that could be looked after.
        self.options, self.cost = dataclasses.replace(options, check_invariants=False), cost
        self._lengths = {_place(token_lib.address(0, *draw)): length for draw, length in lengths.items()}
        self._device_s = self._host_s = 0.0  # when they are through with what they were given
        self._window_ends = collections.deque([0.0, 0.0], maxlen=2)

    replicas = 1

    @property
    def seconds(self) -> float:
        """The time by now: when the last program ends."""
        return self._device_s

    def decodes_from(self, params: None) -> bool:
        """There are no weights."""
        return True

    def decode_weights(self, params: None) -> None:
        """There are none."""

    def init_decode_state(self) -> "SimulatedState":
        """No prompt open, no slot active, every page free."""
        return SimulatedState(self.options.pages - 1)

    def open_prompts(self, params: None, state: "SimulatedState", batches: Sequence[PrefillBatch]) -> "SimulatedState":
        """One prefill."""
        (batch,) = batches
        self._run(self.cost.prefill + self.cost.prefill_token * batch.tokens.size, host=0.0)
        for row, prompt_length in zip(batch.rows, batch.length, strict=True):
            if row < self.options.open_prompts:
                state.prompts[int(row)] = int(prompt_length)
                state.free_pages -= num_pages(int(prompt_length) - 1, self.options.page_size)
        return state

    def decode_window(
        self, params: None, state: "SimulatedState", all_inputs: Sequence[WindowInputs]
    ) -> tuple["SimulatedState", WindowOutputs]:
        """One window; see `decode.decode_window`, in whose order everything happens."""
        (inputs,) = all_inputs
        for row in np.flatnonzero(inputs.closing).tolist():
            state.free_pages += num_pages(state.prompts.pop(row) - 1, self.options.page_size)
        state.queue.extend(self._entries(inputs))
        reserve = int(inputs.reserve)
        self._refill(state, reserve)

        ended: list[_Slot] = []
        decode_steps = busy = cached = 0
        while decode_steps < self.options.window and state.slots and not self._starved(state, len(ended)):
            # Between two ends nothing can change.
            stride = min(self.options.window - decode_steps, *(slot.left for slot in state.slots))
            active = len(state.slots)
            decode_steps, busy = decode_steps + stride, busy + stride * active
            cached += stride * sum(slot.cached for slot in state.slots) + active * stride * (stride - 1) // 2
            for slot in state.slots:
                slot.left -= stride
                slot.cached += stride
            ending = [slot for slot in state.slots if slot.left == 0]
            if ending:
                ended += ending
                state.free_pages += sum(slot.pages for slot in ending)
                state.slots = [slot for slot in state.slots if slot.left > 0]
                self._refill(state, reserve)
        seconds = self.cost.window + decode_steps * self.cost.decode_step + cached * self.cost.cached_token
        self._window_ends.append(self._run(seconds, host=self.cost.host))
        return state, self._outputs(state, ended, decode_steps, busy)

    def fetch_outputs(self, outputs: WindowOutputs) -> list[WindowOutputs]:
        """The one replica's."""
        return [jax.device_get(outputs)]

    def _run(self, seconds: float, *, host: float) -> float:
        """Puts a program behind those under way; when it ends.

        Two windows are under way at most: before it dispatches another one, the host reads the last but one.
        """
        self._host_s = max(self._host_s, self._window_ends[0]) + host
        self._device_s = max(self._device_s, self._host_s) + seconds
        return self._device_s

    def _entries(self, inputs: WindowInputs) -> Iterable[tuple[int, int, int, int]]:
        """(prompt row, output row, limit, length) of each new request."""
        for index in range(int(inputs.count)):
            limit = int(inputs.sampling.max_tokens[index])
            length = self._lengths[_place(inputs.address[index])]
            yield int(inputs.prompt_row[index]), int(inputs.output_row[index]), limit, length

    def _refill(self, state: "SimulatedState", reserve: int) -> None:
        """Idle slots take from the queue's head, in order, while pages for the longest possible response are free."""
        page_size = self.options.page_size
        while state.queue and len(state.slots) < self.options.slots:
            prompt_row, output_row, limit, length = state.queue[0]
            prompt = state.prompts[prompt_row]
            pages = num_pages(prompt + limit, page_size) - (prompt - 1) // page_size
            if pages > state.free_pages - reserve:
                break
            state.queue.popleft()
            state.free_pages -= pages
            length, status = (limit, TRUNCATED) if length >= limit else (length, STOPPED)
            state.slots.append(_Slot(output_row, length, left=length, cached=prompt, pages=pages, status=status))

    def _starved(self, state: "SimulatedState", num_ended: int) -> bool:
        """The queue is dry, a quarter of the slots idle and an eighth of them ended: the host had better look."""
        slots = self.options.slots
        idle = slots - len(state.slots)
        return not state.queue and idle >= max(1, slots // 4) and num_ended >= max(1, slots // 8)

    def _outputs(self, state: "SimulatedState", ended: list[_Slot], decode_steps: int, busy: int) -> WindowOutputs:
        rows = self.options.output_rows
        status, length = np.full(rows, RUNNING, np.int32), np.zeros(rows, np.int32)
        for slot in ended:
            status[slot.output_row], length[slot.output_row] = slot.status, slot.length
        # Nobody reads tokens that nobody drew: one column of zeros stands for all.
        outputs = Outputs(
            tokens=np.zeros((rows, 1), np.int32), logprobs=np.zeros((rows, 1), np.float32), length=length, status=status
        )
        waiting, free_pages, busy, decode_steps = map(
            np.int32, (len(state.queue), state.free_pages, busy, decode_steps)
        )
        outputs = WindowOutputs(
            rows=outputs, waiting=waiting, free_pages=free_pages, busy=busy, decode_steps=decode_steps
        )
        return jax.tree.map(jnp.asarray, outputs)  # the host asks device arrays whether they are ready


@dataclasses.dataclass
class SimulatedState:
    """What the device would hold: prompt lengths by row, waiting requests, running responses."""

    free_pages: int
    prompts: dict[int, int] = dataclasses.field(default_factory=dict)
    queue: collections.deque[tuple[int, int, int, int]] = dataclasses.field(default_factory=collections.deque)
    slots: list[_Slot] = dataclasses.field(default_factory=list)


def _place(address: np.ndarray) -> bytes:
    """An address without its stream: a prompt and a draw."""
    return np.asarray(address[1:]).tobytes()
