"""How a budget of draws is shared out among prompts: water-filling on the bounds, then largest remainders."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


def fill(weights: Float[np.ndarray, " P"], total: float, low: float, high: float) -> Float[np.ndarray, " P"]:
    """Real numbers in [low, high] that sum to `total`, proportional to `weights` wherever no bound binds.

    They are clip(level * weights, low, high) for the one level that gives the sum: a sum that grows with the level
    in straight lines between the 2 P levels at which a prompt reaches a bound.

    Args:
      weights: positive and finite.
      total: within [P * low, P * high].
      low: at least 0.
      high: at least `low`.

    Raises:
      ValueError: a total that the bounds can't give, or a weight that is not positive and finite.
    """
    weights = np.asarray(weights, np.float64)
    count = len(weights)
    if not (np.isfinite(weights).all() and (weights > 0).all()):
        raise ValueError(
            f"weights must be positive and finite; the least is {weights.min()}, the most {weights.max()}."
        )
    if not count * low <= total <= count * high:
        raise ValueError(
            f"{total:g} draws can't be shared among {count} prompts of {low:g} to {high:g} each: the sum is between "
            f"{count * low:g} and {count * high:g}."
        )
    levels = np.unique(np.concatenate([low / weights, high / weights]))
    sums = np.array([np.clip(level * weights, low, high).sum() for level in levels])
    return np.clip(np.interp(total, sums, levels) * weights, low, high)


def allocate(
    weights: Float[np.ndarray, " P"], total: int, low: int, high: int, names: Sequence[str]
) -> Int[np.ndarray, " P"]:
    """Whole numbers of draws that sum to `total` exactly, as close to `fill` as whole numbers come.

    Every prompt gets the whole part of its share; what is left goes, one each, to those with the largest remainders,
    and among equals by name. So a prompt's share does not depend on its place in the list.
    Source: arXiv 2510.04996 (Ada-Est); the largest-remainder rule is Hamilton's.

    Args:
      weights: positive and finite.
      total: within [P * low, P * high].
      low: fewest draws for a prompt.
      high: most.
      names: P distinct names.

    Raises:
      ValueError: as `fill`.
    """
    weights = np.asarray(weights, np.float64)
    # Sums depend on the order of their terms in the last bit: one order, whatever the order of the prompts.
    order = sorted(range(len(weights)), key=lambda index: (weights[index], names[index]))
    shares = fill(weights[order], total, low, high)
    # A share that rounding left just below a whole number has that number.
    whole = np.floor(shares + 1e-9).astype(np.int64)
    left = total - int(whole.sum())
    by_remainder = np.argsort(-np.round(shares - whole, 9), kind="stable")
    whole[by_remainder[:left]] += 1
    draws = np.empty_like(whole)
    draws[order] = whole
    return draws
