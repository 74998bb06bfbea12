"""Problems: their record, and JSONL files and columns of data sets read as records.

The id of a problem names it in checkpoints, samples and reports. Where a source has none, it is a hash of the problem's
text, so that it stays the same when rows are added or reordered.
"""

import collections
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, TypedDict

# Columns of public data sets. The first one that a row has is used: `gt` and `short_answer` are for verifiers, and the
# `answer` beside them is a whole solution.
PROBLEM_COLUMNS = ("problem", "question")
ANSWER_COLUMNS = ("gt", "short_answer", "answer")
# Fields that tables may group problems by. All others are ignored.
LABELS = ("subject", "subfield", "type", "level", "source")
_GSM8K_ANSWER = "\n#### "


class Problem(TypedDict):
    """One problem.

    Fields:
      id: unique in its source.
      problem: the text that a prompt is rendered from.
      answer: the reference that the verifier compares with.
      pass_rate: an earlier estimate in [0, 1], where the source has one.
      labels: those of `LABELS` that the source has, as text.
      prompt: the messages of the row, each with role and content, where the source has them (verl's format). They are
        rendered as they are; `problem` is then the text of the last one.
      columns: every column of the row by the row's own names, for rewards that read others than the answer. They belong
        to neither the id nor the hashes of a run.
    """

    id: str
    problem: str
    answer: str
    pass_rate: NotRequired[float]
    labels: NotRequired[dict[str, str]]
    prompt: NotRequired[list[dict[str, str]]]
    columns: NotRequired[dict[str, Any]]


def _messages(messages: list[Any], where: str) -> list[dict[str, str]]:
    """Returns the messages of a row; ValueError unless all are texts with a role and the last is the user's."""
    for message in messages:
        known = isinstance(message, Mapping) and {"role", "content"} <= set(message)
        if not known or any(value is not None and not isinstance(value, str) for value in message.values()):
            raise ValueError(f"{where}: {message!r} in prompt is no message. It must have role and content, as text.")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"{where}: prompt has {len(messages)} messages and must end with one of the user.")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _has_messages(row: Any) -> bool:
    return isinstance(row, Mapping) and isinstance(row.get("prompt"), list)


def _from_messages(row: Mapping[str, Any], where: str, seen: collections.Counter[str]) -> dict[str, Any]:
    """Returns a row of verl's format with id, problem and answer: see `from_columns`."""
    messages = _messages(row["prompt"], where)
    answer = (row.get("reward_model") or {}).get("ground_truth", row.get("answer"))
    index = (row.get("extra_info") or {}).get("index")
    given = row.get("id")
    if given is None:
        given = _numbered(content_id(json.dumps(messages), str(answer)) if index is None else str(index), seen)
    return {**row, "id": str(given), "problem": messages[-1]["content"], "answer": answer, "prompt": messages}


def _numbered(name: str, seen: collections.Counter[str]) -> str:
    """Returns `name` where it comes first, "name-2" where it comes a second time."""
    seen[name] += 1
    return f"{name}-{seen[name]}" if seen[name] > 1 else name


def check_row(row: Any, where: str, columns: Mapping[str, Any] | None = None) -> Problem:
    """Returns a row with "id", "problem", "answer" as a Problem; a ValueError begins with `where` (file and line).

    `columns` is the row of the source, if `row` was made from it.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: a {type(row).__name__}. One object a line: id, problem, answer.")
    for name in ("id", "problem", "answer"):
        if name not in row:
            raise ValueError(f"{where}: no {name!r} among {sorted(row)}. Every line needs id, problem and answer.")
        if not isinstance(row[name], str):
            raise ValueError(f"{where}: {name} is {row[name]!r}; it must be a string. Put it in quotes.")
        if not row[name].strip():
            raise ValueError(f"{where}: {name} is empty. Drop the line, or fill it in: no response could be right.")
    problem = Problem(id=row["id"], problem=row["problem"], answer=row["answer"])
    pass_rate = row.get("pass_rate")
    if pass_rate is not None:
        if not isinstance(pass_rate, int | float) or not 0.0 <= pass_rate <= 1.0:
            raise ValueError(f"{where}: pass_rate is {pass_rate!r}; it must be a number in [0, 1], or left out.")
        problem["pass_rate"] = float(pass_rate)
    labels = {name: str(row[name]) for name in LABELS if isinstance(row.get(name), str | int) and row[name] != ""}
    if labels:
        problem["labels"] = labels
    if _has_messages(row):
        problem["prompt"] = _messages(row["prompt"], where)
    problem["columns"] = dict(row if columns is None else columns)
    return problem


def to_row(problem: Problem) -> dict[str, Any]:
    """Returns a problem as a row of a JSONL file, with the columns of its source; it is read as the same problem."""
    messages = {"prompt": problem["prompt"]} if "prompt" in problem else {}
    row = {"id": "", "problem": problem["problem"], "answer": problem["answer"], **messages}
    row |= problem.get("labels", {}) | problem.get("columns", {}) | {"id": problem["id"]}
    return row | ({"pass_rate": problem["pass_rate"]} if "pass_rate" in problem else {})


def json_hash(value: Any) -> str:
    """Returns 16 hexadecimal digits of a hash of `value` as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def content_id(problem: str, answer: str) -> str:
    """Returns the id of a problem that has none of its own: a hash of its two texts."""
    return json_hash([problem, answer])


