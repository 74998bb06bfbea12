r"""Grader with the published program's rule for Minerva Math, which is that of Qwen2.5-Math's evaluation.

The answer is taken from the text even where nothing is boxed, and normalised by replacements of text. Numbers are
equal within a relative 1e-4, also as percentages; `reference_equality` compares everything else. What the program
answers is on record in tests/golden/reference/grading.jsonl. `minerva` is the project's own rule.
"""

import re

from reinforce_ada_jax.rewards import math_answer, reference_equality
from reinforce_ada_jax.rewards.math_answer import MAX_BOXED_LENGTH
from reinforce_ada_jax.rewards.number_words import to_digits
from reinforce_ada_jax.rewards.reference import up_to_closing_brace
from reinforce_ada_jax.types import Verdict

warm_up = math_answer.warm_up

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_MINERVA_BEGIN, _MINERVA_END = "final answer is $", "$. I hope"

# Replacements, in this order. Between them a unit at the end is removed, and number words are read.
_LAYOUT = (
    (re.compile(r"\n|\\!"), ""),
    (re.compile(r"\\begin\{array\}\{.*?\}"), r"\\begin{pmatrix}"),
    (re.compile(r"\\end\{array\}"), r"\\end{pmatrix}"),
    (re.compile("bmatrix"), "pmatrix"),
    (re.compile("tfrac|dfrac"), "frac"),
    (re.compile(r"\\(n|l|g)eq"), r"\\\1e"),
    (re.compile(r"\\left"), ""),
    (re.compile(r"\\right"), ""),
    (re.compile(r"\\([{}])"), r"\1"),
)
_UNIT_AT_THE_END = re.compile(r"\\text\{.*?\}$")
_SIGNS = ((re.compile(r"\^\{\\circ\}|\^\\circ"), ""), (re.compile(r"\\?\$"), ""), (re.compile(r"\\[()]"), ""))
_MEANING = (
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    *((re.compile(re.escape(name + sign)), "") for sign in ("=", r"\in", r"\to") for name in "xyz"),
    (re.compile(r"\\emptyset"), "{}"),
    (re.compile(r"\(-\\infty,\\infty\)"), r"\\mathbb{R}"),
    (re.compile(r"\\?%"), ""),
    (re.compile(r"([ {])\."), r"\g<1>0."),
    (re.compile("infinity"), r"\\infty"),
)
_REST = ((re.compile("and"), ""), (re.compile(r"\\mathbf"), ""), (re.compile(r"\\mbox\{.*?\}"), ""))
_DECIMAL_ZEROS = ((re.compile(r"(\d+)\.0*(\D)"), r"\1\2"), (re.compile(r"(\d+)\.0*$"), r"\1"))
_ROOT = re.compile(r"\\sqrt(\w+)")
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")


def _replaced(text: str, replacements: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in replacements:
        text = pattern.sub(replacement, text)
    return text


def _braced(fraction: str) -> str:
    r"""Returns what follows a `\frac` with both of its arguments in braces: `{1}{2}x` for `12x` and for `1{2}x`."""
    if fraction.startswith("{"):
        return fraction
    numerator, rest = fraction[0], fraction[1:]
    return f"{{{numerator}}}{rest}" if rest.startswith("{") else f"{{{numerator}}}{{{rest[0]}}}{rest[1:]}"


def _braced_fractions(text: str) -> str:
    r"""Returns `\frac12` as `\frac{1}{2}`; the text itself where one fraction is cut short."""
    first, *fractions = text.split(r"\frac")
    if any(len(each) < 2 and each != "{" for each in fractions):
        return text
    return r"\frac".join([first, *map(_braced, fractions)])


def normalized(text: str) -> str:
    """Returns an answer in the form in which the program compares it."""
    text = _replaced(text.strip().replace("\n", "").rstrip("."), _LAYOUT)
    text = _UNIT_AT_THE_END.sub("", text).strip() or text
    text = _replaced(to_digits(_replaced(text, _SIGNS)), _MEANING)
    if r"\infty" not in text:
        text = text.replace("inf", r"\infty")
    text = _replaced(text, _REST)
    if "i" not in text:
        text = text.replace("j", "i")
    text = _replaced(text, _DECIMAL_ZEROS)
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _braced_fractions(_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", ""))
    parts = text.split("/")
    if len(parts) == 2 and all("sqrt" in part or _WHOLE.fullmatch(part) for part in parts):
        return rf"\frac{{{parts[0]}}}{{{parts[1]}}}"
    return text


def _after_last_box(text: str) -> str:
    """Returns the text in the braces after the last "boxed", to the end where they don't close, or up to a dollar."""
    text = text.rpartition("boxed")[2]
    if not text.startswith("{"):
        return text.partition("$")[0].strip()
    content = up_to_closing_brace(text[1:])
    return text[1:] if content is None else content


def stated(response: str) -> str:
    """Returns the text of a response's answer: in its last box, after a phrase, or its last number; else ""."""
    response = response.replace("\u043a\u0438", "")  # two Cyrillic letters that a model is known to add
    if _MINERVA_BEGIN in response and _MINERVA_END in response:
        found = response.partition(_MINERVA_BEGIN)[2].partition(_MINERVA_END)[0].strip()
    elif "boxed" in response:
        found = _after_last_box(response)
    elif "he answer is" in response:
        found = response.rpartition("he answer is")[2].strip()
    elif "final answer is" in response:
        found = response.rpartition("final answer is")[2].strip()
    elif "答案是" in response:
        found = response.split("答案是")[1].strip().partition("\n\n")[0].strip()
    else:
        found = next(reversed(_LAST_NUMBER.findall(response.replace(",", ""))), "")
    return re.sub(r"\n\s*", "", found).removeprefix(":").removesuffix(".").removesuffix("/")


def grade(response: str, answer: str) -> Verdict:
    """Returns reward 1 where the published program's Minerva rule does: what is `stated` equals `answer`.

    Reasons: "no_answer" (no answer is stated, and an empty one is wrong), "too_long" (more than `MAX_BOXED_LENGTH`
    characters are stated; the program has no limit).
    """
    text = stated(response)
    if len(text) > MAX_BOXED_LENGTH:  # normalising takes time quadratic in it
        return Verdict(False, 0.0, "too_long")
    text = normalized(text)
    correct = reference_equality.equal(text, answer)
    return Verdict(correct, float(correct), "" if text or correct else "no_answer")
