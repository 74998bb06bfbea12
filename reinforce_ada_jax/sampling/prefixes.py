"""Prefixes that prompts have in common: system text, examples before the question."""

import numpy as np
from jaxtyping import Int

from reinforce_ada_jax.sampling.state import EngineOptions


class Prefixes:
    """Stored tokens of a replica's open prompts, by row: all but the last of each."""

    def __init__(self, options: EngineOptions):
        self._page_size = options.page_size
        self._tokens = np.full((options.open_prompts, options.longest_prompt), -1, np.int32)
        self._adapter = np.full(options.open_prompts, -1, np.int64)

    def find(self, tokens: Int[np.ndarray, " T"], adapter: int) -> tuple[int, int]:
        """Returns the row of the prompt with the longest common prefix, and how many whole pages it fills.

        At least one token is left to prefill. Prompts are prefilled in order: those whose pages it has come first.
        """
        longest = max(0, len(tokens) - 2)
        if longest < self._page_size:
            return 0, 0
        # Only rows with the same first page are compared further: comparing all tokens of all rows takes milliseconds
        # for long prompts.
        first = self._tokens[:, : self._page_size] == tokens[None, : self._page_size]
        rows = np.flatnonzero(first.all(1) & (self._adapter == adapter))
        if not rows.size:
            return 0, 0
        same = self._tokens[rows, :longest] == tokens[None, :longest]
        common = np.where(same.all(1), longest, same.argmin(1))
        best = int(common.argmax())
        return int(rows[best]), int(common[best]) // self._page_size

    def add(self, row: int, tokens: Int[np.ndarray, " T"], adapter: int) -> None:
        """Adds an open prompt, or a parked turn."""
        stored = tokens[:-1][: self._tokens.shape[1]]
        self._tokens[row, : len(stored)] = stored
        self._adapter[row] = adapter

    def remove(self, row: int) -> None:
        """Removes a prompt that is about to be closed."""
        self._tokens[row] = -1