def problems_hash(problems: Iterable[tuple[str, str]]) -> str:
    """Returns a hash of (id, text) pairs, which identifies a set of problems in records and stores."""
    return json_hash([list(pair) for pair in problems])


def _column(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(
        f"{where}: none of the columns {', '.join(names)} among {sorted(row)}. Write the rows to a JSONL file."
    )


def _number(answer: str) -> str:
    """Returns the number after "####" in a solution of GSM8K, without commas."""
    return answer.rpartition(_GSM8K_ANSWER)[2].strip().replace(",", "")


def from_columns(rows: Iterable[Mapping[str, Any]], source: str) -> list[Problem]:
    """Returns the problems of a public data set, in its order.

    The text is `problem` or `question`; the answer is `gt` (RLHFlow's sets), `short_answer` (the gsm8k of TFDS) or
    `answer`; of GSM8K's solutions the number after "####", without commas. A row without `id` gets its `content_id`.
    An id that occurs a second time is followed by "-2": merged sets repeat ids, and a user can't edit them.

    A row whose `prompt` is a list of messages has verl's format: the answer is `reward_model.ground_truth` (or
    `answer`), the id `id`, `extra_info.index` or a hash of messages and answer.
    """
    problems: list[tuple[int, Problem]] = []
    seen: collections.Counter[str] = collections.Counter()
    for number, row in enumerate(rows, start=1):
        where = f"{source}, row {number}"
        if _has_messages(row):
            problems.append((number, check_row(_from_messages(row, where, seen), where, row)))
            continue
        text, answer = _column(row, PROBLEM_COLUMNS, where), _column(row, ANSWER_COLUMNS, where)
        if isinstance(answer, str) and (_GSM8K_ANSWER in answer or "short_answer" in row):
            answer = _number(answer)
        given = content_id(str(text), str(answer)) if row.get("id") is None else str(row["id"])
        complete = {"id": _numbered(given, seen), "problem": text, "answer": answer, "pass_rate": row.get("pass_rate")}
        complete |= {name: row.get(name) for name in LABELS}
        problems.append((number, check_row(complete, where, row)))
    return unique(problems, source, "row")


def unique(problems: Iterable[tuple[int, Problem]], source: str, unit: str) -> list[Problem]:
    """Returns the problems of (number of line or row, problem); ValueError when two have one id, or there are none."""
    kept: list[Problem] = []
    first_of_id: dict[str, int] = {}
    for number, problem in problems:
        first = first_of_id.setdefault(problem["id"], number)
        if first != number:
            raise ValueError(
                f"{source}, {unit}s {first} and {number}: both have id {problem['id']!r}. Samples are addressed by id: "
                "make it unique."
            )
        kept.append(problem)
    if not kept:
        raise ValueError(f"{source} is empty: it needs at least one {unit} with id, problem and answer.")
    return kept


def _parse(line: bytes, where: str, seen: collections.Counter[str]) -> Problem:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error}). One object a line: id, problem, answer.") from error
    if _has_messages(row):
        return check_row(_from_messages(row, where, seen), where, row)
    problem = check_row(row, where)
    return {**problem, "answer": _number(problem["answer"])} if _GSM8K_ANSWER in problem["answer"] else problem


def read_jsonl(file: str | pathlib.Path) -> list[Problem]:
    """Returns the problems of a JSONL file, in its order; ignores blank lines and unknown fields.

    A line whose `prompt` is a list of messages needs no id, problem and answer: see `from_columns`.
    """
    if not pathlib.Path(file).is_file():
        raise ValueError(
            f'There is no file {file}: name a JSONL file of {{"id", "problem", "answer"}}, or cipher:train for the '
            "built-in task."
        )
    lines = enumerate(pathlib.Path(file).read_bytes().splitlines(), start=1)
    seen: collections.Counter[str] = collections.Counter()
    problems = ((number, _parse(line, f"{file}, line {number}", seen)) for number, line in lines if line.strip())
    return unique(problems, str(file), "line")
