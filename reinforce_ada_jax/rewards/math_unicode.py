r"""Characters of Unicode in an answer, written as the LaTeX that Math-Verify reads: `½`, `x²`, `√3`, `１２`, `∞`.

Math-Verify has no meaning for most of them: to it `½` is neither 1/2 nor 0.5, and `x²` is not `x^2`. Characters that it
reads correctly, such as `≤` and `π`, and marks with more than one meaning, such as `③` and `√2x`, are left as they are.
"""

import re
import unicodedata

_SUPERSCRIPTS, _SUBSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_SIGNS = {
    "−": "-", "×": r"\times ", "·": r"\cdot ", "•": r"\cdot ", "∞": r"\infty ", "∈": r"\in ", "⩽": r"\le ",
    "⩾": r"\ge ", "、": ",", **{letter: rf"\mathbb{{{unicodedata.normalize('NFKC', letter)}}}" for letter in "ℂℕℚℝℤ"},
}  # fmt: skip
# Full-width braces, dollars and backslashes stay: as ASCII they would change how the rest is read.
_FULL_WIDTH = str.maketrans({chr(ord(mark) + 0xFEE0): mark for mark in "!%()*+,-./:;<=>[]|"})
_LETTERS = re.compile("[\uff21-\uff3a\uff41-\uff5a\U0001d400-\U0001d7ff]")  # full-width, and the mathematical alphabets
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_SPACE = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# `3–5` may be a range, so a dash is a minus only where an operand begins.
_DASH = re.compile(r"(?:\A|(?<=[(\[,=]))(\s*)–(?=[\s\d.])")
_FRACTION = re.compile("(?:(?<![\\d.,^_])(\\d{1,9}) ?)?([\u00bc-\u00be\u2150-\u215e\u2189])")
_SLASHED = re.compile(r"(?<![\d.])(\d{1,9})⁄(\d{1,9})(?!\d)")
_RAISED_OVER_LOWERED = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹]{1,9})[⁄/]([₀₁₂₃₄₅₆₇₈₉]{1,9})")
_RAISED = re.compile(rf"\^?([{_SUPERSCRIPTS}]+)")
_LOWERED = re.compile(rf"_?([{_SUBSCRIPTS}]+)")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
# Under the sign: a number, a letter, or what is in brackets, if nothing follows that could be under it too.
_ROOT = re.compile(
    r"([√∛∜])\s*(?:(?=\{)|(\d+(?:\.\d+)?|[^\W\d_])(?![\w.^⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ])|\(([^()]*)\)(?![\^⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]))"
)


def _plain(text: str) -> str:
    """Returns the usual characters for raised, lowered and other shapes of them; a minus becomes `−`."""
    return unicodedata.normalize("NFKC", text)


def _fraction(match: re.Match[str]) -> str:
    r"""Returns `\frac{1}{2}` for `½`, and `\frac{5}{2}` for `2½`: to Math-Verify `2\frac{1}{2}x` is x."""
    over, under = map(int, _plain(match[2]).split("⁄"))
    return rf"\frac{{{int(match[1] or 0) * under + over}}}{{{under}}}"


def _root(match: re.Match[str]) -> str:
    content = match[2] or match[3]
    return _ROOTS[match[1]] + ("" if content is None else f"{{{content}}}")


def as_latex(text: str) -> str:
    r"""Returns a text with its Unicode characters as LaTeX, where they have one meaning.

    - `½` and `1⁄2` are `\frac{1}{2}`, and `2½` is `\frac{5}{2}`.
    - `x²` is `x^{2}`, `x₁` is `x_{1}`, `√3` and `√(3)` are `\sqrt{3}`, and `∞` is `\infty`.
    - Digits of any script are those of ASCII; so are full-width letters and signs, as in `（１，２）`, and the letters
      of the mathematical alphabets. `−`, `×` and `·` are signs, and `–` is a minus where an operand begins.
    - Spaces of any width are spaces. Characters without width are removed.
    """
    if text.isascii():
        return text
    text = _SPACE.sub(" ", _INVISIBLE.sub("", text)).translate(_FULL_WIDTH)
    text = _LETTERS.sub(lambda match: _plain(match[0]), text)
    text = re.sub(r"\d", lambda match: str(unicodedata.decimal(match[0])), text)
    text = _ROOT.sub(_root, text)
    text = _RAISED_OVER_LOWERED.sub(lambda match: rf"\frac{{{_plain(match[1])}}}{{{_plain(match[2])}}}", text)
    text = _SLASHED.sub(r"\\frac{\1}{\2}", _FRACTION.sub(_fraction, text))
    text = _LOWERED.sub(lambda match: f"_{{{_plain(match[1])}}}", text)
    text = _DASH.sub(r"\1-", _RAISED.sub(lambda match: f"^{{{_plain(match[1])}}}", text))
    return text.translate(str.maketrans(_SIGNS))
