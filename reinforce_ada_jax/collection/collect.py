"""The collection loop: rounds of responses for every prompt until its strategy says stop.

The sampler and the verifier come in as functions; what is kept of a pool is in advantages.py. Two rules are kept here,
both because short responses finish first and would otherwise be over-represented: a prompt's stopping rule is evaluated
on whole rounds only, and pools are in draw order. There is no barrier between prompts, unless one is asked for.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.prefetch import Prefetch
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, StrategyConfig
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Request, RequestQueue, Response, Verdict

SampleFn = Callable[[RequestQueue], Iterator[list[Response]]]
VerifyFn = Callable[[list[tuple[Prompt, Response]]], list[Verdict] | Future[list[Verdict]]]
EstimateFn = Callable[[Sequence[Prompt]], np.ndarray]


def uniform_at_address(seed: int, iteration: int, prompt_id: str, rounds: int) -> float:
    """A number in [0, 1) that its address decides: whether a prompt goes on after `rounds` rounds, where that is left
    to chance."""
    address = f"{seed}/{iteration}/{rounds}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest()) / 2**64


@dataclasses.dataclass(eq=False)
class _Draws:
    """One prompt's draws so far.

    Attributes:
      index: place among the prompts.
      prefetch: the prompt belongs to the next collection.
      responses: one for each draw asked for, by draw; None until it is back.
      verdicts: of the finished rounds, so it is shorter than `responses` while a round is under way.
      missing: responses of the current round that are not back.
      rounds: finished rounds.
      estimate: pass rate expected, where the strategy plans.
      planned: draws planned.
    """

    prompt: Prompt
    index: int
    prefetch: bool
    estimate: float | None = None
    planned: int | None = None
    responses: list[Response | None] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    missing: int = 0
    rounds: int = 0

    def go_on_from(self, partial: PartialRollouts) -> None:
        """Takes over what was drawn before."""
        self.responses, self.verdicts, self.rounds = list(partial.responses), list(partial.verdicts), partial.rounds
        self.missing = self.responses.count(None)

    def record(self) -> PromptProgress:
        num_correct = sum(verdict.correct for verdict in self.verdicts)
        return PromptProgress(
            self.prompt, self.rounds, len(self.verdicts), num_correct, estimate=self.estimate, planned=self.planned
        )

    def pool(self, strategy: Strategy) -> Pool:
        """All responses of a closed prompt."""
        met = strategy.met(self.record())
        return Pool(self.prompt, tuple(self.responses), tuple(self.verdicts), self.rounds, met, self.estimate)

    def begin_round(self, size: int) -> None:
        self.responses += [None] * size
        self.missing = size

    def requests(self) -> list[Request]:
        """What is still to be drawn of the current round."""
        missing = (draw for draw, response in enumerate(self.responses) if response is None)
        return [Request(self.prompt, draw, self.prefetch) for draw in missing]

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
        prefetch: Prefetch,
        verify_fn: VerifyFn,
        strategy: Strategy,
        *,
        barrier: bool,
        deterministic: bool,
        replacements: Sequence[Prompt],
        estimate_fn: EstimateFn | None,
        seed: int,
        iteration: int,
    ):
        self._verify_fn, self._strategy = verify_fn, strategy
        self._barrier, self._deterministic = barrier, deterministic
        self._seed, self._iteration = seed, iteration
        self._replacements = collections.deque(replacements)
        self._waiting, self._waiting_prefetch = _Waiting(), _Waiting()
        self._held: list[_Draws] = []  # next rounds behind the barrier
        self._returned: dict[tuple[str, int], bool] = {}  # every request taken: is its response back?
        self._outstanding = 0
        self._verifying: collections.deque[tuple[list[_Draws], Future[list[Verdict]]]] = collections.deque()
        self._newly_closed: list[str] = []
        self._num_open = len(prompts)
        self.num_responses = 0
        everyone = [*prompts, *prefetch.prompts]
        self.draws = [_Draws(prompt, index, index >= len(prompts)) for index, prompt in enumerate(everyone)]
        self._draws_of = {draws.prompt.id: draws for draws in self.draws}
        counts = collections.Counter(prompt.id for prompt in [*everyone, *replacements])
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise ValueError(
                f"{len(repeated)} prompt ids are used more than once, {repeated[0]!r} first: ids must differ."
            )
        if strategy.plan is not None:
            self._plan(everyone, strategy.plan, estimate_fn)

    def _plan(self, prompts: Sequence[Prompt], plan: Callable, estimate_fn: EstimateFn | None) -> None:
        """Fixes every prompt's draws before the first one."""
        estimates = np.full(len(prompts), 0.5) if estimate_fn is None else np.asarray(estimate_fn(prompts), float)
        if estimates.shape != (len(prompts),) or not ((estimates >= 0) & (estimates <= 1)).all():
            raise ValueError(
                f"estimate_fn must give {len(prompts)} pass rates in [0, 1]; it gave {estimates.shape}, from "
                f"{estimates.min(initial=np.inf):g} to {estimates.max(initial=-np.inf):g}."
            )
        planned = plan(estimates, [prompt.id for prompt in prompts])
        for draws, pass_rate, size in zip(self.draws, estimates.tolist(), planned.tolist(), strict=True):
            draws.estimate, draws.planned = pass_rate, size

    def begin(self, partial: Mapping[str, PartialRollouts]) -> None:
        """Every prompt's first round, or what is left of the one that was begun before."""
        complete = []
        for draws in self.draws:
            if draws.prompt.id in partial:
                draws.go_on_from(partial[draws.prompt.id])
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
            if not self.wait():
                held, self._held = sorted(self._held, key=lambda draws: draws.index), []
                for draws in held:
                    self._put(draws)
        return self._take(self._waiting, limit)

    def take_prefetch(self, limit: int) -> list[Request]:
        return self._take(self._waiting_prefetch, limit) if self._num_open else []

    def _take(self, waiting: _Waiting, limit: int) -> list[Request]:
        taken = [waiting.pop() for _ in range(min(limit, len(waiting)))]
        self._returned |= {(request.prompt.id, request.draw): False for request in taken}
        self._outstanding += len(taken)
        return taken

    def wait(self) -> bool:
        if not self._verifying:
            return False
        self._finish_rounds(*self._verifying.popleft())
        return True

    def closed(self) -> list[str]:
        closed, self._newly_closed = self._newly_closed, []
        return closed

    # ---- what the loop does --------------------------------------------------------------------------------------

    @property
    def num_closed(self) -> int:
        return sum(not draws.prefetch for draws in self.draws) - self._num_open

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
        size = strategies.asked_for(strategy, record)
        if size == 0 or (record.rounds > 0 and not self._continues(draws, strategy.continue_probability(record))):
            self._close(draws)
            return
        draws.begin_round(size)
        if self._barrier and record.rounds > 0:
            self._held.append(draws)
        else:
            self._put(draws)

    def _continues(self, draws: _Draws, least: float) -> bool:
        return uniform_at_address(self._seed, self._iteration + draws.prefetch, draws.prompt.id, draws.rounds) < least

    def _close(self, draws: _Draws) -> None:
        """Nothing more for this prompt. If nothing of it is kept, a replacement takes its place.

        The prompts opened are so always as many as asked for plus those dropped, in their order: the shortest
        beginning of the list that keeps enough, whoever finishes first.
        """
        self._newly_closed.append(draws.prompt.id)
        if draws.prefetch:
            return
        self._num_open -= 1
        if self._replacements and not self._strategy.keep(draws.pool(self._strategy).correct).size:
            self._num_open += 1
            replacement = _Draws(self._replacements.popleft(), len(self.draws), prefetch=False)
            self.draws.append(replacement)
            self._draws_of[replacement.prompt.id] = replacement
            self._go_on(replacement)

    def _put(self, draws: _Draws) -> None:
        waiting = self._waiting_prefetch if draws.prefetch else self._waiting
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


