"""Prompts in batches of few shapes: each shape of a prefill is compiled once."""

from collections.abc import Iterator, Sequence

import numpy as np

from reinforce_ada_jax.sampling.state import EngineOptions, PrefillBatch

SHORTEST_BUCKET = 16


def buckets(longest: int) -> list[int]:
    """Returns the prefill lengths: powers of two from 16 to the first that holds `longest`."""
    lengths = [SHORTEST_BUCKET]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return lengths


def check_prompt(options: EngineOptions, length: int) -> None:
    """Raises ValueError unless a prompt of this many tokens can be opened."""
    if not 1 <= length <= options.max_prompt_tokens:
        raise ValueError(
            f"a prompt has {length} tokens, and the engine takes 1 to {options.max_prompt_tokens}. Send a shorter one, "
            "or raise data.max_prompt_tokens: prompts are never cut."
        )


def bucket_of(options: EngineOptions, length: int) -> int:
    """Returns the prefill length of a prompt; ValueError if it is empty, or longer than the engine allows."""
    check_prompt(options, length)
    return next(tokens for tokens in buckets(options.max_prompt_tokens) if tokens >= length)


def prefill_batches(
    options: EngineOptions, opened: Sequence[Sequence[tuple[int, np.ndarray]]]
) -> Iterator[list[PrefillBatch]]:
    """Yields the batches of one dispatch after the other: one for each replica, all of the same bucket.

    Args:
      options: a batch has `prefill_rows` rows; rows without a prompt are padding.
      opened: (row, tokens) of each replica's prompts.

    Raises:
      ValueError: a prompt is empty, or longer than the engine allows.
    """
    by_bucket: dict[int, list[list[tuple[int, np.ndarray]]]] = {}
    for replica, prompts in enumerate(opened):
        for row, tokens in prompts:
            bucket = bucket_of(options, len(tokens))
            by_bucket.setdefault(bucket, [[] for _ in opened])[replica].append((row, tokens))
    size = options.prefill_rows
    for bucket, of_replicas in sorted(by_bucket.items()):
        for first in range(0, max(map(len, of_replicas)), size):
            yield [_batch(options, bucket, prompts[first : first + size]) for prompts in of_replicas]


def _batch(options: EngineOptions, bucket: int, prompts: Sequence[tuple[int, np.ndarray]]) -> PrefillBatch:
    size = options.prefill_rows
    tokens, length = np.zeros((size, bucket), np.int32), np.zeros(size, np.int32)
    rows = np.full(size, options.open_prompts, np.int32)  # out of range: dropped
    for index, (row, prompt) in enumerate(prompts):
        tokens[index, : len(prompt)], length[index], rows[index] = prompt, len(prompt), row
    return PrefillBatch(tokens=tokens, length=length, rows=rows)
