r"""Words, relations, units and clock times in answers, and the time that their patterns take."""

import time

import pytest

from reinforce_ada_jax.rewards import math_marks, math_text
from reinforce_ada_jax.rewards.math_answer import MAX_BOXED_LENGTH, grade

MARKED = [
    # (answer, boxed text, equal)
    # Words are text.
    ("circle", r"\text{circle}", True),
    (r"\text{Circle}", "circle", True),
    ("$\\text{circle}$", "circle", True),
    ("Circle", "The answer is $circle$", True),
    (r"\textbf{circle}", "circles", False),
    (r"\text{circle}", "eclcir", False),
    ("east", "seat", False),
    (r"\text{east}", "seat", False),
    ("east", "East", True),
    ("CAB", "ABC", False),
    ("CAB", "cab", True),
    ("Yes", "Sey", False),
    (r"\text{odd}", "odd", True),
    (r"\text{odd}", "dod", False),
    ("dog", r"\text{god}", False),
    (r"\text{No}", "on", False),
    ("even number", r"\text{Even number}", True),
    (r"\text{No solution}", r"\text{no  solution.}", True),
    (r"\text{no solution}", r"\text{one solution}", False),
    (r"\text{north east}", r"\text{east north}", False),
    (r"\text{non-zero}", "nonzero", True),
    (r"\text{October 30}", "October 30", True),
    (r"\text{October 30}", "October 31", False),
    (r"\text{Bob and Ann}", "Bob, Ann", True),
    (r"\text{Bob},\text{Ann}", r"\text{Nan}, \text{Bob}", False),
    # Units without a font.
    ("10", "10 dollars", True),
    ("10 grams", "10", True),
    ("10 km", "10 kilometers", True),
    (r"10\text{ miles per hour}", "10 miles per hour", True),
    ("10 dollars", "10 cents", False),
    ("10", "10 theta", False),
    # A list that goes on.
    ("1,2", r"1,2,\ldots", False),
    (r"1,2,\ldots", "1,2", False),
    (r"1,2,\ldots", r"1, 2, \dots", True),
    (r"1,2,\ldots", r"1, 3, \ldots", False),
    ("3.14159", r"3.14159\ldots", True),
    # Equations: of two, the right sides do not decide unless the left ones are names.
    (r"3\ddot{x}=F", r"5\ddot{x}=F", False),
    ("f(x)=a x+b, where b is any", "f(x)=a x-b, where b is any", False),
    (r"\dim V = 5", r"\dim(V)=5", True),
    ("P(X=3)=0.5", r"P(X = 3)=\frac12", True),
    ("F", r"3\ddot{x}=F", True),
    (r"0.56 = 56\%", r"9.56 = 56\%", False),
    (r"0.56 = 56\%", r"0.56=56\%", True),
    (r"56\%", r"\frac{14}{25}\times 100=56\%", True),
    # Products of letters.
    ("ab", "ba", True),
    ("AB", "BA", True),
    ("abc", "cba", True),
    ("xyz", "zyx", True),
    ("nRT", "RTn", True),
    ("2abxy", "2yxba", True),
    ("abcd", "a b c d", True),
    ("abcd", "abdc", False),  # four letters are a word
    (r"\infty", "infinity", True),
    # Relations are not numbers.
    *[
        ("5", written, False)
        for written in (
            *(
                rf"{sign} 5"
                for sign in (r"\ge", r"\geq", r"\leq", r"\neq", r"\ne", r"\not=", r"\to", r"\sim", ">", "≥")
            ),
            *(
                rf"6 {sign} 5"
                for sign in (r"\to", r"\Rightarrow", r"\cup", r"\neq", "=", r"\approx", "=>", r"\text{ or }")
            ),
            *("x = 6 = 5", "6=5,6=5", r"3 + 3 = 5", r"\ge 5 = 5", r"x \to 5", r"\lnot 5", r"5\text{ or more}"),
            *(r"\text{at least } 5", r"\text{5 or 6}", r"5 \text{ or 6}", r"5 \text{ (or 6)}", r"\text{not }5"),
        )
    ],
    *[("6", f"5 {sign} 6", False) for sign in ("=", r"\to", r"\approx", "≠", r"\in")],
    *[
        ("5", written, True)
        for written in ("x = 5", "x = 2 + 3 = 5", "2 + 3 = 5", r"\approx 5", r"\therefore x = 5", r"\dim V = 5", "= 5")
    ],
    ("7", "x + y = 7", True),
    (r"\frac{1}{2}", r"P(A \cap B) = \frac{1}{2}", True),
    (r"\frac{1}{2}", r"P(A \cap B) = \frac{1}{3}", False),
    (r"\frac{1}{2}", r"0.5 = 50\%", True),
    ("0.6667", r"\frac23 = 0.6667", True),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.414", True),
    ("1.414", r"\sqrt{2} \approx 1.414", True),
    ("1.5", r"\sqrt{2} \approx 1.5", False),  # not within 1 %
    *[("1, 2", rf"x = 1 {sign} x = 2", True) for sign in (r"\lor", r"\vee")],
    ("1, 2", r"x = 1 \lor x = 3", False),
    (r"p \lor q", "p, q", False),
    (r"\frac13", r"33\frac13\%", True),
    ("0.125", r"12\frac{1}{2}\%", True),
    (r"\frac12", r"33\frac13\%", False),
    *[(answer, "500 + 500 = 1,000", answer != "500") for answer in ("1000", "1,000", "500")],
    ("1000", "500 + 400 = 1,000", False),
    (r"x \ge 5", r"x \geq 5", True),
    (r"x \ge 5", r"[5, \infty)", True),
    (r"x \ge 5", "5", False),
    (r"x \ge 5", r"x \ge 6", False),
    ("x > 5", r"(5, \infty)", True),
    (r"x \neq 2", "2", False),
    (r"n \equiv 3 \pmod 7", r"n \equiv 3 \pmod{7}", True),
    # Units that both name.
    (r"5\text{ km}", r"5\text{ m}", False),
    (r"5\text{ m}", r"5\text{ km}", False),
    (r"5\text{ km}", r"5\text{ km}", True),
    (r"5\text{ km}", r"6\text{ km}", False),
    (r"5\text{ km}", "5 m", False),
    (r"x=5\text{ km}", r"5\text{ m}", False),
    (r"5\text{ km}", r"5\text{ kilometers}", True),
    (r"5\text{ km}", "5", True),
    ("5", r"5\text{ km}", True),
    (r"5\text{ cm}", r"5 \mathrm{cm}", True),
    (r"5\text{ h}", r"5\text{ hr}", True),
    (r"5\text{ h}", r"5\text{ min}", False),
    (r"5\mathrm{ m/s}", r"5\text{ km/h}", False),
    (r"5\text{ m/s}", r"5\ \mathrm{m}/\mathrm{s}", True),
    (r"8\text{ mph}", r"8\text{ miles per hour}", True),
    (r"8\text{ mph}", r"8\text{ km/h}", False),
    (r"864 \mbox{ inches}^2", r"864\text{ square inches}", True),
    (r"864 \mbox{ inches}^2", r"864\text{ in}^3", False),
    (r"\frac{1}{2}\text{ kg}", r"0.5\text{ g}", False),
    (r"5\pi\text{ cm}", r"5\pi\text{ m}", False),
    (r"\$5", r"5\text{ dollars}", True),
    (r"\$5", r"5\text{ cents}", False),
    (r"\$5 \text{ per hour}", r"\$5\text{ per day}", False),
    (r"\$5", "€5", False),
    (r"\$5", "5€", False),
    (r"5\text{ euros}", "5 €", True),
    (r"€5", "5 €", True),
    (r"£5", "5 €", False),
    (r"€5, €6", "5 €, 6 €", True),
    (r"10\%", r"\$10", False),
    (r"60^\circ", r"60\text{ degrees}", True),
    (r"60^\circ", r"60\text{ rad}", False),
    (r"20^\circ\text{C}", r"20^\circ", True),
    (r"20^\circ\text{C}", r"20^\circ\text{F}", False),
    (r"10\text{ units}", r"10\text{ cm}", True),
    (r"12\text{ ways}", r"12\text{ possibilities}", True),
    # Clock times.
    ("19:30", "7:30 pm", True),
    (r"7:30\text{ p.m.}", "19:30", True),
    ("7 pm", "19:00", True),
    ("12:30 am", "0:30", True),
    ("7:30 pm", "7:30", True),
    ("19:30", "7:30 am", False),
    ("19:30", "7:30", False),
    ("19:30", "7:31 pm", False),
    ("0:30", "12:45 am", False),
    ("12:00 pm", "0:00", False),
]


@pytest.mark.parametrize(("answer", "boxed", "equal"), MARKED)
def test_what_math_verify_drops(answer, boxed, equal):
    assert grade(rf"\boxed{{{boxed}}}", answer).correct == equal


HOSTILE = [
    "a",
    "1 ",
    " ",
    r"\text{",
    r"\text{1 ",
    r"\begin{cases}",
    "^ ",
    "1=",
    r"\sin ",
    "(A) ",
    "€ ",
    r"1\%",
    "5/m",
    " and ",
    "1_{",
]


@pytest.mark.parametrize("part", HOSTILE)
def test_rewriting_is_fast(part):
    # 10 ms at most where this was written; a pattern that is quadratic in each of its starts takes seconds.
    text = ("5" + part * MAX_BOXED_LENGTH)[:MAX_BOXED_LENGTH]
    start = time.perf_counter()
    for function in (math_marks.same_words, math_marks.same_time, math_marks.marks_differ, math_text.readings):
        function(text, r"5\text{ km}")
    alone = (math_marks.equations_of_numbers, math_marks.with_unit_as_text, math_marks.goes_on)
    for function in (math_text.unwrapped, math_text.normalized, *alone):
        function(text)
    assert time.perf_counter() - start < 1.0
