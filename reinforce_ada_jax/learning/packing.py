"""Packing: which responses share a row of the learner's batches, and which are left out of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class RowLayout(NamedTuple):
    """Room of a row of a batch.

    With `shares_prompts` a row has the tokens of a prompt once for all its responses to it, all but the last one, which
    each response begins with (Prefix Grouper, arXiv 2506.05433). Log-probabilities and gradients stay the same.
    """

    per_row: int = 1  # most responses
    tokens: int = 0  # most tokens; 0: those of the longest prompt and the longest response
    shares_prompts: bool = False

    def row_tokens(self, longest: int) -> int:
        """Returns the tokens of a row, if a prompt and a response have at most `longest` together."""
        return max(self.tokens, longest)

    def num_rows(self, sequences: int, longest: int, multiple: int) -> int:
        """Returns the rows, a multiple of `multiple`, with room for these sequences of `longest` tokens each."""
        in_row = min(self.per_row, self.row_tokens(longest) // longest)
        return multiple * -(-sequences // (multiple * in_row))


class SharedPrompts(NamedTuple):
    """Prompts of the sequences that are to be packed."""

    numbers: Int[np.ndarray, " N"]  # of each sequence's prompt; sequences of one prompt have the same
    tokens: Int[np.ndarray, " N"]  # of them which a row has once for all sequences of the prompt

    def of(self, indices: Sequence[int]) -> "SharedPrompts":
        """Returns those of some sequences."""
        chosen = np.asarray(indices, np.int64)
        return SharedPrompts(self.numbers[chosen], self.tokens[chosen])


def pack(lengths: Sequence[int], row_tokens: int, per_row: int, shared: SharedPrompts | None = None) -> list[list[int]]:
    """Assigns sequences, by their index, to rows: the longest first, each to the first row that has room for it.

    Each sequence has at most `row_tokens` tokens; `lengths` count its prompt. With `per_row` 1 each has a row of its
    own, in the order given. Where `per_row` sets no limit and no prompts are `shared`, first-fit decreasing needs at
    most 11/9 of the fewest possible rows, and one more (Yue, 1991). Where they are, the sequences of a prompt follow
    each other, and a row that has their prompt comes before others.
    """
    if per_row == 1:
        return [[index] for index in range(len(lengths))]
    falling = -np.asarray(lengths, np.int64)
    keys: tuple[np.ndarray, ...] = (falling,)
    if shared is not None and len(lengths):
        longest = np.zeros(shared.numbers.max() + 1, np.int64)
        np.minimum.at(longest, shared.numbers, falling)
        keys = falling, shared.numbers, longest[shared.numbers]
    return _first_fit(np.lexsort(keys).tolist(), lengths, row_tokens, per_row, len(lengths), shared)


def _first_fit(
    order: Sequence[int],
    lengths: Sequence[int],
    row_tokens: int,
    per_row: int,
    max_rows: int,
    shared: SharedPrompts | None,
) -> list[list[int]]:
    """Assigns sequences, in order, each to the first row that has room for it; those that fit nowhere are left out."""
    rows: list[list[int]] = []
    room, free = np.full(max_rows, row_tokens), np.full(max_rows, per_row)
    has_prompt = np.zeros(max_rows, bool)
    of_prompt: dict[int, np.ndarray] = {}
    for index in order:
        needed = np.full(max_rows, lengths[index])
        if shared is not None:
            has_prompt = of_prompt.setdefault(int(shared.numbers[index]), np.zeros(max_rows, bool))
            needed -= np.where(has_prompt, shared.tokens[index], 0)
        fits = (room >= needed) & (free > 0)
        if (fits & has_prompt).any():
            fits &= has_prompt
        row = int(np.argmax(fits)) if max_rows else 0
        if not fits[row : row + 1].any():
            continue
        room[row] -= needed[row]
        free[row] -= 1
        if shared is not None:
            has_prompt[row] = True
        rows += [[]] * (row == len(rows))
        rows[row] = [*rows[row], index]
    return rows


def pack_without_zeros(
    lengths: Sequence[int],
    is_zero: Bool[np.ndarray, " N"],
    row_tokens: int,
    per_row: int,
    micro_rows: int,
    shared: SharedPrompts | None = None,
) -> list[list[int]]:
    """Assigns sequences to rows as `pack` does, but leaves out those that are zero where this saves a micro-batch.

    Zero sequences contribute nothing to the gradient. They fill free room in the micro-batches that the others need, in
    the order given. This costs no time, and metrics take these as a sample of all zero sequences.
    """
    whole = pack(lengths, row_tokens, per_row, shared)
    others = np.flatnonzero(~is_zero).tolist()
    of_others = None if shared is None else shared.of(others)
    needed = pack([lengths[index] for index in others], row_tokens, per_row, of_others)
    max_rows = micro_rows * -(-len(needed) // micro_rows)
    if len(whole) <= max_rows:
        return whole
    order = [others[index] for row in needed for index in row] + np.flatnonzero(is_zero).tolist()
    return _first_fit(order, lengths, row_tokens, per_row, max_rows, shared)
