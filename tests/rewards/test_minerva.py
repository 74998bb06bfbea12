r"""Numbers within one per cent; mathematics elsewhere."""

import pytest

from reinforce_ada_jax.rewards.minerva import close, grade, number
from reinforce_ada_jax.types import Verdict

NUMBERS = [
    ("4.5e33", 4.5e33),
    (r"4.5 \times 10^{33}", 4.5e33),
    (r"4.5\cdot10^33 \text{ erg/s}", 4.5e33),
    ("10^{-8}", 1e-8),
    ("-10^5", -1e5),
    ("15,000", 15000.0),
    (r"15{,}000 \mathrm{~K}", 15000.0),
    ("+2", 2.0),
    (".5", 0.5),
    ("5.", 5.0),
    (r"5\%", 0.05),
    (r"v_{0} = 20 \, \mathrm{m/s}^{2}", 20.0),
    (r"x \approx 1.41", 1.41),
    (r"\sqrt{2} \approx 1.41", 1.41),
    ("-1./3", -1 / 3),
    (r"-\frac{1}{3}", -1 / 3),
    (r"1\frac{1}{2}", 1.5),
    ("np.sqrt{4}", 2.0),
    # No numbers: an equation whose right side is one, a unit that is part of the answer, a pair, nothing.
    ("3x=6", None),
    (r"y^{\prime}+r y=0", None),
    (r"\frac{37}{4} m", None),
    (r"2 \tau", None),
    ("1, 2", None),
    ("2i", None),
    (r"\frac{1}{0}", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_number(text, value):
    """A text with a number, an exponent or a unit is that number."""
    assert number(text) == (None if value is None else pytest.approx(value, rel=1e-12))


def test_close_is_one_per_cent_of_the_mean():
    assert close(100.0, 100.99)
    assert not close(100.0, 101.1)
    assert close(-100.0, -100.99)  # without absolute values the bound would be negative
    assert not close(-100.0, 100.0)
    assert close(1e-20, 1.009e-20)  # an absolute tolerance would let 0 pass for both
    assert not close(1e-20, 0.0)
    assert close(0.0, 0.0)


def test_grade():
    """Numbers are compared to one per cent, other answers as mathematics."""
    assert grade(r"\boxed{2.2 \times 10^{-3} \text{ m}}", "2.197e-3") == Verdict(True, 1.0)
    assert grade(r"\boxed{2.3 \times 10^{-3}}", "2.197e-3") == Verdict(False, 0.0)
    # Math-Verify alone reads e as Euler's number, and rounds to six places.
    assert grade(r"\boxed{3 \times 10^{-8}}", "1e-8") == Verdict(False, 0.0)
    # Not numbers: as for mathematics.
    assert grade(r"\boxed{\frac{A e^{i t}}{2}}", r"\frac{A}{2} e^{i t}").correct
    assert not grade(r"\boxed{\frac{1}{2}}", r"\frac{A}{2}").correct
    assert grade(r"\boxed{\arcsin(10/13)}", "np.arcsin(10/13)").correct
    assert grade("it is 5", "5") == Verdict(False, 0.0, "no_answer")
    assert grade(r"\boxed{%s}" % ("5" * 5000), "5") == Verdict(False, 0.0, "too_long")
