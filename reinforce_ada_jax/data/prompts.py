"""Where problems come from, prompts, and the cursor that says which prompts come next.

The order is a function of (seed, epoch), so the cursor is the whole resume state: three integers. What a response to a
prompt is worth is not known here.
"""

import dataclasses
import pathlib

import numpy as np

from reinforce_ada_jax.data import cipher, hub_problems, tfds_problems
from reinforce_ada_jax.data.problems import Problem, read_jsonl
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.types import Prompt

_CIPHER = "cipher:"


def benchmark_name(source: str) -> str:
    """The name under which a source's results are reported: a file's stem, the built-in task's split, or the name."""
    if source.startswith(_CIPHER):
        return source.removeprefix(_CIPHER)
    for prefix in (tfds_problems.PREFIX, hub_problems.PREFIX):
        if source.startswith(prefix):
            return source.removeprefix(prefix).strip("/").replace("/", "_").replace(":", "_")
    return pathlib.Path(source).stem


def load_problems(source: str) -> list[Problem]:
    """The problems of a source, in its order.

    Args:
      source: "cipher:train" or "cipher:heldout" for the built-in task; "tfds:NAME/SPLIT" or "tfds:DIR" for what
        TensorFlow Datasets has prepared; "hf:NAME", with ":SPLIT" or ":SUBSET:SPLIT" behind, for Hugging Face's
        `datasets`; else the path of a JSONL file.

    Returns:
      Dicts with "id" (unique), "problem", "answer", and "pass_rate" and "labels" where the source has them.
    """
    if source.startswith(_CIPHER):
        return cipher.problems(source.removeprefix(_CIPHER))
    if source.startswith(tfds_problems.PREFIX):
        return tfds_problems.read_tfds(source)
    if source.startswith(hub_problems.PREFIX):
        return hub_problems.read_hub(source)
    return read_jsonl(source)


def tokenize(
    problems: list[Problem],
    tokenizer: Tokenizer,
    template: str,
    max_prompt_tokens: int,
    chat: Chat | None = None,
) -> list[Prompt]:
    """The problems as prompts, rendered as `Tokenizer.render` says.

    Raises:
      ValueError: prompts are longer than `max_prompt_tokens`: how many, how long, and the ids of the first ones. None
        is cut or left out.
    """
    prompts = [
        Prompt(
            id=problem["id"],
            problem=problem["problem"],
            answer=problem["answer"],
            tokens=tokenizer.render(problem["problem"], template, chat),
            pass_rate=problem.get("pass_rate"),
            labels=problem.get("labels", {}),
        )
        for problem in problems
    ]
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > max_prompt_tokens]
    if too_long:
        lengths = [len(prompt.tokens) for prompt in too_long]
        ids = ", ".join(prompt.id for prompt in too_long[:5]) + (", ..." if len(too_long) > 5 else "")
        raise ValueError(
            f"{len(too_long):,} prompts have {min(lengths):,} to {max(lengths):,} tokens, limit "
            f"{max_prompt_tokens:,}: raise data.max_prompt_tokens or run prepare with it. Their ids: {ids}."
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
    def from_json(cls, state: dict[str, int]) -> "PromptCursor":
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
