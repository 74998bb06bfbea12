"""Problem files, prompts, and the cursor that says which prompts come next.

The order is a function of (seed, epoch), so the cursor is the whole resume state: three integers. What a response to a
prompt is worth is not known here.
"""

import dataclasses
import json
import pathlib
from typing import Any, Self

import numpy as np

from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.types import Prompt

_CIPHER = "cipher:"


def benchmark_name(source: str) -> str:
    """The name under which a source's results are reported: a file's stem, or the built-in task's split."""
    return source.removeprefix(_CIPHER) if source.startswith(_CIPHER) else pathlib.Path(source).stem


def _parse_problem(line: bytes, where: str) -> dict[str, Any]:
    """One line of a problem file; ValueError begins with `where` (file and line)."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error}). One object a line: id, problem, answer.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}. One object a line: id, problem, answer.")
    for name in ("id", "problem", "answer"):
        if name not in row:
            raise ValueError(f"{where}: no {name!r} among {sorted(row)}. Every line needs id, problem and answer.")
        if not isinstance(row[name], str):
            raise ValueError(f"{where}: {name} is {row[name]!r}; it must be a string. Put it in quotes.")
    problem = {name: row[name] for name in ("id", "problem", "answer")}
    pass_rate = row.get("pass_rate")
    if pass_rate is not None:
        if not isinstance(pass_rate, int | float) or not 0.0 <= pass_rate <= 1.0:
            raise ValueError(f"{where}: pass_rate is {pass_rate!r}; it must be a number in [0, 1], or left out.")
        problem["pass_rate"] = float(pass_rate)
    return problem


def load_problems(source: str) -> list[dict[str, Any]]:
    """The problems of a source, in its order.

    Args:
      source: "cipher:train" or "cipher:heldout" for the built-in task, else the path of a JSONL file. Blank lines and
        further fields are ignored.

    Returns:
      Dicts with "id" (unique), "problem", "answer", and "pass_rate" where the file has one.
    """
    if source.startswith(_CIPHER):
        return cipher.problems(source.removeprefix(_CIPHER))
    file = pathlib.Path(source)
    if not file.is_file():
        raise ValueError(
            f'There is no file {source}: name a JSONL file of {{"id", "problem", "answer"}}, or cipher:train for the '
            "built-in task."
        )
    problems: list[dict[str, Any]] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        problem = _parse_problem(line, f"{source}, line {number}")
        first = line_of_id.setdefault(problem["id"], number)
        if first != number:
            raise ValueError(
                f"{source}, lines {first} and {number}: both have id {problem['id']!r}. Samples are addressed by id: "
                "make it unique."
            )
        problems.append(problem)
    if not problems:
        raise ValueError(f"{source} is empty: it needs at least one line with id, problem and answer.")
    return problems


def tokenize(
    problems: list[dict[str, Any]], tokenizer: Tokenizer, template: str, max_prompt_tokens: int
) -> list[Prompt]:
    """The problems as prompts, rendered with `template`; ValueError when any is longer than `max_prompt_tokens`."""
    prompts = [
        Prompt(
            id=problem["id"],
            problem=problem["problem"],
            answer=problem["answer"],
            tokens=tokenizer.render(problem["problem"], template),
            pass_rate=problem.get("pass_rate"),
        )
        for problem in problems
    ]
    too_long = [len(prompt.tokens) for prompt in prompts if len(prompt.tokens) > max_prompt_tokens]
    if too_long:
        raise ValueError(
            f"{len(too_long):,} prompts have {min(too_long):,} to {max(too_long):,} tokens, limit "
            f"{max_prompt_tokens:,}: raise data.max_prompt_tokens or run prepare with it."
        )
    return prompts


@dataclasses.dataclass(frozen=True)
class PromptCursor:
    """A position in the endless sequence of prompts: `position` prompts of this epoch have been passed."""

    seed: int
    epoch: int = 0
    position: int = 0

    def to_json(self) -> dict[str, int]:
        """The cursor as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, int]) -> Self:
        """The cursor that `to_json` described."""
        return cls(**state)


def prompts_after(
    prompts: list[Prompt], cursor: PromptCursor, count: int, taken: set[str]
) -> list[tuple[Prompt, PromptCursor]]:
    """Up to `count` prompts one after another, each with the cursor after it; fewer where the data have no more.

    All are different, and none has an id in `taken`. They may reach into the next epoch.
    """
    following: list[tuple[Prompt, PromptCursor]] = []
    taken = set(taken)
    while len(following) < count and len(taken) < len(prompts):
        order = np.random.default_rng([cursor.seed, cursor.epoch]).permutation(len(prompts))
        for position in range(cursor.position, len(prompts)):
            prompt = prompts[order[position]]
            if prompt.id not in taken and len(following) < count:
                taken.add(prompt.id)
                following.append((prompt, dataclasses.replace(cursor, position=position + 1)))
        cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, position=0)
    return following


def next_prompts(prompts: list[Prompt], cursor: PromptCursor, count: int) -> tuple[list[Prompt], PromptCursor]:
    """The next `count` prompts, all different, and the cursor after them. A pure function.

    Every epoch is a permutation drawn from (seed, epoch). A tail shorter than `count` is dropped, and the batch begins
    the next epoch: filling up would put prompts twice into one batch. Which ones are dropped is as random as the
    permutation, so over the epochs no prompt is favoured.
    """
    if not 1 <= count <= len(prompts):
        raise ValueError(
            f"{count:,} prompts are wanted at a time, of {len(prompts):,}: all must be different. Lower "
            "collection.prompts_per_iteration or give more prompts."
        )
    if cursor.position + count > len(prompts):
        cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, position=0)
    order = np.random.default_rng([cursor.seed, cursor.epoch]).permutation(len(prompts))
    end = cursor.position + count
    return [prompts[i] for i in order[cursor.position : end]], dataclasses.replace(cursor, position=end)
