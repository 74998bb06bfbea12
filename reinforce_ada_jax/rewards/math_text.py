r"""Rewrites of the text of a mathematical answer that Math-Verify misreads.

`math_marks` compares what Math-Verify drops. Every pattern takes time linear in a text without long repetitions, and
`math_answer.MAX_BOXED_LENGTH` bounds the text.
"""

import re

from reinforce_ada_jax.rewards.number_words import to_digits

# A command that sets letters in a font for words, with its brace.
FONT = r"\\(?:text(?:normal|up|bf|it|rm|sf|tt)?|math(?:normal|rm|bf|it|sf|tt)|operatorname|mbox)\s*\{"
ENDING = re.compile(r"(?:\s|\\|~|(?<!\.)(?<!\\right)(?<!\\left)\.)+\Z")
# Styles, and signs that say nothing about a number.
_BEGINNING = re.compile(r"\A(?:\s|≈|\\(?:approx|simeq|therefore|bf|large|Large)(?![A-Za-z]))+")
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
# Replacements for letters of constants; the index keeps the old letter, so that different names stay different.
_FREE_LETTERS = {"E": r"\zeta", "e": r"\eta", "I": r"\xi"}
# Digits and their base: 2516_8, A3_{16}, 2516_{\text{eight}}.
_NUMERAL = re.compile(r"(?<![\w^.\\}])((?=[A-F]*\d)[\dA-F]+)\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d))")
_BASE_IN_WORDS = re.compile(rf"(?<=[\dA-F])_\s*\{{\s*(?:{FONT})?\s*([a-z]{{3,8}})\s*(?:\}}\s*)?\}}")
_DEGREES = re.compile(r"\^?\s*(?:\{\s*°\s*\}|°)")
_ANGLE = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])\s*(?:\^\s*(?:\d|\{\s*\d\s*\})\s*)?(?:(?:\\left\s*)?[({]\s*)?)"
    r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})"
)
_ORDINAL = re.compile(
    rf"(?<=\d)\s*\^\s*(?:\{{\s*(?:st|nd|rd|th)\s*\}}|(?:\{{\s*)?{FONT}\s*(?:st|nd|rd|th)\s*\}}(?:\s*\}})?)"
)
_CURRENCY = re.compile(r"[€£¥₹]\s*(?=[\d.])|(?<=\d)\s*[€£¥₹]")
_GROUP = re.compile(rf"({FONT})([^{{}}]*)\}}")
# Between spaces: `\text{A5}` and `\text{3F}` are names.
_NUMBER_IN_GROUP = re.compile(r"(?<!\S)[-+]?\d[\d.,:/]*(?!\S)")
_AND = re.compile(rf",?\s*{FONT}\s*,?\s*(?:and|or)\s*\}}")
# Behind an equals sign, at the end of a text.
_THOUSANDS = re.compile(r"(?<==)\s*\d{1,3}(?:,\d{3})+\Z")
_OR = re.compile(r"\\(?:lor|vee)(?![A-Za-z])")
_MIXED_PERCENT = re.compile(
    r"(?<![\d.,^_])(\d{1,9})\s*\\[dt]?frac\s*(?:\{\s*(\d{1,9})\s*\}\s*\{\s*(\d{1,9})\s*\}|(\d)(\d))\s*\\?%"
)
_APPROX = re.compile(r"≈|\\approx(?![A-Za-z])")
_CASES = re.compile(r"\\begin\{cases\}([^&]*?)\\end\{cases\}")
_EQUATION = re.compile(r"[^=<>]*=[^=<>]*")
_CHOICE = re.compile(
    rf"(?:{FONT})?\s*\(([A-J])\)\s*\}}?(?:\\?[ ~]|\\q?quad(?![A-Za-z]))*(?=\d|\.\d|\\d?frac|\\sqrt|\\pi|\$)"
)
_CHOICE_ALONE = re.compile(rf"(?:{FONT})?\s*\(?([A-J])\)?\s*\}}?")
_PERCENT = re.compile(r"\\?%")
_FROM_ONE_PERCENT = re.compile(r"\s*[1-9][^%]*%\s*")


def _slanted(match: re.Match[str]) -> str:
    """Returns an upright constant as a plain letter, with a space after a letter that precedes it."""
    return f"{match[1]} {match[2]}" if match[1] else match[2]  # a letter may end a command


