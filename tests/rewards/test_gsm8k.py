r"""The number that a response ends in."""

import pytest

from reinforce_ada_jax.rewards.gsm8k import MAX_DIGITS, final_number, grade
from reinforce_ada_jax.types import Verdict

FINAL = [
    (r"2 + 3 = 5, so \boxed{5}", "5"),
    (r"\boxed{\$1{,}450.50}", "1450.50"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"\boxed{6 \cdot 3 = 18}", "18"),
    (r"\boxed{x \approx 18.5}", "18.5"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{-7}", "-7"),
    (r"\boxed{- 7}", "-7"),
    ("#### - 7", "-7"),
    (r"\boxed{1\,450}", "1450"),
    (r"\boxed{1,\!450}", "1450"),
    ("#### 1 450", "1450"),
    (r"\boxed{3 45}", None),
    # More than one number, or none, is no answer; what stands outside of the box doesn't count.
    (r"2 \boxed{\frac{1}{2}}", None),
    (r"2 \boxed{}", None),
    # The data set's own mark.
    ("He pays 3 * 4 = 12 dollars.\n#### 12", "12"),
    ("#### 1,234\nThat was problem 7.", "1234"),
    ("#### unknown", None),
    # Neither: the last number.
    ("She needs 3 boxes of 12, which makes 36.", "36"),
    ("It is $-5.", "-5"),
    ("between 10-15", "15"),
    ("2,5", "5"),
    (".5", "0.5"),
    ("no number", None),
    ("", None),
]


@pytest.mark.parametrize(("response", "number"), FINAL)
def test_final_number(response, number):
    """The final number of a response is found."""
    assert final_number(response) == number


def test_grade_is_exact():
    """Numbers are compared exactly."""
    assert grade("#### 72.00", "72") == Verdict(True, 1.0)
    assert grade(r"\boxed{1450}", "1,450") == Verdict(True, 1.0)
    assert grade("It is 72.5", "72") == Verdict(False, 0.0)
    assert grade("It is -72", "72") == Verdict(False, 0.0)
    assert grade("#### 18", "$18") == Verdict(True, 1.0)
    assert grade("#### 18", "18%") == Verdict(True, 1.0)
    assert grade("#### 0.5", "1/2") == Verdict(True, 1.0)
    assert grade(r"\boxed{- 5}", "5") == Verdict(False, 0.0)
    # In double precision the two are equal.
    assert grade("10000000000000001", "10000000000000000") == Verdict(False, 0.0)
    assert grade("many", "72") == Verdict(False, 0.0, "no_answer")
    assert grade("7" * (MAX_DIGITS + 1), "72") == Verdict(False, 0.0, "too_long")
    assert grade("7" * 100_000, "72") == Verdict(False, 0.0, "too_long")


def test_an_answer_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the answer 'z1SW' is not one number"):  # or 1 would be right
        grade("#### 1", "z1SW")
    with pytest.raises(ValueError, match="the answer '5 or 6' is not one number, which reward.kind=gsm8k needs"):
        grade("#### 5", "5 or 6")
