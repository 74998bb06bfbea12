r"""The published program's graders: its answers on record, and the rules that set them apart from ours."""

import json
import pathlib

import pytest

from reinforce_ada_jax.rewards import math_answer, minerva, reference, reference_equality, reference_minerva
from reinforce_ada_jax.rewards.number_words import to_digits
from reinforce_ada_jax.types import Verdict

RECORDED = pathlib.Path(__file__).parents[1] / "golden" / "reference" / "grading.jsonl"


CASES = [json.loads(line) for line in RECORDED.read_text().splitlines()]
# Every fourth, and all for which the program has two verdicts; the others in slow tests.
FAST = [case for number, case in enumerate(CASES) if not number % 4 or case["training"] != case["evaluation"]]
OTHERS = [case for case in CASES if case not in FAST]
SOME = pytest.mark.parametrize(
    "cases", [pytest.param(FAST, id="some"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)


def test_boxes_on_record():
    assert len(CASES) > 500
    for case in CASES:
        assert reference.training_box(case["response"]) == case["training_box"], case
        assert reference.evaluation_box(case["response"]) == case["evaluation_box"], case


@SOME
def test_verdicts_on_record(cases):
    for case in cases:
        assert reference.grade(case["response"], case["answer"]).reward == case["training"], case
        if case["evaluation_box"].strip() != (case["training_box"] or ""):  # else both compare the same texts
            assert reference.grade_evaluation(case["response"], case["answer"]).reward == case["evaluation"], case


# Recorded with latex2sympy2_extended 1.10.2; 1.11, which the project uses, reads these two texts otherwise.
READ_BY_AN_OLDER_PARSER = {r"$\boxed{28 pct}": False, "$840$": True}


@SOME
def test_minerva_on_record(cases):
    different = {}
    for case in cases:
        stated = reference_minerva.normalized(reference_minerva.stated(case["response"]))
        assert stated == case["minerva_answer"], case
        verdict = reference_minerva.grade(case["response"], case["answer"])
        if verdict.correct != case["minerva"]:
            different[case["response"]] = verdict.correct
    assert different.items() <= READ_BY_AN_OLDER_PARSER.items()


@pytest.mark.parametrize(
    ("response", "training", "evaluation", "ours"),
    [
        # Six decimals count: 0.6667 rounds to itself, 2/3 to 0.666667.
        (r"\boxed{0.6667}", 0.0, 0.0, 1.0),
        (r"\boxed{0.666667}", 1.0, 1.0, 1.0),
        # A brace that nothing opened hides every box from the evaluation only.
        (r"$[0, 1\}$, so \boxed{\frac{2}{3}}", 1.0, 0.0, 1.0),
        # The last box that opens, and the last that closes.
        (r"\boxed{\frac{2}{3}} or \boxed{3", 0.0, 1.0, 1.0),
    ],
)
def test_two_thirds(response, training, evaluation, ours):
    """The published graders and ours differ in digits and boxes."""
    answer = r"\frac{2}{3}"
    assert reference.grade(response, answer).reward == training
    assert reference.grade_evaluation(response, answer).reward == evaluation
    assert math_answer.grade(response, answer).reward == ours


@pytest.mark.parametrize(("response", "answer"), [(r"\boxed{1.414}", r"\sqrt{2}"), (r"\boxed{3.142}", r"\pi")])
def test_four_digits_of_a_root_are_right_for_ours_only(response, answer):
    assert reference.grade(response, answer) == Verdict(False, 0.0)
    assert math_answer.grade(response, answer).correct


def test_reasons():
    """A response without a verdict has a reason."""
    assert reference.grade("it is 5", "5") == Verdict(False, 0.0, "no_answer")
    assert reference.grade(r"\boxed{ }", "5") == Verdict(False, 0.0, "no_answer")
    assert reference.grade(r"\boxed{%s}" % ("5" * 5000), "5") == Verdict(False, 0.0, "too_long")
    assert reference.grade(r"\boxed{48\%}", "48") == Verdict(False, 0.0)  # Math-Verify 0.9.0 alone says 48% is 48
    assert reference_minerva.grade("no number", "5") == Verdict(False, 0.0, "no_answer")
    assert reference_minerva.grade("5" * 5000, "5") == Verdict(False, 0.0, "too_long")


def test_minerva_tolerance():
    # 1e-4 of the larger one: 10001 may differ by 1.0001, and 10001.1 by 1.00011, which is less than 1.1.
    assert reference_minerva.grade(r"\boxed{10001}", "10000") == Verdict(True, 1.0)
    assert reference_minerva.grade(r"\boxed{10001.1}", "10000") == Verdict(False, 0.0)
    assert minerva.grade(r"\boxed{10001.1}", "10000").correct  # within 1 %
    # Percentages both ways, and the last number where nothing is boxed.
    assert reference_minerva.grade(r"\boxed{5}", "0.05").correct
    assert reference_minerva.grade("first 3, then 1,234.5", "1234.5").correct


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("twenty-one", "21"),
        ("three hundred five", "305"),
        ("two thousand and five", "2005"),
        ("one million two thousand three", "1002003"),
        ("two million five thousand", "2006005"),  # the package's own: what follows the million counts twice
        ("one point five", "1.5"),
        ("point", "0"),
        ("007", "7"),
        ("thousand million", "thousand million"),
        ("five five thousand thousand", "five five thousand thousand"),
        ("apples", "apples"),
    ],
)
def test_number_words(text, digits):
    """Words of numbers become digits as in the published package."""
    assert to_digits(text) == digits


# The program executes them all, and takes each for 3.
PYTHON = ["len((1,2,3))", "eval(chr(51))", "Rational(9,3).p", "Rational(9,3). p", "Integer('3')", "sympify(3)"]
MATHEMATICS = ["sqrt(9)", "abs(-3)", "max(2,3)", "sum([1,2])", "3#4"]


@pytest.mark.parametrize(("text", "correct"), [*((t, False) for t in PYTHON), *((t, True) for t in MATHEMATICS)])
def test_a_response_runs_no_python(text, correct):
    assert reference_minerva.grade(rf"\boxed{{{text}}}", "3") == Verdict(correct, float(correct))


@pytest.mark.parametrize("text", ["simplify(3).func(3)", "factor([3].pop())"])
def test_a_text_that_no_parser_reads_is_not_executed_later(text):
    # sympy's N and equals would parse it once more, by themselves, and find 3.
    assert not reference_equality.equal(text, "3")
    assert not reference_equality.equal("3", text)
