"""avg@k, pass@k and their standard errors by hand and by counting all draws of k."""

import itertools
import math

import numpy as np
import pytest

from reinforce_ada_jax.evaluation import scores
from reinforce_ada_jax.evaluation.response_store import GradedResponse
from reinforce_ada_jax.types import Verdict

NAN = pytest.approx(math.nan, nan_ok=True)


def problem(correct: str, truncated: int = 0, reasons: str = "") -> list[GradedResponse]:
    """A problem's responses from "1001": which are correct; the first few are truncated, and have these reasons."""
    words = {"n": "no_answer", "t": "timeout", "l": "too_long"}
    padded = reasons.ljust(len(correct))
    return [
        GradedResponse(10 * (draw + 1), draw < truncated, Verdict(digit == "1", float(digit), words.get(reason, "")))
        for draw, (digit, reason) in enumerate(zip(correct, padded, strict=True))
    ]


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_any_and_all_of_k_are_shares_of_the_draws_of_k(num_samples):
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        correct = [index < num_correct for index in range(num_samples)]
        draws = list(itertools.combinations(correct, k))
        assert scores.pass_at_k(num_correct, num_samples, k) == pytest.approx(np.mean([any(x) for x in draws]))
        assert scores.all_correct_at_k(num_correct, num_samples, k) == pytest.approx(np.mean([all(x) for x in draws]))


def test_a_small_share_is_not_lost():
    # 1 / 10 and 2^-60: the difference of 1 and 1 - 2^-60 is 0, and 1 - 9 / 10 is 0.09999999999999998.
    assert scores.pass_at_k(1, 10, 1) == 0.1
    assert scores.pass_at_k(1, 2**60, 1) == 2.0**-60


def test_statistics_by_hand():
    # One and three of four are correct: averages 1/4 and 3/4, standard deviation sqrt(1/8), error sqrt(1/8 / 2) = 1/4.
    # Of the six pairs three hold the one correct response, and all six one of the three: (1/2 + 1) / 2 = 3/4. No pair
    # is correct in the first, and three of six in the second: 1/4.
    assert scores.statistics([problem("0100", truncated=3, reasons="nnlt"), problem("1101", reasons="n")]) == {
        "problems": 2,
        "avg": 0.5,
        "avg_standard_error": pytest.approx(0.25),
        "pass_at_1": 0.5,
        "pass_at_2": 0.75,
        "pass_at_4": 1.0,
        "all_correct_at_1": 0.5,
        "all_correct_at_2": 0.25,
        "all_correct_at_4": 0.0,
        "truncated_share": 3 / 8,
        "no_answer_share": 3 / 8,
        "failure_share": 1 / 8,
        "tokens_mean": 25.0,
    }


def test_one_problem_has_no_error_and_the_samples_are_a_k_too():
    result = scores.statistics([problem("010100")])
    assert "avg_standard_error" not in result
    assert [key for key in result if key.startswith("pass")] == ["pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]


def test_averages_by_label():
    """Averages are those of the problems with a label."""
    labels = {
        "a": {"level": "5", "source": "x"},
        "b": {"level": "2", "source": "x"},
        "c": {"level": "5", "source": "x"},
        "d": {},
    }
    drawn = {name: problem(correct) for name, correct in zip("abcd", ["01", "11", "00", "11"], strict=True)}
    # A single source says nothing, and 17 values of a label are no table.
    assert scores.by_label(labels, drawn) == {"level": {"2": (1, 1.0), "5": (2, 0.25)}}
    many = {str(number): {"type": str(number)} for number in range(17)}
    assert scores.by_label(many, {name: problem("1") for name in many}) == {}


def test_accuracy_by_initial_difficulty():
    # Ends of ranges belong to the lower one; 0 and 1 are ranges of their own, and 0.01 and 0.99 belong to neither.
    initial = {"a": 0.0, "b": 0.25, "c": 0.01, "d": 0.26, "e": 0.99, "f": 1.0, "g": 0.75}
    drawn = {
        name: problem(correct)
        for name, correct in {"a": "01", "b": "11", "c": "00", "d": "10", "e": "11", "f": "10", "g": "11"}.items()
    }
    found = scores.by_difficulty(initial, drawn | {"unknown": problem("11")})
    assert found == [
        ("0", 1, 0.0, 0.5, NAN),
        ("0_0.25", 2, pytest.approx(0.13), 0.5, pytest.approx(0.5)),  # 1 and 0: deviation sqrt(1/2), over sqrt(2)
        ("0.25_0.5", 1, 0.26, 0.5, NAN),
        ("0.5_0.75", 1, 0.75, 1.0, NAN),
        ("0.75_1", 1, 0.99, 1.0, NAN),
        ("1", 1, 1.0, 0.5, NAN),
    ]
    assert scores.difficulty_statistics(found[:2]) == {
        "avg_initial_0": 0.5, "avg_initial_0_0.25": 0.5, "problems_initial_0": 1, "problems_initial_0_0.25": 2,
    }  # fmt: skip
    assert scores.by_difficulty({}, drawn) == []


def test_the_weighted_average():
    # (3 * 0.5 + 1 * 0.1) / 4 = 0.4; the error sqrt((3 * 0.1)^2 + (1 * 0.4)^2) / 4 = 0.125.
    results = {
        "a": {"problems": 3, "avg": 0.5, "avg_standard_error": 0.1},
        "b": {"problems": 1, "avg": 0.1, "avg_standard_error": 0.4},
    }
    assert scores.weighted(results) == (4, pytest.approx(0.4), pytest.approx(0.125))
    del results["b"]["avg_standard_error"]  # of one problem
    assert scores.weighted(results) == (4, pytest.approx(0.4), NAN)
