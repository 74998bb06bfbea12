"""One request on its way: its responses in the sampler, their texts, and an event for each change.

Everything runs in the event loop but what the sampler calls, which passes its tokens on to the loop.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving.openai.response_text import ResponseText
from reinforce_ada_jax.serving.sampler import Sampled, SampleJob, Sampler


@dataclasses.dataclass(eq=False)
class Choice:
    """One response: its job and draw, its text, and why it ended ("stop", "length"), or "" while it grows."""

    job: SampleJob
    draw: int
    text: ResponseText
    finish_reason: str = ""


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms of all responses of a request: number for each prompt, sampling, seed, stops, and if tokens are shown."""

    num_samples: int
    sampling: SamplingParams
    seed: int | None
    stops: tuple[str, ...]
    keep_pieces: bool


class Call:
    """Responses to one request.

    Attributes:
      choices: `num_samples` of each prompt, prompt by prompt.
      created: time of the request, in seconds since 1970.
      error: what went wrong in the sampler.
      first_token_s: seconds from the request to its first token.
    """

    def __init__(
        self,
        prompts: Sequence[Int[np.ndarray, " T"]],
        terms: Terms,
        tokenizer: Tokenizer,
        sampler: Sampler,
        name: str,
        on_end: Callable[[int], None],
    ):
        """Makes a request that is not submitted.

        Args:
          prompts: their tokens.
          terms: of each response.
          tokenizer: of the model.
          sampler: of the model.
          name: decides the randomness where `terms` have no seed.
          on_end: is called with the generated tokens of each response when it has ended.
        """
        self.created, self.error = time.time(), None
        self.first_token_s: float | None = None
        self.num_prompt_tokens = sum(map(len, prompts))
        self._sampler, self._on_end, self._loop = sampler, on_end, asyncio.get_running_loop()
        self._begun, self._changed = time.monotonic(), asyncio.Event()
        stop_ids = sampler.engine.options.stop_ids
        self.choices: list[Choice] = []
        self._jobs: list[SampleJob] = []
        for number, tokens in enumerate(prompts):
            job = SampleJob(
                f"{name} {number}", tokens, terms.num_samples, terms.sampling, stop_ids, terms.seed, self._done
            )
            first = len(self.choices)
            job.watch = self._passes_on(first)
            self._jobs.append(job)
            self.choices += [
                Choice(job, draw, ResponseText(tokenizer, stop_ids, terms.stops, terms.keep_pieces))
                for draw in range(terms.num_samples)
            ]

    def submit(self) -> None:
        """Queues the responses; wake the sampler's thread after it."""
        for job in self._jobs:
            self._sampler.submit(job)

    # ---- in the sampler's thread ---------------------------------------------------------------------------------

    def _passes_on(self, first: int) -> Callable[[int, Sampled, bool], None]:
        def watch(draw: int, sampled: Sampled, ended: bool) -> None:
            self._in_loop(self._add, self.choices[first + draw], sampled, ended)

        return watch

    def _done(self, found: list[Sampled] | Exception) -> None:
        if isinstance(found, Exception):
            self._in_loop(self._fail, found)

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended with the server
            pass

    # ---- in the event loop ---------------------------------------------------------------------------------------

    def _add(self, choice: Choice, sampled: Sampled, ended: bool) -> None:
        if choice.finish_reason:
            return
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self._begun
        choice.text.add(sampled)
        if ended:
            choice.text.finish()
        if choice.text.at_stop_text:
            self._end(choice, "stop")
            if not ended:
                self._sampler.cancel(choice.job, choice.draw)
        elif ended:
            self._end(choice, "stop" if sampled.stopped else "length")
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.cancel()
        self._changed.set()

    def _end(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        self._on_end(choice.text.num_tokens)

    @property
    def is_finished(self) -> bool:
        """True if every response has ended."""
        return all(choice.finish_reason for choice in self.choices)

    @property
    def is_cancelled(self) -> bool:
        """True if a response was cancelled."""
        return any(choice.finish_reason == "cancelled" for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, without those that were dropped."""
        return sum(choice.text.num_tokens for choice in self.choices)

    @property
    def seconds(self) -> float:
        """Time since the request."""
        return time.monotonic() - self._begun

    async def changed(self) -> None:
        """Waits for new tokens, or for an end.

        Raises:
          Exception: the sampler failed.
        """
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Ends what has not ended: the slots are free after a window."""
        for choice in self.choices:
            if not choice.finish_reason:
                self._end(choice, "cancelled")
                self._sampler.cancel(choice.job, choice.draw)
