"""The collection loop: rounds of responses for every prompt until its strategy says stop.

The sampler and the verifier come in as functions; what is kept of a pool is in advantages.py. Two rules are kept here,
both because short responses finish first and would otherwise be over-represented: a prompt's stopping rule is evaluated
on whole rounds only, and pools are in draw order. There is no barrier between prompts, unless one is asked for.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from reinforce_ada_jax.collection.ahead import Ahead
from reinforce_ada_jax.collection.strategies import Record, Strategy
from reinforce_ada_jax.types import Begun, Pool, Prompt, Request, RequestQueue, Response, Verdict

SampleFn = Callable[[RequestQueue], Iterator[list[Response]]]
VerifyFn = Callable[[list[tuple[Prompt, Response]]], list[Verdict] | Future[list[Verdict]]]


@dataclasses.dataclass(eq=False)
class _Draws:
    """One prompt's draws so far.

    Attributes:
      index: place among the prompts.
      ahead: the prompt belongs to the next collection.
      responses: one for each draw asked for, by draw; None until it is back.
      verdicts: of the finished rounds, so it is shorter than `responses` while a round is under way.
      missing: responses of the current round that are not back.
      rounds: finished rounds.
    """

    prompt: Prompt
    index: int
    ahead: bool
    responses: list[Response | None] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    missing: int = 0
    rounds: int = 0

    def go_on_from(self, begun: Begun) -> None:
        """Takes over what was drawn ahead."""
        self.responses, self.verdicts, self.rounds = list(begun.responses), list(begun.verdicts), begun.rounds
        self.missing = self.responses.count(None)

    def record(self) -> Record:
        num_correct = sum(verdict.correct for verdict in self.verdicts)
        return Record(self.prompt, rounds=self.rounds, drawn=len(self.verdicts), correct=num_correct)

    def begin_round(self, size: int) -> None:
        self.responses += [None] * size
        self.missing = size

    def requests(self) -> list[Request]:
        """What is still to be drawn of the current round."""
        missing = (draw for draw, response in enumerate(self.responses) if response is None)
        return [Request(self.prompt, draw, self.ahead) for draw in missing]

    def finish_round(self, verdicts: Iterator[Verdict]) -> None:
        """Takes from `verdicts` those of this round, in draw order."""
        self.verdicts += itertools.islice(verdicts, len(self.responses) - len(self.verdicts))
        self.rounds += 1


class _Waiting:
    """Requests that nobody has taken, by the number of rounds their prompts have finished: fewest first.

    A prompt's rounds follow one another, so the longest chain still to come is that of a prompt not begun. Beginning
    all of them first and going on from round to round keeps the slots full almost to the end; finishing the prompts
    begun before beginning others leaves the last ones to go through their rounds alone (docs/architecture.md).
    """

    def __init__(self):
        self._by_rounds: dict[int, collections.deque[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_rounds.values()))

    def put(self, rounds: int, requests: list[Request]) -> None:
        self._by_rounds.setdefault(rounds, collections.deque()).extend(requests)

    def pop(self) -> Request:
        rounds = min(self._by_rounds)
        requests = self._by_rounds[rounds]
        request = requests.popleft()
        if not requests:
            del self._by_rounds[rounds]
        return request


class _Collection:
    """types.RequestQueue, and the account of what was taken, what came back, and what is being verified."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        ahead: Ahead,
        verify_fn: VerifyFn,
        strategy: Strategy,
        *,
        barrier: bool,
        deterministic: bool,
    ):
        self._verify_fn, self._strategy = verify_fn, strategy
        self._barrier, self._deterministic = barrier, deterministic
        self._waiting, self._waiting_ahead = _Waiting(), _Waiting()
        self._held: list[_Draws] = []  # next rounds behind the barrier
        self._returned: dict[tuple[str, int], bool] = {}  # every request taken: is its response back?
        self._outstanding = 0
        self._verifying: collections.deque[tuple[list[_Draws], Future[list[Verdict]]]] = collections.deque()
        self._newly_closed: list[str] = []
        self._num_open = len(prompts)
        self.num_responses = 0
        everyone = [*prompts, *ahead.prompts]
        self.draws = [_Draws(prompt, index, index >= len(prompts)) for index, prompt in enumerate(everyone)]
        self._draws_of = {draws.prompt.id: draws for draws in self.draws}
        if len(self._draws_of) < len(everyone):
            counts = collections.Counter(prompt.id for prompt in everyone)
            repeated = [name for name, count in counts.items() if count > 1]
            raise ValueError(
                f"{len(repeated)} prompt ids are used more than once, {repeated[0]!r} first: ids must differ."
            )

    def begin(self, begun: Mapping[str, Begun]) -> None:
        """Every prompt's first round, or what is left of the one that was begun ahead."""
        complete = []
        for draws in self.draws:
            if draws.prompt.id in begun:
                draws.go_on_from(begun[draws.prompt.id])
            if draws.missing:
                self._put(draws)
            elif len(draws.verdicts) < len(draws.responses):
                complete.append(draws)
            else:
                self._go_on(draws)
        self._verify(complete)

    # ---- what the sampler sees -----------------------------------------------------------------------------------

    def take(self, limit: int) -> list[Request]:
        self._hear(wait=False)
        while not self._waiting and not self._outstanding and (self._verifying or self._held):
            if self._verifying:
                self._finish_rounds(*self._verifying.popleft())
            else:
                held, self._held = sorted(self._held, key=lambda draws: draws.index), []
                for draws in held:
                    self._put(draws)
        return self._take(self._waiting, limit)

    def take_ahead(self, limit: int) -> list[Request]:
        return self._take(self._waiting_ahead, limit) if self._num_open else []

    def _take(self, waiting: _Waiting, limit: int) -> list[Request]:
        taken = [waiting.pop() for _ in range(min(limit, len(waiting)))]
        self._returned |= {(request.prompt.id, request.draw): False for request in taken}
        self._outstanding += len(taken)
        return taken

    def closed(self) -> list[str]:
        closed, self._newly_closed = self._newly_closed, []
        return closed

    # ---- what the loop does --------------------------------------------------------------------------------------

    @property
    def num_closed(self) -> int:
        return sum(not draws.ahead for draws in self.draws) - self._num_open

    def receive(self, responses: list[Response]) -> None:
        """Takes finished responses; sends the rounds that they complete to the verifier, in the order of prompts."""
        self._hear(wait=self._deterministic)
        complete = []
        for response in responses:
            self._settle(response)
            draws = self._draws_of[response.prompt_id]
            draws.responses[response.draw] = response
            draws.missing -= 1
            if draws.missing == 0:
                complete.append(draws)
        self.num_responses += len(responses)
        self._verify(sorted(complete, key=lambda draws: draws.index))

    def _settle(self, response: Response) -> None:
        address = response.prompt_id, response.draw
        if self._returned.get(address, True):
            how = "twice" if address in self._returned else "unasked"
            raise RuntimeError(f"The sampler returned draw {response.draw} of prompt {response.prompt_id!r} {how}.")
        self._returned[address] = True
        self._outstanding -= 1

    def _verify(self, complete: list[_Draws]) -> None:
        """Verifies rounds just completed, all in one call; its verdicts are heard now, or when they are there."""
        if not complete:
            return
        verdicts = self._verify_fn(
            [(draws.prompt, response) for draws in complete for response in draws.responses[len(draws.verdicts) :]]
        )
        if isinstance(verdicts, Future):
            self._verifying.append((complete, verdicts))
        else:
            self._hand_out(complete, verdicts)

    def _hear(self, *, wait: bool) -> None:
        """Hears the verdicts of earlier calls. Where the order of events is fixed, just the next `receive` does."""
        while self._verifying and (wait or (not self._deterministic and self._verifying[0][1].done())):
            self._finish_rounds(*self._verifying.popleft())

    def _finish_rounds(self, complete: list[_Draws], verdicts: Future[list[Verdict]]) -> None:
        self._hand_out(complete, verdicts.result())

    def _hand_out(self, complete: list[_Draws], verdicts: list[Verdict]) -> None:
        expected = sum(len(draws.responses) - len(draws.verdicts) for draws in complete)
        if len(verdicts) != expected:
            raise RuntimeError(f"The verifier returned {len(verdicts)} verdicts for {expected} responses.")
        remaining = iter(verdicts)
        for draws in complete:
            draws.finish_round(remaining)
            self._go_on(draws)

    def _go_on(self, draws: _Draws) -> None:
        """Begins the prompt's next round, or closes it."""
        record, strategy = draws.record(), self._strategy
        size = strategy.next_draws(record)
        if size < 0 or (size == 0 and record.rounds == 0) or record.drawn + size > strategy.max_draws:
            raise ValueError(
                f"The strategy asks for {size} more responses of prompt {draws.prompt.id!r} after {record.rounds} "
                f"rounds and {record.drawn} responses; its first round must have at least 1, and all at most "
                f"max_draws = {strategy.max_draws}."
            )
        if size == 0:
            self._newly_closed.append(draws.prompt.id)
            self._num_open -= not draws.ahead
            return
        draws.begin_round(size)
        if self._barrier and record.rounds > 0:
            self._held.append(draws)
        else:
            self._put(draws)

    def _put(self, draws: _Draws) -> None:
        waiting = self._waiting_ahead if draws.ahead else self._waiting
        waiting.put(draws.rounds, draws.requests())

    def finish(self) -> None:
        """Hears what is still being verified. Raises RuntimeError when anything asked for did not come."""
        while self._verifying:
            self._finish_rounds(*self._verifying.popleft())
        lost = [address for address, returned in self._returned.items() if not returned]
        waiting = len(self._waiting) + sum(draws.missing for draws in self._held)
        if lost or waiting:
            first = f" (first: draw {lost[0][1]} of prompt {lost[0][0]!r})" if lost else ""
            raise RuntimeError(
                f"The sampler ended with {len(lost)} requests taken and not returned{first} and {waiting} not taken."
            )

    def pool(self, draws: _Draws) -> Pool:
        """All of a closed prompt's responses."""
        met = self._strategy.met(draws.record())
        return Pool(draws.prompt, tuple(draws.responses), tuple(draws.verdicts), draws.rounds, met)


