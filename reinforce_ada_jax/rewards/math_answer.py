r"""Verifier for mathematics: the last `\boxed{...}` of a response against the reference answer.

Math-Verify compares the answers; text that it misreads is rewritten first (`normalized`, `_decimals`). This module has
no limits of time and memory: Math-Verify can run for hours on a tower of powers and crash in C, so `grade` belongs in
the processes of `rewards.workers`.
"""

import functools
import itertools
import logging
import os
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any

from reinforce_ada_jax.types import Verdict

# Longer than any reference answer, and short enough that a parse is not quadratic in a whole response.
MAX_BOXED_LENGTH = 2048
# Default of Math-Verify: floats are compared after rounding to this number of decimals.
FLOAT_DECIMALS = 6
# A decimal with fewer significant digits than these is a guess, not an approximation.
MIN_ROUNDED_DIGITS = 4

_BRACES = re.compile(r"\\boxed\{|[{}]")
# Mathematics that brings its own delimiters; `\$` is a currency sign.
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed\{")
_ENDING = re.compile(r"(?:\s|\\|~|(?<!\.)(?<!\\right)(?<!\\left)\.)+\Z")
_WORD_AS_INDEX = re.compile(
    r"_\s*(?:\{\s*\\(?:text|textrm|mathrm|operatorname)\s*\{\s*([A-Za-z]+)\s*\}\s*\}"
    r"|(\{\s*)?\\(arg|det|dim|exp|gcd|inf|lim|max|min|sup)(?![A-Za-z])\s*(?(2)\}))"
)
_CONSTANT_WITH_INDEX = re.compile(r"(?<![A-Za-z\\])([EeI])_\s*(?:\{\s*([A-Za-z0-9, ]+?)\s*\}|([A-Za-z0-9]))")
# Groups of three digits, in LaTeX and with the narrow and the unbreakable spaces of Unicode.
_DIGIT_GROUPS = re.compile(r"(?<![\d.,^_])\d{1,3}(?:(?:\\[,;: ]|[~ \u00a0\u2009\u202f])\d{3})+(?!\d)")
# `2e-1` may be 2e - 1: without a decimal point there is no sign.
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:(\d+\.\d+)e([+-]?\d+)|(\d+)e(\d+))(?![\w.])")
_REPEATING = re.compile(r"(?<![\d.,^_])(\d{0,15})\.(\d{0,15})\\(?:overline|bar)\s*(?:\{\s*(\d{1,15})\s*\}|(\d))")
_UPRIGHT_CONSTANT = re.compile(r"([A-Za-z]?)\\mathrm\s*\{\s*([ei])\s*\}")
# Digits and their base: 2516_8, A3_{16}.
_NUMERAL = re.compile(r"(?<![\w^.\\}])((?=[A-F]*\d)[\dA-F]+)\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d))")
_HALF_OF_DAY = re.compile(r"(?<![A-Za-z\\])([ap])\.?m(?![A-Za-z])", re.IGNORECASE)
_DEGREES = re.compile(r"\^?\s*(?:\{\s*°\s*\}|°)")
_CHOICE = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf)\{\s*\(([A-J])\)\s*\}(?:\\?[ ~]|\\q?quad(?![A-Za-z]))*"
    r"(?=\d|\.\d|\\d?frac|\\sqrt|\\pi|\$)"
)
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mbox)\s*\{"
_WORDS = re.compile(rf"(?:{_TEXT})?\s*([A-Za-z]{{4,}}(?:[ -][A-Za-z]+)*)\s*\}}?")
# A unit in upright letters whose symbols mean one thing; `\text{hr}` beside `\text{h}` says nothing.
_UNIT = re.compile(rf"{_TEXT}\s*((?:[kcmn]?[mgs]|min|h|[km]?[NJWV]|[kM]?Hz)(?:/(?:[km]?m|k?g|m?s|min|h))?)\s*\}}")
_RELATION = re.compile(r"[\s${]*(?:[<>≤≥≠]|\\(?:[gl]eq?|[gl]eqslant|neq?|not|[gl]t|to)(?![A-Za-z]))")
# `\text{12 apples}`: a number and what it counts; `5^{\text{th}}`; currencies.
_COUNTED = re.compile(rf"{_TEXT}\s*(\d[\d.,]*)\s+([A-Za-z][A-Za-z ]*)\}}")
_ORDINAL = re.compile(rf"(?<=\d)\s*\^\s*(?:\{{\s*)?{_TEXT}\s*(?:st|nd|rd|th)\s*\}}(?:\s*\}})?")
_CURRENCY = re.compile(r"[€£¥]\s*(?=\d)|(?<=\d)\s*[€£¥]")
# Replacements for letters of constants; the index keeps the old letter, so that different names stay different.
_FREE_LETTERS = {"E": r"\zeta", "e": r"\eta", "I": r"\xi"}
_DECIMAL = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)?\.\d+")
_ASSIGNED_TO = re.compile(r"\\?[A-Za-z]\w*\s*(?:=|\\approx|≈)")
_PLAIN = re.compile(r"[^<>=≤≥≠\[\]()]*")  # neither a relation nor an interval
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


