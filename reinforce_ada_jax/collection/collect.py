"""The collection loop: rounds of responses for every prompt until its strategy says stop.

The sampler and the verifier come in as functions; what is kept of a pool is in advantages.py. Two rules are kept here,
both because short responses finish first and would otherwise be over-represented: a prompt's stopping rule is evaluated
on whole rounds only, and pools are in draw order. There is no barrier between prompts.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from reinforce_ada_jax.collection.strategies import Record, Strategy
from reinforce_ada_jax.types import Pool, Prompt, Request, RequestQueue, Response, Verdict

SampleFn = Callable[[RequestQueue], Iterator[list[Response]]]
VerifyFn = Callable[[list[tuple[Prompt, Response]]], list[Verdict]]


@dataclasses.dataclass(eq=False)
class _Draws:
    """One prompt's draws so far.

    Attributes:
      index: place among the prompts.
      responses: one for each draw asked for, by draw; None until it is back.
      verdicts: of the finished rounds, so it is shorter than `responses` while a round is under way.
      missing: responses of the current round that are not back.
      rounds: finished rounds.
      pool: set when the prompt is closed.
    """

    prompt: Prompt
    index: int
    responses: list[Response | None] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    missing: int = 0
    rounds: int = 0
    pool: Pool | None = None

    def record(self) -> Record:
        num_correct = sum(verdict.correct for verdict in self.verdicts)
        return Record(self.prompt, rounds=self.rounds, drawn=len(self.verdicts), correct=num_correct)

    def begin_round(self, size: int) -> list[Request]:
        requests = [Request(self.prompt, draw) for draw in range(len(self.responses), len(self.responses) + size)]
        self.responses += [None] * size
        self.missing = size
        return requests

    def finish_round(self, verdicts: Iterator[Verdict]) -> None:
        """Takes from `verdicts` those of this round, in draw order."""
        self.verdicts += itertools.islice(verdicts, len(self.responses) - len(self.verdicts))
        self.rounds += 1


class _Queue:
    """types.RequestQueue, and the account of what was taken and what came back."""

    def __init__(self):
        self._begun: collections.deque[Request] = collections.deque()
        self._not_begun: collections.deque[list[Request]] = collections.deque()  # first rounds
        self._returned: dict[tuple[str, int], bool] = {}  # every request taken: is its response back?
        self._closed: list[str] = []

    def take(self, limit: int) -> list[Request]:
        taken = []
        while len(taken) < limit and (self._begun or self._not_begun):
            if not self._begun:
                self._begun.extend(self._not_begun.popleft())
            request = self._begun.popleft()
            self._returned[request.prompt.id, request.draw] = False
            taken.append(request)
        return taken

    def closed(self) -> list[str]:
        closed, self._closed = self._closed, []
        return closed

    def put(self, requests: list[Request]) -> None:
        """Queues a prompt's next round: behind the prompts begun, ahead of those not begun."""
        if requests[0].draw == 0:
            self._not_begun.append(requests)
        else:
            self._begun.extend(requests)

    def close(self, prompt_id: str) -> None:
        self._closed.append(prompt_id)

    def settle(self, response: Response) -> None:
        """Notes that the response of a request is back."""
        address = response.prompt_id, response.draw
        if self._returned.get(address, True):
            how = "twice" if address in self._returned else "unasked"
            raise RuntimeError(f"The sampler returned draw {response.draw} of prompt {response.prompt_id!r} {how}.")
        self._returned[address] = True

    def check_settled(self) -> None:
        """Raises RuntimeError when anything was asked for and did not come."""
        lost = [address for address, returned in self._returned.items() if not returned]
        waiting = len(self._begun) + sum(len(requests) for requests in self._not_begun)
        if lost or waiting:
            first = f" (first: draw {lost[0][1]} of prompt {lost[0][0]!r})" if lost else ""
            raise RuntimeError(
                f"The sampler ended with {len(lost)} requests taken and not returned{first} and {waiting} not taken."
            )


def _next_round(draws: _Draws, strategy: Strategy) -> list[Request]:
    """Begins the prompt's next round; empty when the strategy says stop."""
    record = draws.record()
    size = strategy.next_draws(record)
    if size < 0 or (size == 0 and record.rounds == 0) or record.drawn + size > strategy.max_draws:
        raise ValueError(
            f"The strategy asks for {size} more responses of prompt {draws.prompt.id!r} after {record.rounds} rounds "
            f"and {record.drawn} responses; its first round must have at least 1, and all at most max_draws = "
            f"{strategy.max_draws}."
        )
    return draws.begin_round(size)


def _verify_rounds(complete: list[_Draws], verify_fn: VerifyFn) -> None:
    """Verifies the rounds just completed, all in one call, and hands the verdicts out."""
    pairs = [(draws.prompt, response) for draws in complete for response in draws.responses[len(draws.verdicts) :]]
    verdicts = verify_fn(pairs)
    if len(verdicts) != len(pairs):
        raise RuntimeError(f"The verifier returned {len(verdicts)} verdicts for {len(pairs)} responses.")
    remaining = iter(verdicts)
    for draws in complete:
        draws.finish_round(remaining)


def collect(
    prompts: Sequence[Prompt],
    sample_fn: SampleFn,
    verify_fn: VerifyFn,
    strategy: Strategy,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Pool]:
    """Draws responses for every prompt until the strategy closes it.

    Each prompt goes on to its next round as soon as its own round is complete and verified. The order of events
    follows from the sampler's yields alone: rounds completed by one yield are verified in one call and continued in
    the order of `prompts`.

    Args:
      prompts: P prompts with distinct ids.
      sample_fn: a generator function over a types.RequestQueue, which yields lists of finished responses in any order.
      verify_fn: pairs (prompt, response) -> verdicts, aligned with them.
      strategy: see strategies.py.
      on_progress: called after every yield with (prompts closed, responses drawn) so far.

    Returns:
      P pools, aligned with `prompts`.

    Raises:
      ValueError: two prompts share an id, or the strategy breaks its own bounds.
      RuntimeError: the sampler returned a response unasked or twice, or ended with requests outstanding; or the
        verifier returned the wrong number of verdicts.
    """
    draws_of = {prompt.id: _Draws(prompt, index) for index, prompt in enumerate(prompts)}
    if len(draws_of) < len(prompts):
        counts = collections.Counter(prompt.id for prompt in prompts)
        repeated = [name for name, count in counts.items() if count > 1]
        raise ValueError(f"{len(repeated)} prompt ids are used more than once, {repeated[0]!r} first: ids must differ.")
    queue = _Queue()
    for draws in draws_of.values():
        queue.put(_next_round(draws, strategy))

    num_closed = num_responses = 0
    for responses in sample_fn(queue):
        complete = []
        for response in responses:
            queue.settle(response)
            draws = draws_of[response.prompt_id]
            draws.responses[response.draw] = response
            draws.missing -= 1
            if draws.missing == 0:
                complete.append(draws)
        num_responses += len(responses)
        if complete:
            complete.sort(key=lambda draws: draws.index)
            _verify_rounds(complete, verify_fn)
        for draws in complete:
            requests = _next_round(draws, strategy)
            if requests:
                queue.put(requests)
                continue
            met = strategy.met(draws.record())
            draws.pool = Pool(draws.prompt, tuple(draws.responses), tuple(draws.verdicts), draws.rounds, met)
            queue.close(draws.prompt.id)
            num_closed += 1
        if on_progress is not None:
            on_progress(num_closed, num_responses)
    queue.check_settled()
    return [draws.pool for draws in draws_of.values()]
