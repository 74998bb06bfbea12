"""The gap between the engine's log-probabilities of its own tokens and the learner's, under the same weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from reinforce_ada_jax.config import Config

# Engine and learner compute the same number in different programs. In float32 on a CPU they differ by rounding alone
# (1e-6 at temperature 1, more below it); elsewhere products are rounded to bfloat16 or less, and a mean above the
# second number is logged.
FLOAT32_LOGPROB_GAP, ALARMING_LOGPROB_GAP = 1e-4, 0.05


class LogprobGap(NamedTuple):
    """Absolute differences of log-probabilities, over tokens.

    Attributes:
      total: sum over the tokens drawn from the current weights.
      largest: of the same tokens.
      num_tokens: their number.
      num_not_finite: tokens, of whatever weights, whose difference is not finite.
    """

    total: Float[Array, ""]
    largest: Float[Array, ""]
    num_tokens: Float[Array, ""]
    num_not_finite: Float[Array, ""]


def no_gap() -> LogprobGap:
    """The gap of no tokens."""
    return LogprobGap(*[jnp.float32(0)] * 4)


def logprob_gap(
    logprobs: Float[Array, "B T"],
    behaviour_logprobs: Float[Array | np.ndarray, "B T"],
    mask: Bool[Array | np.ndarray, "B T"],
    is_fresh: Bool[Array | np.ndarray, "B T"],
) -> LogprobGap:
    """Computes the gap over tokens; values under the mask may be anything.

    Args:
      logprobs: the learner's; not differentiated.
      behaviour_logprobs: the engine's.
      mask: True at tokens of responses.
      is_fresh: True at tokens that were drawn from the weights that `logprobs` are computed with.
    """
    gaps = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logprobs) - behaviour_logprobs), 0.0)
    fresh = mask & is_fresh
    of_fresh = jnp.where(fresh, gaps, 0.0)
    counts = (jnp.sum(x).astype(jnp.float32) for x in (fresh, ~jnp.isfinite(gaps)))
    return LogprobGap(of_fresh.sum(), of_fresh.max(), *counts)


def combined(one: LogprobGap, other: LogprobGap) -> LogprobGap:
    """The gap over the tokens of both."""
    largest = jnp.maximum(one.largest, other.largest)
    return LogprobGap(*(a + b for a, b in zip(one, other, strict=True)))._replace(largest=largest)


def max_gap(config: Config) -> float | None:
    """The largest difference that rounding explains; None where there is no such bound."""
    if config.draws_in_int8:
        return None
    if config.model.numerics == "invariant":
        return 0.0
    if config.model.compute_dtype == "float32" and jax.default_backend() == "cpu":
        return FLOAT32_LOGPROB_GAP / min(1.0, config.sampling.temperature)
    return None
