"""Estimates of pass rates before drawing, for the strategy `estimate`, and their calibration.

The value head, which needs the policy's hidden states, is in learning/value_head.py; the collection loop calls either
one as a function from prompts to pass rates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.types import Pool, Prompt

RELIABILITY_BINS = 5


class Ema:
    """Exponential average of each prompt's own pass rate: a Beta posterior with decay.

        N <- decay * N + n,   K <- decay * K + k,   p = (K + a) / (N + a + b)

    after every iteration that drew n responses, k of them correct. So p is never 0 and never 1.
    Source: arXiv 2510.04996 (Ada-Est).
    """

    def __init__(self, *, decay: float = 0.85, prior_correct: float = 0.5, prior_wrong: float = 0.5):
        """`decay` is in [0, 1); `prior_correct` (a) and `prior_wrong` (b) are above 0.

        The defaults are ours, with the prior of Jeffreys: the paper has no numbers.
        """
        self._decay, self._prior_correct, self._prior_wrong = decay, prior_correct, prior_wrong
        self._counts: dict[str, tuple[float, float]] = {}  # by prompt id: (N, K)

    def estimate(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, " P"]:
        """Returns the pass rates expected now, in (0, 1); a prompt without draws has the prior's mean."""
        return self.estimate_ids([prompt.id for prompt in prompts])

    def estimate_ids(self, ids: Sequence[str]) -> Float[np.ndarray, " P"]:
        counts = np.array([self._counts.get(name, (0.0, 0.0)) for name in ids], np.float64).reshape(-1, 2)
        drawn, correct = counts.T
        return (correct + self._prior_correct) / (drawn + self._prior_correct + self._prior_wrong)

    def observe(self, pools: Sequence[Pool]) -> dict[str, float]:
        """Adds the draws of one iteration; returns no metrics."""
        for pool in pools:
            self.observe_counts(pool.prompt.id, len(pool.verdicts), int(pool.correct.sum()))
        return {}

    def observe_counts(self, prompt_id: str, drawn: float, correct: float) -> None:
        old_drawn, old_correct = self._counts.get(prompt_id, (0.0, 0.0))
        self._counts[prompt_id] = self._decay * old_drawn + drawn, self._decay * old_correct + correct

    def to_json(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; float64 numbers come back unchanged."""
        return {"counts": {name: list(counts) for name, counts in self._counts.items()}}

    def load_json(self, saved: Mapping[str, Any]) -> None:
        self._counts = {name: (drawn, correct) for name, (drawn, correct) in saved["counts"].items()}


def calibration(pools: Sequence[Pool]) -> dict[str, float]:
    """Compares the estimates made before drawing with the outcomes of the draws.

    Returns:
      `estimator/brier`, the mean over prompts of the mean squared difference between the estimate and each draw's
      correctness; `estimator/calibration_error`, the mean over prompts of |estimate - outcome| after averaging both
      within five equal bins of the estimate; and for each bin with prompts `estimator/bin_<i>_estimate`,
      `..._outcome` and `..._share`. Nothing where no pool has an estimate.
    """
    known = [pool for pool in pools if pool.estimate is not None]
    if not known:
        return {}
    estimate = np.array([pool.estimate for pool in known])
    outcome = np.array([pool.correct.mean() for pool in known])
    brier = np.mean([np.square(pool.estimate - pool.correct).mean() for pool in known])
    bins = np.minimum((estimate * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    result, error = {"estimator/brier": float(brier)}, 0.0
    for index in range(RELIABILITY_BINS):
        inside = bins == index
        if inside.any():
            values = float(estimate[inside].mean()), float(outcome[inside].mean()), float(inside.mean())
            error += values[2] * abs(values[0] - values[1])
            names = (f"estimator/bin_{index}_{name}" for name in ("estimate", "outcome", "share"))
            result |= dict(zip(names, values, strict=True))
    return result | {"estimator/calibration_error": error}
