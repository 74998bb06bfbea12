r"""Answers in Unicode against LaTeX in both directions, and the verdicts of Math-Verify alone beside them."""

import pytest

from reinforce_ada_jax.rewards.math_answer import grade, math_verify

# (one answer, the other, equal, does Math-Verify alone say so). It reads the signs of the first part. Most others it
# compares as texts, so that it refuses right answers. It accepts none of the wrong ones.
PAIRS = [
    ("−5", "-5", True, True),
    ("−5", "5", False, False),
    ("5−3", "2", True, True),
    ("3×4", "12", True, True),
    ("3×4", "34", False, False),
    ("6÷2", "3", True, True),
    ("2⋅3", "6", True, True),
    ("π/2", r"\frac{\pi}{2}", True, True),
    ("x ≤ 5", r"x \le 5", True, True),
    ("x ≥ 5", r"x \le 5", False, False),
    ("[1,2)∪(3,4]", r"[1,2)\cup(3,4]", True, True),
    ("±2", r"\pm 2", True, True),
    # Fractions. To Math-Verify `2\frac{1}{2}x` is x.
    ("½", r"\frac{1}{2}", True, False),
    ("½", "0.5", True, False),
    ("½", "12", False, False),
    ("½", "2", False, False),
    ("⅞", "0.875", True, False),
    ("1½", r"\frac{3}{2}", True, False),
    ("1½", "0.5", False, False),
    ("1½", r"\frac{11}{2}", False, False),
    ("3 ½", "3.5", True, False),
    ("−½", "-0.5", True, False),
    ("½x²", r"\frac{x^2}{2}", True, False),
    ("2½x", r"\frac{5x}{2}", True, False),
    ("2½x", "x", False, False),
    ("1⁄2", "0.5", True, False),
    ("¹⁄₂", "0.5", True, False),
    # Digits, letters and signs of full width, and digits of other scripts.
    ("１２", "12", True, False),
    ("１２", "21", False, False),
    ("－１．５", "-1.5", True, False),
    ("１，２３４", "1234", True, False),
    ("１，２", "12", False, False),
    ("（１， ２）", "(1,2)", True, False),
    ("（２， １）", "(1,2)", False, False),
    ("ｘ＝５", "5", True, False),
    ("𝑥²", "x^2", True, False),
    ("٤٢", "42", True, False),
    ("５０％", r"50\%", True, False),
    ("1、2、3", "1,2,3", True, False),
    # Powers, indices, roots.
    ("x²", "x^2", True, False),
    ("x²", "2x", False, False),
    ("x²", "x_2", False, False),
    ("2¹⁰", "1024", True, False),
    ("4²", "42", False, False),
    ("10⁻³", "0.001", True, False),
    ("3 × 10⁸", r"3 \times 10^8", True, False),
    ("(x+1)²", "(x+1)^2", True, False),
    ("x₁₂", "x_{12}", True, False),
    ("3x₁", "3", False, False),
    ("2√3", r"2\sqrt{3}", True, False),
    ("√2", "2", False, False),
    ("√(x+1)", r"\sqrt{x+1}", True, False),
    ("√3/2", r"\frac{\sqrt3}{2}", True, False),
    ("√12", r"\sqrt{1}2", False, False),
    ("∛8", "2", True, False),
    # Two meanings: the root of 2x, or x times the root of 2.
    ("√2x", r"\sqrt{2x}", False, False),
    ("√2x", r"\sqrt{2}x", False, False),
    # Infinity, sets, dashes, spaces, characters without width.
    ("(−∞, 3]", r"(-\infty,3]", True, False),
    ("(−∞, 3]", r"(-\infty,3)", False, False),
    ("x ∈ ℝ", r"x\in\mathbb{R}", True, False),
    ("–5", "-5", True, False),
    ("3–5", "-2", False, False),
    ("12\u2009345", "12345", True, False),
    ("12\u202f345", "12345", True, False),
    ("12\u3000345", "12345", True, False),
    ("12\u200b", "12", True, False),
    ("③", "3", False, False),
]


@pytest.mark.parametrize(("one", "other", "equal", "_"), PAIRS)
def test_unicode_is_read(one, other, equal, _):
    assert grade(rf"\boxed{{{one}}}", other).correct == equal
    assert grade(rf"\boxed{{{other}}}", one).correct == equal


@pytest.mark.parametrize(("one", "other", "_", "theirs"), PAIRS)
def test_verdicts_of_math_verify(one, other, _, theirs):
    library = math_verify()
    parsed = [library.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (other, one)]
    assert library.verify(*parsed, timeout_seconds=None) == theirs
