"""A budget of draws is shared over prompts within their bounds, exactly, in whatever order they come."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_ada_jax.collection.allocation import allocate, fill


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


# ---- real numbers ----------------------------------------------------------------------------------------------------


def test_proportional_where_no_bound_binds():
    # 2 : 5 : 1 of 24 are 6, 15 and 3.
    np.testing.assert_allclose(fill(np.array([2.0, 5.0, 1.0]), 24, 2, 32), [6, 15, 3], rtol=1e-14)


def test_what_a_bound_takes_the_others_share_in_proportion():
    # 4 : 25 : 1 of 24 would give the last 0.8. It has 2, and 22 are shared 4 : 25. Cutting 0.8 up to 2 alone would
    # sum to 25.2; scaling that back would leave the last below its bound.
    np.testing.assert_allclose(fill(np.array([4.0, 25.0, 1.0]), 24, 2, 32), [88 / 29, 550 / 29, 2], rtol=1e-14)
    # Both bounds: the first at 10, the last at 2, and the middle one has what is left.
    np.testing.assert_allclose(fill(np.array([100.0, 5.0, 1.0]), 18, 2, 10), [10, 6, 2], rtol=1e-14)


def test_the_ends():
    """Weights decide nothing where all have the least or the most draws."""
    weights = np.array([3.0, 1.0])
    np.testing.assert_array_equal(fill(weights, 4, 2, 32), [2, 2])
    np.testing.assert_array_equal(fill(weights, 64, 2, 32), [32, 32])
    np.testing.assert_array_equal(fill(weights, 6, 3, 3), [3, 3])
    # Between two levels where nothing is free: any level gives the same.
    np.testing.assert_allclose(fill(np.array([1.0, 1000.0]), 34, 2, 32), [2, 32], rtol=1e-14)


positive = st.floats(1e-3, 1e3)


@st.composite
def problems(draw, most_prompts=12):
    weights = draw(st.lists(positive, min_size=1, max_size=most_prompts))
    low = draw(st.integers(0, 4))
    high = low + draw(st.integers(0, 30))
    return np.array(weights), draw(st.integers(len(weights) * low, len(weights) * high)), low, high


@given(problems())
def test_fill_is_the_one_level_that_gives_the_sum(problem):
    weights, total, low, high = problem
    shares = fill(weights, total, low, high)
    assert shares.sum() == pytest.approx(total, abs=1e-9 * max(total, 1))
    assert ((shares >= low) & (shares <= high)).all()
    # Another way to find it: the sum grows with the level, so halve the interval.
    below, above = 0.0, (high + 1) / weights.min()
    for _ in range(200):
        middle = (below + above) / 2
        if np.clip(middle * weights, low, high).sum() < total:
            below = middle
        else:
            above = middle
    np.testing.assert_allclose(shares, np.clip(above * weights, low, high), rtol=1e-7, atol=1e-7)


# ---- whole numbers ---------------------------------------------------------------------------------------------------


def test_largest_remainders():
    # Shares 2.5, 1.75, 1.75: whole parts 2, 1, 1, and two more for the two remainders of 0.75.
    assert allocate(np.array([10.0, 7.0, 7.0]), 6, 0, 6, names(3)).tolist() == [2, 2, 2]
    # 8/3 each; rounding each to the nearest would spend 9.
    assert allocate(np.ones(3), 8, 2, 32, names(3)).tolist() == [3, 3, 2]


def test_among_equals_the_name_decides_not_the_place():
    weights, prompts = np.ones(3), ["b", "c", "a"]
    assert allocate(weights, 8, 2, 32, prompts).tolist() == [3, 2, 3]
    assert allocate(weights, 8, 2, 32, prompts[::-1]).tolist() == [3, 2, 3]


@settings(max_examples=300)
@given(problems(), st.data())
def test_the_sum_is_exact_and_the_order_of_prompts_nothing(problem, data):
    weights, total, low, high = problem
    if data.draw(st.booleans()):  # ties, and remainders that are equal
        weights = np.round(weights) + 1
    draws = allocate(weights, total, low, high, names(len(weights)))
    assert draws.dtype == np.int64
    assert draws.sum() == total
    assert ((draws >= low) & (draws <= high)).all()
    shares = fill(weights, total, low, high)
    assert (np.abs(draws - shares) < 1 + 1e-6).all()
    # Whose share is larger gets no less.
    assert (draws[:, None] <= draws)[shares[:, None] < shares - 1e-6].all()
    order = data.draw(st.permutations(range(len(weights))))
    again = allocate(weights[list(order)], total, low, high, [f"p{number}" for number in order])
    assert again.tolist() == draws[list(order)].tolist()


@settings(max_examples=60)
@given(st.lists(positive, min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 5), st.data())
def test_no_whole_numbers_are_closer(weights, low, width, data):
    """Largest remainders are, of all whole numbers with that sum, nearest to the shares in the sum of squares."""
    weights, high = np.array(weights), low + width
    total = data.draw(st.integers(len(weights) * low, len(weights) * high))
    shares = fill(weights, total, low, high)
    candidates = np.array(list(itertools.product(range(low, high + 1), repeat=len(weights))))
    candidates = candidates[candidates.sum(1) == total]
    best = np.square(candidates - shares).sum(1).min()
    found = np.square(allocate(weights, total, low, high, names(len(weights))) - shares).sum()
    assert found <= best + 1e-6


def test_a_published_iteration_spends_its_budget():
    # 512 prompts, 8 each on average: not one draw more or less, though no share is whole.
    weights = 1 / np.sqrt(np.random.default_rng(0).beta(0.6, 1.2, 512) + 0.01)
    draws = allocate(weights, 4096, 2, 32, names(512))
    assert draws.sum() == 4096
    assert draws.min() >= 2 and draws.max() <= 32


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [5, 97])
def test_a_total_out_of_reach_is_refused(total):
    with pytest.raises(ValueError, match=f"{total} draws can't be shared among 3 prompts of 2 to 32.*between 6 and 96"):
        allocate(np.ones(3), total, 2, 32, names(3))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan])
def test_weights_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="weights must be positive and finite"):
        fill(np.array([1.0, bad]), 8, 2, 32)
