"""Budget of a replica's cache pages: a lower bound of the free ones, which the host keeps without asking the device.

The host submits a window before it reads the one before it. So what it knows of free pages is one window old, and a
prompt may be opened only into pages that are free whatever the windows in flight do. Which physical pages a prompt or
a response gets is decided on the device (pages.py).
"""

import collections
from collections.abc import Iterable

from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.types import Prompt


class PageBudget:
    """Pages of open prompts, and pages that are guaranteed to be free when the next program runs."""

    def __init__(self, options: EngineOptions):
        self._options = options
        self._prompt_pages: dict[str, int] = {}  # of open prompts
        self.guaranteed_free_pages = options.pages - 1
        # Of each window in flight: pages closed less pages opened since the one before, and its reserve.
        self._in_flight: collections.deque[tuple[int, int]] = collections.deque()
        self._closed = self._opened = 0  # pages, since the newest window was submitted

    def _pages(self, prompt: Prompt) -> int:
        return num_pages(len(prompt.tokens) - 1, self._options.page_size)

    def _room_for_prompts(self) -> int:
        """Pages that prompts may take: one response must always fit beside them, or none would ever start."""
        options = self._options
        return options.pages - 1 - options.table_width - sum(self._prompt_pages.values())

    def fits(self, prompt: Prompt) -> bool:
        """Returns True if the prompt can be opened now."""
        return self._pages(prompt) <= min(self._room_for_prompts(), self.guaranteed_free_pages)

    def open_prompt(self, prompt: Prompt) -> None:
        """Takes the pages of a prompt that fits."""
        self._prompt_pages[prompt.id] = pages = self._pages(prompt)
        self.guaranteed_free_pages -= pages
        self._opened += pages

    def close_prompt(self, prompt_id: str) -> None:
        """Counts on the pages of a prompt from the next window on, which releases them."""
        self._closed += self._prompt_pages.pop(prompt_id)

    def submit_window(self, next_prompts: Iterable[Prompt]) -> int:
        """Accounts for a window, and returns the pages that its new responses must leave free.

        Args:
          next_prompts: those that wait to be opened next.
        """
        reserve = max(0, min(sum(map(self._pages, next_prompts)), self._room_for_prompts()))
        self._in_flight.append((self._closed - self._opened, reserve))
        self.guaranteed_free_pages = self._after_window(self.guaranteed_free_pages + self._closed, reserve)
        self._closed = self._opened = 0
        return reserve

    def read_window(self, free_pages: int) -> None:
        """Starts again from the pages that were free at the end of the oldest window in flight."""
        self._in_flight.popleft()
        self.guaranteed_free_pages = free_pages
        for page_change, reserve in self._in_flight:  # at most one
            self.guaranteed_free_pages = self._after_window(self.guaranteed_free_pages + page_change, reserve)

    def _after_window(self, free_pages: int, reserve: int) -> int:
        """Returns the pages that are free after a window which began with at least `free_pages`.

        Slots may take all but `reserve`, and never more than their tables hold.
        """
        options = self._options
        held_by_slots = options.slots * options.table_width
        return max(min(free_pages, reserve), options.pages - 1 - sum(self._prompt_pages.values()) - held_by_slots)
