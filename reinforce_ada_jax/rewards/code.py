"""Reward of a program: the share of its tests that it passes, each run in a sandbox of its own.

The program is the last fenced block of the response. It never sees an expected value: outputs are compared here, and
assertions run in a second sandbox, which calls the program's functions (`code_sides`).
"""

import json
import math
import pathlib
import re
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.isolation import sandbox
from reinforce_ada_jax.isolation.sandbox import Limits, Outcome, Program
from reinforce_ada_jax.rewards import code_sides
from reinforce_ada_jax.rewards.code_tests import FunctionCall, InputOutput, Test, read_tests
from reinforce_ada_jax.rewards.dialects import Columns, RewardFn
from reinforce_ada_jax.types import Verdict

_FENCED = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
_SIDES = pathlib.Path(code_sides.__file__).read_text(encoding="utf-8")
_SPARE_S = 0.5  # for the start and the end of a sandbox


def program_of(response: str) -> str | None:
    """Returns the last fenced block that is marked as Python, or else the last without a mark; None: there is none."""
    blocks = {language.lower() in _PYTHON[1:]: text for _, language, text in _FENCED.findall(response)
              if language.lower() in _PYTHON}  # fmt: skip
    return blocks.get(True, blocks.get(False))


def _same_token(written: str, expected: str) -> bool:
    if written == expected:
        return True
    try:
        found, wanted = float(written), float(expected)
    except ValueError:
        return False
    allowed = 1e-6 * max(1.0, abs(wanted)) if math.isfinite(wanted) else 0.0
    return "." in expected and (found == wanted or abs(found - wanted) <= allowed)


def same_output(written: str, expected: str) -> bool:
    """Returns True if two outputs have the same words; numbers with a decimal point may differ by a relative 1e-6."""
    ours, theirs = written.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_token, ours, theirs))


def _reason(outcome: Outcome) -> str:
    return f"{outcome.limit}_limit" if outcome.limit else "exception" if outcome.code else ""


def _run_program(program: bytes, test: InputOutput, limits: Limits) -> tuple[bool, str]:
    outcome = sandbox.run([Program(["program.py"], {"program.py": program}, test.input.encode())], limits)
    reason = _reason(outcome)
    return not reason and same_output(outcome.output.decode(errors="replace"), test.output), reason


def _run_test(program: bytes, test: Test, limits: Limits) -> tuple[bool, str]:
    """Runs test and program in two sandboxes that a socket connects; input and output need the program's alone."""
    if isinstance(test, InputOutput):
        return _run_program(program, test, limits)
    token = secrets.token_hex(16)  # written after the last assertion, by a process in which the program has no part
    given: dict[str, Any] = {"token": token}
    if isinstance(test, FunctionCall):
        given |= {"function": test.function, "arguments": test.arguments, "expected": [test.expected, *test.or_text]}
    else:
        given |= {"code": test.code}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        files = {"program.py": program}
        sides = [
            Program(["-c", _SIDES, "test"], stdin=json.dumps(given).encode(), channel=ours.fileno()),
            Program(["-c", _SIDES, "program"], files, channel=theirs.fileno()),
        ]
        outcome = sandbox.run(sides, limits, on_start=[ours.close, theirs.close])
    passed = outcome.output.decode(errors="replace") == token
    return passed, "" if passed or not outcome.limit else f"{outcome.limit}_limit"


def grader(*, time_limit_s: float, max_tests: int, limits: Mapping[str, Any]) -> RewardFn:
    """Returns a grader of programs, for a verifier worker.

    The first `max_tests` tests of a problem run (0: all), each under `limits`, the fields of `Limits`. A test that
    could outlast the time of a whole grading does not start, and counts as failed.
    """
    of_test = Limits(**limits)

    def grade(response: str, _: str, columns: Columns) -> Verdict:
        deadline = time.monotonic() + time_limit_s - of_test.wall_s - _SPARE_S
        tests = read_tests(columns)[: max_tests or None]
        program = program_of(response)
        if program is None:
            return Verdict(False, 0.0, "no_code")
        text = program.encode(errors="replace")
        passed, first_reason = 0, ""
        for test in tests:
            if time.monotonic() > deadline:
                first_reason = first_reason or "time_limit"
                break
            holds, reason = _run_test(text, test, of_test)
            passed += holds
            first_reason = first_reason or reason
            if reason == "time_limit":  # the others would take as long
                break
        return Verdict(passed == len(tests), passed / len(tests), first_reason)

    return grade