def collect(
    prompts: Sequence[Prompt],
    sample_fn: SampleFn,
    verify_fn: VerifyFn,
    strategy: Strategy,
    *,
    barrier: bool = False,
    deterministic: bool = True,
    begun: Mapping[str, Begun] | None = None,
    ahead: Ahead | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Pool]:
    """Draws responses for every prompt until the strategy closes it.

    Each prompt goes on to its next round as soon as its own round is complete and verified.

    Args:
      prompts: P prompts with distinct ids.
      sample_fn: a generator function over a types.RequestQueue, which yields lists of finished responses in any order.
      verify_fn: pairs (prompt, response) -> verdicts, aligned with them; or a future of them, for verification beside
        the sampler's work. Futures are heard in the order of the calls.
      strategy: see strategies.py.
      barrier: begin no next round before every prompt's round is finished, as the reference program does. The pools
        are the same; only time differs.
      deterministic: hear the verdicts of a future when the next yield comes, no sooner and no later, so that the order
        of events follows from the sampler's yields alone; else as soon as they are there.
      begun: what an earlier collection drew ahead, by prompt id.
      ahead: prompts of the next collection, to be drawn where slots would be idle.
      on_progress: called after every yield with (prompts closed, responses drawn) so far.

    Returns:
      P pools, aligned with `prompts`.

    Raises:
      ValueError: two prompts share an id, or the strategy breaks its own bounds.
      RuntimeError: the sampler returned a response unasked or twice, or ended with requests outstanding; or the
        verifier returned the wrong number of verdicts.
    """
    ahead = ahead or Ahead(())
    collection = _Collection(prompts, ahead, verify_fn, strategy, barrier=barrier, deterministic=deterministic)
    collection.begin(begun or {})
    for responses in sample_fn(collection):
        collection.receive(responses)
        if on_progress is not None:
            on_progress(collection.num_closed, collection.num_responses)
    collection.finish()
    for draws in collection.draws[len(prompts) :]:
        if any(response is not None for response in draws.responses):
            ahead.begun[draws.prompt.id] = Begun(tuple(draws.responses), tuple(draws.verdicts), draws.rounds)
    return [collection.pool(draws) for draws in collection.draws[: len(prompts)]]
