"""Rows of a replica's prompt table and of its outputs: which are free, and what occupies the others.

Windows report new tokens only. Output rows append them to the tokens that the host has.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.sampling.state import EngineOptions, Outputs
from reinforce_ada_jax.types import Request


class ParkedTurn(NamedTuple):
    """A turn of a trajectory whose pages stay for the next one."""

    row: int  # prompt row that has the pages
    prompt_id: str  # of the turn's prompt
    tokens: Int[np.ndarray, " T"]  # of the prompt and the response


class Rows:
    """Row allocator of one replica."""

    def __init__(self, options: EngineOptions):
        self._has_rings = options.ring_window > 0  # a turn's pages in rings are written over
        self.prompts: dict[str, int] = {}  # row of each open prompt, by its id
        self.closing = np.zeros(options.open_prompts, bool)  # rows of prompts that the next window releases
        self.parked: dict[str, ParkedTurn] = {}  # by the id of the next turn's prompt, the oldest first
        self.park_rows: dict[int, int] = {}  # prompt rows that turns in flight may be parked in, by output row
        self.free_prompt_rows = list(range(options.open_prompts))[::-1]
        self.in_flight: dict[int, Request] = {}  # requests on the device, by output row
        self.free_output_rows = list(range(options.output_rows))[::-1]
        # Responses in their output rows; zeros take memory only where they are written.
        size = options.output_rows, options.max_response_tokens
        self.tokens, self.logprobs = np.zeros(size, np.int32), np.zeros(size, np.float32)
        self.length = np.zeros(options.output_rows, np.int32)  # tokens by the last window read; any in free rows
        self.limit = np.zeros(options.output_rows, np.int32)  # most tokens of each response in flight
        self._since = np.zeros(options.output_rows, np.int64)  # number of the window with which each row was taken
        self._submitted = self._read = 0  # windows

    def take_closing(self) -> np.ndarray:
        """Returns `closing` for a window, after which these rows are free.

        They are not free before: a prompt that was opened in one would be released by this window.
        """
        self._submitted += 1
        closing, self.closing = self.closing, np.zeros_like(self.closing)
        self.free_prompt_rows += np.flatnonzero(closing).tolist()
        return closing

    def start(self, request: Request, max_tokens: int) -> int:
        """Returns the output row that the response will fill; a turn gets a row to be parked in, if one is free."""
        row = self.free_output_rows.pop()
        self.in_flight[row], self.limit[row], self._since[row] = request, max_tokens, self._submitted
        if request.continues and self.free_prompt_rows and not self._has_rings:
            self.park_rows[row] = self.free_prompt_rows.pop()
        return row

    def write(self, new: Outputs) -> None:
        """Puts the tokens that a window wrote into the output rows."""
        row, column = np.nonzero(np.arange(new.tokens.shape[1]) < (new.length - new.start)[:, None])
        place = new.start[row] + column
        self.tokens[row, place], self.logprobs[row, place] = new.tokens[row, column], new.logprobs[row, column]
        self.length = new.length
        self._read += 1

    def begun(self) -> list[int]:
        """Returns the output rows of responses in flight that have tokens, by the last window read."""
        return [row for row in self.in_flight if self._since[row] <= self._read and self.length[row]]

    def response(self, row: int) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
        """Returns tokens of a response so far and their log-probabilities, to be copied before the next window."""
        return self.tokens[row, : self.length[row]], self.logprobs[row, : self.length[row]]
