"""Trajectories: several turns of the model with an environment's answers between them, drawn as one response.

`Trajectories` is between the queue of a collection and its sampler, and is itself a types.RequestQueue. The sampler
draws turns. A finished turn goes to the environment, which works while the sampler draws other turns. Its answer
becomes a further request, whose prompt is the dialogue so far; or it ends the trajectory, and the collection receives
one response with the verdict.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from reinforce_ada_jax.collection.request_queue import CollectionQueue
from reinforce_ada_jax.collection.verification import WAIT_S
from reinforce_ada_jax.types import MAX_TURNS, TRUNCATED, Prompt, Request, Response, Verdict

Tokens = Int32[np.ndarray, " T"]


@runtime_checkable
class Environment(Protocol):
    """Environment of many trajectories; the types of its trajectories and answers are its own."""

    def begin(self, prompt: Prompt, draw: int) -> Any:
        """Returns a new trajectory."""
        ...

    def submit(self, trajectory: Any, tokens: Tokens) -> Future[Any]:
        """Gives a finished turn to the environment, which works on it meanwhile."""
        ...

    def read(self, trajectory: Any, answer: Any) -> Tokens | Verdict:
        """Returns the tokens with which the answer continues the trajectory, or the verdict that ends it."""
        ...

    def end(self, trajectory: Any) -> None:
        """Forgets a trajectory that gets no further turn."""
        ...


@dataclasses.dataclass(eq=False)
class _Trajectory:
    request: Request  # of the collection
    environment: Any  # the environment's own state
    turns: list[Response] = dataclasses.field(default_factory=list)  # the model's turns so far
    tokens: list[Tokens] = dataclasses.field(default_factory=list)  # of all segments so far, the model's and others

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def turn_id(self, turn: int) -> str:
        """Returns the id of a turn's prompt: part of the address of its tokens."""
        prompt = self.request.prompt
        return f"{prompt.id}#{self.request.draw}.{turn}" if turn else prompt.id

    def next_request(self, max_turns: int) -> Request:
        """Returns the request for the next turn."""
        prompt, turn = self.request.prompt, len(self.turns)
        tokens = np.concatenate([prompt.tokens, *self.tokens])
        following = dataclasses.replace(prompt, id=self.turn_id(turn), tokens=tokens)
        continues = self.turn_id(turn + 1) if turn + 1 < max_turns else ""
        return Request(following, self.request.draw, self.request.prefetch, continues)

    def response(self, *, truncated: bool) -> Response:
        """Returns all segments as one response, which ends with the model's last one."""
        segments = self.tokens[: 2 * len(self.turns) - 1]
        logprobs = [np.zeros(len(segment), np.float32) for segment in segments]
        logprobs[::2] = [turn.logprobs for turn in self.turns]
        return Response(
            self.request.prompt.id, self.request.draw, np.concatenate(segments), np.concatenate(logprobs), truncated,
            self.turns[-1].policy_version, tuple(map(len, segments)) if len(segments) > 1 else (),
            experts=self.turns[-1].experts,  # its prompt has all tokens before it
        )  # fmt: skip


