"""An engine without a policy, whose cache holds the tokens themselves in place of keys and values.

It takes the place of an `Engine` in `Rollouts`. A response reads its whole context back when it ends: two holders of
one page would show. What is "sampled" follows from the address (`response_to`), so a response under a wrong address
shows as well. Slots, queue and pages are those of the window model.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from bench.simulation import HostArray
from bench.window_model import WindowModel
from reinforce_ada_jax.sampling.pages import NULL
from reinforce_ada_jax.sampling.state import EngineOptions, Occupancy, WindowInputs, WindowOutputs

VOCABULARY = 50_000
# From an address, its limit and the longest response to tokens, and whether the limit cut them.
Answer = Callable[[np.ndarray, int, int], tuple[list[int] | np.ndarray, bool]]


def response_to(words: np.ndarray | tuple[int, ...], limit: int, longest: int) -> tuple[list[int], bool]:
    """Tokens drawn under an address, and whether the limit cut them: what the engine does, for the test to expect."""
    digest = hashlib.blake2b(np.asarray(words, np.uint32).tobytes(), digest_size=8).digest()
    first, length = int.from_bytes(digest[:4]), 1 + int.from_bytes(digest[4:]) % longest
    tokens = [(first + 7 * place) % VOCABULARY for place in range(min(length, limit))]
    return tokens, length > limit


def given(tokens: Mapping[bytes, np.ndarray]) -> Answer:
    """Answers with what another engine drew under the same addresses."""
    return lambda words, limit, longest: (tokens[words.tobytes()], True)


class PageReplica(WindowModel):
    """One replica, with a token in each place of its cache."""

    def __init__(self, options: EngineOptions, answer: Answer):
        super().__init__(options, lambda address, limit: answer(address, limit, options.max_response_tokens))
        self.cache = np.zeros((options.pages, options.page_size), np.int32)
        self.prompts: dict[int, list[int]] = {}  # by row
        self.sequences: dict[int, list[int]] = {}  # of running responses, prompt first, by output row

    def decode_window(self, inputs: WindowInputs) -> tuple[WindowOutputs, int, int]:
        opened = inputs.opened
        for row, length, tokens in zip(opened.row.tolist(), opened.length.tolist(), opened.tokens, strict=True):
            self.prompts[row] = tokens[:length].tolist()
        return super().decode_window(inputs)

    def _places(self, table: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        position = np.arange(begin, end)
        return table[position // self.options.page_size], position % self.options.page_size

    def _write(self, table: np.ndarray, begin: int, tokens: Sequence[int]) -> None:
        pages, offsets = self._places(table, begin, begin + len(tokens))
        assert (pages != NULL).all()
        self.cache[pages, offsets] = tokens

    def on_prefill(self, prompt_row: int, begin: int, num_tokens: int) -> None:
        tokens = self.prompts[prompt_row][:-1]
        assert begin + num_tokens <= len(tokens)
        self._write(self.state.prompts.table[prompt_row], begin, tokens[begin : begin + num_tokens])

    def on_start(self, slot: int, prompt_row: int) -> None:
        slots, prompt = self.state.slots, self.prompts[prompt_row]
        shared, row = slots.shared[slot], int(slots.requests.output_row[slot])
        if (len(prompt) - 1) % self.options.page_size:
            self.cache[slots.table[slot, shared]] = self.cache[self.state.prompts.table[prompt_row, shared]]
        self.sequences[row] = prompt + list(self.responses[row][0])

    def on_advance(self, active: np.ndarray, num_tokens: np.ndarray) -> None:
        slots = self.state.slots
        for slot, count in zip(active.tolist(), num_tokens.tolist(), strict=True):
            begin = int(slots.position[slot])
            tokens = self.sequences[int(slots.requests.output_row[slot])][begin : begin + count]
            self._write(slots.table[slot], begin, tokens)

    def on_end(self, slot: int) -> None:
        slots = self.state.slots
        sequence, end = self.sequences.pop(int(slots.requests.output_row[slot])), int(slots.position[slot])
        context = self.cache[self._places(slots.table[slot], 0, end)]
        assert context.tolist() == sequence[:end], "a page was written by somebody else"

    def on_evict(self, slot: int) -> None:
        del self.sequences[int(self.state.slots.requests.output_row[slot])]


class PageEngine:
    """See the module. `options.stop_ids` means nothing here: lengths follow from addresses."""

    def __init__(self, options: EngineOptions, replicas: int = 1, answer: Answer = response_to):
        self.options, self.replicas, self.spans_processes, self._answer = options, replicas, False, answer

    def decode_weights(self, params: None) -> None:
        pass

    def init_decode_state(self) -> list[PageReplica]:
        return [PageReplica(self.options, self._answer) for _ in range(self.replicas)]

    def decode_window(
        self, params: None, state: list[PageReplica], inputs: Sequence[WindowInputs], vote: int = 0
    ) -> tuple[list[PageReplica], WindowOutputs]:
        of_replicas = [replica.decode_window(one)[0] for replica, one in zip(state, inputs, strict=True)]
        return state, jax.tree.map(lambda *x: np.stack(x).view(HostArray), *of_replicas)

    def fetch_outputs(self, outputs: WindowOutputs) -> list[WindowOutputs]:
        return [jax.tree.map(lambda x, at=replica: x[at], outputs) for replica in range(self.replicas)]

    def fetch(self, state: list[PageReplica]) -> list[Occupancy]:
        return [jax.tree.map(np.array, replica.state) for replica in state]
