"""The responses in samples/, to be read by a person: how an iteration's are written, and which ones a report shows.

A report has as many iterations as fit, evenly spaced, the newest among them.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.rewards.math_answer import last_boxed

MOST_ROWS, MOST_BYTES = 10_000, 12_000_000  # of one page, shared by its runs
LONGEST_TEXT = 20_000  # characters of one problem or response; the middle of a longer one is left out


@dataclasses.dataclass(frozen=True, eq=False)
class Sampled:
    """What a report shows of one run.

    Attributes:
      rows: lines of samples/<iteration>.jsonl, each with its `iteration` and the `boxed` answer of its response.
      shown, total: iterations that `rows` are of, and that have samples.
      responses: in samples/ altogether.
    """

    rows: list[dict[str, Any]]
    shown: int
    total: int
    responses: int


def write(file: pathlib.Path, groups: Sequence[Group], decode: Callable[[np.ndarray], str]) -> None:
    """Every response of the groups, kept or not, one a line; `decode` makes text of tokens."""
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for group in groups:
            advantage = dict(zip(group.kept.tolist(), group.advantages.tolist(), strict=True))
            pool = group.pool
            for response, verdict in zip(pool.responses, pool.verdicts, strict=True):
                line = {
                    "prompt": pool.prompt.id, "problem": pool.prompt.problem, "answer": pool.prompt.answer,
                    "draw": response.draw, "response": decode(response.tokens), "tokens": len(response.tokens),
                    "truncated": response.truncated, "correct": verdict.correct, "reward": verdict.reward,
                    "reason": verdict.reason, "advantage": advantage.get(response.draw),
                }  # fmt: skip
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of 0, ..., count - 1: the last and, as far as they go, the first and others between."""
    if most >= count:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return sorted({int(place) for place in np.linspace(0, count - 1, most).round()})


def shortened(text: str) -> str:
    """`text`, without its middle where it is too long."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters not shown ...]\n{text[-half:]}"


def _rows(file: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of one file; what follows the last line break was never finished."""
    rows = []
    for number, text in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
            boxed = last_boxed(line["response"])
            rows.append({
                "iteration": int(file.stem), "problem": shortened(line["problem"]), "answer": shortened(line["answer"]),
                "draw": line["draw"], "response": shortened(line["response"]), "boxed": boxed and shortened(boxed),
                "correct": line["correct"], "reason": line["reason"], "reward": line["reward"],
                "advantage": line["advantage"], "tokens": line["tokens"], "truncated": line["truncated"],
            })  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}, line {number}: no sampled response ({error!r}). Remove the file.") from error
    return rows


def read(workdir: pathlib.Path, most_rows: int, most_bytes: int) -> Sampled:
    """Samples of a run, within the limits; where one iteration alone is beyond them, its first responses.

    Raises:
      ValueError: a finished line is no sampled response.
    """
    files = sorted(file for file in (workdir / "samples").glob("*.jsonl") if file.stem.isdecimal())
    counts = [file.read_bytes().count(b"\n") for file in files]
    files = [file for file, count in zip(files, counts, strict=True) if count]
    if not files:
        return Sampled([], 0, 0, 0)
    responses, size = sum(counts), sum(file.stat().st_size for file in files)
    most = min(len(files) * most_rows // responses, len(files) * most_bytes // size)
    chosen = [files[place] for place in evenly_spaced(len(files), max(1, most))]
    rows: list[dict[str, Any]] = []
    shown = 0
    # Iterations differ in size: the newest first, while there is room.
    for file in reversed(chosen):
        found = _rows(file)
        if rows and len(rows) + len(found) > most_rows:
            break
        rows = found[:most_rows] + rows
        shown += 1
    return Sampled(rows, shown, len(files), responses)


def words(name: str, sampled: Sampled) -> str:
    """What is shown of a run, in a sentence."""
    if not sampled.responses:
        return f"{name} has no sampled responses (logging.sampled_prompts)."
    if len(sampled.rows) == sampled.responses:
        return f"{name}: all {sampled.responses:,} responses of {sampled.total:,} iterations in samples/."
    which = "the newest, and others evenly spaced" if sampled.shown > 1 else "the newest"
    return (
        f"{name}: {len(sampled.rows):,} of {sampled.responses:,} responses in samples/, of {sampled.shown:,} of "
        f"{sampled.total:,} iterations ({which}); "
        f"{sampled.responses - len(sampled.rows):,} are not shown."
    )


def read_all(workdirs: Sequence[pathlib.Path]) -> list[Sampled]:
    """Each run's samples, the page's limits shared equally."""
    return [read(workdir, MOST_ROWS // len(workdirs), MOST_BYTES // len(workdirs)) for workdir in workdirs]
