"""Problems: their record, their ids and hashes. rows.py makes them from the rows of files and data sets.

The id of a problem names it in checkpoints, samples and reports. Where a source has none, it is a hash of the problem
and its answer, so that it stays the same when rows are added or reordered.
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NotRequired, TypedDict

# Fields that tables may group problems by.
LABELS = ("subject", "subfield", "type", "level", "source")


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a problem, for messages; equal to any other, because it does not belong to the problem."""

    place: str = dataclasses.field(compare=False)  # file and line, or data set and row
    problem: str = dataclasses.field(compare=False)  # the column of the text, in quotes
    answer: str = dataclasses.field(compare=False)  # column of the answer, in quotes, and how it was read


class Problem(TypedDict):
    """One problem.

    `prompt` has the messages of a row, each with role and content, in verl's format. They are rendered as they are;
    `problem` is then the text of the last one. `columns` are for rewards that read other columns than the answer. They
    are no part of the id.
    """

    id: str  # unique in its source
    problem: str  # the text that a prompt is rendered from
    answer: str  # the reference that the verifier compares with
    pass_rate: NotRequired[float]  # an earlier estimate in [0, 1]
    labels: NotRequired[dict[str, str]]  # those of `LABELS` that the source has, as text
    prompt: NotRequired[list[dict[str, str]]]
    columns: NotRequired[dict[str, Any]]  # every column of the row, by the row's own names
    origin: NotRequired[Origin]  # of a row, for messages


def place(problem: Problem) -> str:
    """Returns file and line of a problem, for messages, or its id."""
    return problem["origin"].place if "origin" in problem else f"problem {problem['id']!r:.80}"


def to_row(problem: Problem) -> dict[str, Any]:
    """Returns a problem as a row of a JSONL file, with the columns of its source; the same `Columns` read it again."""
    messages = {"prompt": problem["prompt"]} if "prompt" in problem else {}
    row = {"id": "", "problem": problem["problem"], "answer": problem["answer"], **messages}
    row |= problem.get("labels", {}) | problem.get("columns", {}) | {"id": problem["id"]}
    return row | ({"pass_rate": problem["pass_rate"]} if "pass_rate" in problem else {})


def description(source: str, problems: Sequence[Problem]) -> str:
    """Returns one line on what was read: "a.jsonl: 2 rows; problem from 'question', answer from 'gt'"."""
    origins = [problem["origin"] for problem in problems if "origin" in problem]
    if not origins:
        return f"{source}: {len(problems):,} problems"

    def columns(names: Iterable[str]) -> str:
        counts = collections.Counter(names)
        return " and ".join(name if len(counts) == 1 else f"{name} ({count:,})" for name, count in counts.items())

    taken = (f"{part} from {columns(getattr(origin, part) for origin in origins)}" for part in ("problem", "answer"))
    return f"{source}: {len(problems):,} rows; {', '.join(taken)}"


def json_hash(value: Any) -> str:
    """Returns 16 hexadecimal digits of a hash of `value` as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
