r"""Verifier for mathematics: the last `\boxed{...}` of a response against the reference answer.

Math-Verify compares the answers. Before that, `math_text` rewrites text that Math-Verify misreads, and `math_marks`
compares text that Math-Verify drops. This module has no limits of time and memory: Math-Verify can run for hours on a
tower of powers and crash in C, so `grade` belongs in the processes of `rewards.workers`.
"""

import functools
import itertools
import json
import logging
import os
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from reinforce_ada_jax.rewards.math_marks import (
    ASSIGNED_TO,
    equations_of_numbers,
    goes_on,
    is_bound,
    marks_differ,
    right_side,
    same_list,
    same_time,
    same_words,
    with_unit_as_text,
)
from reinforce_ada_jax.rewards.math_text import normalized, readings, unwrapped, without_percent
from reinforce_ada_jax.rewards.math_unicode import as_latex
from reinforce_ada_jax.types import Verdict

# Longer than any reference answer, and short enough that a parse is not quadratic in a whole response.
MAX_BOXED_LENGTH = 2048
# Default of Math-Verify: floats are compared after rounding to this number of decimals.
FLOAT_DECIMALS = 6
# A decimal with fewer significant digits than these is a guess, not an approximation.
MIN_ROUNDED_DIGITS = 4

# Numbers below it have too few of `FLOAT_DECIMALS` left: they are compared relative to the larger one.
SMALL = 1e-3

