"""Averages over earlier iterations, and the noise of scores that is made of them."""

import numpy as np
import pytest

from reinforce_ada_jax.collection.averages import Averages, rounds, score_squares
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict


def pool(draws, sizes):
    """The pool of draws [(correct, probabilities of the tokens), ...]."""
    responses = tuple(
        Response("p", draw, np.ones(len(tokens), np.int32), np.log(np.array(tokens, np.float32)), False)
        for draw, (_, tokens) in enumerate(draws)
    )
    verdicts = tuple(Verdict(correct, float(correct)) for correct, _ in draws)
    return Pool(Prompt("p", "", "", np.ones(1, np.int32)), responses, verdicts, len(sizes), True, None, sizes)


def test_half_of_an_average_is_from_the_last_iteration():
    averages = Averages().after({"a": (8.0, 2.0)}).after({"a": (3.0, 1.0), "b": (1.0, 1.0)})
    assert averages.mean("a", 0.0) == (4 + 3) / (1 + 1) and averages.mean("b", 0.0) == 1.0
    assert averages.mean("c", 7.0) == 7.0
    # Without an observation an average stays.
    assert averages.after({}).mean("a", 0.0) == 3.5


def test_rounds_are_counted_by_prompt():
    assert rounds([pool([(True, [0.5])], (1,)), pool([(False, [0.5])] * 4, (2, 2))]) == {"rounds": (3.0, 2.0)}


def test_squares_and_repeats_by_hand():
    pools = [
        pool([(False, [0.5, 0.2]), (True, [0.5, 0.5])], (1, 1)),
        pool([(True, [0.75]), (True, [0.25])], (2,)),
        pool([(False, [0.1])] * 2, (2,)),
    ]
    found = score_squares(pools)
    # Squares of 1 - pi, summed over tokens: 0.5 for the first success, then 1/16 and 9/16.
    assert found["square_correct"] == pytest.approx((0.5 + 10 / 16, 3), rel=1e-6)
    assert found["square_wrong"] == pytest.approx((0.25 + 0.64 + 2 * 0.81, 3), rel=1e-6)
    # The mean probability of a correct draw, 1/4 and 1/2, over the pass rates of first rounds: 0, 1 and 0.
    assert found["repeated"] == pytest.approx((0.75, 1.0), rel=1e-6)


@pytest.mark.parametrize(
    "right", [pytest.param([0.3], marks=pytest.mark.slow), [0.2, 0.1], pytest.param([0.1] * 3, marks=pytest.mark.slow)]
)
def test_the_noise_of_successes_is_that_beyond_their_mean(right):
    # Single draws until the first success, many prompts. Correct responses have these probabilities, p = 0.3.
    numbers = iter(np.random.default_rng(3).choice(len(right) + 1, 100_000, p=[*right, 0.7]).tolist())
    pools = []
    for _ in range(20_000):
        draws = []
        while not (draws and draws[-1][0]):
            number = next(numbers)
            draws.append((number < len(right), [right[number] if number < len(right) else 0.7]))
        pools.append(pool(draws, (1,) * len(draws)))
    noise = Averages().after(score_squares(pools)).score_noise()
    # Two correct responses are equal with the chance sum (pi / p)^2: 1, 5/9 and 1/3.
    assert noise.success / noise.correct == pytest.approx(1 - sum((x / 0.3) ** 2 for x in right), abs=0.03)
    assert noise.correct == pytest.approx(sum(x * (1 - x) ** 2 for x in right) / 0.3, rel=0.01)
    assert noise.wrong == pytest.approx(0.09, rel=1e-5)


def test_nothing_is_known_at_first():
    assert Averages().score_noise() == (0.0, 0.0, 0.0)
    # No prompt was solved: successes have no noise that is known.
    assert Averages().after(score_squares([pool([(False, [0.5])], (1,))])).score_noise() == pytest.approx(
        (0.0, 0.0, 0.25), rel=1e-6
    )
