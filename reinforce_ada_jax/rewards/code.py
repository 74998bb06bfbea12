"""Reward of a program: the share of its tests that it passes, each run in a sandbox of its own.

The program is the last fenced block of the response. It never sees an expected value: outputs are compared here, and
assertions run in a second sandbox, which calls the program's functions (`code_test_side`).
"""

import json
import math
import pathlib
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from reinforce_ada_jax.isolation import sandbox
from reinforce_ada_jax.isolation.sandbox import Limits, Program
from reinforce_ada_jax.rewards.code_tests import FunctionCall, InputOutput, Test, long_numbers, read_tests
from reinforce_ada_jax.rewards.code_wire import close
from reinforce_ada_jax.rewards.dialects import Columns, RewardFn
from reinforce_ada_jax.types import Verdict

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([\w+#.-]*)(.*)")
_PYTHON = ("", "py", "python", "python3")
# Possessive: a program may print a million digits and a letter.
_NUMBER = re.compile(r"[+-]?(\d++\.?\d*+|\.\d++)(e[+-]?\d++)?", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_UNSUPPORTED = re.compile(r"unsupported_\w+", re.ASCII)
_NEW_MODULE = """
import sys, types

def new(name, text):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(module))
"""
_SPARE_S = 0.5  # for the start and the end of a sandbox


def _source(name: str, *parts: str) -> str:
    """Returns a module's text for `python -c`, with the modules that it imports: a sandbox has none of our files."""
    folder, package = pathlib.Path(__file__).parent, __name__.rpartition(".")[0]
    texts = {part: (folder / f"{part}.py").read_text(encoding="utf-8") for part in (*parts, name)}
    made = (f"new('{package}.{part}', {texts[part]!r})" for part in parts)
    return "\n".join([_NEW_MODULE, *made, texts[name]])


_SCRIPT = _source("code_script")
_PROGRAM_SIDE = _source("code_program_side", "code_script", "code_wire")
_TEST_SIDE = _source("code_test_side", "code_wire", "code_names", "code_remote")


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Yields the mark and the text of each fenced block, without the indentation of its fence, as in Markdown.

    The time is about linear in the length: the end of a fence that nothing closes is looked for only once.
    """
    lines = re.sub("\r\n?", "\n", response).split("\n")
    never_closed = {"`": math.inf, "~": math.inf}  # for fences of this length or longer
    after = 0
    for number, line in enumerate(lines, 1):
        found = _FENCE.fullmatch(line)
        if number <= after or not found:
            continue
        indent, fence, mark, rest = found.groups()
        if len(fence) >= never_closed[fence[0]] or (fence[0] == "`" and "`" in rest):
            continue
        stripped = ((end, lines[end].strip(" \t")) for end in range(number, len(lines)))
        closing = (end for end, text in stripped if text.startswith(fence) and not text.strip(fence[0]))
        if (end := next(closing, None)) is None:
            never_closed[fence[0]] = len(fence)
            continue
        after = end + 1
        block = "".join(f"{each}\n" for each in lines[number:end])
        yield mark.lower(), re.sub(f"^[ \t]{{0,{len(indent)}}}", "", block, flags=re.MULTILINE)


def program_of(response: str) -> str | None:
    """Returns the last fenced block that is marked as Python, or else the last without a mark; None: there is none."""
    blocks = {mark in _PYTHON[1:]: text for mark, text in _blocks(response) if mark in _PYTHON}
    return blocks.get(True, blocks.get(False))


def _same_token(written: str, expected: str) -> bool:
    if written == expected:
        return True
    is_number = _NUMBER.fullmatch(written) and _NUMBER.fullmatch(expected) and not _WHOLE.fullmatch(expected)
    return bool(is_number) and math.isfinite(float(expected)) and close(float(written), float(expected))


def same_output(written: str, expected: str) -> bool:
    """Returns True if two outputs have the same words.

    If a number with a decimal point or an exponent is expected, it may be off by 1e-6, absolute or relative. Two whole
    numbers must be equal.
    """
    ours, theirs = written.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_token, ours, theirs))


def _run_test(program: bytes, test: Test, limits: Limits) -> tuple[bool, str]:
    """Runs test and program in two sandboxes that a socket connects; an `InputOutput` needs only the program's."""
    files = {"program.py": program}
    if isinstance(test, InputOutput):
        outcome = sandbox.run([Program(["-c", _SCRIPT], files, test.input.encode())], limits)
        reason = f"{outcome.limit}_limit" if outcome.limit else "exception" if outcome.code else ""
        return not reason and same_output(outcome.output.decode(errors="replace"), test.output), reason
    token = secrets.token_hex(16)  # written after the last assertion by the test's process, not by the program's
    given: dict[str, Any] = {"token": token}
    if isinstance(test, FunctionCall):
        given |= {"function": test.function, "arguments": test.arguments, "expected": [test.expected, *test.or_text]}
    else:
        given |= {"code": test.code}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sides = [
            Program(["-c", _TEST_SIDE], stdin=json.dumps(given).encode(), channel=ours.fileno()),
            Program(["-c", _PROGRAM_SIDE], files, channel=theirs.fileno()),
        ]
        outcome = sandbox.run(sides, limits, on_start=[ours.close, theirs.close])
    verdict = outcome.output.decode(errors="replace")
    if verdict == token:
        return True, ""
    if outcome.limit:
        return False, f"{outcome.limit}_limit"
    # The exit code of the test says only that an assertion failed. The exit code of the program says that it ended
    # early.
    return False, verdict if _UNSUPPORTED.fullmatch(verdict) else "exception" if outcome.other_code else ""


def grader(*, time_limit_s: float, max_tests: int, limits: Mapping[str, Any]) -> RewardFn:
    """Returns a grader of programs, for a verifier worker.

    The first `max_tests` tests of a problem run (0: all), each under `limits`, the fields of `Limits`. A test that
    could outlast the time of a whole grading does not start, and counts as failed.
    """
    of_test = Limits(**limits)

    @long_numbers()
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
