"""Experts of the tokens of prompts and responses, on the host: from a window's `Routes` to `Response.experts`."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt

from reinforce_ada_jax.sampling.state import EngineOptions, WindowOutputs
from reinforce_ada_jax.sampling.window_inputs import OpenedPrompt


@dataclasses.dataclass(eq=False)
class _Prompt:
    """Experts of the tokens that an open prompt has in the cache; the first `shared` are those of another prompt."""

    experts: UInt[np.ndarray, "T LC"]
    like: "_Prompt | None" = None
    shared: int = 0

    def complete(self) -> UInt[np.ndarray, "T LC"]:
        """Returns the experts of all tokens; the caller knows that all are prefilled."""
        if self.like is not None:
            self.experts[: self.shared] = self.like.complete()[: self.shared]
            self.like = None
        return self.experts


class ReportedRoutes:
    """Routes of one replica's prompts and responses, read window by window."""

    def __init__(self, options: EngineOptions):
        self._options = options
        self._opened: collections.deque[Sequence[OpenedPrompt]] = collections.deque()  # of windows that are not read
        self._prompts: dict[int, _Prompt] = {}  # by row, as of the last window read
        self._responses: np.ndarray | None = None  # by output row

    def submit_window(self, opened: Sequence[OpenedPrompt]) -> None:
        """Takes the prompts that a window opens; windows are read in the order in which they are submitted."""
        self._opened.append(opened)

    def read_window(self, outputs: WindowOutputs) -> None:
        """Takes the routes of the oldest window that was not read."""
        routes, rows = outputs.routes, outputs.rows
        assert routes is not None
        size, dtype = routes.of_prompts.shape[1], routes.of_prompts.dtype
        for opened in self._opened.popleft():
            like = self._prompts.get(opened.like) if opened.cached else None
            own = np.zeros((len(opened.tokens) - 1, size), dtype)
            self._prompts[opened.row] = _Prompt(own, like, opened.cached)
        number = np.flatnonzero(routes.row[: routes.count] < self._options.open_prompts)
        for row in np.unique(routes.row[number]).tolist():
            own = number[routes.row[number] == row]
            self._prompts[row].experts[routes.position[own]] = routes.of_prompts[own]
        if self._responses is None:
            shape = self._options.output_rows, self._options.max_response_tokens, size
            self._responses = np.zeros(shape, dtype)  # takes memory only where it is written
        row, column = np.nonzero(np.arange(routes.of_responses.shape[1]) < (rows.length - rows.start)[:, None])
        self._responses[row, rows.start[row] + column] = routes.of_responses[row, column]

    def response(self, prompt_row: int, output_row: int, tokens: int) -> UInt[np.ndarray, "T LC"]:
        """Returns the experts of the tokens of a prompt and of its response, all but the last."""
        assert self._responses is not None
        return np.concatenate([self._prompts[prompt_row].complete(), self._responses[output_row, :tokens]])

    def park(self, row: int, experts: UInt[np.ndarray, "T LC"]) -> None:
        """Takes what `response` returned for a turn that is parked in a prompt row."""
        self._prompts[row] = _Prompt(experts)
