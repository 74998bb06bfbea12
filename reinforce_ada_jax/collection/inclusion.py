"""Unequal-probability samples without repetition: inclusion probabilities, and the systematic sample that has them.

A sample of n out of N prompts that includes prompt x with probability pi_x, and counts it n / (N pi_x) times, estimates
the mean over all N without bias (Horvitz and Thompson, 1952):

    E[1/n sum over the sample of n / (N pi_x) g_x] = 1/N sum over all of g_x

Noise times cost is least where pi_x is proportional to sqrt(v_x / c_x), for E|g_x|^2 = v_x and the cost c_x: this
minimises (sum of v_x / pi_x) (sum of c_x pi_x), by Cauchy's inequality.
"""

import numpy as np
from jaxtyping import Float, Int


def relative_probabilities(
    sizes: Float[np.ndarray, " N"], shares: Float[np.ndarray, " N"], uniform: float
) -> Float[np.ndarray, " N"]:
    """Returns probabilities q relative to equal ones: (1 - uniform) sizes / mean + uniform.

    `shares` are those of the kinds of prompts in the data; their sum is 1. Where all sizes are 0, q is 1.
    """
    mean = float(shares @ sizes)
    return (1.0 - uniform) * (sizes / mean) + uniform if mean > 0 else np.ones(len(sizes))


def inclusion_probabilities(sizes: Float[np.ndarray, " N"], count: int, uniform: float) -> Float[np.ndarray, " N"]:
    """Returns pi_x = min(1, a multiple of q_x), for the q of `relative_probabilities`, with the sum `count`.

    No pi_x is below uniform * count / N, so no prompt counts more than 1 / uniform times.
    """
    q = relative_probabilities(sizes, np.full(len(sizes), 1.0 / len(sizes)), uniform)
    certain = np.full(len(sizes), count == len(sizes))
    while True:  # a prompt whose pi would exceed 1 is certain, and the others share the rest
        pi = np.ones(len(sizes))
        pi[~certain] = (count - certain.sum()) * q[~certain] / q[~certain].sum()
        if (pi[~certain] < 1.0).all():
            return pi
        certain |= pi >= 1.0


def systematic_sample(
    pi: Float[np.ndarray, " N"], order: Int[np.ndarray, " N"], uniform: float
) -> Int[np.ndarray, " n"]:
    """Returns the indices of a sample that includes x with probability pi_x in (0, 1], without repetition.

    Intervals of the lengths pi_x are placed side by side in the given order. Their sum is a whole number. The
    points `uniform`, `uniform` + 1, ... select the intervals that they lie in (Madow, 1949). `uniform` is random in
    [0, 1).
    """
    certain, others = order[pi[order] >= 1.0], order[pi[order] < 1.0]
    if not len(others):
        return certain
    ends = np.cumsum(pi[others])
    points = uniform + np.arange(round(float(ends[-1])))  # the last end is a whole number, up to rounding
    return np.concatenate([certain, others[np.searchsorted(ends[:-1], points, side="right")]])
