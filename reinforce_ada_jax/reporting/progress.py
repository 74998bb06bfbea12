"""The progress line of a command at the terminal."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import tqdm

MINUTE_S = 60.0
PATIENCE_S = 5.0
LINE = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class _Lines:
    """Output to a log file: tqdm would go back to the start of its line, here each text is a new line."""

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


class _Bar(tqdm.tqdm):
    """Bar that no change of the wall clock stops: tqdm would show nothing until a clock set back has caught up."""

    _time = property(lambda self: time.monotonic, lambda self, _: None)


def _style() -> dict[str, Any]:
    """Settings of tqdm for this terminal or log file."""
    if sys.stderr.isatty():
        return {"mininterval": 0.1, "dynamic_ncols": True}
    return {"mininterval": MINUTE_S, "miniters": 0, "file": _Lines(), "bar_format": LINE}


def watched(items: range, what: str, *, quiet: bool = False) -> tqdm.tqdm:
    """Returns the items; a progress line counts them if they take more than `PATIENCE_S` seconds."""
    return _Bar(items, desc=what, delay=PATIENCE_S, leave=False, disable=quiet, **_style())


class Progress:
    """One line at the terminal: units done (iterations, problems), rate, time left, and the current phase.

    With `quiet` only the texts of `say` are shown. A log file gets a line every minute, and one at the end.
    """

    def __init__(self, total: int, done: int, unit: str = "iteration", *, quiet: bool = False):
        self._quiet = quiet
        self._bar = _Bar(total=total, initial=done, desc=unit, unit="it", disable=quiet, **_style())
        self._numbers = ""

    @property
    def done(self) -> int:
        return self._bar.n

    def phase(self, text: str) -> None:
        self._bar.set_postfix_str(f"{text}  {self._numbers}", refresh=False)
        self._bar.update(0)

    def iteration(self, numbers: Mapping[str, str]) -> None:
        """Counts one iteration; its numbers stay visible during the next one."""
        self._numbers = "  ".join(f"{name} {value}" for name, value in numbers.items())
        self._bar.set_postfix_str(self._numbers, refresh=False)
        self._bar.update(1)

    def reach(self, done: int, text: str = "") -> None:
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done - self._bar.n)

    def say(self, text: str) -> None:
        """Writes a warning above the progress line."""
        tqdm.tqdm.write(text, file=sys.stderr)

    def note(self, text: str) -> None:
        """Writes news, such as the result of an evaluation, above the progress line, unless it is quiet."""
        if text and not self._quiet:
            self.say(text)

    def close(self) -> None:
        self._bar.close()
