r"""Graders with the rules of the published program: its training verifier, and its evaluation of boxed answers.

Use them to compare scores with the paper's. `math_answer` reads more answers correctly: these rules reject 0.6667 for
2/3, 1.414 for the square root of 2, and 3.142 for pi. Source: RLHFlow/Reinforce-Ada, whose behaviour is on record in
tests/golden/reference/grading.jsonl. Its rule for Minerva Math is in `reference_minerva`.
"""

import itertools
import re
from typing import Any

from reinforce_ada_jax.rewards import math_answer
from reinforce_ada_jax.rewards.math_answer import FLOAT_DECIMALS, MAX_BOXED_LENGTH
from reinforce_ada_jax.types import Verdict

warm_up = math_answer.warm_up

_BOX = r"\boxed{"
_BOX_WITHOUT_BRACES = re.compile(r"\\boxed\s+([a-zA-Z0-9]+)")


def up_to_closing_brace(text: str) -> str | None:
    """Returns the text before the brace that closes a group opened before the text; None if there is none."""
    depth = 1
    for brace in re.finditer("[{}]", text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return None


def training_box(text: str) -> str | None:
    """Returns what the training verifier reads: the content of the box that opens last; None if it never closes."""
    _, box, rest = text.rpartition(_BOX)
    content = up_to_closing_brace(rest) if box else None
    return None if content is None else content.strip()


def evaluation_box(text: str) -> str:
    r"""Returns what the evaluation reads: the content of the box that closes last, else `7` of `\boxed 7`, else "".

    A closing brace that nothing opened, anywhere in the text, means that there is no answer.
    """
    opened: list[int] = []
    boxed = None
    for brace in re.finditer("[{}]", text):
        if brace.group() == "{":
            opened.append(brace.end())
        elif not opened:
            return ""
        else:
            begin = opened.pop()
            if text.endswith(_BOX, 0, begin):
                boxed = text[begin : brace.start()]
    if boxed is not None:
        return boxed
    match = _BOX_WITHOUT_BRACES.search(text)
    return match[1] if match else ""


def _as_fraction(read: Any) -> Any:
    """Returns a percentage as a fraction. Math-Verify 0.9.0 reads 48% as 48; 0.8.0, of the paper's runs, does not."""
    from sympy import Mul, UnevaluatedExpr  # noqa: PLC0415  (loaded by Math-Verify)

    if isinstance(read, Mul) and any(isinstance(factor, UnevaluatedExpr) for factor in read.args):
        return read.doit()
    return read


def _compare(boxed: str | None, answer: str) -> Verdict:
    """Compares as Math-Verify's metric does, with its defaults: nothing is rewritten, six decimals count."""
    if not boxed:
        return Verdict(False, 0.0, "no_answer")
    if len(boxed) > MAX_BOXED_LENGTH:
        return Verdict(False, 0.0, "too_long")
    # sympy and ANTLR raise any exception on a model's text.
    try:
        answers = math_answer.parse(rf"\boxed{{{answer}}}", ("latex",))
        predictions = math_answer.parse(rf"\boxed{{{boxed}}}", ("expression", "latex"))
    except Exception:
        return Verdict(False, 0.0, "error")
    pairs = itertools.product(map(_as_fraction, answers), map(_as_fraction, predictions))
    return math_answer.verdict(pairs, float_rounding=FLOAT_DECIMALS)


def grade(response: str, answer: str) -> Verdict:
    """Returns reward 1 where the published program's training verifier gives 1: `training_box` equals `answer`.

    Reasons: "no_answer", "too_long" (more than `MAX_BOXED_LENGTH` characters in the box, which the program does not
    limit), "error" (Math-Verify failed on every comparison that did not match).
    """
    return _compare(training_box(response), answer)


def grade_evaluation(response: str, answer: str) -> Verdict:
    """Returns reward 1 where the published evaluation does: `evaluation_box` equals `answer`. Reasons: as `grade`."""
    return _compare(evaluation_box(response), answer)
