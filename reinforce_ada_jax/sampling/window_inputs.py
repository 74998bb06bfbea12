"""The arrays that the host passes to a decode window, made of the requests that start with it."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt32

from reinforce_ada_jax.sampling.state import (
    ADDRESS_WORDS,
    EngineOptions,
    OpenedPrompts,
    Sampling,
    SamplingParams,
    WindowInputs,
)


class QueueEntry(NamedTuple):
    """One request as the device queues it."""

    prompt_row: int
    output_row: int
    address: UInt32[np.ndarray, " 4"]
    sampling: SamplingParams
    park_row: int | None = None


class OpenedPrompt(NamedTuple):
    """A prompt as the device opens it.

    Attributes:
      row: of the prompt; also that of a parked turn with which it begins.
      tokens: of the prompt.
      like: row of a prompt with the same first tokens, or `row` itself.
      shared: pages of that row, from the first on, with which this prompt begins.
      cached: tokens in these pages.
    """

    row: int
    tokens: Int[np.ndarray, " T"]
    like: int = 0
    shared: int = 0
    cached: int = 0


def window_inputs(
    options: EngineOptions,
    entries: Sequence[QueueEntry],
    closing: Bool[np.ndarray, " R"],
    opened: Sequence[OpenedPrompt],
    reserve: int,
    survivors: Int[np.ndarray, " width"],
    cancelled: Collection[int] = (),
    park_reserve: int = 0,
) -> WindowInputs:
    """Returns the inputs of one replica's window.

    Args:
      options: of the engine; there is room for `output_rows` entries.
      entries: in the order in which slots take them.
      closing: prompt rows to release.
      opened: prompts to open, in the order in which they are prefilled.
      reserve: pages that new responses must leave free.
      survivors: from `admission.Lengths.survivors`.
      cancelled: output rows whose responses end with their next token.
      park_reserve: pages that parked turns must leave free or to slots.
    """
    no_row = options.open_prompts

    def column(values: Sequence, dtype: type, empty: int = 0) -> np.ndarray:
        array = np.full(options.output_rows, empty, dtype)
        array[: len(entries)] = values
        return array

    address = np.zeros((options.output_rows, ADDRESS_WORDS), np.uint32)
    for row, entry in zip(address, entries, strict=False):
        row[:] = entry.address
    return WindowInputs(
        prompt_row=column([entry.prompt_row for entry in entries], np.int32),
        output_row=column([entry.output_row for entry in entries], np.int32),
        park_row=column([no_row if entry.park_row is None else entry.park_row for entry in entries], np.int32, no_row),
        address=address,
        sampling=Sampling(
            max_tokens=column([entry.sampling.max_tokens for entry in entries], np.int32),
            temperature=column([entry.sampling.temperature for entry in entries], np.float32, 1),
            top_k=column([entry.sampling.top_k for entry in entries], np.int32),
            top_p=column([entry.sampling.top_p for entry in entries], np.float32, 1),
        ),
        count=np.asarray(len(entries), np.int32),
        cancelled=np.isin(np.arange(options.output_rows), list(cancelled)),
        closing=closing,
        opened=_opened_prompts(options, opened),
        reserve=np.asarray(reserve, np.int32),
        park_reserve=np.asarray(park_reserve, np.int32),
        survivors=survivors,
    )


def _opened_prompts(options: EngineOptions, opened: Sequence[OpenedPrompt]) -> OpenedPrompts:
    rows = options.open_prompts
    prompts = OpenedPrompts(
        row=np.full(rows, rows, np.int32),  # out of range: dropped
        tokens=np.zeros((rows, options.max_prompt_tokens), np.int32),
        length=np.ones(rows, np.int32),
        like=np.zeros(rows, np.int32),
        shared=np.zeros(rows, np.int32),
        cached=np.zeros(rows, np.int32),
    )
    for index, prompt in enumerate(opened):
        prompts.row[index], prompts.length[index] = prompt.row, len(prompt.tokens)
        prompts.tokens[index, : len(prompt.tokens)] = prompt.tokens
        prompts.like[index], prompts.shared[index], prompts.cached[index] = prompt.like, prompt.shared, prompt.cached
    return prompts
