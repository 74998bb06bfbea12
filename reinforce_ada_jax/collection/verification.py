"""Rounds at the verifier: submitted as they complete, and read in the order of submission."""

import collections
import itertools
from collections.abc import Callable
from concurrent.futures import Future, wait

from reinforce_ada_jax.collection.prompt_rollouts import PromptRollouts
from reinforce_ada_jax.types import Prompt, Response, Verdict

WAIT_S = 0.5  # between two calls of `waiting`

VerifyFn = Callable[[list[tuple[Prompt, Response]]], list[Verdict] | Future[list[Verdict]]]


class VerificationQueue:
    """Verifier calls in order. Verdicts are read at once, or later where the verifier returns a future."""

    def __init__(self, verify_fn: VerifyFn, *, deterministic: bool, waiting: Callable[[], None]):
        """With `deterministic`, futures are read at the sampler's next yield, and not before.

        `waiting` is called again and again while verdicts are waited for, and may raise.
        """
        self._verify_fn, self._deterministic, self._waiting = verify_fn, deterministic, waiting
        self._pending: collections.deque[tuple[list[PromptRollouts], Future[list[Verdict]]]] = collections.deque()

    @property
    def pending(self) -> bool:
        """True if a call has not been read."""
        return bool(self._pending)

    def submit(self, complete: list[PromptRollouts]) -> list[PromptRollouts]:
        """Verifies the rounds of `complete`, all in one call; returns the prompts whose verdicts have arrived."""
        if not complete:
            return []
        verdicts = self._verify_fn(
            [(rollouts.prompt, response) for rollouts in complete for response in rollouts.unverified()]
        )
        if isinstance(verdicts, Future):
            self._pending.append((complete, verdicts))
            return []
        return _finish_rounds(complete, verdicts)

    def read(self, *, at_yield: bool = False) -> list[PromptRollouts]:
        """Reads the verdicts that are due; returns the prompts whose rounds they finish."""
        finished: list[PromptRollouts] = []
        while self._pending and (at_yield if self._deterministic else self._pending[0][1].done()):
            finished += self.read_next()
        return finished

    def read_next(self) -> list[PromptRollouts]:
        """Waits for the oldest call; returns the prompts whose rounds it finishes, none where no call is pending."""
        if not self._pending:
            return []
        complete, verdicts = self._pending[0]
        while not wait([verdicts], WAIT_S).done:
            self._waiting()
        self._pending.popleft()
        return _finish_rounds(complete, verdicts.result())


def _finish_rounds(complete: list[PromptRollouts], verdicts: list[Verdict]) -> list[PromptRollouts]:
    sizes = [len(rollouts.unverified()) for rollouts in complete]
    if len(verdicts) != sum(sizes):
        raise RuntimeError(f"The verifier returned {len(verdicts)} verdicts for {sum(sizes)} responses.")
    remaining = iter(verdicts)
    for rollouts, size in zip(complete, sizes, strict=True):
        rollouts.finish_round(list(itertools.islice(remaining, size)))
    return complete
