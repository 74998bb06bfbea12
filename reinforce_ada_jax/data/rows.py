"""Rules by which a row becomes a problem: which columns hold its text, its answer and its id.

The rules are the same for every source: files, data sets of the hub, and those of TensorFlow Datasets. They read the
rows of TRL, verl, tunix, OpenAI's files and the published prompt sets without a setting (docs/problems.md).
"""

import collections
import dataclasses
import decimal
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from reinforce_ada_jax.data.problems import LABELS, Origin, Problem, json_hash

# The first column that a row has is used; a list of messages in `prompt` comes before them all. tunix has a rendered
# prompt in `prompts` in addition to the question; OpenAI's files have `messages`.
PROBLEM_COLUMNS = ("problem", "question", "prompt", "prompts", "messages")
# Answers for a verifier come before whole solutions, because public sets have both: `gt` of RLHFlow's sets,
# `short_answer` of the gsm8k of TFDS, `reference_answer` of OpenAI's files.
ANSWER_COLUMNS = (
    "reward_model.ground_truth", "gt", "ground_truth", "short_answer", "reference_answer", "answer", "solution",
)  # fmt: skip
NO_ANSWER = "none"
MAX_ID_LENGTH = 1024

_GSM8K_ANSWER = re.compile(r"(?:\A|\n)####[ \t]*(\S[^\n]*?)\s*\Z")
_NUMBER = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s${}]{1,40})\s*\$")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns that a user names, in place of the rules; a dot leads into an object: "extra_info.question"."""

    problem: str = ""  # column of the text, or of messages; "": by the rules
    answer: str = ""  # column of the answer; "none": no answer, for a reward that reads none; "": by the rules
    required: bool = True  # a row without a named column is refused; otherwise the rules hold for it
    messages_first: bool = False  # `messages` precede all other columns of the text that the rules find


BY_RULES = Columns()


def shown(value: Any) -> str:
    """Returns a value for an error message, cut to a line."""
    return f"{_SHORT.repr(value):.200}"


def _names(row: Mapping[str, Any]) -> str:
    names = sorted(map(str, itertools.islice(row, 30)))
    return ", ".join(f"{name:.40}" for name in names) + (", ..." if len(row) > 30 else "") or "(it has none)"


def _get(row: Mapping[str, Any], name: str, missing: Any = None) -> Any:
    """Returns a column, or `missing`; "a.b" is also field b of the object in column a."""
    if row.get(name) is None and "." in name:
        outer, _, inner = name.partition(".")
        return _get(row[outer], inner, missing) if isinstance(row.get(outer), Mapping) else missing
    return row.get(name, missing)


def _find(row: Mapping[str, Any], part: str, columns: Columns, where: str) -> tuple[str, Any]:
    """Returns name and value of the column that holds `part`, "problem" or "answer"."""
    named, names = getattr(columns, part), PROBLEM_COLUMNS if part == "problem" else ANSWER_COLUMNS
    if part == "problem" and columns.messages_first and isinstance(row.get("messages"), list):
        names = ("messages",)
    elif part == "problem" and isinstance(row.get("prompt"), list):
        names = ("prompt",)
    searched = [named] if named and columns.required else [named, *names] if named else names
    for name in searched:
        if (value := _get(row, name)) is not None:
            return name, value
    setting = f"data.{part}_column"
    if empty := [name for name in searched if _get(row, name, missing="") is None]:
        raise ValueError(
            f"{where}: {empty[0]} is null. Give the row its {part}, remove the row, or name another column: "
            f"--config.{setting}=NAME."
        )
    if named and columns.required:
        raise ValueError(f"{where}: no column {named!r}, which {setting} names, among {_names(row)}.")
    without = f", or --config.{setting}={NO_ANSWER} for a reward that reads no answer" if part == "answer" else ""
    raise ValueError(
        f"{where}: no {part}: none of {', '.join(names)} among its columns {_names(row)}. Name the column: "
        f"--config.{setting}=NAME{without}."
    )