class Trajectories:
    """types.RequestQueue of turns, over the queue of a collection (`collect` attaches it).

    With `deterministic` the order of events follows from the sampler's yields alone: answers are read at the next
    yield, in the order of the turns, or one by one when the sampler has nothing else to do. Turns of trajectories that
    have begun precede new requests: the sampler may hold their pages.
    """

    def __init__(
        self, environment: Environment, *, max_turns: int, max_tokens: int, max_begun: int, deterministic: bool
    ):
        """Makes the queue of a collection's turns.

        A trajectory with more than `max_turns` turns of the model counts as failed (`Verdict.failed`). It has at most
        `max_tokens` tokens after the prompt, those of the environment included. At most `max_begun` trajectories run at
        a time, because the sampler has no room for the turns of more.
        """
        self._environment, self._max_turns, self._max_tokens = environment, max_turns, max_tokens
        self._max_begun, self._deterministic = max_begun, deterministic
        self._verdicts: dict[tuple[str, int], Verdict] = {}

    def attach(self, queue: CollectionQueue, waiting: Callable[[], None] = lambda: None) -> None:
        """Begins a collection; `waiting` is called again and again while answers are waited for, and may raise."""
        self._queue, self._waiting = queue, waiting
        self._decoding: dict[tuple[str, int], _Trajectory] = {}  # turns at the sampler, by their address
        self._pending: dict[Future[Any], _Trajectory] = {}  # turns at the environment, in order
        self._ready: collections.deque[tuple[Request, _Trajectory]] = collections.deque()  # next turns
        self._over: list[str] = []  # prompts of turns whose trajectory has ended
        self._verdicts.clear()

    def verdicts(self, pairs: Sequence[tuple[Prompt, Response]]) -> list[Verdict]:
        """Returns the environment's verdicts on responses of this collection."""
        return [self._verdicts.pop((prompt.id, response.draw)) for prompt, response in pairs]

    def tokens_left(self, request: Request) -> int:
        """Returns the limit of tokens of a turn that the sampler draws."""
        return self._max_tokens - self._decoding[request.prompt.id, request.draw].num_tokens

    # ---- what the sampler calls --------------------------------------------------------------------------------------

    def take(self, limit: int, *, wait: bool = True) -> list[Request]:
        while True:
            if not self._deterministic:
                self._hand_over(self._read([future for future in self._pending if future.done()]))
            taken = self._take_ready(limit)
            if room := min(limit - len(taken), self._room):
                taken += self._begin(self._queue.take(room, wait=wait))
            if taken or self._decoding or not (wait and self._pending):
                return taken
            self._wait_for_answer()

    def take_prefetch(self, limit: int) -> list[Request]:
        return self._begin(self._queue.take_prefetch(min(limit, self._room)))

    def take_speculative(self, limit: int, prompt_ids: Collection[str]) -> list[Request]:
        return self._begin(self._queue.take_speculative(min(limit, self._room), prompt_ids))

    def wait(self) -> bool:
        if not self._pending:
            return self._queue.wait()
        self._wait_for_answer()
        return True

    def awaits_verdicts(self) -> bool:
        return bool(self._pending) or self._queue.awaits_verdicts()

    def closed(self) -> list[str]:
        over, self._over = self._over, []
        return over + self._queue.closed()

    # ---- what the collection calls -----------------------------------------------------------------------------------

    def receive(self, turns: Iterable[Response]) -> None:
        """Reads due answers, then gives finished turns to the environment; RuntimeError for unasked ones."""
        finished = self._read(list(self._pending) if self._deterministic else [])
        for turn in turns:
            trajectory = self._decoding.pop((turn.prompt_id, turn.draw), None)
            if trajectory is None:
                raise RuntimeError(f"The sampler returned draw {turn.draw} of prompt {turn.prompt_id!r} unasked.")
            trajectory.turns.append(turn)
            trajectory.tokens.append(turn.tokens)
            if turn.truncated:
                finished.append(self._end(trajectory, Verdict(False, 0.0, TRUNCATED), truncated=True))
            else:
                self._pending[self._environment.submit(trajectory.environment, turn.tokens)] = trajectory
        self._queue.receive(finished)

    @property
    def _room(self) -> int:
        """Number of trajectories that may begin."""
        return max(0, self._max_begun - len(self._decoding) - len(self._pending) - len(self._ready))

    # ---- turns -------------------------------------------------------------------------------------------------------

    def _begin(self, requests: Sequence[Request]) -> list[Request]:
        """Returns the requests of first turns."""
        begun = []
        for request in requests:
            trajectory = _Trajectory(request, self._environment.begin(request.prompt, request.draw))
            self._decoding[request.prompt.id, request.draw] = trajectory
            begun.append(dataclasses.replace(request, continues=trajectory.turn_id(1) if self._max_turns > 1 else ""))
        return begun

    def _take_ready(self, limit: int) -> list[Request]:
        """Returns up to `limit` requests of next turns."""
        taken = [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
        self._decoding |= {(request.prompt.id, request.draw): trajectory for request, trajectory in taken}
        return [request for request, _ in taken]

    def _wait_for_answer(self) -> None:
        """Waits for the oldest turn at the environment; unless `deterministic`, for any turn."""
        due = list(self._pending)[:1]
        if not self._deterministic:
            while not futures.wait(self._pending, WAIT_S, return_when=futures.FIRST_COMPLETED).done:
                self._waiting()
            due = [future for future in self._pending if future.done()]
        self._hand_over(self._read(due))

    def _hand_over(self, finished: list[Response]) -> None:
        if finished:
            self._queue.receive(finished)

    def _read(self, due: Sequence[Future[Any]]) -> list[Response]:
        """Reads answers, waiting for each; returns the responses of the trajectories that end."""
        finished = []
        for future in due:
            while not futures.wait([future], WAIT_S).done:
                self._waiting()
            trajectory = self._pending.pop(future)
            found = self._environment.read(trajectory.environment, future.result())
            if isinstance(found, Verdict):
                finished.append(self._end(trajectory, found))
            elif len(trajectory.turns) == self._max_turns:
                finished.append(self._end(trajectory, Verdict(False, 0.0, MAX_TURNS)))
            elif trajectory.num_tokens + len(found) >= self._max_tokens:
                finished.append(self._end(trajectory, Verdict(False, 0.0, TRUNCATED), truncated=True))
            else:
                trajectory.tokens.append(found)
                self._ready.append((trajectory.next_request(self._max_turns), trajectory))
        return finished

    def _end(self, trajectory: _Trajectory, verdict: Verdict, *, truncated: bool = False) -> Response:
        self._environment.end(trajectory.environment)
        # The turn that will not follow is closed too, so that the sampler does not wait for it.
        self._over += [trajectory.turn_id(turn) for turn in range(1, len(trajectory.turns) + 1)]
        response = trajectory.response(truncated=truncated)
        self._verdicts[response.prompt_id, response.draw] = verdict
        return response