def _as_fraction(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction: its digits minus those before the period, over 9...90...0."""
    whole, once, period = match[1], match[2], match[3] or match[4]
    numerator = int(whole + once + period) - int((whole + once) or "0")
    return rf"\frac{{{numerator}}}{{{(10 ** len(period) - 1) * 10 ** len(once)}}}"


def _mixed_percent(match: re.Match[str]) -> str:
    r"""Returns a mixed number of percent as a fraction: 100/300 for `33\frac13\%`."""
    whole, over, under = int(match[1]), int(match[2] or match[4]), int(match[3] or match[5])
    return rf"\frac{{{whole * under + over}}}{{{100 * under}}}"


def _alternatives(text: str) -> str:
    r"""Returns equations between `\lor` as a list."""
    parts = _OR.split(text)
    return ", ".join(parts) if all("=" in part for part in parts) else text


def _base_in_digits(match: re.Match[str]) -> str:
    """Returns a base in words as a number; other words, such as a name in an index, stay."""
    base = to_digits(match[1])
    return f"_{{{base}}}" if base.isdecimal() else match[0]


def numerals(text: str) -> list[tuple[str, int]]:
    """Returns the digits and the base of each number in a text that has one."""
    text = _BASE_IN_WORDS.sub(_base_in_digits, text)
    return [(match[1], int(match[2] or match[3])) for match in _NUMERAL.finditer(text)]


def _numbers_outside(match: re.Match[str]) -> str:
    r"""Returns a group of text with its numbers outside: `5\text{ or }6` for `\text{5 or 6}`."""
    if not any(map(str.isdigit, match[2])):
        return match[0]
    parts = _NUMBER_IN_GROUP.split(match[2])
    texts = [f"{match[1]}{part}}}" if part.strip() else part for part in parts]
    return "".join(map(str.__add__, texts, [*_NUMBER_IN_GROUP.findall(match[2]), ""]))


def _listed(match: re.Match[str]) -> str:
    r"""Returns the lines of `cases` as a list, if each is one equation: a system, not a function in pieces."""
    lines = [line.strip(" ,.;\n") for line in match[1].split(r"\\")]
    lines = [line for line in lines if line]
    return ", ".join(lines) if all(map(_EQUATION.fullmatch, lines)) else match[0]


def unwrapped(text: str) -> str:
    r"""Returns a text with the numbers of its groups outside: `\text{12 apples}` is `12\text{ apples}`."""
    return _GROUP.sub(_numbers_outside, text)


def normalized(text: str) -> str:
    r"""Returns `text` in a form that Math-Verify reads correctly; each rule fixes a general misreading.

    - White space, the backslash of a control space, a tie and a full stop are removed at the end: `185\ ` is 185, `5~`
      and `5.` are 5. An ellipsis and the empty delimiter `\right.` stay. `\approx` is removed at the beginning.
    - A word used as an index is a name in any font: `V_{\min }` and `V_{\text{min}}` are `V_{min}`.
    - Digits in groups of three are one number: `12\,345`, `12 345` and `= 12,345` are 12345.
    - `3e5` is 3 * 10^5, `90°` is `90^\circ`, `0.1\overline{6}` is 15/90, `\mathrm{e}` is e, and a tie is a space.
    - `\text{12 apples}` is 12, `5^{\text{th}}` and `€5` are 5, `2516_{\text{eight}}` is `2516_{8}`.
    - A function of an angle in degrees gets it in radians: `\cos 60^\circ` is 1/2.
    - A system of equations in `cases` is a list of them, and so are `x=1 \lor x=2` and `6, 8\text{, and }10`.
    - `33\frac13\%` is 100/300.
    - The empty set has one name, `\emptyset`.
    - A letter with an index is a variable: `E_{1}` has nothing to do with Euler's number, nor `I_{0}` with the
      imaginary unit. Math-Verify drops such indices, or stops at the letter: `\frac{2}{3} E_{1}` is 2/3 to it.
    """
    text = _MIXED_PERCENT.sub(_mixed_percent, _alternatives(_BEGINNING.sub("", ENDING.sub("", text.strip()))))
    text = _CURRENCY.sub("", _ORDINAL.sub("", _AND.sub(", ", unwrapped(text))))
    text = _BASE_IN_WORDS.sub(_base_in_digits, _CASES.sub(_listed, text))
    for groups in (_DIGIT_GROUPS, _THOUSANDS):
        text = groups.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = _REPEATING.sub(_as_fraction, _UPRIGHT_CONSTANT.sub(_slanted, text.replace("~", r"\ ")))
    text = re.sub(r"\\varnothing(?![A-Za-z])", r"\\emptyset", re.sub(r"\\not\s*=", r"\\neq ", text))
    text = _SCIENTIFIC.sub(r"\1\3 \\times 10^{\2\4}", _DEGREES.sub(r"^{\\circ}", text))
    text = _ANGLE.sub(r"\1\\frac{\2\\pi}{180}", text)
    text = _WORD_AS_INDEX.sub(lambda match: f"_{{{match[1] or match[3]}}}", text)
    return _CONSTANT_WITH_INDEX.sub(
        lambda match: f"{_FREE_LETTERS[match[1]]}_{{{match[1]}{match[2] or match[3]}}}", text
    )


def without_percent(text: str) -> str:
    return _PERCENT.sub("", text)


def readings(text: str, other: str) -> list[str]:
    r"""Returns the text of an answer, and its other possible meanings, given the text of the other answer.

    - With one `\pm`, perhaps with `\mp`: the two values.
    - If it begins with the letter of a choice: the value after the letter, unless `other` begins with another one; and
      the letter, if `other` is a letter alone.
    - A percentage from 1 % on without its sign, if `other` has none.
    - What follows the only `\approx`, if `other` has none.
    """
    text, letter = text.strip(), _CHOICE.match(other.strip())
    label, found = _CHOICE.match(text), [text]
    if label and (not letter or letter[1] == label[1]):
        found.append(text[label.end() :])
    if label and _CHOICE_ALONE.fullmatch(ENDING.sub("", other.strip())):
        found.append(label[1])
    signs = text.replace("±", r"\pm ").replace("∓", r"\mp ")
    if signs.count(r"\pm") + (r"\pm" not in signs) * signs.count(r"\mp") == 1:
        plus = signs.replace(r"\pm", "+").replace(r"\mp", "-")
        minus = signs.replace(r"\pm", "-").replace(r"\mp", "+")
        found.append(f"{plus}, {minus}")
    if _FROM_ONE_PERCENT.fullmatch(text) and not _PERCENT.search(other):
        found.append(without_percent(text))
    sides = _APPROX.split(text)
    if len(sides) == 2 and not _APPROX.search(other):
        found.append(sides[1])
    return found
