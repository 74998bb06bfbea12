"""Requests of one collection: which draw the sampler gets next, and which prompts need no more draws."""

import collections
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import kept_draws
from reinforce_ada_jax.collection.continuation import following, joined
from reinforce_ada_jax.collection.prompt_rollouts import Phase, PromptRollouts
from reinforce_ada_jax.collection.speculation import speculative_requests
from reinforce_ada_jax.collection.verification import VerificationQueue
from reinforce_ada_jax.types import Request, Response


class CollectionQueue:
    """Implements types.CuttableQueue: the strategy turns verdicts into further requests, or closes prompts.

    Requests of prompts with the fewest finished rounds go first. The rounds of a prompt follow one another, so a prompt
    that has not started has the longest chain of rounds left. Starting all prompts first keeps the slots full almost
    to the end; finishing the started ones first leaves the last prompts to go through their rounds alone
    (docs/architecture.md has the numbers).
    """

    def __init__(
        self,
        prompts: Sequence[PromptRollouts],
        replacements: Sequence[PromptRollouts],
        strategy: strategies.Strategy,
        verification: VerificationQueue,
        *,
        barrier: bool,
        speculative: bool,
        seed: int,
        iteration: int,
    ):
        """Arguments as for `collect`; the prompts have distinct ids, and their index is their position.

        A prompt, and a replacement, may have draws already, from which it continues.
        """
        self.prompts = list(prompts)  # in order, and after them the replacements that were opened
        self._by_id = {rollouts.prompt.id: rollouts for rollouts in prompts}
        self._replacements = collections.deque(replacements)
        self._strategy, self._verification = strategy, verification
        # With a barrier no round starts early, and planned draws are all requested at once.
        self._speculative = speculative and not barrier and strategy.plan is None
        self._barrier, self._seed, self._iteration = barrier, seed, iteration
        # Heaps of this collection's requests, and of later ones'. Responses that have begun go first in their round.
        self._waiting: list[tuple[int, int, bool, int, Request]] = []
        self._waiting_prefetch: list[tuple[int, int, bool, int, Request]] = []
        self._order = itertools.count()
        self._in_flight: dict[tuple[str, int], None] = {}  # addresses, in the order in which they were taken
        self._following: dict[str, Request] = {}  # whose responses go on, by the id of the sampler's prompt
        self._newly_closed: list[str] = []
        self.num_responses = 0  # received so far
        self.cuts_at_end = False
        self.running: Callable[[], Sequence[Response]] = tuple
        self._begin(prompts)

    def _begin(self, prompts: Sequence[PromptRollouts]) -> None:
        """Continues each prompt from its draws, if it has any."""
        for rollouts in prompts:
            if rollouts.phase is Phase.SAMPLING:
                self._put(rollouts)
            elif rollouts.phase is Phase.WAITING:
                self._advance([rollouts])
        complete = [rollouts for rollouts in prompts if rollouts.phase is Phase.VERIFYING]
        self._advance(self._verification.submit(complete))

    @property
    def num_closed(self) -> int:
        return sum(rollouts.phase is Phase.CLOSED and not rollouts.prefetch for rollouts in self.prompts)

    def take(self, limit: int, *, wait: bool = True) -> list[Request]:
        self._advance(self._verification.read())
        while not (self._waiting or self._in_flight or (self._verification.pending and not wait)):
            if not (self.wait() or self._release()):
                break
        return self._take(self._waiting, limit)

    def take_prefetch(self, limit: int) -> list[Request]:
        return [] if self.is_complete() and not self.cuts_at_end else self._take(self._waiting_prefetch, limit)

    def take_speculative(self, limit: int, prompt_ids: Collection[str]) -> list[Request]:
        if not self._speculative:
            return []
        # A response that goes on has a prompt of its own at the sampler.
        ids = dict.fromkeys(self._following[each].prompt.id if each in self._following else each for each in prompt_ids)
        prompts = (self._by_id[prompt_id] for prompt_id in ids if prompt_id in self._by_id)
        return self._started(speculative_requests(prompts, limit, self._strategy.max_draws))

    def _take(self, waiting: list[tuple[int, int, bool, int, Request]], limit: int) -> list[Request]:
        return self._started([heapq.heappop(waiting)[-1] for _ in range(min(limit, len(waiting)))])

    def _started(self, requests: list[Request]) -> list[Request]:
        self._in_flight |= {(request.prompt.id, request.draw): None for request in requests}
        taken = [following(request) for request in requests]
        self._following |= {new.prompt.id: old for old, new in zip(requests, taken, strict=True) if old.begun}
        return taken

    def is_complete(self) -> bool:
        return self.num_closed == sum(not rollouts.prefetch for rollouts in self.prompts)

    def give_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            original = self._following.pop(request.prompt.id, request)
            del self._in_flight[original.prompt.id, original.draw]

    def add_begun(self, cut: Iterable[Response]) -> None:
        for response in map(self._whole, cut):
            self._by_id[response.prompt_id].add(response)

    def begun(self) -> dict[str, list[Response]]:
        """Returns the tokens so far of what runs, by prompt id; nothing changes, so the sampler goes on."""
        found: dict[str, list[Response]] = {}
        for response in self.running():
            whole = self._with_begun(response)
            found.setdefault(whole.prompt_id, []).append(whole)
        return found

    def wait(self) -> bool:
        finished = self._verification.read_next()
        self._advance(finished)
        return bool(finished)

    def awaits_verdicts(self) -> bool:
        return self._verification.pending

    def closed(self) -> list[str]:
        closed, self._newly_closed = self._newly_closed, []
        return closed

    def receive(self, responses: Iterable[Response]) -> None:
        """Reads due verdicts, then submits the rounds that `responses` complete; RuntimeError for unasked ones."""
        self._advance(self._verification.read(at_yield=True))
        complete = []
        for received in responses:
            response = self._whole(received)
            rollouts = self._by_id.get(response.prompt_id)
            address = response.prompt_id, response.draw
            if rollouts is None or address not in self._in_flight:
                how = "twice" if rollouts and any(rollouts.responses[response.draw : response.draw + 1]) else "unasked"
                raise RuntimeError(f"The sampler returned draw {response.draw} of prompt {response.prompt_id!r} {how}.")
            del self._in_flight[address]
            self.num_responses += 1
            was_sampling = rollouts.phase is Phase.SAMPLING
            rollouts.add(response)
            if was_sampling and rollouts.phase is Phase.VERIFYING:
                complete.append(rollouts)
            elif rollouts.is_finished:
                self._newly_closed.append(rollouts.prompt.id)
        self._advance(self._verification.submit(sorted(complete, key=lambda rollouts: rollouts.index)))

    def _whole(self, response: Response) -> Response:
        """Returns the whole of a response that has ended; if it went on from earlier tokens, closes their prompt."""
        whole = self._with_begun(response)
        if self._following.pop(response.prompt_id, None) is not None:
            self._newly_closed.append(response.prompt_id)
        return whole

    def _with_begun(self, response: Response) -> Response:
        """Returns a response with the tokens that it had when it was requested, if it had any."""
        request = self._following.get(response.prompt_id)
        return response if request is None or request.begun is None else joined(request.begun, response)

    def finish(self) -> None:
        """Reads the remaining verdicts; RuntimeError if a requested response did not come."""
        while self.wait():
            pass
        waiting = len(self._waiting) + sum(len(rollouts.requests()) for rollouts in self._held())
        if self._in_flight or waiting:
            lost = [f" (first: draw {draw} of prompt {prompt_id!r})" for prompt_id, draw in self._in_flight]
            raise RuntimeError(
                f"The sampler ended with {len(lost)} requests taken and not returned{lost[0] if lost else ''} and "
                f"{waiting} not taken."
            )

    def _advance(self, prompts: Iterable[PromptRollouts]) -> None:
        """Starts the next round of each prompt, or closes it, as the strategy decides."""
        advanced = list(prompts)
        while advanced:
            for rollouts in advanced:
                self._advance_one(rollouts)
            # Rounds that speculative draws have filled already.
            advanced = self._verification.submit([each for each in advanced if each.phase is Phase.VERIFYING])

    def _advance_one(self, rollouts: PromptRollouts) -> None:
        iteration = self._iteration + rollouts.prefetch
        size = strategies.next_round(self._strategy, rollouts.progress(), self._seed, iteration)
        if size == 0:
            self._close(rollouts)
            return
        rollouts.start_round(size)
        if self._barrier and rollouts.rounds > 0:
            rollouts.phase = Phase.HELD
        else:
            self._put(rollouts)

    def _put(self, rollouts: PromptRollouts) -> None:
        waiting = self._waiting_prefetch if rollouts.prefetch else self._waiting
        for request in rollouts.requests():
            if (request.prompt.id, request.draw) not in self._in_flight:
                key = rollouts.prefetch, rollouts.rounds, request.begun is None, next(self._order)
                heapq.heappush(waiting, (*key, request))

    def _held(self) -> list[PromptRollouts]:
        return [rollouts for rollouts in self.prompts if rollouts.phase is Phase.HELD]

    def _release(self) -> bool:
        """Starts the rounds behind the barrier, in the order of the prompts; False where there are none."""
        held = self._held()
        for rollouts in held:
            rollouts.phase = Phase.SAMPLING
            self._put(rollouts)
        return bool(held)

    def _close(self, rollouts: PromptRollouts) -> None:
        """Closes a prompt, and opens the next replacement if none of its responses is kept.

        So the opened replacements are the shortest prefix of their list that is enough, in any order of completion.
        """
        rollouts.phase = Phase.CLOSED
        if rollouts.is_finished:
            self._newly_closed.append(rollouts.prompt.id)
        if rollouts.prefetch or not self._replacements:
            return
        if not kept_draws(rollouts.pool(self._strategy), self._strategy).size:
            opened = self._replacements.popleft()
            self.prompts.append(opened)
            self._by_id[opened.prompt.id] = opened
            self._begin([opened])
