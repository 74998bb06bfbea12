r"""Verifier for GSM8K: the final number of a response must be exactly the reference number."""

import re
from fractions import Fraction

from reinforce_ada_jax.rewards.math_answer import last_boxed
from reinforce_ada_jax.types import Verdict

# Longer than any answer; Python refuses to read 5,000 digits.
MAX_DIGITS = 100

# A minus sign after a word, a number or a bracket is a hyphen or a difference: the last number of `10-15` is 15.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)}])[-−])?\\?\$?"
    r"(?P<digits>\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)?(?P<rest>\.\d+)?"
)
# Spaces of LaTeX and Unicode between groups of three digits, and those after a sign.
_GROUPS = re.compile(r"(?<=\d)(?:\\[,;: ]|[~ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SIGN = re.compile(r"\A([\s({]*[-−])\s+")
_LETTER = re.compile(r"[^\W\d_]")
_MARK = "####"


def _numbers(text: str) -> list[str]:
    """Returns the decimal numbers in `text`, in order, without thousands separators and currency signs."""
    found = []
    for match in _NUMBER.finditer(text):
        if match["digits"] or match["rest"]:
            digits = re.sub(r"[,{}]", "", match["digits"] or "0")
            found.append(("-" if match["sign"] else "") + digits + (match["rest"] or ""))
    return found


def final_number(response: str) -> str | None:
    r"""Returns the number in the last box of a response, else after the last `####`, else the last of all.

    In a box and after `####` only the text after the last equals sign counts, where `- 5` is -5, and `1\,450` is 1450.
    If it does not have exactly one number, as in `\boxed{\frac{1}{2}}`, the result is None.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        stated = boxed
    elif _MARK in response:
        stated = response.rpartition(_MARK)[2].strip().partition("\n")[0]
    else:
        return next(reversed(_numbers(response)), None)
    stated = re.split(r"=|≈|\\approx", stated.replace(r"\!", ""))[-1]
    return _only_number(_GROUPS.sub("", _SIGN.sub(r"\1", stated)))


def _only_number(text: str) -> str | None:
    numbers = _numbers(text)
    return numbers[0] if len(numbers) == 1 else None


def _reference(answer: str) -> Fraction:
    try:
        return Fraction(answer.replace(",", ""))
    except (ValueError, ZeroDivisionError):  # $18, 25%
        number = None if _LETTER.search(answer) else _only_number(answer)
        if number is None or len(number) > MAX_DIGITS:
            raise ValueError(f"the answer {answer[:40]!r} is not one number, which reward.kind=gsm8k needs") from None
        return Fraction(number)


def grade(response: str, answer: str) -> Verdict:
    r"""Returns reward 1 where the final number of `response` is `answer`, else 0: 72 is 72.00, `\$1{,}450` is 1450.

    Source: openai/grade-school-math, where the text after `####` is compared without commas; models that are asked to
    box the number are read from the box. Reasons: "no_answer" (no number), "too_long" (more than `MAX_DIGITS`
    characters of one).
    """
    number = final_number(response)
    if number is None:
        return Verdict(False, 0.0, "no_answer")
    if len(number) > MAX_DIGITS:
        return Verdict(False, 0.0, "too_long")
    correct = Fraction(number) == _reference(answer)
    return Verdict(correct, float(correct))
