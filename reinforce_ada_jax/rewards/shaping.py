"""Reward shaping: decides which graded rewards are correct, and how much the length of a correct response costs.

Only correct responses have a penalty, as in arXiv 2502.04463 and 2505.12284. DAPO (2503.14476, section 3.4), from which
the shape of the penalty comes, lowers every reward. In a group without a right answer this would only teach to be wrong
in fewer tokens. The penalty stays apart from the reward, which measures the outcome alone; advantages.py compares it
among a prompt's correct responses.
"""

import dataclasses

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
    """Rule that turns graded rewards into verdicts."""

    positive_threshold: float  # a graded reward above it is correct; a failed verdict never is
    overlong_tokens: int = 0  # number of tokens before the limit over which the penalty rises from 0 to 1
    max_response_tokens: int = 0  # the limit

    def __call__(self, verdict: Verdict, num_tokens: int) -> Verdict:
        """Returns the verdict on a response of `num_tokens` tokens, the stop token included."""
        correct = verdict.reward > self.positive_threshold and not verdict.failed
        share = overlong_share(num_tokens, self.overlong_tokens, self.max_response_tokens)
        return dataclasses.replace(verdict, correct=correct, penalty=share if correct else 0.0)

    def all(self, verdicts: list[Verdict], lengths: list[int]) -> list[Verdict]:
        return [self(verdict, length) for verdict, length in zip(verdicts, lengths, strict=True)]
