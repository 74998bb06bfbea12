"""Calls of tools in a model's text: where they begin, and their parsing.

Qwen writes each call as JSON between `<tool_call>` and `</tool_call>`, after a text or without one. Llama-3 answers
with the JSON alone.
"""

import json
from collections.abc import Collection
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """A call of a function; the arguments are JSON."""

    name: str
    arguments: str


def settled_length(text: str) -> int:
    """Returns how many characters of a growing text are no part of a call, whatever comes next."""
    begin = text.lstrip()
    if not begin or begin.startswith("{"):
        return 0
    if OPEN in text:
        return text.index(OPEN)
    return len(text) - partial_length(text, OPEN)


def partial_length(text: str, word: str) -> int:
    """Returns the length of the longest suffix of a text that is a prefix of `word`, but not all of it."""
    most = min(len(text), len(word) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(word[:length])), 0)


def parse_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """Returns the text before the calls, and the calls; if these cannot be read, the whole text and no calls.

    JSON alone is a call only if it names one of the functions that the request offers, `names`.
    """
    if OPEN in text:
        before, *blocks = text.split(OPEN)
        calls = [_call(block.partition(CLOSE)[0]) for block in blocks]
    else:
        before, calls = "", [_call(text)]
        if calls[0] is not None and calls[0].name not in names:
            return text, []
    found = [call for call in calls if call is not None]
    return (before, found) if len(found) == len(calls) else (text, [])


def _call(text: str) -> Call | None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    try:
        call = Call(value["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        "".join(call).encode()
    except ValueError:  # NaN or 1e999, which Python reads as JSON; half of a surrogate pair, which JSON can escape
        return None
    return call
