"""Random streams of requests, and an account of them: what was asked, what came back, what may be asked next."""

import collections
import dataclasses
from collections.abc import Collection

import numpy as np

from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.types import Prompt, Request, Response


def random_options(rng: np.random.Generator, **fixed) -> EngineOptions:
    """Sizes of everything, often down to the fewest pages that config.least_pages allows."""
    page_size, prompt, response = (int(rng.integers(1, most + 1)) for most in (8, 20, 12))
    sizes = dict(
        slots=int(rng.integers(1, 10)),
        window=int(rng.choice([1, 2, 3, 7, 16])),
        page_size=page_size,
        open_prompts=int(rng.integers(1, 8)),
        prefill_tokens=int(rng.choice([1, 3, 8, 40])),
        max_prompt_tokens=prompt,
        max_response_tokens=response,
    ) | fixed  # fmt: skip
    prompt, response, page_size = (sizes[key] for key in ("max_prompt_tokens", "max_response_tokens", "page_size"))
    least = num_pages(prompt, page_size) + num_pages(prompt + response, page_size) + 1
    more = int(rng.choice([0, 0, 1, 2, 5, 40]))
    return EngineOptions(
        pages=least + more, stop_ids=(), seed=0, dtype="float32", check_invariants=True, **sizes
    )  # fmt: skip


@dataclasses.dataclass
class _Rounds:
    """A prompt, the sizes of its rounds still to come, and draws of this round that are not back."""

    prompt: Prompt
    sizes: collections.deque[int]
    prefetch: bool
    drawn: int = 0
    missing: int = 0


class RandomStream:
    """types.RequestQueue over random prompts with random rounds, whose verdicts take a random time.

    A prompt's next round is asked for, or the prompt closed, when the verdicts of its round are there. As in
    collection/collect.py `take` waits for verdicts where nothing taken is outstanding, and `wait` for the next ones.
    """

    def __init__(self, rng: np.random.Generator, options: EngineOptions, vocabulary: int, prefix: str = "p"):
        self._rng, self._patience = rng, int(rng.choice([0, 0, 2, 6]))
        lengths = rng.integers(1, options.max_prompt_tokens + 1, int(rng.integers(0, 10)))
        # The prompts of half of the streams have a common beginning, of different lengths.
        beginning = rng.integers(0, vocabulary, options.max_prompt_tokens)
        like = rng.integers(0, 2) * rng.integers(0, 2 * options.max_prompt_tokens, len(lengths))
        prefetch = rng.random(len(lengths)) < rng.choice([0.0, 0.0, 0.4])
        self.limits = {}
        self._longest = options.max_response_tokens
        self.rounds = [
            _Rounds(
                Prompt(
                    f"{prefix}{index}",
                    "",
                    "",
                    np.concatenate(
                        [
                            beginning[: min(like[index], length)],
                            rng.integers(0, vocabulary, max(0, length - like[index])),
                        ]
                    ).astype(np.int32),
                ),
                collections.deque(rng.integers(1, 6, int(rng.integers(1, 4))).tolist()),
                bool(is_prefetch),
            )
            for index, (length, is_prefetch) in enumerate(zip(lengths.tolist(), prefetch, strict=True))
        ]
        self._of = {each.prompt.id: each for each in self.rounds}
        self._waiting: collections.deque[Request] = collections.deque()
        self._waiting_prefetch: collections.deque[Request] = collections.deque()
        self._verifying: collections.deque[tuple[int, _Rounds]] = collections.deque()  # heard when the clock is there
        self._clock, self._closed = 0, []
        self._num_open = sum(not each.prefetch for each in self.rounds)
        self.taken: dict[tuple[str, int], bool] = {}  # is it back?
        self.responses: dict[tuple[str, int], Response] = {}
        for each in self.rounds:
            self._go_on(each)

    # ---- what the sampler sees -----------------------------------------------------------------------------------

    def take(self, limit: int, *, wait: bool = True) -> list[Request]:
        assert limit > 0
        self._tick()
        while wait and not self._waiting and not self.outstanding and self.wait():
            pass
        return self._take(self._waiting, limit)

    def take_prefetch(self, limit: int) -> list[Request]:
        assert limit > 0
        return self._take(self._waiting_prefetch, limit) if self._num_open else []

    def take_speculative(self, limit: int, prompt_ids: Collection[str]) -> list[Request]:
        assert limit > 0
        return []

    def closed(self) -> list[str]:
        self._tick()
        closed, self._closed = self._closed, []
        return closed

    def awaits_verdicts(self) -> bool:
        return bool(self._verifying)

    def wait(self) -> bool:
        if not self._verifying:
            return False
        self._go_on(self._verifying.popleft()[1])
        return True

    # ---- the account ---------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        return sum(not back for back in self.taken.values())

    def limit(self, request: Request) -> int:
        """Response tokens that this request may have: a number of its own."""
        return 1 + (7 * request.draw + len(request.prompt.tokens)) % self._longest

    def _tick(self) -> None:
        self._clock += 1
        while self._verifying and self._verifying[0][0] <= self._clock:
            self.wait()

    def _take(self, waiting: collections.deque[Request], limit: int) -> list[Request]:
        taken = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        self.taken |= {(request.prompt.id, request.draw): False for request in taken}
        return taken

    def _go_on(self, each: _Rounds) -> None:
        if not each.sizes:
            self._closed.append(each.prompt.id)
            self._num_open -= not each.prefetch
            return
        each.missing = each.sizes.popleft()
        waiting = self._waiting_prefetch if each.prefetch else self._waiting
        waiting.extend(Request(each.prompt, each.drawn + draw, each.prefetch) for draw in range(each.missing))
        each.drawn += each.missing

    def receive(self, responses: list[Response]) -> None:
        """Stores responses, as the collection loop does with a yield."""
        for response in responses:
            place = response.prompt_id, response.draw
            assert place in self.taken, f"{place} came unasked"
            assert not self.taken[place], f"{place} came twice"
            self.taken[place], self.responses[place] = True, response
            each = self._of[response.prompt_id]
            each.missing -= 1
            if each.missing == 0:
                self._verifying.append((self._clock + int(self._rng.integers(0, self._patience + 1)), each))

    def finish(self) -> None:
        """Everything taken is back, and of this iteration's prompts everything was taken."""
        lost = [place for place, back in self.taken.items() if not back]
        assert not lost, f"{lost} never came back"
        assert not self._waiting, f"{len(self._waiting)} requests were never taken"
        while self.wait():
            pass
        assert not self._num_open and not self._waiting, "a prompt was left in the middle"
