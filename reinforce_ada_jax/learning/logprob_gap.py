"""The gap between the engine's log-probabilities of its own tokens and the learner's, under the same weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from reinforce_ada_jax.config import Config


class GapLimits(NamedTuple):
    """Differences that rounding explains."""

    mean: float  # most over all tokens
    largest: float  # most of one token

    def hold(self, mean: float | Float[Array, ""], largest: float | Float[Array, ""]) -> bool | Bool[Array, ""]:
        """Returns True where neither is above its limit; False where one is not a number."""
        return (mean <= self.mean) & (largest <= self.largest)


# Engine and learner compute the same number in different programs. In float32 on a CPU they differ by rounding alone.
# The mean is below 1e-7 at temperature 1, and single tokens reach 1e-4 where large steps have made the weights grow.
# Wrong masks, wrong positions or old weights exceed one of the limits by far. Elsewhere products are rounded to
# bfloat16 or less, and a mean above the last number is logged.
FLOAT32_LIMITS, ALARMING_LOGPROB_GAP = GapLimits(mean=1e-5, largest=1e-2), 0.05


class LogprobGap(NamedTuple):
    """Absolute differences of log-probabilities, over tokens."""

    total: Float[Array, ""]  # sum over the tokens drawn from the current weights
    largest: Float[Array, ""]  # of the same tokens
    num_tokens: Float[Array, ""]  # their number
    num_not_finite: Float[Array, ""]  # tokens of any weights whose difference is not finite


def logprob_gap(
    logprobs: Float[Array, "B T"],
    behaviour_logprobs: Float[Array | np.ndarray, "B T"],
    mask: Bool[Array | np.ndarray, "B T"],
    is_fresh: Bool[Array | np.ndarray, "B T"],
) -> LogprobGap:
    """Computes the gap over tokens; values where the mask is False may be anything.

    `is_fresh` is True at tokens that were drawn from the weights that `logprobs` are computed with.
    """
    gaps = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logprobs) - behaviour_logprobs), 0.0)
    fresh = mask & is_fresh
    of_fresh = jnp.where(fresh, gaps, 0.0)
    counts = (jnp.sum(x).astype(jnp.float32) for x in (fresh, ~jnp.isfinite(gaps)))
    return LogprobGap(of_fresh.sum(), of_fresh.max(), *counts)


def combined(one: LogprobGap, other: LogprobGap) -> LogprobGap:
    """Returns the gap over the tokens of both."""
    largest = jnp.maximum(one.largest, other.largest)
    return LogprobGap(*(a + b for a, b in zip(one, other, strict=True)))._replace(largest=largest)


def gap_limits(config: Config) -> GapLimits | None:
    """Returns what rounding explains; None where there is no such bound."""
    if config.draws_in_int8:
        return None
    if config.model.numerics == "invariant":
        return GapLimits(0.0, 0.0)
    if config.model.compute_dtype == "float32" and jax.default_backend() == "cpu":
        scale = 1 / min(1.0, config.sampling.temperature)
        return GapLimits(*(scale * limit for limit in FLOAT32_LIMITS))
    return None
