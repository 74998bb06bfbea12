"""Tests of a programming problem, read from the columns of public data sets (the table in docs/how_to/code.md)."""

import ast
import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# BigCodeBench has an entry point, and test cases instead of a function `check`.
_DEFINES_CHECK = re.compile(r"^def check\b", re.MULTILINE)
# Groups of columns: the first group with a test is read, with all columns of the group.
COLUMNS = (
    ("verification_info",), ("tests",), ("test_cases",), ("official_tests",), ("input_output",),
    ("public_tests", "private_tests", "generated_tests"), ("public_test_cases", "private_test_cases"),
    ("test_list",), ("test",),
)  # fmt: skip
_INPUTS, _OUTPUTS = ("inputs", "input"), ("outputs", "output", "expected_output")
_FUNCTIONS = ("fn_name", "func_name")
# `two_sum`, or `Solution().twoSum` of LeetCodeDataset.
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*(?:\(\))?)*")
# Digits of a whole number in a test, such as a factorial. Python's own limit is 4,300.
MAX_DIGITS = 100_000


@dataclasses.dataclass(frozen=True)
class InputOutput:
    """A program that reads `input` must write `output`."""

    input: str
    output: str


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of the program's function, or of this method of its class Solution, must return `expected`.

    `or_text`: the text that `expected` was read from, if the text itself may be expected: "12" is a number or a text.
    """

    function: str
    arguments: Sequence[Any]
    expected: Any
    or_text: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Assertions:
    """Python that must run to its end with the names of the program."""

    code: str


Test = InputOutput | FunctionCall | Assertions


@contextlib.contextmanager
def long_numbers() -> Iterator[None]:
    """Lets Python read and write whole numbers of `MAX_DIGITS` digits, which tests of APPS have."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def _from_json(value: Any) -> Any:
    """Returns the value of a text that is JSON; any other text, and any other value, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _argument(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"the argument {line[:40]!r} of a function is not JSON") from None


def _pair(given: Any, wanted: Any, function: str, *, lines: bool) -> Test:
    """Returns the test of one input and its output; `lines`: arguments are lines of JSON."""
    if not function:
        return InputOutput(_text(given), _text(wanted))
    if lines and isinstance(given, str):
        arguments = [_argument(line) for line in given.splitlines() if line.strip()]
        return FunctionCall(function, arguments, _from_json(wanted))
    values, expected = _from_json(given), _from_json(wanted)
    is_text = isinstance(given, list) and isinstance(wanted, str) and expected != wanted
    arguments = values if isinstance(values, list) else [values]
    return FunctionCall(function, arguments, expected, (wanted,) if is_text else ())


def _of_object(value: Mapping[str, Any], function: str) -> list[Test]:
    nested = _first(value, ("test_cases", "tests"))
    function = _first(value, _FUNCTIONS) or function
    if nested is not None:
        return _of_value(nested, function)
    given, wanted = _first(value, _INPUTS), _first(value, _OUTPUTS)
    if given is None or wanted is None:
        raise ValueError(f"an object of tests has {', '.join(sorted(value)) or 'nothing'}, and no input and output")
    functional = value.get("testtype") == "functional"
    if functional and not function:
        raise ValueError("tests of the type functional need metadata.func_name")
    if isinstance(given, list) and isinstance(wanted, list) and "type" not in value and "testtype" not in value:
        if len(given) != len(wanted):
            raise ValueError(f"{len(given)} inputs and {len(wanted)} outputs: each test needs one of both")
        return [_pair(*pair, function, lines=False) for pair in zip(given, wanted, strict=True)]
    return [_pair(given, wanted, function if functional or "testtype" not in value else "", lines=functional)]


def _assertions(code: str) -> Assertions:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"a text is neither JSON nor Python: {code[:40]!r}") from None
    return Assertions(code)


def _runs(code: str) -> bool:
    """Returns True if a test, or a runner of tests, does more than define names: otherwise every program would pass.

    An `async` test counts only where unittest awaits it, a class only where it is collected (`run_class`).
    """
    function = (ast.FunctionDef, ast.AsyncFunctionDef)
    defining = (*function, ast.Import, ast.ImportFrom, ast.ClassDef, ast.Assign, ast.AnnAssign)
    body = ast.parse(code).body
    collected = [(node, False) for node in body]
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = " ".join(map(ast.unparse, node.bases))
            if node.name.startswith("Test") or "TestCase" in bases:
                collected += [(each, "IsolatedAsyncioTestCase" in bases) for each in node.body]
    named = [each for each in collected if isinstance(each[0], function) and each[0].name.startswith("test_")]
    if any(isinstance(test, ast.AsyncFunctionDef) and not is_awaited for test, is_awaited in named):
        return False
    if named:
        return True
    loaded = {each.id for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Name)}
    if any(isinstance(node, function) and node.name == "check" for node in body) and "check" not in loaded:
        statements = [node for node in body if not isinstance(node, (*function, ast.ClassDef))]
        return any(isinstance(each, ast.Assert) for node in statements for each in ast.walk(node))
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_guarded = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if not (isinstance(node, defining) or is_text or is_guarded):
            return True
    return False


def _of_value(value: Any, function: str) -> list[Test]:
    value = _from_json(value)
    if isinstance(value, str):
        return [_assertions(value)] if value.strip() else []
    if isinstance(value, Mapping):
        return _of_object(value, function) if value else []
    if not isinstance(value, Sequence):
        raise ValueError(f"tests are a {type(value).__name__}: they must be a text, a list or an object")
    return list(itertools.chain.from_iterable(_of_value(entry, function) for entry in value))


@long_numbers()
def read_tests(columns: Mapping[str, Any]) -> list[Test]:
    """Returns the tests of a problem; ValueError if it has none, or they have another form."""
    model, metadata = columns.get("reward_model"), _from_json(columns.get("metadata"))
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    function = (_first(metadata, _FUNCTIONS) if isinstance(metadata, Mapping) else None) or ""
    given = dict(columns)
    if isinstance(_from_json(given.get("private_test_cases")), str):
        del given["private_test_cases"]  # of LiveCodeBench: a pickle, which nothing here may open
    groups = {" + ".join(group): [given.get(name) for name in group] for group in COLUMNS}
    groups["reward_model.ground_truth"] = [truth]
    for name, group in groups.items():
        try:
            tests = [test for value in group if value is not None for test in _of_value(value, function)]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
        if tests:
            break
    else:
        raise ValueError(f"no tests: none of {', '.join(groups)} among its columns {', '.join(sorted(columns)):.200}")
    imports, entry = columns.get("test_imports"), columns.get("entry_point")
    lines = [*(imports if isinstance(imports, list) else [imports]), columns.get("test_setup_code")]
    setup = "".join(f"{line}\n" for line in lines if isinstance(line, str))
    is_named = name == "test" and isinstance(entry, str) and _ENTRY_POINT.fullmatch(entry)
    call = f"\ncheck({entry})\n" if is_named else ""

    def whole(code: str) -> str:
        return setup + code + (call if _DEFINES_CHECK.search(code) else "")

    tests = [
        dataclasses.replace(test, code=whole(test.code)) if isinstance(test, Assertions) else test for test in tests
    ]
    tests = [test for test in tests if not isinstance(test, Assertions) or _runs(test.code)]
    if not tests:
        raise ValueError(
            f"{name}: its code only defines names, or an async test that nothing awaits: call check(), give "
            "entry_point, or define test_..."
        )
    return tests


@long_numbers()
def tests_hash(problems: Iterable[Mapping[str, Any]]) -> str:
    """Returns a hash of the tests of problems, from their columns; raises ValueError as `read_tests` does."""
    found = hashlib.sha256()
    for columns in problems:
        found.update(f"{read_tests(columns)!r}\n".encode())
    return found.hexdigest()[:16]