def _messages(messages: Any, name: str, where: str) -> list[dict[str, str]]:
    """Returns the messages of a row; ValueError unless all are texts with a role and the last is the user's."""
    if not isinstance(messages, list):
        raise ValueError(f"{where}: {name} is {shown(messages)}; it must be a text, or a list of messages.")
    # OpenAI's files for fine-tuning end with the answer to learn.
    last = messages[-1] if messages and name == "messages" else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        messages = messages[:-1]
    for message in messages:
        known = isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        if not known or any(value is not None and not isinstance(value, str) for value in message.values()):
            raise ValueError(
                f"{where}: {shown(message)} in {name} is no message. It must have role and content, as text."
            )
    if not messages or messages[-1]["role"] != "user":
        found = f"the last one has the role {shown(messages[-1]['role'])}" if messages else "there are none"
        raise ValueError(f"{where}: the messages in {name} must end with one of the role 'user', and {found}.")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _boxed(text: str) -> str | None:
    r"""Returns the content of the box of a solution that opens last among those that close, or None.

    MATH has `\fbox{}` and `\boxed {}` too, and `\boxed 5` before the end of a formula.
    """
    opened: list[int | None] = []  # where the content of a box begins; None for another brace
    begin, end = -1, -1
    for brace in _BOX_OR_BRACE.finditer(text):
        if brace[0] == "}":
            content = opened.pop() if opened else None
            if content is not None and content > begin:
                begin, end = content, brace.start()
        else:
            opened.append(brace.end() if len(brace[0]) > 1 else None)
    if begin >= 0:
        return text[begin:end].strip()
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None


def _answer(row: Mapping[str, Any], columns: Columns, where: str) -> tuple[str, str]:
    """Returns the answer as text, and from where it was taken."""
    found = any(_get(row, name) is not None for name in ANSWER_COLUMNS)
    if columns.answer == NO_ANSWER and (columns.required or not found):
        return "", "no column"
    name, value = _find(row, "answer", columns, where)
    if isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0:
        return _digits(value), repr(name)
    if isinstance(value, list | dict) and name in (columns.answer, "reward_model.ground_truth", "ground_truth"):
        return json.dumps(value, ensure_ascii=False), f"{name!r} (as JSON)"
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name} is {shown(value)}; an answer must be a text or a number.")
    if match := _GSM8K_ANSWER.search(value):
        return _without_commas(match[1]), f"{name!r} (after '####')"
    boxed = _boxed(value) if name == "solution" else None
    if boxed:
        return boxed, rf"{name!r} (in \boxed{{}})"
    return _without_commas(value) if name == "short_answer" else value, repr(name)


def _digits(number: int | float) -> str:
    """Returns a number in digits, with no exponent: graders read the e of 5e-05 as a letter. 72.0 is 72."""
    if isinstance(number, int):
        return str(number)
    return format(decimal.Decimal(repr(number + 0.0)), "f").removesuffix(".0")  # + 0.0: no -0


def _without_commas(answer: str) -> str:
    return answer.replace(",", "") if _NUMBER.fullmatch(answer) else answer


def _numbered(name: str, seen: collections.Counter[str]) -> str:
    """Returns `name` at its first occurrence, "name-2" at the second, and so on."""
    seen[name] += 1
    return f"{name}-{seen[name]}" if seen[name] > 1 else name


def _own_id(row: Mapping[str, Any], where: str) -> str | None:
    name = row.get("id")
    if name is None:
        return None
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"{where}: id is {shown(name)}; it must be a text or a whole number.")
    return _checked_id(str(name), "id", where)


