"""Sampled responses of a run, in samples/: an iteration's are written, and those that a report shows are chosen.

A report shows as many iterations as fit, evenly spaced, including the newest.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.files.durable import read_records
from reinforce_ada_jax.rewards.math_answer import last_boxed
from reinforce_ada_jax.types import Response

MOST_ROWS, MOST_BYTES = 10_000, 12_000_000  # per page
TEXTS = ("problem", "answer", "response")
OTHERS = ("prompt", "draw", "correct", "reason", "reward", "advantage", "tokens", "truncated")
LONGEST_TEXT = 20_000  # characters of a problem or response; the middle of a longer one is left out


@dataclasses.dataclass(frozen=True, eq=False)
class SampledResponses:
    """Responses of one run that a report shows."""

    rows: list[dict[str, Any]]  # lines of samples/<iteration>.jsonl with `iteration` and the `boxed` answer
    shown: int  # number of iterations in `rows`
    total: int  # number of iterations that have samples
    responses: int  # number of responses in samples/


def transcript(response: Response, decode: Callable[[np.ndarray], str]) -> str:
    """Returns the text of a response; turns are marked by [environment] and [model], on lines of their own."""
    ends = np.cumsum(response.segments, dtype=np.int64)[:-1]
    texts = [decode(segment) for segment in np.split(response.tokens, ends)]
    names = itertools.cycle(("[environment]", "[model]"))
    return "\n".join([texts[0], *(part for text in texts[1:] for part in (next(names), text.strip("\n")))])


def write(file: pathlib.Path, groups: Sequence[Group], decode: Callable[[np.ndarray], str]) -> None:
    """Writes every response of the groups, kept or not, one per line; `decode` turns tokens into text."""
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for group in groups:
            advantage = dict(zip(group.kept.tolist(), group.advantages.tolist(), strict=True))
            pool = group.pool
            for response, verdict in zip(pool.responses, pool.verdicts, strict=True):
                line = {
                    "prompt": pool.prompt.id, "problem": pool.prompt.problem, "answer": pool.prompt.answer,
                    "draw": response.draw, "response": transcript(response, decode), "tokens": response.num_sampled,
                    "truncated": response.truncated, "correct": verdict.correct, "reward": verdict.reward,
                    "reason": verdict.reason, "penalty": verdict.penalty, "advantage": advantage.get(response.draw),
                }  # fmt: skip
                if verdict.rewards:
                    line["rewards"] = dict(verdict.rewards)
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")


def evenly_spaced(count: int, most: int) -> list[int]:
    """Returns at most `most` of 0, ..., count - 1, evenly spaced, including the last."""
    if most == 1:
        return [count - 1] if count else []
    return sorted({int(index) for index in np.linspace(0, count - 1, min(most, count)).round()})


def shortened(text: str) -> str:
    """Returns `text`, without its middle if it is too long."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters not shown ...]\n{text[-half:]}"


def _row(line: dict[str, Any]) -> dict[str, Any]:
    boxed = last_boxed(line["response"])
    row = {key: shortened(line[key]) for key in TEXTS} | {"boxed": boxed and shortened(boxed)}
    return row | {key: line[key] for key in OTHERS}


def read(
    workdir: pathlib.Path, most_rows: int, most_bytes: int, after: int = 0, last: int | None = None
) -> SampledResponses:
    """Reads samples of a run within the limits, always some of the newest iteration: at most `most_rows` of it.

    Only iterations after `after`, up to `last` (None: all), are counted and read.
    """
    files = sorted(file for file in (workdir / "samples").glob("*.jsonl") if file.stem.isdecimal())
    files = [file for file in files if after < int(file.stem) and (last is None or int(file.stem) <= last)]
    counts = [file.read_bytes().count(b"\n") for file in files]
    files = [file for file, count in zip(files, counts, strict=True) if count]
    if not files:
        return SampledResponses([], 0, 0, 0)
    responses, size = sum(counts), sum(file.stat().st_size for file in files)
    most = min(len(files) * most_rows // responses, len(files) * most_bytes // size)
    chosen = [files[index] for index in evenly_spaced(len(files), max(1, most))]
    rows: list[dict[str, Any]] = []
    shown = 0
    # Iterations differ in size: take the newest first, while there is room.
    for file in reversed(chosen):
        lines = read_records(file, _row, "a sampled response", "Remove the file.")
        found = [{"iteration": int(file.stem), **line} for line in lines]
        if rows and len(rows) + len(found) > most_rows:
            break
        rows = found[:most_rows] + rows
        shown += 1
    return SampledResponses(rows, shown, len(files), responses)


def description(name: str, sampled: SampledResponses) -> str:
    """Returns a sentence on the responses that are shown of a run."""
    if not sampled.responses:
        return f"{name} has no sampled responses (logging.sampled_prompts)."
    if len(sampled.rows) == sampled.responses:
        return f"{name}: all {sampled.responses:,} responses of {sampled.total:,} iterations in samples/."
    which = "the newest, and others evenly spaced" if sampled.shown > 1 else "the newest"
    shown = len(sampled.rows)
    return (
        f"{name}: {shown:,} of {sampled.responses:,} responses in samples/, of {sampled.shown:,} of {sampled.total:,} "
        f"iterations ({which}); {sampled.responses - shown:,} are not shown."
    )


def read_all(workdirs: Sequence[pathlib.Path]) -> list[SampledResponses]:
    """Reads the samples of each run, with equal shares of a page's limits."""
    return [read(workdir, MOST_ROWS // len(workdirs), MOST_BYTES // len(workdirs)) for workdir in workdirs]
