"""Which responses of a pool form its group, and which groups form a minibatch: the rows that reach the update.

What those rows are worth is in advantages.py; which strategy keeps which rows is in strategies.py.
"""

from collections.abc import Sequence

import numpy as np


def deal(sizes: Sequence[int], num_minibatches: int) -> list[list[int]]:
    """Groups dealt out to minibatches such that each has as many groups and about as many rows as the others.

    The largest first, to and fro (0 1 2 2 1 0 ...): no two minibatches differ by more than one group, nor by more rows
    than the largest group has. Groups without rows are left out.

    Args:
      sizes: rows of each group.
      num_minibatches: at least 1.

    Returns:
      For every minibatch the places of its groups, ascending; a minibatch may be empty where groups are few.
    """
    largest_first = sorted((place for place, size in enumerate(sizes) if size), key=lambda place: -sizes[place])
    there_and_back = [*range(num_minibatches), *reversed(range(num_minibatches))]
    minibatches: list[list[int]] = [[] for _ in range(num_minibatches)]
    for turn, place in enumerate(largest_first):
        minibatches[there_and_back[turn % (2 * num_minibatches)]].append(place)
    return [sorted(places) for places in minibatches]


def balanced_group(correct: np.ndarray, group_size: int) -> np.ndarray:
    """The draw indices of a group of n that is as evenly correct and wrong as its pool allows.

    The first n // 2 correct and the first n - n // 2 wrong responses in draw order; where one side is short, the next
    ones of the other side fill its place. No randomness, and no word on whether a stopping rule was met: an all-wrong
    pool gives its first n.
    Source: the reference program (arXiv 2510.04996); tests/golden/reference/adaptive_rounds.jsonl holds its answers.

    Args:
      correct: bool[N], verdicts in draw order.
      group_size: n.

    Returns:
      int[n], ascending, that is in draw order, as the reference lists them: not correct ones first.

    Raises:
      ValueError: the pool has fewer than n responses.
    """
    correct = np.asarray(correct, bool)
    if len(correct) < group_size:
        raise ValueError(
            f"A group of {group_size} was asked of a pool of {len(correct)} responses: draw at least as many "
            "(collection.samples_per_round) or lower collection.group_size."
        )
    right, wrong = np.flatnonzero(correct), np.flatnonzero(~correct)
    num_right = min(max(group_size // 2, group_size - len(wrong)), len(right))
    return np.sort(np.concatenate([right[:num_right], wrong[: group_size - num_right]]))
