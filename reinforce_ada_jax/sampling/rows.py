"""Rows of a replica's prompt table and of its outputs: which are free, and what occupies the others."""

import numpy as np

from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.types import Request


class Rows:
    """Row allocator of one replica.

    Attributes:
      prompts: row of each open prompt, by its id.
      closing: bool[R], rows of prompts that the next window releases.
      in_flight: requests on the device, by output row.
    """

    def __init__(self, options: EngineOptions):
        self.prompts: dict[str, int] = {}
        self.closing = np.zeros(options.open_prompts, bool)
        self.free_prompt_rows = list(range(options.open_prompts))[::-1]
        self.in_flight: dict[int, Request] = {}
        self.free_output_rows = list(range(options.output_rows))[::-1]

    def open_prompt(self, prompt_id: str) -> int:
        """Returns the row that the prompt gets."""
        self.prompts[prompt_id] = row = self.free_prompt_rows.pop()
        return row

    def close_prompt(self, prompt_id: str) -> int:
        """Marks a prompt's row for the next window to release, and returns it."""
        row = self.prompts.pop(prompt_id)
        self.closing[row] = True
        return row

    def take_closing(self) -> np.ndarray:
        """Returns `closing` for a window, after which these rows are free.

        Not before: a prompt that was opened by now would be in a row that this window releases.
        """
        closing, self.closing = self.closing, np.zeros_like(self.closing)
        self.free_prompt_rows += np.flatnonzero(closing).tolist()
        return closing

    def start(self, request: Request) -> int:
        """Returns the output row that the response will fill."""
        row = self.free_output_rows.pop()
        self.in_flight[row] = request
        return row

    def finish(self, row: int) -> Request:
        """Frees an output row; returns the request that its response answers."""
        self.free_output_rows.append(row)
        return self.in_flight.pop(row)
