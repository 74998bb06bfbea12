"""Demonstrations: prompts with the responses to learn from, read from the rows of TRL, verl and OpenAI.

The prompt is rendered as for reinforcement learning. The response is encoded alone, as a sampler would have drawn it,
and ends with the token that the chat template writes after an answer.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from reinforce_ada_jax.data.problems import Problem, place
from reinforce_ada_jax.data.prompts import load_problems, tokenize
from reinforce_ada_jax.data.rows import NO_ANSWER, Columns, shown
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.data.turns import following
from reinforce_ada_jax.types import Prompt

# The first of these columns that a row has is used. A list in `messages` that ends with a message of the assistant
# comes before them all.
RESPONSE_COLUMNS = ("completion", "response", "solution", "answer")
# Parts of an answer that chat templates write in forms of their own.
_NOT_LEARNED = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True, eq=False)
class Demonstration:
    """A prompt, whose `answer` is the text of the response, and the tokens of the response with the end token."""

    prompt: Prompt
    tokens: Int32[np.ndarray, " T"]


def _text(value: Any, name: str, where: str) -> str:
    """Returns the text of a response: a text, or a list with one message of the assistant."""
    message = value[0] if isinstance(value, list) and len(value) == 1 else None
    if isinstance(message, Mapping) and message.get("role") == "assistant":
        if others := [key for key in _NOT_LEARNED if message.get(key)]:
            raise ValueError(
                f"{where}: the message of the assistant in {name} has {others[0]}, and only content is learned. Write "
                "it into content as the model writes it, or leave the row out."
            )
        value = message.get("content")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{where}: {name} is {shown(value)}; a response must be a text that is not empty, or one message of the "
            "assistant with such a text."
        )
    return value


def _response(problem: Problem, columns: Columns) -> tuple[str, str]:
    """Returns the response to a problem, and the column that has it."""
    row, where = problem.get("columns"), place(problem)
    if row is None:  # the built-in task
        return problem["answer"], "answer"
    messages = row.get("messages")
    by_rules = not columns.answer and columns.problem in ("", "messages")
    if by_rules and isinstance(messages, list) and messages[-1]["role"] == "assistant":
        return _text(messages[-1:], "messages", where), "messages"
    names = (columns.answer,) if columns.answer else RESPONSE_COLUMNS
    for name in names:
        if row.get(name) is not None:
            return _text(row[name], name, where), name
    raise ValueError(
        f"{where}: no response: none of {', '.join(names)} among its columns {shown(sorted(row))}, and no messages "
        "that end with one of the assistant. Name the column: --config.data.answer_column=NAME."
    )


def end_tokens(tokenizer: Tokenizer, template: str, chat: Chat) -> Int32[np.ndarray, " T"]:
    """Returns the tokens after an answer, up to the token that ends it, as the chat template writes them.

    With the template "plain" it is the end token that the folder names. Raises ValueError where there is none.
    """
    if template == "plain":
        end = tokenizer.special_tokens.get("eos_token")
        ids = [number for number in tokenizer.stop_ids if tokenizer.token(number) == end] or tokenizer.stop_ids[:1]
        return np.array(ids, np.int32)
    tokens = following(tokenizer, chat, chat.messages("a question"), [], stop_id=None)
    stops = np.flatnonzero(np.isin(tokens, tokenizer.stop_ids))
    if not len(stops):
        raise ValueError(
            f"the chat template of {tokenizer.folder} writes none of the end tokens "
            f"{', '.join(map(tokenizer.token, tokenizer.stop_ids))} after an answer, so the model would not learn to "
            "end: copy the template that belongs to the model there as chat_template.jinja, or set "
            "data.template=plain for rows of texts."
        )
    return tokens[: stops[0] + 1]


def read(
    source: str,
    columns: Columns,
    tokenizer: Tokenizer,
    template: str,
    chat: Chat,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    report: Callable[[str], None] = lambda _: None,
) -> list[Demonstration]:
    """Returns the demonstrations of a source, in its order; none is cut or left out.

    The source is as for `load_problems`; `columns` are those of prompt and response that the user named; template and
    chat are as for `Tokenizer.render`. A response is counted with its end token. `report` gets a line on what was read.
    Raises ValueError where a row has no response, or prompts or responses are longer than their limits.
    """
    # `messages` hold both prompt and response; a text column next to them may have only the first message.
    problems = load_problems(source, Columns(columns.problem, NO_ANSWER, messages_first=True))
    found = [_response(problem, columns) for problem in problems]
    prompts = tokenize(problems, tokenizer, template, max_prompt_tokens, chat)
    end = end_tokens(tokenizer, template, chat)
    demonstrations = [
        Demonstration(
            dataclasses.replace(prompt, answer=text),
            np.concatenate([tokenizer.encode(text, add_special_tokens=False), end]),
        )
        for prompt, (text, _) in zip(prompts, found, strict=True)
    ]
    if too_long := [each for each in demonstrations if len(each.tokens) > max_response_tokens]:
        sizes = [len(each.tokens) for each in too_long]
        raise ValueError(
            f"{len(sizes):,} responses of {source} have {min(sizes):,} to {max(sizes):,} tokens, limit "
            f"{max_response_tokens:,}: raise sampling.max_response_tokens, or leave these rows out. The first is that "
            f"of {shown(too_long[0].prompt.id)}."
        )
    taken = " and ".join(repr(name) for name in collections.Counter(name for _, name in found))
    tokens = sum(len(each.tokens) for each in demonstrations)
    report(f"{source}: {len(found):,} rows; response from {taken}, {tokens:,} tokens of responses")
    return demonstrations