def _checked_id(name: str, key: str, where: str) -> str:
    if not 0 < len(name.strip()) <= len(name) <= MAX_ID_LENGTH:
        raise ValueError(
            f"{where}: {key} has {len(name):,} characters; it must have 1 to {MAX_ID_LENGTH:,}, not all blank."
        )
    if name.splitlines() != [name]:
        raise ValueError(
            f"{where}: {key} is {shown(name)}; it must be one line, because reports have it in their lines."
        )
    return name


def to_problem(row: Any, where: str, seen: collections.Counter[str], columns: Columns, *, unique_ids: bool) -> Problem:
    """Returns a row, an object with JSON values, as a problem.

    `where` is file and line, for the beginning of errors; `seen` counts the ids so far. Of two equal ids the second
    gets "-2". With `unique_ids` this holds only for ids that are made here; the caller refuses a repeated `id` of rows.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: a {type(row).__name__}. One object a line, with a problem and an answer.")
    column, text = _find(row, "problem", columns, where)
    messages = None if isinstance(text, str) else _messages(text, column, where)
    answer, answer_from = _answer(row, columns, where)
    problem_from = repr(column) if messages is None else f"the messages in {column!r}"
    text = text if messages is None else messages[-1]["content"]
    for name, value in (("problem", text), ("answer", answer)):
        if not value.strip() and (name, columns.answer) != ("answer", NO_ANSWER):
            raise ValueError(f"{where}: {name} is empty. Drop the line, or fill it in: no response could be right.")
    name = _own_id(row, where)
    if name is None:
        index, asked = _get(row, "extra_info.index"), text if messages is None else json.dumps(messages)
        if isinstance(index, bool):
            raise ValueError(f"{where}: extra_info.index is {index}; it must be a text or a whole number.")
        indexed = isinstance(index, str | int) and len(str(index)) <= MAX_ID_LENGTH
        found = _checked_id(str(index), "extra_info.index", where) if indexed else json_hash([asked, answer])
        name = _numbered(found, seen)
    elif not unique_ids:
        name = _numbered(name, seen)
    problem = Problem(id=name, problem=text, answer=answer, columns=dict(row))
    problem["origin"] = Origin(where, problem_from, answer_from)
    if messages is not None:
        problem["prompt"] = messages
    pass_rate = row.get("pass_rate")
    if pass_rate is not None:
        if isinstance(pass_rate, bool) or not isinstance(pass_rate, int | float) or not 0.0 <= pass_rate <= 1.0:
            raise ValueError(f"{where}: pass_rate is {shown(pass_rate)}; it must be a number in [0, 1], or left out.")
        problem["pass_rate"] = float(pass_rate)
    labels = {name: str(row[name]) for name in LABELS if isinstance(row.get(name), str | int) and row[name] != ""}
    return {**problem, "labels": labels} if labels else problem


def to_problems(
    rows: Iterable[tuple[int, Any]],
    source: str,
    columns: Columns = BY_RULES,
    *,
    unit: str = "row",
    unique_ids: bool = False,
) -> list[Problem]:
    """Returns the problems of the rows of a source, in its order; rows are (number, object with JSON values).

    `unit` is the name of a row in messages. With `unique_ids` an `id` that comes twice is refused. Otherwise the second
    gets "-2": merged sets repeat ids, and a user can't edit them. Raises ValueError, with source and row, where a row
    is no problem, two rows have one id, or there are none.
    """
    problems: list[Problem] = []
    first_of_id: dict[str, int] = {}
    seen: collections.Counter[str] = collections.Counter()
    for number, row in rows:
        problem = to_problem(row, f"{source}, {unit} {number}", seen, columns, unique_ids=unique_ids)
        first = first_of_id.setdefault(problem["id"], number)
        if first != number:
            raise ValueError(
                f"{source}, {unit}s {first} and {number}: both have id {shown(problem['id'])}. Samples are addressed "
                "by id: make it unique."
            )
        problems.append(problem)
    if not problems:
        raise ValueError(f"{source} is empty: it needs at least one {unit} with a problem and an answer.")
    return problems
