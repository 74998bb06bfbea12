"""Allocation of a budget of draws to prompts: water-filling within bounds, then largest remainders."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


def fill(
    weights: Float[np.ndarray, " P"], total: float | int, low: float | int, high: float | int
) -> Float[np.ndarray, " P"]:
    """Returns real numbers in [low, high] that sum to `total`, proportional to `weights` where no bound binds.

    They are clip(level * weights, low, high) for the one level that gives the sum. The sum is piecewise linear in the
    level, with 2 P corners where a prompt reaches a bound. Raises ValueError where the bounds don't allow the total, or
    a weight is not positive and finite.
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
    """Returns integer numbers of draws that sum to `total` exactly, as close to `fill` as integers come.

    Every prompt gets the integer part of its share; the rest goes, one each, to the largest remainders, and among
    equals by name. So a prompt's draws do not depend on its position in the list. Names are distinct. Raises ValueError
    as `fill` does. Source: arXiv 2510.04996 (Ada-Est); the largest-remainder rule is Hamilton's.
    """
    weights = np.asarray(weights, np.float64)
    # A sum's last bit depends on the order of its terms, so the order must not be that of the prompts.
    order = sorted(range(len(weights)), key=lambda index: (weights[index], names[index]))
    shares = fill(weights[order], total, low, high)
    # A share that rounding left just below an integer counts as that integer.
    whole = np.floor(shares + 1e-9).astype(np.int64)
    left = total - int(whole.sum())
    by_remainder = np.argsort(-np.round(shares - whole, 9), kind="stable")
    whole[by_remainder[:left]] += 1
    draws = np.empty_like(whole)
    draws[order] = whole
    return draws
