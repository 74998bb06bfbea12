"""Balanced groups. The reference program's own answers are in test_simulate.py, behind the rounds they come from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reinforce_ada_jax.collection.groups import balanced_group, deal


def group(bits: str, group_size: int) -> list[int]:
    return balanced_group(np.array([bit == "1" for bit in bits]), group_size).tolist()


def test_first_of_each_side_in_draw_order():
    # Correct at 2, 7, 8; wrong at 0, 1, 3, ... Two of each, the first ones: {2, 7} and {0, 1}.
    # Correct ones first would list [2, 7, 0, 1]; the last ones of each side would be [5, 6, 7, 8].
    assert group("001000011", 4) == [0, 1, 2, 7]


def test_an_odd_place_goes_to_the_wrong_side():
    # n // 2 = 1 correct and n - n // 2 = 2 wrong. Rounding up would give [0, 1, 2].
    assert group("1100", 3) == [0, 2, 3]


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        ("0000100000", [0, 1, 2, 4]),  # one correct: three wrong fill up; without filling the group has 3
        ("1111011111", [0, 1, 2, 4]),  # one wrong: three correct fill up
        ("00000000", [0, 1, 2, 3]),
        ("11111111", [0, 1, 2, 3]),
        ("0101", [0, 1, 2, 3]),  # no more than the group
    ],
)
def test_a_short_side_is_filled_from_the_other(bits, expected):
    assert group(bits, 4) == expected


def test_too_small_a_pool_is_refused():
    with pytest.raises(ValueError, match="pool of 3 responses has no group of 4"):
        group("101", 4)


@given(correct=st.lists(st.booleans(), min_size=1, max_size=40), data=st.data())
def test_as_even_as_the_pool_allows(correct, data):
    group_size = data.draw(st.integers(1, len(correct)))
    correct = np.array(correct)
    kept = balanced_group(correct, group_size)
    assert len(kept) == group_size
    assert np.all(np.diff(kept) > 0)
    num_right = int(correct[kept].sum())
    # Written another way: off n // 2 only as far as one side is short.
    short_right = max(0, group_size // 2 - correct.sum())
    short_wrong = max(0, group_size - group_size // 2 - (~correct).sum())
    assert num_right == group_size // 2 - short_right + short_wrong
    # No response is passed over for a later one of its side.
    for side in (True, False):
        of_side = np.flatnonzero(correct == side)
        kept_of_side = kept[correct[kept] == side]
        assert kept_of_side.tolist() == of_side[: len(kept_of_side)].tolist()


def test_deal_goes_back_and_forth_from_the_largest_group():
    # Largest first, back and forth over three minibatches: 9 8 7 | 6 5 4 | 3; the empty one at index 2 is left out.
    sizes = [4, 9, 0, 7, 3, 8, 5, 6]
    assert deal(sizes, 3) == [[0, 1, 4], [5, 6], [3, 7]]


def test_deal_of_equal_groups_is_even():
    assert deal([4] * 8, 2) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert deal([4] * 5, 1) == [[0, 1, 2, 3, 4]]
    assert deal([0, 0], 2) == [[], []]


@given(st.lists(st.integers(0, 32), max_size=40), st.integers(1, 5))
def test_deal_is_fair_and_complete(sizes, num_minibatches):
    minibatches = deal(sizes, num_minibatches)
    assert sorted(index for indices in minibatches for index in indices) == [i for i, size in enumerate(sizes) if size]
    rows = [sum(sizes[index] for index in indices) for indices in minibatches]
    assert max(rows) - min(rows) <= max(sizes, default=0)
    counts = [len(indices) for indices in minibatches]
    assert max(counts) - min(counts) <= 1
