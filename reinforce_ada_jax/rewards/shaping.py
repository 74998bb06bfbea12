"""Reward shaping: makes the outcome (correct or not) and the reward of advantages from a graded reward.

Stopping rules and pass rates use the outcome, advantages the reward. A length penalty therefore lowers the reward of a
long response without making a right answer wrong.
"""

import dataclasses
from concurrent.futures import Future

from reinforce_ada_jax.types import Verdict


def overlong_share(num_tokens: int, overlong_tokens: int, max_response_tokens: int) -> float:
    """Returns the share of the last `overlong_tokens` before the limit that a response fills, in [0, 1].

    0 up to max_response_tokens - overlong_tokens, 1 at max_response_tokens, linear between.
    Source: soft overlong punishment (DAPO, arXiv 2503.14476, section 3.4), counted in tokens.
    """
    if overlong_tokens == 0:
        return 0.0
    beyond = num_tokens - (max_response_tokens - overlong_tokens)
    return min(max(beyond / overlong_tokens, 0.0), 1.0)


@dataclasses.dataclass(frozen=True)
class Shaping:
    """Rule that turns graded rewards into verdicts.

    Attributes:
      positive_threshold: a graded reward above it is correct.
      overlong_tokens: number of tokens before the limit that are penalised; 0: none.
      overlong_penalty: penalty at the limit.
      max_response_tokens: the limit.
    """

    positive_threshold: float
    overlong_tokens: int = 0
    overlong_penalty: float = 0.0
    max_response_tokens: int = 0

    def __call__(self, verdict: Verdict, num_tokens: int) -> Verdict:
        """Returns the verdict on a response of `num_tokens` tokens, the stop token included."""
        penalty = self.overlong_penalty * overlong_share(num_tokens, self.overlong_tokens, self.max_response_tokens)
        return dataclasses.replace(
            verdict, correct=verdict.reward > self.positive_threshold, reward=verdict.reward - penalty
        )

    def all(self, verdicts: list[Verdict], lengths: list[int]) -> list[Verdict]:
        """Returns the shaped verdicts in order."""
        return [self(verdict, length) for verdict, length in zip(verdicts, lengths, strict=True)]

    def later(self, verdicts: Future[list[Verdict]], lengths: list[int]) -> Future[list[Verdict]]:
        """Returns a future of the shaped verdicts, done when the graded ones are."""
        shaped: Future[list[Verdict]] = Future()

        def finish(graded: Future[list[Verdict]]) -> None:
            if not shaped.set_running_or_notify_cancel():
                return
            try:
                shaped.set_result(self.all(graded.result(), lengths))
            except BaseException as error:  # raised where the future is read
                shaped.set_exception(error)

        verdicts.add_done_callback(finish)
        return shaped
