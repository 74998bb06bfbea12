"""Which responses of a pool form its group: the rows that reach the update.

What those rows are worth is in advantages.py; which strategy keeps which rows is in strategies.py.
"""

import numpy as np


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
