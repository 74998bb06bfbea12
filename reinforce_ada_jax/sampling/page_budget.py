"""Budget of a replica's cache pages: a lower bound of the free ones, which the host keeps without asking the device.

The host submits a window before it reads the one before it. So its knowledge of free pages is one window old, and a
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
        # Pages of open prompts by row, under numbers of the host's own, and how many prompts hold each.
        self._pages_of: dict[int, list[int]] = {}
        self._holders: collections.Counter[int] = collections.Counter()
        self._given = 0  # of these numbers
        self.guaranteed_free_pages = options.pages - 1
        self.parkable_turns = 0  # responses in flight whose pages may stay with a prompt row
        # For each window in flight: pages closed less pages opened since the one before, and its reserve.
        self._in_flight: collections.deque[tuple[int, int]] = collections.deque()
        self._closed = self._opened = 0  # pages, since the newest window was submitted

    def _new_numbers(self, count: int) -> range:
        self._given += count
        return range(self._given - count, self._given)

    def _pages(self, prompt: Prompt) -> int:
        return num_pages(len(prompt.tokens) - 1, self._options.page_size)

    def _room_for_prompts(self, for_responses: int) -> int:
        """Pages that more prompts may take. One response must always fit beside them, or none would ever start."""
        options = self._options
        return options.pages - 1 - max(options.table_width, for_responses) - len(self._holders)

    def fits(self, prompt: Prompt, shared: int = 0, for_responses: int = 0, *, after_closing: bool = False) -> bool:
        """Returns True if the prompt can be opened now.

        Its first `shared` pages are those of another prompt. Prompts must leave `for_responses` pages to responses.
        With `after_closing`, pages that the next window releases count as free.
        """
        free = self.guaranteed_free_pages + (self._closed if after_closing else 0)
        return self._pages(prompt) - shared <= min(self._room_for_prompts(for_responses), free)

    def open_prompt(self, row: int, prompt: Prompt, like: int = 0, shared: int = 0) -> None:
        """Takes the pages of a prompt that fits; the first `shared` are those of the prompt in row `like`.

        A prompt that continues a parked turn takes its row: `like` is the same row, and `shared` are all its pages.
        """
        new = self._pages(prompt) - shared
        pages = [*(self._pages_of[like][:shared] if shared else ()), *self._new_numbers(new)]
        self._pages_of[row] = pages
        self._holders.update(pages[shared:] if like == row else pages)
        self.guaranteed_free_pages -= new
        self._opened += new

    def park(self, row: int, num_pages: int, like: int, shared: int) -> None:
        """Counts a response's pages as those of a prompt row; the first `shared` are those of its prompt.

        They have not been free since the window that parked them; `read_window` for that window must follow.
        """
        self._pages_of[row] = [*self._pages_of[like][:shared], *self._new_numbers(num_pages - shared)]
        self._holders.update(self._pages_of[row])

    def close_prompt(self, row: int) -> None:
        """Counts the pages that only this prompt holds as free from the next window on, which releases them."""
        for page in self._pages_of.pop(row):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._closed += 1

    def submit_window(self, next_prompts: Iterable[Prompt], for_responses: int = 0) -> int:
        """Accounts for a window, and returns the pages that its new responses must leave free, for `next_prompts`.

        They are at most what `for_responses` leaves, as in `fits`.
        """
        reserve = max(0, min(sum(map(self._pages, next_prompts)), self._room_for_prompts(for_responses)))
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

        Slots may take all but `reserve`, and no more than their tables hold. Each turn that is parked meanwhile may
        take as many pages as the longest prompt.
        """
        options = self._options
        held_by_slots = options.slots * options.table_width + self.parkable_turns * options.prompt_width
        return max(min(free_pages, reserve), options.pages - 1 - len(self._holders) - held_by_slots)
