r"""Comparisons of what Math-Verify drops from an answer: words, clock times, units, bases, relations.

Only texts are compared here: `math_text` rewrites them, and `math_answer` compares their values.
"""

import itertools
import re

from reinforce_ada_jax.rewards.math_text import ENDING, FONT, numerals

_FONT_NAME = re.compile(FONT.removesuffix(r"\{") + r"(?=\{)")
_DOLLARS = re.compile(r"\A\$([^$]*)\$\Z")
_SPACE = re.compile(r"\\[ ,;:!]|~|\s+")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z\d ,'-]*")
_WORD = re.compile(r"[A-Za-z]{4}|(?<![A-Za-z])(?:[A-Z]{3}|[A-Z][a-z]{2})(?![A-Za-z])")
_SET_AS_WORD = re.compile(FONT + r"[^{}A-Za-z]*[A-Za-z]{2}")
_LIST = re.compile(r",| and | or ")

_HALF_OF_DAY = re.compile(r"(?<![A-Za-z\\])([ap])\.?m(?![A-Za-z])", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?(?:([ap])\.?m\.?)?")

ASSIGNED_TO = re.compile(r"\\?[A-Za-z]\w{0,40}\s*(?:=|\\approx|≈)")
_EQUALS = re.compile(r"(?<![<>!:\\])=(?![>=])|\\approx(?![A-Za-z])|≈")
_OPERATOR = re.compile(r"[-+*]|\\(?:cdot|times)(?![A-Za-z])|\A\s*\d")
_OF_NUMBERS = re.compile(
    r"(?:[-+*/^\d.,()\s{}$]|\\(?:[dt]?frac|sqrt|pi|cdot|times|left|right)(?![A-Za-z])|\\[,;:! %$])+"
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ITEMS = re.compile(r",(?!\d{3})|;")
_GOES_ON = re.compile(r",\s*(?:\\[lc]?dots(?![A-Za-z])|\.\.\.|…)")
_BOUND = re.compile(
    r"(?<![\\A-Za-z])(?:not|at least|at most|(?:more|less|fewer|greater|other) than"
    r"|or (?:more|less|fewer|greater|another))(?![A-Za-z])|\(or ",
    re.IGNORECASE,
)

# A unit and its other spellings; those of three letters and more may end with "s".
_SPELLINGS = """
    mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre;
    in inch inches; ft foot feet; yd yard; mi mile; acre; ml mL milliliter millilitre; l L liter litre; gallon;
    mg milligram; g gram; kg kilogram; lb lbs pound £; oz ounce; N newton; J joule; kJ kilojoule; W watt; kW kilowatt;
    ms millisecond; s sec second; min minute; h hr hrs hour; day; week; month; year; V volt; Hz hertz; kHz kilohertz;
    dollar USD $; cent ¢; euro EUR €; percent %; degree °; rad radian; C celsius; F fahrenheit
"""
_UNITS = {
    spelling: names[0]
    for names in map(str.split, _SPELLINGS.split(";"))
    for name in names
    for spelling in ((name, name + "s") if len(name) > 2 else (name,))
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_PLAIN_UNITS = (
    (re.compile(r"\^\s*(?:\{\s*)?\\circ(?![A-Za-z])"), "°"),
    (re.compile(r"(?<![A-Za-z])mph(?![A-Za-z])"), "mi/h"),
    (re.compile(r"(?<![A-Za-z])k(?:m|p|mp)h(?![A-Za-z])"), "km/h"),
    (re.compile(r"\\(?:([$%])|[A-Za-z]+|.)"), r"\1 "),
    (re.compile(r"[{}]"), ""),
)
_AMOUNT = re.compile(r"(?:([$€£])\s*)?(?<!\^)(?<!\^-)\d[\d.,]*((?:\^-?\d+|[^\d$€£]|[€£](?!\s*\.?\d))*)")
# Units without a font at the end of a text. Those of one or two letters may be variables.
_BARE_UNITS = re.compile(r"(?<=[\d}])\s*([A-Za-z]{3,}(?:\s+[A-Za-z]+)*)\s*\Z")
_FACTOR = re.compile(r"(/|[A-Za-z]+|[%°$€£¢])\s*(?:\^(-?\d+))?")


def _without_fonts(text: str) -> str:
    return _SPACE.sub(" ", re.sub(r"[{}]", "", _FONT_NAME.sub("", text))).strip(" .")


def same_words(text: str, other: str) -> bool | None:
    r"""Returns whether two answers in words are the same text; None if they are no answers in words.

    An answer in words has only letters, with spaces, commas and later digits, and one of the two answers has a word:
    four letters in a run, `ABC`, `Yes`, or letters in `\text` or another font for words. Case, fonts, spaces and
    hyphens do not count. Lists of the same items in another order give None.
    """
    plain = [_without_fonts(_DOLLARS.sub(r"\1", ENDING.sub("", each.strip()))) for each in (text, other)]
    if not all(map(_PLAIN.fullmatch, plain)):
        return None
    if not any(map(_WORD.search, plain)) and not any(map(_SET_AS_WORD.search, (text, other))):
        return None
    lists = [
        ["".join(item.split()) for item in _LIST.split(words.replace("-", " ").lower()) if item.strip()]
        for words in plain
    ]
    if lists[0] == lists[1]:
        return True
    return None if sorted(lists[0]) == sorted(lists[1]) else False


def _minutes(text: str) -> tuple[set[int], bool] | None:
    """Returns what a clock time may mean, in minutes after midnight, and whether it says a.m. or p.m."""
    match = _CLOCK.fullmatch(re.sub(r"[{}$]", "", _SPACE.sub("", _FONT_NAME.sub("", text))).lower())
    if match is None or not (match[2] or match[3]):
        return None
    hour, minute = int(match[1]), int(match[2] or "0")
    as_written = 60 * hour + minute
    if match[3] is None:
        return {as_written}, False
    return {as_written, 60 * (hour % 12 + 12 * (match[3] == "p")) + minute}, True


def same_time(text: str, other: str) -> bool | None:
    """Returns whether two clock times are equal; None if one is no clock time, or neither says a.m. or p.m."""
    ours, theirs = _minutes(text), _minutes(other)
    if ours is None or theirs is None or not (ours[1] or theirs[1]):
        return None
    return not ours[0].isdisjoint(theirs[0])


def _bases(text: str) -> set[int]:
    """Returns the bases in a text, of numerals that have one."""
    return {base for digits, base in numerals(text) if all(int(digit, 36) < base for digit in digits)}


def _halves_of_day(text: str) -> set[str]:
    """Returns "a" for a time before noon in a text, "p" for one after it."""
    return {match[1].lower() for match in _HALF_OF_DAY.finditer(text)}


def _known(word: str) -> str | None:
    return _UNITS.get(word) or (_UNITS.get(word.lower()) if len(word) > 1 else None)


def _unit(symbols: str) -> dict[str, int]:
    """Returns the powers of the units in a text: {"m": 1, "s": -1} for "m/s"."""
    powers: dict[str, int] = {}
    sign, power = 1, 1
    for word, exponent in _FACTOR.findall(symbols):
        unit = _known(word)
        if word in ("/", "per"):
            sign = -1
        elif unit is None:
            power = _POWERS[word]
        else:
            powers[unit], power = sign * int(exponent or power), 1
    if powers.keys() & {"C", "F"}:
        powers.pop("degree", None)
    return powers


def _units(text: str) -> set[tuple[tuple[str, int], ...]]:
    """Returns the units that follow the numbers of a text, sorted; none if the text has letters that are no units."""
    text = _FONT_NAME.sub(" ", ASSIGNED_TO.sub("", text))
    for pattern, replacement in _PLAIN_UNITS:
        text = pattern.sub(replacement, text)
    amounts = list(_AMOUNT.finditer(text))
    words = re.findall("[A-Za-z]+", text)
    if not amounts or re.search("[A-Za-z]", text[: amounts[0].start()]):
        return set()
    if not all(_known(word) or word in _POWERS or word == "per" for word in words):
        return set()
    found = {tuple(sorted(_unit((match[1] or "") + match[2]).items())) for match in amounts} - {()}
    # Degrees may be those of an angle or of a temperature.
    return found | {(("C", 1),), (("F", 1),)} if (("degree", 1),) in found else found


def marks_differ(text: str, other: str) -> bool:
    """Returns True where both texts name bases, halves of the day, or units, and have none of them in common."""
    marked = [(marks(text), marks(other)) for marks in (_bases, _halves_of_day, _units)]
    return any(ours and theirs and ours.isdisjoint(theirs) for ours, theirs in marked)


def with_unit_as_text(text: str) -> str:
    r"""Returns a text with the units at its end in `\text`: to Math-Verify `10 grams` is a product of letters."""
    match = _BARE_UNITS.search(text)
    words = match[1].split() if match else []
    is_unit = [(len(word) > 2 and _known(word)) or word in _POWERS or word == "per" for word in words]
    return rf"{text[: match.start()]}\text{{ {match[1]}}}" if match and all(is_unit) else text


def goes_on(text: str) -> bool:
    r"""Returns True for a list that goes on, `1, 2, \ldots`: Math-Verify drops the dots."""
    return bool(_GOES_ON.search(text))


def same_list(text: str, other: str) -> bool:
    r"""Returns True for two lists that go on and are the same text, but for spaces at commas and for the dots."""
    plain = [re.sub(r"\s*,\s*", ",", _GOES_ON.sub(",...", each)).strip() for each in (text, other)]
    return goes_on(text) and plain[0] == plain[1]


def is_bound(text: str) -> bool:
    r"""Returns True for a bound in words, such as `5 \text{ or more}`: Math-Verify drops the words."""
    return bool(_BOUND.search(text))


def equations_of_numbers(text: str) -> list[tuple[str, str]]:
    r"""Returns the neighbouring sides of `=` and `\approx` without letters: (5, 6) for `x = 5 = 6`."""
    lists = (_EQUALS.split(item) for item in _ITEMS.split(_THOUSANDS.sub("", text)))
    return [pair for sides in lists for pair in itertools.pairwise(sides) if all(map(_OF_NUMBERS.fullmatch, pair))]


def right_side(text: str, other: str = "") -> str | None:
    r"""Returns the text after the last `=`, 5 for `\dim V = 5`; None unless the left side has a name or is empty.

    If `other` is an equation too, the left side must be no more than a name: `2a + b = T` is not `a - b = T`.
    """
    signs = list(_EQUALS.finditer(text))
    left = text[: signs[-1].start()] if signs else ""
    named = not left.strip() or re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", left))
    if not signs or not named or (_EQUALS.search(other) and _OPERATOR.search(left)):
        return None
    return text[signs[-1].end() :].strip(" $")
