r"""Equality of two answers in the published program's Minerva rule: as texts, numbers, lists, equations, expressions.

Expressions are read by sympy's `parse_expr`, then by latex2sympy, as in the environment that the program's README
describes. There sympy's own LaTeX parser is skipped, because it needs another version of ANTLR.

`parse_expr` executes what it parses. Here it gets no attributes, no texts and only functions of mathematics, so a
response cannot run Python; the program has no such limits. So a response that calls `simplify` or `open` is graded
differently from the program.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from reinforce_ada_jax.rewards.math_answer import math_verify

TOLERANCE = 1e-4

_CHOICES = "ABCDE"
_MATRIX = re.compile(r"(\\begin\{[pb]matrix\})(.*)\\end\{[pb]matrix\}", re.DOTALL)
_BRACKETED = re.compile(r"[(\[].+[)\]]")
# Code that no answer needs and that `parse_expr` would execute: texts, attributes, continued lines.
_CODE = re.compile(r"""['"\\]|\.[\s\#]*(?![eE][-+]?\d)[^\W\d]""")
_PLAIN_FUNCTIONS = ("sqrt", "root", "cbrt", "real_root")


def _number(text: str) -> float | None:
    """Returns a number without thousands separators, or None; 5% is 0.05."""
    text = text.replace(",", "")
    for digits, scale in ((text, 1.0), (text.removesuffix("%").removesuffix("\\"), 100.0)):
        try:
            return float(digits) / scale
        except ValueError:
            if not text.endswith("%"):
                return None
    return None


def _close(answer: float, prediction: float) -> bool:
    return math.isclose(answer, prediction, rel_tol=TOLERANCE)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("a function that is none of mathematics")


@functools.cache
def _names() -> dict[str, Any]:
    """Returns sympy's names for `parse_expr`: classes of expressions and constants; other functions are refused."""
    math_verify()  # sets variables that sympy reads at its import
    import sympy  # noqa: PLC0415  (a second, which the trainer need not spend)

    def safe(value: Any) -> bool:
        return isinstance(value, sympy.Basic) or (isinstance(value, type) and issubclass(value, sympy.Basic))

    values = ((name, getattr(sympy, name)) for name in sympy.__all__)
    names = {
        name: value if safe(value) or name in _PLAIN_FUNCTIONS or not callable(value) else _refuse
        for name, value in values
    }
    harmless = {each.__name__: each for each in (abs, round, pow, sum, divmod)}
    return names | harmless | {"max": sympy.Max, "min": sympy.Min, "__builtins__": {}}


def _parse_python(text: str, caret_is_power: bool = False) -> Any:
    from sympy.parsing import sympy_parser  # noqa: PLC0415

    if _CODE.search(text):
        raise ValueError("not an expression")
    rules = sympy_parser.standard_transformations
    rules += (sympy_parser.convert_xor,) if caret_is_power else ()
    value = sympy_parser.parse_expr(text, transformations=rules, global_dict=_names())
    if value is _refuse:
        raise ValueError("a function, not an expression")
    return value


def _read(text: str) -> Any:
    """Returns the expression that one of the parsers reads in a text, else the text."""
    _names()
    from latex2sympy2_extended.latex2sympy2 import latex2sympy  # noqa: PLC0415  (it imports sympy)

    single = text.replace("\\\\", "\\")
    for parse, version in itertools.product((_parse_python, latex2sympy), dict.fromkeys((single, text))):
        try:
            return parse(version)
        except Exception:  # sympy and ANTLR raise any exception on a model's text
            continue
    return text


def _expression(read: Any) -> Any:
    """Returns an expression; a text that neither parser read is parsed, as sympy's functions do with arguments."""
    return _parse_python(read, caret_is_power=True) if isinstance(read, str) else read


def _holds(test: Callable[[], Any]) -> bool:
    """Returns the result of a test; False if it raises anything, as in the program."""
    try:
        return bool(test())
    except Exception:
        return False


def _same_value(prediction: str, answer: str) -> bool:
    """Returns True where two texts are read as equal expressions, equations, numbers or matrices."""
    a, b = _read(prediction), _read(answer)
    import sympy  # noqa: PLC0415

    def same_matrix() -> bool:
        rounded = [matrix.applyfunc(lambda entry: round(entry, 3)) for matrix in (a, b)]
        return a.shape == b.shape and rounded[0].equals(rounded[1])

    tests = (
        lambda: str(a) == str(b) or a == b,
        lambda: a.equals(_expression(b)) or sympy.simplify(a - b) == 0,
        lambda: abs(a.lhs - a.rhs).equals(abs(b.lhs - b.rhs)),
        lambda: _close(*(float(sympy.N(_expression(each))) for each in (a, b))),
        same_matrix,
    )
    return any(map(_holds, tests))


def _is_choice(prediction: str, answer: str) -> bool:
    """Returns True where the answer is a letter of a multiple choice and the last such letter of the prediction."""
    letters = re.findall(rf"\b([{_CHOICES}])\b", prediction.upper())
    return len(answer) == 1 and answer in _CHOICES and letters[-1:] == [answer]


def _without_brackets(prediction: str, answer: str) -> tuple[str, str]:
    """Returns both texts in lower case, without brackets.

    Square ones go only if brackets are around the prediction, and the answer does not begin with the other kind.
    """
    square = prediction[:1] == "[" and prediction[-1:] == "]" and not answer.startswith("(")
    round_ = prediction[:1] == "(" and prediction[-1:] == ")" and not answer.startswith("[")
    texts = [text.strip("[]()") if square or round_ else text for text in (prediction, answer)]
    first, second = (re.sub("[{}()]", "", text).lower() for text in texts)
    return first, second


def _all_equal(predictions: Iterable[str], answers: Iterable[str]) -> bool:
    predictions, answers = list(predictions), list(answers)
    return len(predictions) == len(answers) and all(map(equal, predictions, answers))


def _equal_lists(prediction: str, answer: str) -> bool:
    if not (_BRACKETED.match(prediction) and _BRACKETED.match(answer)):
        return False
    return _all_equal(prediction[1:-1].split(","), answer[1:-1].split(","))


def _rows(matrix: str) -> list[list[str]] | None:
    """Returns the entries of a matrix, or None if the text is none."""
    match = _MATRIX.fullmatch(matrix)
    if match is None:
        return None
    return [row.strip().split("&") for row in match[2].split("\\\\") if row.strip()]


def _equal_matrices(prediction: str, answer: str) -> bool:
    rows, others = _rows(prediction), _rows(answer)
    if rows is None or others is None or len(rows) != len(others):
        return False
    return all(map(_all_equal, rows, others))


def _equal_equations(prediction: str, answer: str) -> bool:
    """Returns True for equations with the same difference of sides, and for `x = 5` and 5."""
    sides, others = prediction.split("="), answer.split("=")
    if len(sides) == len(others) == 2:
        (left, right), (other_left, other_right) = (map(str.strip, both) for both in (sides, others))
        difference, other = f"{left} - ({right})", f"{other_left} - ({other_right})"
        return _same_value(difference, other) or _same_value(f"-({difference})", other)
    if len(sides) == 2 and len(others) == 1 and len(sides[0].strip()) <= 2:
        return equal(sides[1], answer)
    if len(others) == 2 and len(sides) == 1 and len(others[0].strip()) <= 2:
        return equal(prediction, others[1])
    return False


def equal(prediction: str, answer: str) -> bool:
    """Returns True where the program takes a normalised prediction for the answer."""
    if prediction.strip().lower() == answer.strip().lower() or _is_choice(prediction, answer):
        return True
    value, expected = _number(prediction), _number(answer)
    if value is not None and expected is not None:
        return any(_close(each, value) for each in (expected / 100, expected, expected * 100))
    if not prediction:
        return False
    prediction, answer = prediction.strip(), answer.strip()
    if "pmatrix" in prediction and "pmatrix" not in answer:
        # A set that is compared with a matrix becomes one; its single backslashes do not separate rows.
        sets = (found.strip("{}").replace(",", "\\") for found in re.findall(r"\{.*,.*\}", answer))
        answer = ", ".join(rf"\begin{{pmatrix}}{each}\end{{pmatrix}}" for each in sets)
    first, second = _without_brackets(prediction, answer)
    tests = (_equal_lists, _equal_matrices, _equal_equations, _same_value)
    return first == second or any(test(prediction, answer) for test in tests)
