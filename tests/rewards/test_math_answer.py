r"""Boxes and answers. The pairs of COMPARED are excerpts of other projects' tests: OpenBMB/OlympiadBench,
hendrycks/math, QwenLM/Qwen2.5-Math (MIT) and NVIDIA/NeMo-Skills, huggingface/Math-Verify (Apache-2.0).
"""

import os
import subprocess
import sys
import time

import pytest

from reinforce_ada_jax.rewards.math_answer import MAX_BOXED_LENGTH, grade, last_boxed
from reinforce_ada_jax.types import Verdict

BOXES = [
    (r"\boxed{1}", "1"),
    (r"a \boxed{1} b \boxed{2} c", "2"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\boxed{4}}", "4"),
    (r"\boxed{1}{2}", "1"),
    (r"$\{1,2\}$ so \boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{}", ""),
    (r"\boxed{a}\boxed{}", ""),
    (r"\mathbf{\boxed{6}}", "6"),
    # Braces outside need not balance. An extractor that counts from the beginning of the text gives "" here.
    (r"x } \boxed{1}", "1"),
    (r"{ \boxed{1}", "1"),
    (r"set \} typo \boxed{5}", "5"),
    # The last one that closes: a truncated second box does not undo the first.
    (r"\boxed{1} then \boxed{2", "1"),
    (r"\boxed{1} then \boxed{x \boxed{2}", "2"),
    # Not boxes.
    ("", None),
    (r"\boxed{1", None),
    (r"\boxed 7", None),
    (r"\fbox{9}", None),
    ("boxed{6}", None),
    ("<answer>5</answer>", None),
]


@pytest.mark.parametrize(("text", "content"), BOXES)
def test_last_boxed(text, content):
    """The content of the last box is found."""
    assert last_boxed(text) == content


def test_last_boxed_is_linear():
    # 100,000 boxes that never close; a scan from each of them to the end would be 6e10 characters.
    start = time.perf_counter()
    assert last_boxed(r"\boxed{3}" + r"\boxed{" * 100_000) == "3"
    assert time.perf_counter() - start < 5.0


COMPARED = [
    # (answer, boxed text, equal)
    ("x=1", "1", True),
    ("x=1", "x=2", False),
    ("a_{n} =2 n    +1", "2n+    1", True),
    ("(2,1),(3,1)", "(3,1),(2,1)", True),
    ("x^2+y^2=1", "x^{2}=1-y^2", True),
    ("x^2+y^2=1", "x^{2}-y^{2}=1", False),
    ("0.64N", "0.6400 N", True),
    ("0.6", r"\frac{3}{5}", True),
    ("0.6", r"60\%", True),
    (r"7.8\times 10^2", "780", True),
    (r"10\text{ units}", "10 ", True),
    (r"10\text{ units}", "100 ", False),
    (r"\$10", "10", True),
    ("10", r"\$10", True),
    (r"\left(x-2\right)\left(x+2\right)", "(x-2)(x+2)", True),
    (r"\frac34i", r"\frac{3}{4}i", True),
    (r"\tfrac83", r"\frac{8}{3}", True),
    ("1/2", "0.5", True),
    ("A", r"\textbf{A}", True),
    (".185", "0.185", True),
    ("odd", r"\text{oddd}", False),
    (r"\sqrt{67},-\sqrt{85}", r"\sqrt{67}", False),
    ("10{,}000", "9999", False),
    ("50,625", "50625", True),
    ("7425000", "7,425,000", True),
    ("33.3", r"\frac{100}{3}", False),
    (r"\frac{1}{12}", "0.0833333333333333", True),
    (r"1\frac{1}{4}", r"\frac{5}{4}", True),
    (r"x \in [-2,7]", r"-2 \le x \le 7", True),
    ("185", "185\\", True),  # Math-Verify reads no number before a control space
    ("185", r"185\ ", True),
    # The gold may bring its own delimiters, and so may what stands in the box.
    (r"$\frac{1}{2}$", "0.5", True),
    (r"\boxed{[-4/2, 0.5]}", r"[-2, \frac{1}{2}]", True),
    ("9", r"the answer is $9$", True),
    # Not mathematics: the strings decide.
    (r"\text{Yes}", r"\text{yes}", True),
    (r"\text{Yes}", r"\text{no}", False),
]


