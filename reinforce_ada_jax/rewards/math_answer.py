r"""The verifier for mathematics: the last `\boxed{...}` of a response against the reference answer.

What counts as the answer and how two answers are compared lives here. Time and memory limits do not: Math-Verify can
run for hours on a tower of powers and die in C, so `grade` belongs in the processes of `rewards.workers`.
"""

import functools
import itertools
import logging
import os
import re
import types

from reinforce_ada_jax.types import Verdict

# Longer than any reference answer, and short enough that a parse is not quadratic in a whole response.
MAX_BOXED_LENGTH = 2048

_BRACES = re.compile(r"\\boxed\{|[{}]")
# Mathematics that brings its own delimiters; `\$` is a currency sign.
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed\{")


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{...}` that opens last among those that close, or None.

    One pass, linear in the text, whatever the nesting. Braces outside a box need not balance. An escaped brace counts
    like a plain one, as in the reference program: `\{1, 2\}` balances itself. `\boxed{\boxed{4}}` gives "4", and
    `\boxed{1} ... \boxed{2` gives "1".
    """
    open_braces: list[int | None] = []  # where the content of a box begins; None for a plain brace
    begin, end = -1, -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == r"\boxed{":
            open_braces.append(match.end())
        elif token == "{":
            open_braces.append(None)
        elif token == "}" and open_braces:
            content = open_braces.pop()
            if content is not None and content > begin:
                begin, end = content, match.start()
    return None if begin < 0 else text[begin:end]


@functools.cache
def _math_verify() -> types.ModuleType:
    """Math-Verify, imported at the first grading: sympy takes a second that the training process need not spend."""
    # With gmpy2 some inputs hang in C or abort the process; sympy reads this once, when it is first imported.
    os.environ["SYMPY_GROUND_TYPES"] = "python"
    import math_verify  # noqa: PLC0415  (the reason is above)

    # It warns that its own time-outs are off. They are off on purpose: they need the main thread and cancel alarms.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def warm_up() -> None:
    """Imports and compiles what a grading needs, so that no item's time limit pays for it (see `rewards.worker`)."""
    grade(r"\boxed{\frac{1}{2}}", "0.5")


def _parse(text: str, *targets: object) -> list[object]:
    """What Math-Verify reads in `text`: expressions, and the string itself as the last resort."""
    # `5\ ` ends in a control space, which it does not read: the backslash goes with the space.
    text = text.strip().rstrip("\\")
    # A bare answer has to be delimited to be read as LaTeX, and read whole. A box does that, as in verl's scorer.
    delimited = text if _DELIMITED.search(text) else rf"\boxed{{{text}}}"
    return _math_verify().parse(delimited, targets, parsing_timeout=None, raise_on_error=True)


def _equal(gold: object, prediction: object) -> bool:
    return _math_verify().verify(
        gold, prediction, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
    )


def grade(response: str, answer: str) -> Verdict:
    r"""Whether the last `\boxed{...}` of `response` equals `answer` in the sense of Math-Verify.

    The gold is parsed as LaTeX and the prediction as an expression or LaTeX; `x \in [1, 2]` equals `1 \le x \le 2`.

    Args:
      response: the text of a response.
      answer: the reference answer: bare LaTeX (`\frac{1}{2}`) or text with delimited mathematics (`$\frac{1}{2}$`).

    Returns:
      Reward 1 or 0. Reasons: "no_answer" (no box, or a blank one), "too_long" (more than `MAX_BOXED_LENGTH`
      characters in it), "error" (Math-Verify failed on every comparison that did not match).
    """
    boxed = last_boxed(response)
    if boxed is None or not boxed.strip():
        return Verdict(False, 0.0, "no_answer")
    if len(boxed.strip()) > MAX_BOXED_LENGTH:
        return Verdict(False, 0.0, "too_long")
    library = _math_verify()
    # Equal configurations: Math-Verify caches the compiled patterns (0.1 s) of the last one only.
    latex, expression = library.LatexExtractionConfig(), library.ExprExtractionConfig()
    failed = False
    # sympy and ANTLR raise whatever they please on what a model may write (RecursionError, MemoryError, TypeError,
    # AssertionError, ...), so no narrower class would do.
    try:
        golds, predictions = _parse(answer, latex), _parse(boxed, expression, latex)
    except Exception:
        return Verdict(False, 0.0, "error")
    for gold, prediction in itertools.product(golds, predictions):
        try:
            if _equal(gold, prediction):
                return Verdict(True, 1.0)
        except Exception:
            failed = True  # the expressions cannot be compared; their strings, which come next, still can
    return Verdict(False, 0.0, "error" if failed else "")
