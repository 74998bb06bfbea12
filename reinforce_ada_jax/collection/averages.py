"""Decayed averages over past iterations: constants for the next one, because they contain none of its outcomes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from reinforce_ada_jax.types import Pool, Response, ScoreNoise

# Decay of a sum at each iteration: about half of an average is from the last iteration.
DECAY = 0.5

Sums = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Averages:
    sums: Sums = dataclasses.field(default_factory=dict)  # by name: decayed total, decayed number of observations

    def mean(self, name: str, default: float) -> float:
        """Returns an average; `default` where nothing was observed."""
        total, count = self.sums.get(name, (0.0, 0.0))
        return total / count if count else default

    def after(self, observed: Sums) -> "Averages":
        """Returns the averages after an iteration with these totals and numbers of observations."""
        names = sorted({*self.sums, *observed})
        none = 0.0, 0.0
        pairs = ((self.sums.get(name, none), observed.get(name, none)) for name in names)
        decayed = [(DECAY * before[0] + now[0], DECAY * before[1] + now[1]) for before, now in pairs]
        return Averages(dict(zip(names, decayed, strict=True)))

    def score_noise(self) -> ScoreNoise:
        """Returns the noise of scores; the noise of a success is 0 until a correct response was seen."""
        correct, wrong = self.mean("square_correct", 0.0), self.mean("square_wrong", 0.0)
        return ScoreNoise(correct * (1.0 - min(1.0, self.mean("repeated", 1.0))), correct, wrong)


def rounds(pools: Sequence[Pool]) -> dict[str, tuple[float, float]]:
    """Returns the total of rounds and the number of prompts of an iteration."""
    return {"rounds": (float(sum(pool.rounds for pool in pools)), float(len(pools)))}


def score_square(response: Response) -> float:
    """Returns the sum over the sampled tokens of (1 - pi)^2, which estimates the squared score (`score_squares`)."""
    return float(np.square(np.expm1(response.logprobs[response.sampled].astype(np.float64))).sum())


def score_squares(pools: Sequence[Pool]) -> dict[str, tuple[float, float]]:
    """Returns the sums for `Averages.score_noise`.

        square_correct, square_wrong   sum over tokens of (1 - pi)^2, of correct and of wrong draws
        repeated                       pi(y) of correct draws / pass rates: the chance that two correct draws are equal

    (1 - pi)^2 is the part of a token's squared score that its own logit gives. The other logits add the sum of their
    pi^2, which is never larger. The log-probabilities are those of the sampler, so no draw needs a pass of the learner.
    A correct draw is y with probability pi(y) / p. Over prompts the chance is a ratio of sums. A prompt's pass rate is
    that of its first round, whose mean is p.
    """
    squares: dict[bool, list[float]] = {True: [], False: []}
    repeated, pass_rates = [], []
    for pool in pools:
        logprobs = [response.logprobs[response.sampled].astype(np.float64) for response in pool.responses]
        for correct, response in zip(pool.correct.tolist(), pool.responses, strict=True):
            squares[correct].append(score_square(response))
        probabilities = np.array([math.exp(of_draw.sum()) for of_draw in logprobs])
        repeated.append(float(probabilities[pool.correct].mean()) if pool.correct.any() else 0.0)
        pass_rates.append(float(pool.correct[: pool.round_sizes[0]].mean()))
    return {
        "square_correct": (math.fsum(squares[True]), float(len(squares[True]))),
        "square_wrong": (math.fsum(squares[False]), float(len(squares[False]))),
        "repeated": (math.fsum(repeated), math.fsum(pass_rates)),
    }