_BRACES = re.compile(r"\\boxed\{|[{}]")
# Mathematics that brings its own delimiters; `\$` is a currency sign.
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed\{")
_SPACE_OUTSIDE_NUMBERS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_DECIMAL = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)?\.\d+")
_NUMBERS_ONLY = re.compile(r"(?:[-+\d.,;()\[\]{}$\s]|\\[{},; ]|\\(?:left|right|cup|infty)(?![A-Za-z]))*")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the `\boxed{...}` that opens last among those that close, or None.

    One pass, linear in the text. Braces outside a box need not balance. An escaped brace counts like a plain one, as in
    the reference program. `\boxed{\boxed{4}}` gives "4", and `\boxed{1} ... \boxed{2` gives "1".
    """
    open_braces: list[int | None] = []  # start of the content of a box; None for a plain brace
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
def math_verify() -> types.ModuleType:
    """Returns Math-Verify, imported at the first grading: sympy takes a second, which the trainer need not spend."""
    # With gmpy2 some inputs hang in C or abort the process; sympy reads this once, when it is first imported.
    os.environ["SYMPY_GROUND_TYPES"] = "python"
    os.environ["MPMATH_NOGMPY"] = "1"
    import math_verify as library  # noqa: PLC0415  (the reason is above)

    # It warns that its time limits are off. They are off on purpose: they need the main thread and cancel alarms.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library


def warm_up() -> None:
    """Grades once, so that no time limit includes the imports (see `rewards.worker`)."""
    grade(r"\boxed{\frac{1}{2}}", "0.5")


def _decimals(prediction: str, answer: str) -> int:
    r"""Returns the number of decimals to which floats are rounded before they are compared.

    A decimal stands for an exact reference that rounds to it: against `\frac{2}{3}`, 0.6667 is right, 0.6666 and
    0.66668 are not. There are three conditions. Every number with the most decimals has `MIN_ROUNDED_DIGITS`
    significant digits. The prediction consists of numbers only (the decimals of `1.2346 \times 10^{-5}` say nothing).
    The reference has no decimals, because otherwise it is not exact.
    """
    rest = ASSIGNED_TO.sub("", prediction)
    decimals = [match.group() for match in _DECIMAL.finditer(rest)]
    if not decimals or _DECIMAL.search(answer) or not _NUMBERS_ONLY.fullmatch(rest):
        return FLOAT_DECIMALS
    longest = max(len(decimal.rpartition(".")[2]) for decimal in decimals)
    # All numbers are rounded to the same place, so each number that decides the place must obey the rule: otherwise
    # 1234.5 next to 0.3 would make 0.3 right for 1/3. A number with fewer decimals is compared to more decimals than it
    # has.
    deciding = [decimal for decimal in decimals if len(decimal.rpartition(".")[2]) == longest]
    significant = [len(decimal.replace(",", "").replace(".", "").lstrip("0")) for decimal in deciding]
    return FLOAT_DECIMALS if min(significant) < MIN_ROUNDED_DIGITS else min(longest, FLOAT_DECIMALS)


def parse(text: str, names: Sequence[str]) -> list[Any]:
    """Returns what Math-Verify finds in `text`: an expression, and the string itself as the last resort.

    `names` are "latex" (delimited mathematics) and "expression" (bare numbers and sums). Any exception may be raised.
    """
    library = math_verify()
    # The configurations are equal at every call, because Math-Verify caches the patterns (0.1 s) of one list of them.
    configs = {"latex": library.LatexExtractionConfig(), "expression": library.ExprExtractionConfig()}
    return library.parse(text, [configs[name] for name in names], parsing_timeout=None, raise_on_error=True)


def _whole(text: str) -> list[Any]:
    """Returns what Math-Verify reads in a whole text."""
    # A bare answer needs delimiters to be read as LaTeX and as a whole. With a box alone, as in verl's scorer, a text
    # that Math-Verify can't read counts as the fractions in it: `-(\frac{1}{2},\frac13)` would be 1/2.
    found = parse(text if _DELIMITED.search(text) else rf"$$\boxed{{{text}}}$$", ("latex",))
    # White space says nothing in an answer that Math-Verify leaves as a text.
    return [_SPACE_OUTSIDE_NUMBERS.sub("", each) if isinstance(each, str) else each for each in found]


def read(text: str, other: str = "") -> list[Any]:
    r"""Returns what Math-Verify reads in an answer, bare or with delimited mathematics (see `parse`).

    If Math-Verify can't read an equation, the right side counts: `\dim V = 5` is 5 (`other` is the text that it is
    compared with, see `right_side`). Other answers that it can't read are texts: the 5 in `\ge 5` is no answer. An
    answer with `i` has a second reading, in which `i` is the imaginary unit.
    """
    text = normalized(text)
    found = _whole(text)
    if not found or isinstance(found[0], str):
        side = right_side(text, other)
        found = [*(_whole(side) if side is not None else []), *found]
    # Math-Verify reads another symbol i in `2i` than in `2 i` and `i`: one of them is declared real.
    import sympy  # noqa: PLC0415  (after `math_verify`)

    real, free = sympy.Symbol("i", real=True), sympy.Symbol("i", real=False)
    found = [_with_names(each).xreplace({real: free}) if hasattr(each, "xreplace") else each for each in found]
    return [*found, *_with_imaginary_unit(found[0], free)] if found and "I" not in text else found


def _with_names(found: Any) -> Any:
    r"""Returns an expression in which derivatives of letters are names: `\frac{dy}{dx}` and `dz/dx` are 0 to sympy."""
    import sympy  # noqa: PLC0415

    derivatives = found.atoms(sympy.Derivative) if hasattr(found, "atoms") else ()
    return found.xreplace({each: sympy.Symbol(str(each), real=True) for each in derivatives if each.expr.is_Symbol})


def _with_imaginary_unit(found: Any, symbol: Any) -> list[Any]:
    """Returns an expression with the imaginary unit for a symbol, or nothing where it has no such symbol."""
    import sympy  # noqa: PLC0415

    if symbol not in getattr(found, "free_symbols", ()):
        return []
    try:
        return [found.xreplace({symbol: sympy.I})]
    except Exception:  # `i < 5`, and whatever else sympy refuses
        return []


def verdict(
    pairs: Iterable[tuple[Any, Any]], refuse: Callable[[Any, Any], bool] = lambda *_: False, **options: Any
) -> Verdict:
    """Returns reward 1 where Math-Verify finds one (answer, prediction) of `pairs` equal, else 0.

    A pair for which `refuse` is True is not equal. Reason "error": a comparison failed and none matched. `options` are
    those of Math-Verify's `verify`.
    """
    failed = False
    for pair in pairs:
        try:
            same = math_verify().verify(*pair, timeout_seconds=None, raise_on_error=True, **options)
            if same and not refuse(*pair):
                return Verdict(True, 1.0)
        except Exception:
            failed = True  # the expressions cannot be compared; their strings, which come next, still can
    return Verdict(False, 0.0, "error" if failed else "")


def _are_different_small_numbers(answer: Any, prediction: Any) -> bool:
    """Returns True for numbers below `SMALL` that differ by more than one in a thousand.

    In the six decimals that Math-Verify compares, 1e-9 equals 2e-9, and -1e-9.
    """
    import sympy  # noqa: PLC0415

    try:
        ours, theirs = sympy.N(answer.doit()), sympy.N(prediction.doit())
        largest = max(abs(ours), abs(theirs))
        return bool(largest < SMALL and abs(ours - theirs) > SMALL * largest)
    except Exception:  # texts, sets, expressions with letters
        return False


def _close(sides: tuple[str, str]) -> bool:
    r"""Returns True for two numbers within 1 % of each other, and also if the sides are not read as two numbers.

    The percent sign of the right side may be left out: `\frac{14}{25} \times 100 = 56\%`.
    """
    try:
        left, right, unsigned = (complex(read(side)[0].doit()) for side in (*sides, without_percent(sides[1])))
    except Exception:  # sympy and ANTLR raise any exception on a model's text
        return True
    return any(abs(left - each) <= 0.01 * max(abs(left), abs(each)) for each in (right, unsigned))


def _hedged(text: str, answer: str) -> bool:
    r"""Returns True for equations of numbers that do not hold.

    Also for a bound in words that the answer lacks, and where only one of the two is a list that goes on.
    """
    if (is_bound(text) and not is_bound(answer)) or goes_on(text) != goes_on(answer):
        return True
    return text.strip() != answer.strip() and not all(map(_close, equations_of_numbers(text)))


def alternatives(answer: str) -> list[str]:
    """Returns the right answers in a JSON list of texts, such as verl's `ground_truth`; the answer itself otherwise.

    A list of numbers alone is one answer: it looks like an interval, `[1, 2]`.
    """
    if not answer.lstrip().startswith("["):
        return [answer]
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):  # an interval, a matrix
        return [answer]
    texts = [str(each) for each in found if isinstance(each, str | int | float)]
    return texts if len(texts) == len(found) and any(isinstance(each, str) for each in found) else [answer]


def grade(response: str, answer: str) -> Verdict:
    r"""Returns reward 1 where the last `\boxed{...}` of `response` equals `answer` in the sense of Math-Verify, else 0.

    Both are read as LaTeX; `x \in [1, 2]` equals `1 \le x \le 2`. An equation counts as its right side if the other
    answer is no equation. An inequality never counts as a number. An equation of numbers must hold within 1 %. The
    letter of a choice may precede a value: `\textbf{(C)}\ 5` is also 5, and C. Answers in words are compared as text.
    Units, bases and halves of the day may be left out, but not differ: `11_2` is not `11_3`, but 11 is either. See
    `math_text.normalized`, `math_text.readings` and `math_marks`.

    Args:
      response: the text of a response.
      answer: the reference answer: bare LaTeX (`\frac{1}{2}`) or text with delimited mathematics (`$\frac{1}{2}$`); or
        a JSON list of such texts, of which any is right.

    Returns:
      A verdict. Reasons: "no_answer" (no box, or a blank one), "too_long" (more than `MAX_BOXED_LENGTH` characters in
      it), "error" (Math-Verify failed on every comparison that did not match).
    """
    boxed = last_boxed(response)
    if boxed is None or not boxed.strip():
        return Verdict(False, 0.0, "no_answer")
    if len(boxed.strip()) > MAX_BOXED_LENGTH:
        return Verdict(False, 0.0, "too_long")
    found = Verdict(False, 0.0)
    for each in alternatives(answer):
        if (found := _compared(boxed, each)).correct:
            break
    return found


def _compared(boxed: str, answer: str) -> Verdict:
    """Returns the verdict on the content of a box, for one right answer."""
    boxed, answer = (with_unit_as_text(unwrapped(as_latex(each))) for each in (boxed, answer))
    if marks_differ(boxed, answer) or _hedged(boxed, answer):
        return Verdict(False, 0.0)
    for same in (same_words(boxed, answer), same_time(boxed, answer), same_list(boxed, answer) or None):
        if same is not None:
            return Verdict(same, float(same))
    # Percent signs are removed, because with them Math-Verify compares fractions differently from whole numbers.
    if "%" in boxed and "%" in answer:
        boxed, answer = without_percent(boxed), without_percent(answer)
    decimals = _decimals(normalized(boxed), normalized(answer))
    # sympy and ANTLR raise any exception on a model's text (RecursionError, MemoryError, TypeError, ...).
    try:
        predictions = [found for text in readings(boxed, answer) for found in read(text, answer)]
        pairs = itertools.product(
            [found for text in readings(answer, boxed) for found in read(text, boxed)], predictions
        )
    except Exception:
        return Verdict(False, 0.0, "error")
    return verdict(pairs, _are_different_small_numbers, float_rounding=decimals, allow_set_relation_comp=True)
