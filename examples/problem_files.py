"""Problems of an example: all different, and written as the commands read them."""

import json
import pathlib
from collections.abc import Callable, Hashable
from typing import TypeVar

MOST_REPEATS = 1000  # known problems in a row, after which no others are expected

T = TypeVar("T", bound=Hashable)


def distinct(draw: Callable[[], T], count: int) -> list[T]:
    """Returns `count` different problems in the order in which `draw` gave them first.

    Raises:
      ValueError: `draw` gives no other problems any more.
    """
    drawn: dict[T, None] = {}
    repeats = 0
    while len(drawn) < count:
        before = len(drawn)
        drawn[draw()] = None
        repeats = 0 if len(drawn) > before else repeats + 1
        if repeats == MOST_REPEATS:
            raise ValueError(
                f"{count:,} different problems are asked for, and only {before:,} were found: the last "
                f"{MOST_REPEATS:,} draws gave known ones. Ask for fewer problems, or for larger ones."
            )
    return list(drawn)


def write(file: pathlib.Path, rows: list[dict[str, str]]) -> None:
    """Writes rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
