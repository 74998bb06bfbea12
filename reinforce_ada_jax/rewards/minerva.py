r"""Verifier for Minerva Math (OCWCourses): numbers within a tolerance, everything else as in `math_answer`.

The reference answers are measured and computed quantities with two to five digits, written as programs write them
(`4.5e33`, `-1./3`), without units.
"""

import math
import re

from reinforce_ada_jax.rewards import math_answer
from reinforce_ada_jax.rewards.math_answer import MAX_BOXED_LENGTH, last_boxed
from reinforce_ada_jax.types import Verdict

TOLERANCE = 0.01

warm_up = math_answer.warm_up

_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?")
_UNIT_SIGNS = re.compile(r"(?:\\cdot|[/.,])+\Z")  # left over between units, and at the end of a sentence
_SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\$|\s+")
_APPROXIMATELY = re.compile(r"≈|\\(?:approx|simeq|sim)(?![A-Za-z])")
# `v =`, `\rho_{0} =`, `x(t) =`: a name. With more than a name on its left it is an equation, not a number.
_NAME = re.compile(r"\A\s*\\?[A-Za-z]+\s*(?:_(?:\w|\{[^{}]*\}))?\s*(?:\([A-Za-z]\))?\s*=")
# A mantissa, a power of ten, or both; then perhaps a percent sign.
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<mantissa>(?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)(?:\.\d*)?|\.\d+)?"
    r"(?:(?:(?:\\times|\\cdot|\*|×|·)|(?<!\d)(?<!\.))10\^(?:\{(?P<power>[-+]?\d+)\}|(?P<bare_power>[-+]?\d+))"
    r"|[eE](?P<exponent>[-+]?\d+))?(?P<percent>\\?%)?",
    re.ASCII,  # like Math-Verify, which reads no other digits
)


def _normalized(text: str) -> str:
    r"""Returns the numbers of a program in LaTeX: Math-Verify misreads `np.arcsin(10/13)`, `4.5e33` and `-1./3`."""
    text = re.sub(r"\bnp\.([a-z]+)", r"\\\1", text)
    text = re.sub(r"(?<=\d)[eE]([-+]?\d+)(?![\d.])", r" \\times 10^{\1}", text)
    return re.sub(r"(?<=\d)\.(?=[/*])", "", text)


def number(text: str) -> float | None:
    r"""Returns the number in an answer, or None: 0.0022 for `v \approx 2.2 \times 10^{-3} \text{ m/s}`.

    Units and names are ignored. Exact expressions are numbers too: `\arcsin(10/13)` is 0.878.
    """
    text = _NAME.sub("", _UNIT.sub("", _APPROXIMATELY.split(text)[-1]))
    match = _NUMBER.fullmatch(_UNIT_SIGNS.sub("", _SPACE.sub("", text)))
    if match is None or match.end() == match.end("sign"):
        return _evaluated(text)
    power = match["power"] or match["bare_power"] or match["exponent"] or "0"
    mantissa = re.sub(r"[,{}]", "", match["mantissa"] or "1")
    return float(f"{match['sign']}{mantissa}e{power}") / (100.0 if match["percent"] else 1.0)


def _evaluated(text: str) -> float | None:
    text = _normalized(text)
    # A letter is a variable, or a unit that belongs to the answer: Math-Verify would drop the c of `\frac{1}{2}c`.
    if "=" in text or re.search(r"[A-Za-df-z]", re.sub(r"\\[A-Za-z]+", "", text)):
        return None
    # sympy and ANTLR raise any exception; `math_answer.grade`, which comes next, reports it in its verdict.
    try:
        found = math_answer.read(text)
        value = math.nan if isinstance(found[0], str) else complex(found[0])
    except Exception:
        return None
    return value.real if value.imag == 0.0 and math.isfinite(value.real) else None


def close(gold: float, prediction: float) -> bool:
    """Returns |gold - prediction| < 0.01 |gold + prediction| / 2: the two differ by less than 1 % of their mean.

    Source: `numeric_equality` with threshold 0.01 (Minerva, arXiv 2206.14858, appendix). There the threshold applies
    around 0 only. Elsewhere numpy's `isclose` with 1e-5 is used: it asks for more digits than the reference answers
    have.
    """
    return gold == prediction or abs(gold - prediction) < TOLERANCE * abs(gold + prediction) / 2


def grade(response: str, answer: str) -> Verdict:
    r"""Returns reward 1 where the last `\boxed{...}` of `response` is within 1 % of the number `answer`.

    `math_answer.grade` decides where one of the two is not a number, or the two are not close.
    """
    boxed = last_boxed(response)
    if boxed is not None and len(boxed.strip()) <= MAX_BOXED_LENGTH:
        gold = number(answer)
        prediction = None if gold is None else number(boxed)
        if gold is not None and prediction is not None and close(gold, prediction):
            return Verdict(True, 1.0)
    return math_answer.grade(response, _normalized(answer))
