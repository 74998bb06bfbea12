"""Sources of problems, and their prompts. collection/selection.py decides which of them an iteration draws."""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from reinforce_ada_jax.data import cipher, hub_problems, tfds_problems
from reinforce_ada_jax.data.files import read_file
from reinforce_ada_jax.data.problems import Problem, place
from reinforce_ada_jax.data.rows import BY_RULES, Columns
from reinforce_ada_jax.data.templates import CHAT, Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.types import Prompt

_CIPHER = "cipher:"
# A text is not tokenised if it has more than 100,000 characters and more than 32 for each allowed token. English has 4
# characters in a token, code 3.
UNCHECKED_CHARACTERS, CHARACTERS_PER_TOKEN = 100_000, 32


def benchmark_name(source: str) -> str:
    """Returns the name of a source in reports: a file's stem, the built-in task's split, or the data set's name."""
    if source.startswith(_CIPHER):
        return source.removeprefix(_CIPHER)
    for prefix in (tfds_problems.PREFIX, hub_problems.PREFIX):
        if source.startswith(prefix):
            return source.removeprefix(prefix).strip("/").replace("/", "_").replace(":", "_")
    return pathlib.Path(source.removesuffix(".gz")).stem


def load_problems(source: str, columns: Columns = BY_RULES) -> list[Problem]:
    """Returns the problems of a source, in its order.

    Args:
      source: "cipher:train" or "cipher:heldout" for the built-in task; "tfds:NAME/SPLIT" or "tfds:DIR" for a data set
        prepared with TensorFlow Datasets; "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:SUBSET:SPLIT" for Hugging Face's
        `datasets`; else the path of a JSONL or Parquet file, or of a folder that `datasets` reads, here or in a
        bucket (gs://).
      columns: those that the user named; by default the rules of rows.py find them.
    """
    if source.startswith(_CIPHER):
        return cipher.problems(source.removeprefix(_CIPHER))
    if buckets.is_bucket(source):
        source = str(buckets.fetch(source))
    if source.startswith(tfds_problems.PREFIX):
        return tfds_problems.read_tfds(source, columns)
    if pathlib.Path(source).is_dir() and not any(pathlib.Path(source).iterdir()):
        raise ValueError(f"{source} is an empty folder: name a JSONL or Parquet file, or a folder with such files.")
    if source.startswith(hub_problems.PREFIX) or pathlib.Path(source).is_dir():
        return hub_problems.read_hub(source, columns)
    return read_file(source, columns)


def to_prompt(problem: Problem, tokens: Int[np.ndarray, " T"]) -> Prompt:
    """Returns a problem with the tokens of its prompt."""
    return Prompt(
        id=problem["id"],
        problem=problem["problem"],
        answer=problem["answer"],
        tokens=tokens,
        pass_rate=problem.get("pass_rate"),
        labels=problem.get("labels", {}),
        messages=tuple(problem.get("prompt", ())),
        columns=problem.get("columns", {}),
    )


def _characters(problem: Problem) -> int:
    messages = problem.get("prompt")
    return sum(len(message["content"]) for message in messages) if messages else len(problem["problem"])


def short_prompts(
    problems: Sequence[Problem], tokenizer: Tokenizer, template: str, max_prompt_tokens: int, chat: Chat = CHAT
) -> tuple[list[Prompt], list[tuple[Problem, int | None]]]:
    """Returns the problems as prompts, made by `Tokenizer.render`, and those that are too long.

    The latter come with their number of tokens, or None where it was not counted: tokenising a text of 10 MB takes a
    minute and 4 GB.
    """
    prompts: list[Prompt] = []
    too_long: list[tuple[Problem, int | None]] = []
    for problem in problems:
        if _characters(problem) > max(UNCHECKED_CHARACTERS, CHARACTERS_PER_TOKEN * max_prompt_tokens):
            too_long.append((problem, None))
            continue
        try:
            tokens = tokenizer.render(problem["problem"], template, chat, problem.get("prompt"))
        except ValueError as error:
            raise ValueError(f"{place(problem)}: {error}") from error
        if len(tokens) > max_prompt_tokens:
            too_long.append((problem, len(tokens)))
        else:
            prompts.append(to_prompt(problem, tokens))
    return prompts, too_long


def tokenize(
    problems: Sequence[Problem], tokenizer: Tokenizer, template: str, max_prompt_tokens: int, chat: Chat = CHAT
) -> list[Prompt]:
    """Returns the problems as prompts; none is cut or left out, and ValueError says which are too long."""
    prompts, too_long = short_prompts(problems, tokenizer, template, max_prompt_tokens, chat)
    if too_long:
        counted = [size for _, size in too_long if size is not None]
        sizes = [f"{len(counted):,} prompts have {min(counted):,} to {max(counted):,} tokens"] if counted else []
        if len(counted) < len(too_long):
            longest = max(_characters(problem) for problem, size in too_long if size is None)
            sizes.append(f"{len(too_long) - len(counted):,} prompts have up to {longest:,} characters")
        ids = ", ".join(problem["id"] for problem, _ in too_long[:5]) + (", ..." if len(too_long) > 5 else "")
        raise ValueError(
            f"{' and '.join(sizes)}, limit {max_prompt_tokens:,}: raise data.max_prompt_tokens or run prepare "
            f"with it. The first is {place(too_long[0][0])}. Their ids: {ids:.500}."
        )
    alike = len({prompt.tokens.tobytes() for prompt in prompts}) == 1
    if alike and len({(prompt.problem, str(prompt.messages)) for prompt in prompts}) > 1:
        raise ValueError(
            f"the chat template of {tokenizer.folder} gives all {len(prompts):,} problems the same "
            f"{len(prompts[0].tokens)} tokens, without their text: copy the template again, or another one, there as "
            "chat_template.jinja."
        )
    return prompts
