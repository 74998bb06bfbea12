"""Groups of responses from pools, and minibatches of groups: the rows that reach the update.

Their advantages are in advantages.py; strategies.py decides which strategy keeps which rows.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int


def deal(sizes: Sequence[int], num_minibatches: int) -> list[list[int]]:
    """Deals groups to minibatches of about equal numbers of groups and rows; returns the indices of each, ascending.

    Groups are dealt from the largest to the smallest, in the order 0 1 2 2 1 0 ... So two minibatches differ by at most
    one group, and by at most the rows of the largest group. Groups without rows are left out; a minibatch may be empty.
    """
    largest_first = sorted((index for index, size in enumerate(sizes) if size), key=lambda index: -sizes[index])
    order = [*range(num_minibatches), *reversed(range(num_minibatches))]
    minibatches: list[list[int]] = [[] for _ in range(num_minibatches)]
    for dealt, index in enumerate(largest_first):
        minibatches[order[dealt % len(order)]].append(index)
    return [sorted(indices) for indices in minibatches]


def balanced_group(correct: Bool[np.ndarray, " N"], group_size: int) -> Int[np.ndarray, " n"]:
    """Returns the draw indices of a group of n that is as evenly correct and wrong as its pool allows.

    It has the first n // 2 correct and the first n - n // 2 wrong responses in draw order; if one side has too few, the
    next ones of the other side fill up. It depends on no randomness and no stopping rule: an all-wrong pool gives its
    first n. Source: the reference program (arXiv 2510.04996); tests/golden/reference/adaptive_rounds.jsonl holds its
    results.

    Args:
      correct: verdicts of the pool in draw order.
      group_size: n.

    Returns:
      n indices in draw order, as in the reference program.

    Raises:
      ValueError: the pool has fewer than n responses.
    """
    correct = np.asarray(correct, bool)
    if len(correct) < group_size:
        raise ValueError(
            f"A pool of {len(correct)} responses has no group of {group_size}: raise collection.samples_per_round or "
            "lower collection.group_size."
        )
    right, wrong = np.flatnonzero(correct), np.flatnonzero(~correct)
    num_right = min(max(group_size // 2, group_size - len(wrong)), len(right))
    return np.sort(np.concatenate([right[:num_right], wrong[: group_size - num_right]]))
