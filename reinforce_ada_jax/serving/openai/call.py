"""A request while it is answered: its responses in the sampler, their texts and scores, and an event for each change.

Everything runs in the event loop, except the functions that sampler and scorer call: these pass results to the loop.
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.learning.scoring import Scores
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving.http import Refusal
from reinforce_ada_jax.serving.openai.scoring import ScoreJob, ScoreQueue
from reinforce_ada_jax.serving.response_text import Piece, ResponseText
from reinforce_ada_jax.serving.sampler import Sampled, SampleJob, Sampler


class Backend(NamedTuple):
    """The device side of a model."""

    sampler: Sampler
    scoring: ScoreQueue


class PromptText(NamedTuple):
    """A prompt's tokens, and their pieces of text if the answer begins with them."""

    tokens: Int[np.ndarray, " T"]
    pieces: Sequence[Piece] = ()


@dataclasses.dataclass(eq=False)
class Choice:
    index: int  # in the answer
    job: SampleJob  # draws this choice, and the others of its prompt
    draw: int  # its number in the job
    text: ResponseText
    finish_reason: str = ""  # "stop", "length" or "cancelled"; "" until it has ended and has its scores, if requested
    score_job: ScoreJob | None = None
    scores: Scores | None = None  # of each piece of the text
    # How much of the text a stream has sent.
    num_sent_chars: int = 0
    num_sent_pieces: int = 0
    is_sent: bool = False


@dataclasses.dataclass(frozen=True)
class Terms:
    num_samples: int  # for each prompt
    sampling: SamplingParams
    seed: int | None  # None: the name of the request decides
    stops: tuple[str, ...]  # texts that end a response
    keep_pieces: bool  # the answer shows tokens
    keep_end: bool = False  # the answer also shows the token that ended a response
    goes_on: bool = False  # the text of a response goes on with that of its prompt
    scored: bool = False  # the scorer is needed: the sampler's log-probabilities are not enough
    draws: bool = True  # False: the answer has only the prompts


class Call:
    """Responses to one request.

    `name` decides the randomness where `terms` have no seed. `on_end` is called with the generated tokens of each
    response when it has ended.
    """

    def __init__(
        self,
        prompts: Sequence[PromptText],
        terms: Terms,
        tokenizer: Tokenizer,
        backend: Backend,
        name: str,
        on_end: Callable[[int], None],
    ):
        self.created = time.time()
        self.error: Exception | None = None  # of sampler or scorer, or that the server ends
        self.first_token_s: float | None = None
        self.num_prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.terms, self.tokenizer, self._backend = terms, tokenizer, backend
        self._on_end, self._loop = on_end, asyncio.get_running_loop()
        self._begun, self._changed = time.monotonic(), asyncio.Event()
        stop_ids = backend.sampler.engine.options.stop_ids
        self.choices: list[Choice] = []  # prompt by prompt
        for number, prompt in enumerate(prompts):
            job = SampleJob(
                f"{name} {number}", prompt.tokens, terms.num_samples, terms.sampling, stop_ids, terms.seed, self._done
            )
            job.watch = functools.partial(self._grown, len(self.choices))
            after = prompt.tokens.tolist() if terms.goes_on else ()
            for draw in range(terms.num_samples):
                text = ResponseText(
                    tokenizer, stop_ids, terms.stops, terms.keep_pieces,
                    keep_end=terms.keep_end, prompt=prompt.pieces, after=after,
                )  # fmt: skip
                self.choices.append(Choice(len(self.choices), job, draw, text))

    def submit(self) -> None:
        """Queues the responses; the caller must then wake the thread of the devices."""
        if self.terms.draws:
            for job in dict.fromkeys(choice.job for choice in self.choices):
                self._backend.sampler.submit(job)
        else:
            for choice in self.choices:
                self._drawn(choice, "length")
            self._changed.set()

    # ---- in the thread of the devices ---------------------------------------------------------------------------

    def _grown(self, first: int, draw: int, sampled: Sampled, ended: bool) -> None:
        self._in_loop(self._add, self.choices[first + draw], sampled, ended)

    def _done(self, found: list[Sampled] | Exception) -> None:
        if isinstance(found, Exception):
            self._in_loop(self.fail, found)

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended with the server
            pass

    # ---- in the event loop ---------------------------------------------------------------------------------------

    def _add(self, choice: Choice, sampled: Sampled, ended: bool) -> None:
        if choice.finish_reason or choice.score_job:
            return
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self._begun
        try:
            choice.text.add(sampled)
            if ended:
                choice.text.finish()
        except ValueError as error:  # tokens that the tokenizer can't decode; clients do not learn where its folder is
            self.fail(Refusal(500, str(error).replace(str(self.tokenizer.folder), "the model")))
            return
        if choice.text.at_stop_text:
            self._drawn(choice, "stop")
            if not ended:
                self._backend.sampler.cancel(choice.job, choice.draw)
        elif ended:
            self._drawn(choice, "stop" if sampled.stopped else "length")
        self._changed.set()

    def _drawn(self, choice: Choice, reason: str) -> None:
        """Ends a response that has all its tokens; if scores are needed, they are computed first."""
        pieces = choice.text.pieces
        if not self.terms.scored or not pieces:
            self._end(choice, reason)
            return
        tokens = np.array([piece.token for piece in pieces], np.int32)
        if not choice.text.has_prompt:
            tokens = np.concatenate([choice.job.tokens, tokens])
        done = functools.partial(self._in_loop, self._scored, choice, reason)
        temperature = float(self.terms.sampling.as_arrays.temperature) or 1.0
        choice.score_job = ScoreJob(tokens, temperature, done)
        self._backend.scoring.submit(choice.score_job)

    def _scored(self, choice: Choice, reason: str, found: Scores | Exception) -> None:
        if choice.finish_reason:
            return
        if isinstance(found, Exception):
            self.fail(found)
            return
        first = len(found.logprobs) - len(choice.text.pieces)
        choice.scores = Scores(*(values[first:] for values in found))
        self._end(choice, reason)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends all responses; `changed` raises the error."""
        self.error = error
        self.cancel()

    def _end(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        self._on_end(choice.text.num_tokens)

    @property
    def is_cancelled(self) -> bool:
        return any(choice.finish_reason == "cancelled" for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, without those that were dropped."""
        return sum(choice.text.num_tokens for choice in self.choices)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    async def changed(self) -> None:
        """Waits for new tokens, or for the end of a response; raises `error`."""
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error

    async def finished(self) -> None:
        """Waits until all responses have ended; raises as `changed` does."""
        while self.error is not None or not all(choice.finish_reason for choice in self.choices):
            await self.changed()

    def cancel(self) -> None:
        """Ends the responses that have not ended; their slots are free after a window."""
        self._changed.set()
        for choice in self.choices:
            if not choice.finish_reason:
                self._end(choice, "cancelled")
                if choice.score_job is not None:
                    choice.score_job.is_cancelled = True
                elif self.terms.draws:
                    self._backend.sampler.cancel(choice.job, choice.draw)
