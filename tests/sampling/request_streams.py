"""Random streams of requests, and an account of them: what was asked, what came back, what may be asked next."""

import collections
import dataclasses
import hashlib
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
        tail=(2, 4, 16),
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

    def __init__(
        self, rng: np.random.Generator, options: EngineOptions, vocabulary: int, prefix: str = "p", longest: int = 0
    ):
        longest = longest or options.max_prompt_tokens
        self._rng, self._patience = rng, int(rng.choice([0, 0, 2, 6]))
        lengths = rng.integers(1, longest + 1, int(rng.integers(0, 10)))
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


@dataclasses.dataclass
class _Trajectory:
    """A draw that goes on after its first response."""

    request: Request  # of the first turn
    turns: int
    turn: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)  # after the prompt
    segments: list[int] = dataclasses.field(default_factory=list)


class TurnStream(RandomStream):
    """A stream whose draws are trajectories of one to four turns, as long as the engine's prompts have room for them.

    How many turns, and what the environment says, follows from the address. Its answers take a random time. `turns`
    has each turn's request with its response.
    """

    def __init__(
        self, rng: np.random.Generator, options: EngineOptions, vocabulary: int, prefix: str = "p", most_turns: int = 4
    ):
        self._in_engine: dict[tuple[str, int], _Trajectory] = {}
        self._next_turns: collections.deque[Request] = collections.deque()
        self._environments: collections.deque[tuple[int, _Trajectory]] = collections.deque()
        self._of_turn: dict[str, _Trajectory] = {}
        self._most_turns = most_turns
        self.turns: list[tuple[Request, Response]] = []
        self._requests: dict[tuple[str, int], Request] = {}
        self._room, self._vocabulary = options.max_prompt_tokens, vocabulary
        super().__init__(rng, options, vocabulary, prefix, longest=-(-self._room // 3))

    def take(self, limit: int, *, wait: bool = True) -> list[Request]:
        while self._environments and self._environments[0][0] <= self._clock:
            self._answer()
        requests = [self._next_turns.popleft() for _ in range(min(limit, len(self._next_turns)))]
        if limit > len(requests):
            requests += [self._first(request) for request in super().take(limit - len(requests), wait=wait)]
        if wait and not requests and not self._in_engine and self._environments:
            self._answer()
            return self.take(limit)
        for request in requests:
            self._in_engine[request.prompt.id, request.draw] = self._of_turn[f"{request.prompt.id}/{request.draw}"]
            self._requests[request.prompt.id, request.draw] = request
        return requests

    def take_prefetch(self, limit: int) -> list[Request]:
        requests = [self._first(request) for request in super().take_prefetch(limit)]
        for request in requests:
            self._in_engine[request.prompt.id, request.draw] = self._of_turn[f"{request.prompt.id}/{request.draw}"]
            self._requests[request.prompt.id, request.draw] = request
        return requests

    def wait(self) -> bool:
        if super().wait():
            return True
        if self._environments:
            self._answer()
            return True
        return False

    def awaits_verdicts(self) -> bool:
        return super().awaits_verdicts() or bool(self._environments)

    def _number(self, *words: object) -> int:
        return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=4).digest())

    def _first(self, request: Request) -> Request:
        number = self._number(request.prompt.id, request.draw)
        trajectory = _Trajectory(request, 1 + number % self._most_turns)
        self._of_turn[f"{request.prompt.id}/{request.draw}"] = trajectory
        goes_on = trajectory.turns > 1 or number % 5 == 0  # some that end with their first turn might have gone on
        return dataclasses.replace(request, continues=f"{request.prompt.id}#{request.draw}.1" if goes_on else "")

    def _answer(self) -> None:
        """The environment's answer to the trajectory that has waited longest: one to five tokens, and a request."""
        trajectory = self._environments.popleft()[1]
        prompt, draw = trajectory.request.prompt, trajectory.request.draw
        prompt_id = f"{prompt.id}#{draw}.{trajectory.turn}"
        number = self._number(prompt_id)
        answer = [(number + 11 * place) % self._vocabulary for place in range(1 + number % 5)]
        trajectory.tokens += answer
        trajectory.segments.append(len(answer))
        tokens = np.concatenate([prompt.tokens, trajectory.tokens]).astype(np.int32)
        if len(tokens) > self._room:
            del trajectory.tokens[-len(answer) :], trajectory.segments[-1]
            return self._finish_trajectory(trajectory)
        request = Request(
            Prompt(prompt_id, "", "", tokens), draw, trajectory.request.prefetch,
            f"{prompt.id}#{draw}.{trajectory.turn + 1}" if trajectory.turn + 1 < trajectory.turns else "",
        )  # fmt: skip
        self._of_turn[f"{prompt_id}/{draw}"] = trajectory
        self._next_turns.append(request)

    def _finish_trajectory(self, trajectory: _Trajectory) -> None:
        request = trajectory.request
        self._closed += [
            f"{request.prompt.id}#{request.draw}.{turn}"
            for turn in range(1, trajectory.turn + 1 + self._rng.integers(2))
        ]
        tokens = np.array(trajectory.tokens, np.int32)
        whole = Response(
            request.prompt.id, request.draw, tokens, np.zeros(len(tokens), np.float32), False,
            segments=tuple(trajectory.segments),
        )  # fmt: skip
        super().receive([whole])

    def receive(self, responses: list[Response]) -> None:
        for response in responses:
            place = response.prompt_id, response.draw
            assert place in self._in_engine, f"{place} came unasked or twice"
            trajectory = self._in_engine.pop(place)
            self.turns.append((self._requests[place], response))
            trajectory.tokens += response.tokens.tolist()
            trajectory.segments.append(len(response.tokens))
            trajectory.turn += 1
            if trajectory.turn == trajectory.turns:
                self._finish_trajectory(trajectory)
            else:
                self._environments.append((self._clock + int(self._rng.integers(0, self._patience + 1)), trajectory))

    def finish(self) -> None:
        assert not self._in_engine and not self._next_turns and not self._environments
        super().finish()
