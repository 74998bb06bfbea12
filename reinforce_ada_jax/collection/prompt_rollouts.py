"""State of one prompt in a collection: its responses so far, and the phase that it is in."""

import dataclasses
import enum
import itertools
from collections.abc import Iterable

from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Request, Response, Verdict, counted_rewards


class Phase(enum.Enum):
    """WAITING -> SAMPLING -> VERIFYING -> WAITING -> ... -> CLOSED; with a barrier, WAITING -> HELD -> SAMPLING."""

    WAITING = "between two rounds: the strategy decides"
    HELD = "its next round waits behind the barrier"
    SAMPLING = "draws of its round are missing"
    VERIFYING = "its round is complete, verdicts are missing"
    CLOSED = "no further round"


@dataclasses.dataclass(eq=False)
class PromptRollouts:
    prompt: Prompt
    index: int  # its position in the collection; rounds that are complete at the same time are verified in this order
    prefetch: int = 0  # collections until the prompt's own one; 0: it is this one
    estimate: float | None = None  # expected pass rate, where the strategy needs it
    planned: int | None = None  # planned draws, where the strategy plans
    phase: Phase = Phase.WAITING  # the queue sets HELD and CLOSED, methods set the others
    responses: list[Response | None] = dataclasses.field(default_factory=list)  # by draw; None: missing
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)  # of the finished rounds, by draw
    rounds: int = 0  # finished rounds
    round_sizes: list[int] = dataclasses.field(default_factory=list)  # draws of each started round
    speculative: dict[int, Response | None] = dataclasses.field(default_factory=dict)  # by draw; None: missing
    begun: dict[int, Response] = dataclasses.field(default_factory=dict)  # tokens so far of missing draws

    @property
    def next_draw(self) -> int:
        """Number of the first draw that has no request yet."""
        return len(self.responses) + len(self.speculative)

    @property
    def is_finished(self) -> bool:
        """True if the prompt is closed and none of its speculative draws is missing."""
        return self.phase is Phase.CLOSED and None not in self.speculative.values()

    def resume(self, partial: PartialRollouts) -> None:
        """Continues from the draws of an earlier collection.

        The first round without verdicts is resumed. Later rounds become speculative, because its verdicts decide
        whether they are needed.
        """
        begin = len(partial.responses) - sum(partial.round_sizes[partial.rounds + 1 :])
        later = itertools.takewhile(lambda response: response is not None, partial.responses[begin:])
        self.responses, self.speculative = list(partial.responses[:begin]), dict(enumerate(later, begin))
        self.verdicts, self.rounds = list(partial.verdicts), partial.rounds
        self.round_sizes = list(partial.round_sizes[: partial.rounds + 1])
        self.begun = {response.draw: response for response in partial.begun if response.draw < begin}
        if len(self.verdicts) < len(self.responses):
            self.phase = Phase.SAMPLING if None in self.responses else Phase.VERIFYING

    def partial(self, running: Iterable[Response] = (), *, finished_rounds: bool = False) -> PartialRollouts:
        """Returns the draws so far, or those of finished rounds, for another collection to resume from.

        `running` has the tokens so far of draws in flight, which replace those in `begun`.
        """
        cut = self.begun | {each.draw: each for each in running if each.draw < len(self.responses)}
        responses, sizes, begun = self.responses, self.round_sizes, tuple(cut.values())
        if finished_rounds:
            responses, sizes, begun = responses[: len(self.verdicts)], sizes[: self.rounds], ()
        return PartialRollouts(tuple(responses), tuple(self.verdicts), self.rounds, tuple(sizes), begun)

    def progress(self) -> PromptProgress:
        """Returns the counts of the finished rounds."""
        correct = sum(verdict.correct for verdict in self.verdicts)
        return PromptProgress(
            self.prompt, self.rounds, len(self.verdicts), correct, self.estimate, self.planned, self._improved()
        )

    def _improved(self) -> bool:
        if not self.rounds:
            return False
        rewards = counted_rewards(self.verdicts).tolist()
        begin = len(rewards) - self.round_sizes[self.rounds - 1]
        earlier = rewards[:begin] or rewards
        # Relative to the first, so that equal rewards have exactly their value as mean.
        mean = earlier[0] + sum(reward - earlier[0] for reward in earlier) / len(earlier)
        return max(rewards[begin:]) > mean

    def pool(self, strategy: Strategy) -> Pool:
        """Returns the pool of a closed prompt."""
        met = bool(strategy.met(self.progress()))  # a comparison of numpy numbers is not a bool of JSON
        responses = tuple(response for response in self.responses if response is not None)
        discarded = tuple(response.num_sampled for response in self.speculative.values() if response is not None)
        return Pool(
            self.prompt, responses, tuple(self.verdicts), self.rounds, met, self.estimate, tuple(self.round_sizes),
            discarded,
        )  # fmt: skip

    def start_round(self, size: int) -> None:
        """WAITING -> SAMPLING; WAITING -> VERIFYING where speculative draws fill the round."""
        begin = len(self.responses)
        self.responses += [self.speculative.pop(draw, None) for draw in range(begin, begin + size)]
        self.round_sizes.append(size)
        self.phase = Phase.SAMPLING if None in self.responses else Phase.VERIFYING

    def requests(self) -> list[Request]:
        """Returns one request for each missing draw of the started rounds, speculative ones in flight included."""
        missing = (draw for draw, response in enumerate(self.responses) if response is None)
        return [Request(self.prompt, draw, self.prefetch, begun=self.begun.get(draw)) for draw in missing]

    def add(self, response: Response) -> None:
        """Stores a response, or its tokens so far; with the last one of the round, SAMPLING -> VERIFYING."""
        if response.draw in self.speculative:
            self.speculative[response.draw] = response
            return
        if response.is_cut:
            self.begun[response.draw] = response
            return
        self.begun.pop(response.draw, None)
        self.responses[response.draw] = response
        if None not in self.responses:
            self.phase = Phase.VERIFYING

    def unverified(self) -> list[Response]:
        """Returns the responses of a complete round, in draw order."""
        return [response for response in self.responses[len(self.verdicts) :] if response is not None]

    def finish_round(self, verdicts: Iterable[Verdict]) -> None:
        """VERIFYING -> WAITING, with the verdicts of the round in draw order."""
        self.verdicts += verdicts
        self.rounds += 1
        self.phase = Phase.WAITING