@pytest.mark.parametrize(("answer", "boxed", "equal"), COMPARED)
def test_comparison(answer, boxed, equal):
    """Equal mathematics is right however it is written."""
    assert grade(rf"So it is $\boxed{{{boxed}}}$.", answer) == Verdict(equal, float(equal))


REPAIRED = [
    # What ends an answer without being part of it.
    ("5", "5.", True),
    ("12", r"12~", True),
    (r"\frac{1}{3}", r"\frac{1}{3}\ ", True),
    ("7:15 p.m.", "7:15 p.m", True),
    ("1,2,3...", "1,2,3", False),  # the ellipsis stays
    # Groups of digits, an exponent as programs write it, the sign of degrees, the letter of a choice.
    *[("12345", written, True) for written in (r"12\,345", "12 345", r"12\ 345", "12~345", r"12\;345", "12\u202f345")],
    ("(1000, 2)", "(1 000, 2)", True),
    ("12345.5", "12 345.5", True),
    ("12345", "12 34 5", False),
    ("1000", "1 0000", False),
    ("1, 234", "1234", False),
    ("300000", "3e5", True),
    ("0.0015", "1.5e-3", True),
    ("30000", "3e5", False),
    ("2e", "2e", True),
    ("2e^{5}", "2e5", False),
    ("90", "90°", True),
    (r"90^\circ", "90°", True),
    ("5", r"\textbf{(C)}\ 5", True),
    (r"\text{(C)} 5", "5", True),
    ("5", r"\textbf{(C)}\ 6", False),
    (r"\text{(C)}", "C", True),
    ("5", r"\text{(5)} 6", False),
    (r"\textbf{(C)}\ 5", r"\textbf{(D)}\ 5", False),
    ("C", r"\text{(A)}, \text{(C)}", False),
    ("5", r"\textbf{(A)},5", False),
    ("D", r"\text{(A)} D", False),
    (r"\text{(A)},\text{(C)}", r"\text{(C)}", False),
    ("-1", r"\text{(A)}-1", False),
    ("2e-1", "2e - 1", True),
    ("2e-2", "0.02", False),
    (r"2^3\,100", "800", True),
    ("90", "90^°", True),
    ("90", "90^{°}", True),
    (r"\left\{ x \right.", "x", False),
    # A word as an index.
    (r"V_{\text{min}}=3a", r"V_{\min }=3a", True),
    (r"V_{\min}=3a", r"3 a", True),
    (r"T_{\mathrm{max}}", r"T_\max", True),
    (r"T_{max}", r"T_{\min}", False),
    # A letter with an index is a variable. Math-Verify read 3 E_{1} as 3, and I_{0} as the square root of -1.
    (r"3 E_{1}", "3", False),
    (r"3 E_{1}", r"E_1 \cdot 3", True),
    (r"3 E_{1}", r"3 E_{2}", False),
    (r"\frac{I_{0}}{2}", r"\frac{i}{2}", False),
    (r"I_{0}=\frac{V}{R}", r"\frac{V}{R}", True),
    (r"e_{1}+e_{2}", r"e_2+e_1", True),
    ("e^{2}", r"e^2", True),
    # A decimal stands for the exact reference that rounds to it, from four significant digits on.
    (r"\frac{5}{7}", "0.7143", True),
    (r"\frac{5}{7}", "0.7142", False),  # cut off, not rounded
    (r"\frac{5}{7}", "0.714", False),
    (r"\frac{1}{7000}", "0.0001", False),  # one digit
    (r"\sqrt{3}", "1.73205", True),
    (r"\sqrt{3}", "1.73206", False),
    (r"\sqrt{3}", r"x = 1.7321", True),
    (r"100\sqrt{3}", "173.2", True),
    (r"\left[0, \frac{2}{3}\right)", "[0, 0.66667)", True),
    (r"\left[0, \frac{2}{3}\right)", "[0, 0.66667]", False),
    ("10000/3", "3,333.33", True),
    ("25", "25.0001", False),
    ("25.25", "25.2512", False),  # a reference with decimals is not exact
    (r"\frac{2}{3}", r"67.13\%", False),  # rounded to two places both would be 0.67
    (r"\frac{1}{90000}", r"1.2346 \times 10^{-5}", False),
    # Each component is held to four digits, whatever the other one is.
    (r"(\frac{2469}{2}, \frac{1}{3})", "(1234.5, 0.3)", False),
    (r"(\frac{1}{3}, \frac{2469}{2})", "(0.3, 1234.5)", False),
    (r"(\frac{2469}{2}, \frac{3}{10})", "(1234.5, 0.3)", True),  # both are exact
    (r"(\frac{2}{3}, \frac{1}{3})", "(0.6667, 0.3333)", True),
    (r"(\frac{2}{3}, \frac{1}{3})", "(0.6667, 0.333)", False),
    # Repeating decimals.
    (r"\frac{1}{3}", r"0.\overline{3}", True),
    (r"-\frac{37}{30}", r"-1.2\bar{3}", True),
    (r"0.\overline{42}", r"\frac{14}{33}", True),
    (r"0.\overline{42}", r"0.4\overline{2}", False),
    (r"0.\overline{42}", "0.42", False),
    (r"\overline{AB}", r"\overline{AC}", False),
    # Numerals of a base.
    ("11_3", "11_2", False),
    ("2516_8", "2516_{7}", False),
    ("2516_8", "2516_{8}", True),
    ("2516_8", "2516", True),
    ("2516", "2516_8", True),
    ("A3_{16}", "A3_{16}", True),
    ("A3_{16}", "A3_{12}", False),
    # Times of a day.
    (r"12:30 \text{ p.m.}", r"12:30\text{ AM}", False),
    (r"5\text{ PM}", r"5 \text{ p.m.}", True),
    (r"5\text{ PM}", "5", True),
    (r"3 \pm 2", "3 + a.m", False),
    # Constants, spaces and the empty set.
    ("e^2", r"\mathrm{e}^2", True),
    (r"2\pi i", r"2\pi\mathrm{i}", True),
    ("1+2i", r"1 + 2\, i", True),
    (r"2i\pi", r"2\pi i", True),
    ("1+2i", "1 - 2 i", False),
    ("12", r"12~\mathrm{m/s}", True),
    (r"\emptyset", r"\varnothing", True),
    # Two values.
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1\pm\sqrt{5}}{2}", True),
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1 \mp \sqrt5}{2}", True),
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}", True),
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}", True),
    (r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}", r"\frac{1 \pm \sqrt5}{2}", True),
    (r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}", r"x = \frac{1 \pm \sqrt5}{2}", True),
    (r"x=2\pm\sqrt3", r"x=2-\sqrt3 \text{ or } x=2+\sqrt3", True),
    (r"\{1\pm\sqrt{5},-2\}", r"-2, 1\pm\sqrt5", True),
    (r"(\pm 1, 2)", "(1,2),(-1,2)", True),
    (r"\pm 1 \pm \sqrt{2}", r"\pm 1\pm\sqrt2", True),  # not read, but the same text
    ("3 ± 2", "5, 1", True),
    (r"3 \pm 2", "5, 1", True),
    (r"3 \pm \sqrt{2}", r"3 \pm \sqrt{3}", False),
    (r"3 \pm 2", "5, 2", False),
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1+\sqrt5}{2}", False),
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1-\sqrt5}{2}", False),
    (r"\frac{1+\sqrt5}{2}", r"\frac{1 \pm \sqrt5}{2}", False),
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1 \pm \sqrt3}{2}", False),
    (r"\frac{1 \pm \sqrt5}{2}", r"\frac{-1 \pm \sqrt5}{2}", False),
    (r"\{1\pm\sqrt{5},-2\}", r"1\pm\sqrt5", False),
    # What cannot be read is not the fraction that it contains.
    (r"\frac{4}{3}", r"-(\frac{4}{3},\frac13)", False),
    (r"\frac{1}{2}", r"2 ( \frac{1}{2} [", False),
    (r"\left(\frac{1}{8},\frac{1}{3}\right)", r"-\left(\frac{1}{8},\frac{1}{3}\right)", False),
    (r"\left(\frac{1}{8},\frac{1}{3}\right)", r"9\left( \frac{1}{8}, \frac{1}{3} \right)", False),
    # Small numbers are compared relative to each other: with six decimals 2^{-98} is its double, and its negative.
    (r"\frac{1}{2^{98}}", r"-\frac{1}{2^{98}}", False),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{97}}", False),
    (r"\frac{1}{2^{98}}", "2^{-98}", True),
    (r"\frac{1}{2^{98}}", r"3.155\times10^{-30}", True),
    ("0.0000001", "0.0000002", False),
    (r"6.626\times10^{-34}", r"1.0\times10^{-34}", False),
    ("10^{-400}", "10^{-401}", False),
    (r"\frac{1}{3000}", "0.0003333", True),
    # A derivative is a name, and not 0.
    (r"\frac{d x}{d t}=k x-a", r"\frac{d y}{d t}=k x-a", False),
    (r"3\frac{dy}{dx}=x", r"5\frac{dy}{dx}=x", False),
    (r"\frac{dy}{dx}", "0", False),
    (r"\frac{dy}{dx}=2x", r"\frac{dy}{dx}=x+x", True),
    (r"\frac{d}{dx}x^2", "2x", True),
    # Angles in degrees, the imaginary unit.
    (r"\frac{1}{2}", r"\cos 60^\circ", True),
    (r"\cos(60^\circ)", r"\frac{1}{2}", True),
    (r"\frac{3}{4}", r"\sin^2 60°", True),
    (r"\frac{1}{2}", r"\sin 60^\circ", False),
    (r"\frac{1}{2}", r"\cos 60", False),
    (r"e^{i\pi}", "-1", True),
    ("1", r"e^{i\pi}", False),
    ("i", r"\sqrt{-1}", True),
    ("-i", r"\sqrt{-1}", False),
    ("3+4i", "3-4i", False),
    (r"\cos\theta+i\sin\theta", r"e^{i\theta}", True),
    (r"2 \pm 3i", "2-3i, 2+3i", True),
    (r"\sum_{i=1}^{3} i", "6", True),
    ("I^2R", "-R", False),  # a current
    # Lists with "or" and "and", systems.
    ("1,2", "x=1 or x=2", True),
    ("x=1 or x=2", "1,2", True),
    ("1,2", r"1 \text{ or } 2", True),
    ("1,2", r"\text{1 or 2}", True),
    ("1,2", r"1 \text{ or } 3", False),
    ("1,2", "x=1", False),
    (r"6, 8\text{, and }10", "6, 8, 10", True),
    (r"6, 8\text{, and }10", "6, 8", False),
    ("(1,2)", r"\begin{cases}x=1\\y=2\end{cases}", True),
    (r"\begin{cases}x=1\\y=2\end{cases}", "(1,2)", True),
    ("(2,1)", r"\begin{cases}x=1\\y=2\end{cases}", False),
    ("2", r"\begin{cases}x=1\\y=2\end{cases}", False),
    # Choices with their values.
    ("A", r"\text{(A) 5}", True),
    (r"\text{(A) 5}", "(A)", True),
    (r"\text{(A) 5}", r"\textbf{(A)}\ 5", True),
    ("A", "(A) 5", True),
    ("5", r"\text{(A) 5}", True),
    ("6", r"\text{(A) 5}", False),
    ("A", r"\text{(B) 5}", False),
    (r"\text{(A) 5}", "B", False),
    (r"\text{(A) 5}", r"\text{(A) 6}", False),
    # Percentages.
    (r"33\frac{1}{3}", r"33\frac13\%", True),
    (r"33\frac13\%", r"\frac{100}{3}\%", True),
    (r"33\frac13\%", r"33\frac23\%", False),
    (r"33.5\%", "33.5", True),
    ("0.6", r"0.6\%", False),
    (r"60\%", r"0.6\%", False),
    # Numbers in text, ordinals, currencies, bases in words.
    ("12", r"\text{12 apples}", True),
    (r"\text{12 apples}", r"\text{12 oranges}", True),
    ("12", r"\text{13 apples}", False),
    ("1234", r"\text{1,234 people}", True),
    ("5", r"\text{5 cm}", True),
    ("5", r"\text{-5 cm}", False),
    (r"6\text{ cm}", r"\text{5 cm}", False),
    (r"\text{5 cm}", r"5\text{ m}", False),
    (r"\text{A5}", "5", False),
    ("5", r"5^{\text{th}}", True),
    ("5", "5^{th}", True),
    ("5", r"6^{\text{th}}", False),
    ("5", r"n^{\text{th}}", False),
    ("5", "€5", True),
    ("5", "5 €", True),
    ("5", "€6", False),
    ("2516_8", r"2516_{\text{eight}}", True),
    (r"2516_{\text{eight}}", "2516", True),
    (r"2516_{\text{eight}}", "2516_7", False),
    (r"2516_{\text{eight}}", "2517_8", False),
    (r"11_{\text{two}}", "11_{three}", False),
]


