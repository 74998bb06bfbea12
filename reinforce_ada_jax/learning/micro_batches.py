"""Micro-batches of sequences of any length: which ones share a program's rows, in few shapes."""

from collections.abc import Iterator, Sequence

import numpy as np

# Tokens of a micro-batch, padding included; a row may be longer.
MICRO_TOKENS = 4096
SHORTEST_ROW = 16
# Numbers of rows differ by this factor, so that few shapes are compiled.
ROWS_FACTOR = 4


def row_tokens(longest: int) -> int:
    """Returns the tokens of a row with room for `longest`, a power of two."""
    return max(SHORTEST_ROW, 1 << (longest - 1).bit_length())


def num_rows(sequences: int, tokens: int, least: int) -> int:
    """Returns the rows, of `tokens` each, for `sequences` or fewer: `least` times a power of ROWS_FACTOR."""
    rows = least
    while rows < sequences and rows * tokens < MICRO_TOKENS:
        rows *= ROWS_FACTOR
    return rows


def micro_batches(lengths: Sequence[int], least_rows: int = 1) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Yields (indices of the sequences, shape of their rows), the longest first; `least_rows` divides the rows."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        tokens = row_tokens(lengths[order[0]])
        rows = num_rows(len(order), tokens, least_rows)
        chosen, order = order[:rows], order[rows:]
        yield chosen, (rows, tokens)


def padded(sequences: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Returns sequences of numbers of one type as the first rows of an array, and zeros elsewhere."""
    rows = np.zeros(shape, sequences[0].dtype)
    for row, sequence in zip(rows, sequences, strict=False):
        row[: len(sequence)] = sequence
    return rows