def collect(
    prompts: Sequence[Prompt],
    sample_fn: SampleFn,
    verify_fn: VerifyFn,
    config: StrategyConfig | Strategy,
    *,
    replacements: Sequence[Prompt] = (),
    estimate_fn: EstimateFn | None = None,
    seed: int = 0,
    iteration: int = 0,
    barrier: bool = False,
    deterministic: bool = True,
    partial: Mapping[str, PartialRollouts] | None = None,
    prefetch: Prefetch | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Pool]:
    """Draws responses for every prompt until the strategy closes it.

    Each prompt goes on to its next round as soon as its own round is complete and verified.

    Args:
      prompts: P prompts with distinct ids.
      sample_fn: a generator function over a types.RequestQueue, which yields lists of finished responses in any order.
      verify_fn: pairs (prompt, response) -> verdicts, aligned with them; or a future of them, for verification beside
        the sampler's work. Futures are heard in the order of the calls.
      config: names the strategy and its settings (`strategies.StrategyConfig`), or is a strategy already.
      replacements: more prompts, of which the next one is opened whenever a prompt closes of which nothing is kept.
      estimate_fn: prompts -> the pass rates expected of them, for strategies that plan; None: 1/2 for all.
      seed: of the run; with `iteration`, the prompt's id and the round it decides what a strategy leaves to chance.
      iteration: see `seed`.
      barrier: begin no next round before every prompt's round is finished, as the reference program does. The pools
        are the same; only time differs.
      deterministic: hear the verdicts of a future when the next yield comes, no sooner and no later, so that the order
        of events follows from the sampler's yields alone; else as soon as they are there.
      partial: what an earlier collection drew prefetch, by prompt id.
      prefetch: prompts of the next collection, to be drawn where slots would be idle.
      on_progress: called after every yield with (prompts closed, responses drawn) so far.

    Returns:
      P pools, aligned with `prompts`, and after them those of the replacements that were opened, in their order.

    Raises:
      ValueError: two prompts share an id, the strategy breaks its own bounds, or the settings break a rule.
      RuntimeError: the sampler returned a response unasked or twice, or ended with requests outstanding; or the
        verifier returned the wrong number of verdicts.
    """
    strategy = config if isinstance(config, Strategy) else strategies.build(config)
    prefetch = prefetch or Prefetch(())
    collection = _Collection(
        prompts,
        prefetch,
        verify_fn,
        strategy,
        barrier=barrier,
        deterministic=deterministic,
        replacements=replacements,
        estimate_fn=estimate_fn,
        seed=seed,
        iteration=iteration,
    )
    collection.begin(partial or {})
    for responses in sample_fn(collection):
        collection.receive(responses)
        if on_progress is not None:
            on_progress(collection.num_closed, collection.num_responses)
    collection.finish()
    for draws in collection.draws:
        if draws.prefetch and any(response is not None for response in draws.responses):
            prefetch.partial[draws.prompt.id] = PartialRollouts(
                tuple(draws.responses), tuple(draws.verdicts), draws.rounds
            )
    return [draws.pool(strategy) for draws in collection.draws if not draws.prefetch]