@pytest.mark.parametrize(("answer", "boxed", "equal"), REPAIRED)
def test_what_is_put_into_other_words(answer, boxed, equal):
    assert grade(rf"\boxed{{{boxed}}}", answer).correct == equal


@pytest.mark.parametrize(
    ("answer", "boxed", "equal"),
    [
        ('["1/2", "3"]', "0.5", True),
        ('["1/2", "3"]', "3", True),
        ('["1/2", "3"]', "1/2, 3", False),
        ('["1/2", "3"]', "2", False),
        (r'["\\frac{1}{2}"]', "0.5", True),
        ('["yes", 2]', "2", True),
        ("[1, 2]", "[1, 2]", True),  # an interval
        ("[1, 2]", "2", False),
        ("[]", "2", False),
        ('["2", ["3"]]', "3", False),
    ],
)
def test_any_answer_of_a_list_of_texts_is_right(answer, boxed, equal):
    assert grade(rf"\boxed{{{boxed}}}", answer).correct == equal


def test_only_the_last_box_counts():
    assert grade(r"\boxed{1} or rather \boxed{2}", "2").correct
    assert not grade(r"\boxed{2} or rather \boxed{1}", "2").correct


def test_reasons():
    """A response without a verdict has a reason."""
    assert grade("the answer is 1", "1") == Verdict(False, 0.0, "no_answer")
    assert grade(r"\boxed{ }", "1") == Verdict(False, 0.0, "no_answer")
    assert grade(r"\boxed{%s}" % ("1" * (MAX_BOXED_LENGTH + 1)), "1") == Verdict(False, 0.0, "too_long")
    assert grade(r"\boxed{%s}" % ("1" + " " * MAX_BOXED_LENGTH), "1").correct
    # Two clock times: sympy raises on the comparison, and the strings differ.
    assert grade(r"\boxed{1:00}", "12:00") == Verdict(False, 0.0, "error")
    assert grade(r"\boxed{12:00}", "12:00") == Verdict(True, 1.0)


def test_import_is_cheap_and_ground_types_are_python():
    # gmpy2 must be off before sympy is imported, and the training process must not pay for sympy at all.
    program = (
        "import sys\n"
        "from reinforce_ada_jax.rewards import math_answer\n"
        "assert not {'sympy', 'math_verify', 'jax'} & sys.modules.keys()\n"
        "math_answer.warm_up()\n"
        "from sympy.external.gmpy import GROUND_TYPES\n"
        "assert GROUND_TYPES == 'python', GROUND_TYPES\n"
        "from mpmath.libmp import BACKEND\n"
        "assert BACKEND == 'python', BACKEND\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("SYMPY_GROUND_TYPES", "MPMATH_NOGMPY")
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
