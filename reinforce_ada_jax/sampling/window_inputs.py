"""The arrays that the host passes to a decode window, made of the requests that start with it."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from reinforce_ada_jax.sampling.state import (
    ADDRESS_WORDS,
    EngineOptions,
    OpenedPrompts,
    Requests,
    Sampling,
    WindowInputs,
)


class OpenedPrompt(NamedTuple):
    """A prompt as the device opens it."""

    row: int  # of the prompt; also that of a parked turn with which it begins
    tokens: Int[np.ndarray, " T"]  # of the prompt
    like: int = 0  # row of a prompt with the same first tokens, or `row` itself
    shared: int = 0  # pages of that row, from the first on, with which this prompt begins
    cached: int = 0  # tokens in these pages


def window_inputs(
    options: EngineOptions,
    entries: Sequence[Requests],
    closing: Bool[np.ndarray, " R"],
    opened: Sequence[OpenedPrompt],
    reserve: int,
    survivors: Int[np.ndarray, " width"],
    cancelled: Collection[int] = (),
    park_reserve: int = 0,
) -> WindowInputs:
    """Returns the inputs of one replica's window.

    The entries are single requests, at most `output_rows`, in the order in which slots take them; prompts are opened in
    the order given. `survivors` is from `admission.Lengths`, and the other arguments are as in `WindowInputs`.
    """
    size = options.output_rows
    key = np.zeros((size, ADDRESS_WORDS), np.uint32)
    for row, entry in zip(key, entries, strict=False):
        row[:] = entry.key
    return WindowInputs(
        requests=Requests(
            prompt_row=_column([entry.prompt_row for entry in entries], size),
            output_row=_column([entry.output_row for entry in entries], size),
            park_row=_column([entry.park_row for entry in entries], size, options.open_prompts),
            sampling=Sampling(
                max_tokens=_column([entry.sampling.max_tokens for entry in entries], size),
                temperature=_column([entry.sampling.temperature for entry in entries], size, 1, np.float32),
                top_k=_column([entry.sampling.top_k for entry in entries], size),
                top_p=_column([entry.sampling.top_p for entry in entries], size, 1, np.float32),
            ),
            key=key,
            begun=_column([entry.begun for entry in entries], size) if options.begun_tokens else None,
        ),
        count=np.asarray(len(entries), np.int32),
        cancelled=np.isin(np.arange(options.output_rows), list(cancelled)),
        closing=closing,
        opened=_opened_prompts(options, opened),
        reserve=np.asarray(reserve, np.int32),
        park_reserve=np.asarray(park_reserve, np.int32),
        survivors=survivors,
    )


def _column(values: Sequence, size: int, empty: int = 0, dtype: type = np.int32) -> np.ndarray:
    """Returns an array with the values at its front."""
    array = np.full(size, empty, dtype)
    array[: len(values)] = values
    return array


def _opened_prompts(options: EngineOptions, opened: Sequence[OpenedPrompt]) -> OpenedPrompts:
    rows = options.opened_rows
    tokens = np.zeros((rows, options.longest_prompt), np.int32)
    for row, prompt in zip(tokens, opened, strict=False):
        row[: len(prompt.tokens)] = prompt.tokens
    return OpenedPrompts(
        row=_column([prompt.row for prompt in opened], rows, options.open_prompts),  # out of range: dropped
        tokens=tokens,
        length=_column([len(prompt.tokens) for prompt in opened], rows, 1),
        like=_column([prompt.like for prompt in opened], rows),
        shared=_column([prompt.shared for prompt in opened], rows),
        cached=_column([prompt.cached for prompt in opened], rows),
    )