def _slanted(match: re.Match[str]) -> str:
    """Returns the letter of an upright constant, apart from a letter before it."""
    return f"{match[1]} {match[2]}" if match[1] else match[2]  # a letter may end a command


def _as_fraction(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction: its digits less those before the period, over 9...90...0."""
    whole, once, period = match[1], match[2], match[3] or match[4]
    numerator = int(whole + once + period) - int((whole + once) or "0")
    return rf"\frac{{{numerator}}}{{{(10 ** len(period) - 1) * 10 ** len(once)}}}"


def _bases(text: str) -> set[int]:
    """Returns the bases of the numerals in a text that have one."""
    found = ((match[1], int(match[2] or match[3])) for match in _NUMERAL.finditer(text))
    return {base for digits, base in found if all(int(digit, 36) < base for digit in digits)}


def _halves_of_day(text: str) -> set[str]:
    """Returns "a" for a time before noon in a text, "p" for one after it."""
    return {match[1].lower() for match in _HALF_OF_DAY.finditer(text)}


def _units(text: str) -> set[str]:
    """Returns the units in a text, as far as their symbols are well known."""
    return {match[1] for match in _UNIT.finditer(text)}


def _words(text: str) -> str | None:
    """Returns an answer that is words alone, in lower case; None for any other."""
    found = _WORDS.fullmatch(_ENDING.sub("", text.strip()).strip("$"))
    return found[1].lower() if found else None


def normalized(text: str) -> str:
    r"""Returns `text` in a form that Math-Verify reads correctly; each rule fixes a general misreading.

    - White space, the backslash of a control space, a tie and a full stop are removed at the end: `185\ ` is 185, `5~`
      and `5.` are 5. An ellipsis and the empty delimiter `\right.` stay.
    - A word used as an index is a name in any font: `V_{\min }` and `V_{\text{min}}` are `V_{min}`.
    - Digits in groups of three are one number: `12\,345` and `12 345` are 12345.
    - `3e5` is 3 * 10^5, `90°` is `90^\circ`, `0.1\overline{6}` is 15/90, `\mathrm{e}` is e, and a tie is a space.
    - The empty set has one name, `\emptyset`.
    - `\text{12 apples}` is 12, `5^{\text{th}}` and `€5` are 5.
    - A letter with an index is a variable: `E_{1}` has nothing to do with Euler's number, nor `I_{0}` with the
      imaginary unit. Math-Verify drops such indices, or stops at the letter: `\frac{2}{3} E_{1}` is 2/3 to it.
    """
    text = _ENDING.sub("", text.strip())
    text = _CURRENCY.sub("", _ORDINAL.sub("", _COUNTED.sub(r"\1\\text{ \2}", text)))
    text = _DIGIT_GROUPS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = _REPEATING.sub(_as_fraction, _UPRIGHT_CONSTANT.sub(_slanted, text.replace("~", r"\ ")))
    text = re.sub(r"\\varnothing(?![A-Za-z])", r"\\emptyset", text)
    text = _SCIENTIFIC.sub(r"\1\3 \\times 10^{\2\4}", _DEGREES.sub(r"^{\\circ}", text))
    text = _WORD_AS_INDEX.sub(lambda match: f"_{{{match[1] or match[3]}}}", text)
    return _CONSTANT_WITH_INDEX.sub(
        lambda match: f"{_FREE_LETTERS[match[1]]}_{{{match[1]}{match[2] or match[3]}}}", text
    )


def _decimals(prediction: str, answer: str) -> int:
    r"""Returns the number of decimals to which floats are rounded before they are compared.

    A decimal stands for an exact reference that rounds to it: against `\frac{2}{3}`, 0.6667 is right, 0.6666 and
    0.66668 are not. Every number with as many decimals must have `MIN_ROUNDED_DIGITS` significant digits, the
    prediction must be numbers only (the decimals of `1.2346 \times 10^{-5}` say nothing), and a reference that has
    decimals is not exact.
    """
    rest = _ASSIGNED_TO.sub("", prediction)
    decimals = [match.group() for match in _DECIMAL.finditer(rest)]
    if not decimals or _DECIMAL.search(answer) or not _NUMBERS_ONLY.fullmatch(rest):
        return FLOAT_DECIMALS
    longest = max(len(decimal.rpartition(".")[2]) for decimal in decimals)
    # All numbers are rounded to the same place, so each number that decides the place must obey the rule: otherwise
    # 1234.5 next to 0.3 would make 0.3 right for 1/3. A number with fewer decimals is compared beyond its last one.
    deciding = [decimal for decimal in decimals if len(decimal.rpartition(".")[2]) == longest]
    significant = [len(decimal.replace(",", "").replace(".", "").lstrip("0")) for decimal in deciding]
    return FLOAT_DECIMALS if min(significant) < MIN_ROUNDED_DIGITS else min(longest, FLOAT_DECIMALS)


def parse(text: str, names: Sequence[str]) -> list[Any]:
    """Returns what Math-Verify finds in `text`: an expression, and the string itself as the last resort.

    `names` are "latex" (delimited mathematics) and "expression" (bare numbers and sums). Any exception may be raised.
    """
    library = math_verify()
    # Equal at every call: Math-Verify caches the patterns (0.1 s) of one list of configurations.
    configs = {"latex": library.LatexExtractionConfig(), "expression": library.ExprExtractionConfig()}
    return library.parse(text, [configs[name] for name in names], parsing_timeout=None, raise_on_error=True)


def read(text: str, names: Sequence[str] = ("latex",)) -> list[Any]:
    """Returns what Math-Verify reads in an answer, bare or with delimited mathematics (see `parse`)."""
    text = normalized(text)
    # A bare answer has to be delimited to be read as LaTeX, and read whole. A box does that, as in verl's scorer.
    found = parse(text if _DELIMITED.search(text) else rf"\boxed{{{text}}}", names)
    # Its `2i` has another i than its `2 i` and `i`: one is declared real.
    import sympy  # noqa: PLC0415  (after `math_verify`)

    one_i = {sympy.Symbol("i", real=True): sympy.Symbol("i", real=False)}
    return [each.xreplace(one_i) if hasattr(each, "xreplace") else each for each in found]


def verdict(pairs: Iterable[tuple[Any, Any]], **options: Any) -> Verdict:
    """Returns reward 1 where Math-Verify finds one (answer, prediction) of `pairs` equal, else 0.

    Reason "error": a comparison failed and none matched. `options` are those of its `verify`.
    """
    failed = False
    for pair in pairs:
        try:
            if math_verify().verify(*pair, timeout_seconds=None, raise_on_error=True, **options):
                return Verdict(True, 1.0)
        except Exception:
            failed = True  # the expressions cannot be compared; their strings, which come next, still can
    return Verdict(False, 0.0, "error" if failed else "")


def _readings(text: str, other: str) -> list[str]:
    r"""Returns the text, and what else it says.

    That is the value behind the letter of a choice that begins it, if `other` has no other letter; and with one `\pm`
    the two values.
    """
    text, letter = text.strip(), _CHOICE.match(other.strip())
    label, found = _CHOICE.match(text), [text]
    if label and (not letter or letter[1] == label[1]):
        found.append(text[label.end() :])
    before, sign, after = text.partition(r"\pm")
    if sign and before.strip() and not after.startswith(r"\pm") and not re.search(r"\\pm|\\mp|[,=]", before + after):
        found.append(f"{before}+{after}, {before}-{after}")
    return found


def grade(response: str, answer: str) -> Verdict:
    r"""Returns reward 1 where the last `\boxed{...}` of `response` equals `answer` in the sense of Math-Verify, else 0.

    The gold is parsed as LaTeX and the prediction as an expression or LaTeX; `x \in [1, 2]` equals `1 \le x \le 2`. The
    letter of a choice may precede a value: `\textbf{(C)}\ 5` is also 5. Numerals of other bases differ: `11_2` is not
    `11_3`, but 11 is either. So do times before and after noon, and units. `\ge 5` is not 5. Words of four letters and
    more are compared as text without case, and shorter ones as products: `east` is not `seat`, and `ab` is `ba`.

    Args:
      response: the text of a response.
      answer: the reference answer: bare LaTeX (`\frac{1}{2}`) or text with delimited mathematics (`$\frac{1}{2}$`).

    Returns:
      A verdict. Reasons: "no_answer" (no box, or a blank one), "too_long" (more than `MAX_BOXED_LENGTH` characters in
      it), "error" (Math-Verify failed on every comparison that did not match).
    """
    boxed = last_boxed(response)
    if boxed is None or not boxed.strip():
        return Verdict(False, 0.0, "no_answer")
    if len(boxed.strip()) > MAX_BOXED_LENGTH:
        return Verdict(False, 0.0, "too_long")
    words, wanted = _words(boxed), _words(answer)
    if words and wanted:
        return Verdict(words == wanted, float(words == wanted))
    # Math-Verify drops these: a relation before a number, and marks of both.
    marks = [(marks(boxed), marks(answer)) for marks in (_bases, _halves_of_day, _units)]
    differ = any(ours and theirs and ours.isdisjoint(theirs) for ours, theirs in marks)
    if differ or (_RELATION.match(boxed) and _PLAIN.fullmatch(answer)):
        return Verdict(False, 0.0)
    decimals = _decimals(normalized(boxed), normalized(answer))
    # sympy and ANTLR raise any exception on a model's text (RecursionError, MemoryError, TypeError, ...).
    try:
        predictions = [found for text in _readings(boxed, answer) for found in read(text, ("expression", "latex"))]
        pairs = itertools.product([found for text in _readings(answer, boxed) for found in read(text)], predictions)
    except Exception:
        return Verdict(False, 0.0, "error")
    return verdict(pairs, float_rounding=decimals, allow_set_relation_comp=True)
