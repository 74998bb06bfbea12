"""Groups to arrays: the border between the host's records and the learner's programs."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.types import Response


class Example(NamedTuple):
    """One response as the update sees it; its advantage is weight * (reward - baseline).

    Attributes:
      prompt: int32[T], tokens of the prompt.
      response: the draw.
      reward: of the response.
      baseline: what the reward is compared with.
      weight: factor of their difference.
    """

    prompt: np.ndarray
    response: Response
    reward: float = 0.0
    baseline: float = 0.0
    weight: float = 1.0


@struct.dataclass
class Batch:
    """Rows of T tokens, each of up to S sequences of prompt + response side by side, padded on the right.

    B rows, T = longest prompt + longest response. What is known of a row's response tokens stands in R columns, in
    their order: those of the first response, of the second, ... An unpacked batch has S = 1 and R = longest response; a
    packed one has R = T.

    Masks are never stored: `prompt_length` and `response_length` say what counts, whatever ids the padding has.
    A row without response tokens is padding; rows with tokens come first. `Learner.put` cuts the rows into
    micro-batches, and every array then has their axis in front.
    """

    tokens: Int[Array, "*M B T"]
    prompt_length: Int[Array, "*M B S"]
    response_length: Int[Array, "*M B S"]
    reward: Float[Array, "*M B S"]
    baseline: Float[Array, "*M B S"]
    weight: Float[Array, "*M B S"]
    policy_version: Int[Array, "*M B S"]  # `Response.policy_version`
    behaviour_logprobs: Float[Array, "*M B R"]
    old_logprobs: Float[Array, "*M B R"]
    reference_logprobs: Float[Array, "*M B R"] | None = None  # where there is a KL term; else nothing is held


def pack(lengths: Sequence[int], row_tokens: int, per_row: int) -> list[list[int]]:
    """Sequences, by their number, to rows: the longest first, each into the first row that has room for it.

    First-fit decreasing needs at most 11/9 of the rows that are possible, and one more (Johnson, 1973).

    Args:
      lengths: of the sequences, each at most `row_tokens`.
      row_tokens: that a row holds.
      per_row: sequences that a row holds; 1: each has its own, in the order given.
    """
    if per_row == 1:
        return [[number] for number in range(len(lengths))]
    rows: list[list[int]] = []
    room, free = np.full(len(lengths), row_tokens), np.full(len(lengths), per_row)
    for number in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        row = int(np.argmax((room >= lengths[number]) & (free > 0)))
        room[row] -= lengths[number]
        free[row] -= 1
        rows += [[]] * (row == len(rows))
        rows[row] = [*rows[row], number]
    return rows


def make_batch(
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    num_rows: int | None = None,
    per_row: int = 1,
) -> Batch:
    """A batch of the examples, packed into rows, and empty rows up to `num_rows`.

    `old_logprobs` starts as the behaviour's, and is replaced by the learner's own before the first update.

    Args:
      examples: what the batch is made of.
      max_prompt_tokens: limit of a prompt.
      max_response_tokens: limit of a response.
      num_rows: rows of the batch, B; None: as many as are needed.
      per_row: responses that may share a row, S; 1: none do, and rows keep the order of the examples.

    Raises:
      ValueError: a prompt or a response longer than its limit, a prompt without a token, or more rows than `num_rows`.
    """
    row_tokens = max_prompt_tokens + max_response_tokens
    for example in examples:
        before, length = len(example.prompt), len(example.response.tokens)
        if not 0 < before <= max_prompt_tokens or length > max_response_tokens:
            raise ValueError(
                f"a row has {before} prompt and {length} response tokens; the limits are 1 to {max_prompt_tokens} and "
                f"{max_response_tokens}."
            )
    lengths = [len(example.prompt) + len(example.response.tokens) for example in examples]
    rows = pack(lengths, row_tokens, per_row)
    size = len(rows) if num_rows is None else num_rows
    if len(rows) > size:
        raise ValueError(f"{len(rows)} rows are more than the {size} that the batch is to have: raise num_rows.")
    tokens = np.zeros((size, row_tokens), np.int32)
    prompt_length, response_length, policy_version = np.zeros((3, size, per_row), np.int32)
    reward, baseline, weight = np.zeros((3, size, per_row), np.float32)
    logprobs = np.zeros((size, max_response_tokens if per_row == 1 else row_tokens), np.float32)
    for row, numbers in enumerate(rows):
        start = column = 0
        for place, number in enumerate(numbers):
            prompt, response, *of_response = examples[number]
            before, length = len(prompt), len(response.tokens)
            tokens[row, start : start + before] = prompt
            tokens[row, start + before : start + before + length] = response.tokens
            logprobs[row, column : column + length] = response.logprobs
            at = row, place
            prompt_length[at], response_length[at], policy_version[at] = before, length, response.policy_version
            reward[at], baseline[at], weight[at] = of_response
            start, column = start + before + length, column + length
    return Batch(
        tokens=tokens,
        prompt_length=prompt_length,
        response_length=response_length,
        reward=reward,
        baseline=baseline,
        weight=weight,
        policy_version=policy_version,
        behaviour_logprobs=logprobs,
        old_logprobs=logprobs,
    )


# ---- what the lengths say, of arrays on the host or on devices ------------------------------------------------------


def _columns(of: Array, size: int) -> np.ndarray:
    """0, 1, ... along the last axis, with as many axes as `of` has."""
    return np.arange(size, dtype=np.int32)[(None,) * (of.ndim - 1)]


def _place(lengths: Int[Array, "*B S"], size: int) -> Int[Array, "*B C"]:
    """Whose each of so many columns is, where sequences of these lengths stand side by side; S where nobody's."""
    return (_columns(lengths, size)[..., None] >= lengths.cumsum(axis=-1)[..., None, :]).sum(axis=-1)


def response_mask(batch: Batch) -> Bool[Array, "*M B R"]:
    """True at response tokens, the stop tokens included."""
    lengths = batch.response_length
    return _columns(lengths, batch.behaviour_logprobs.shape[-1]) < lengths.sum(axis=-1, keepdims=True)


def owners(batch: Batch) -> Int[Array, "*M B R"]:
    """Of which of its row's responses each column is, from 0; S beyond them."""
    return _place(batch.response_length, batch.behaviour_logprobs.shape[-1])


def members(batch: Batch) -> Bool[Array, "*M B R S"] | None:
    """Which columns are whose response's; None where a row is one."""
    size, owner = batch.response_length.shape[-1], owners(batch)[..., None]
    return None if size == 1 else owner == _columns(owner, size)


def of_tokens(values: Array, owner: Int[Array, "*B R"]) -> Array:
    """A number of every response, [*B, S], at each of its tokens, [*B, R]; beyond them, any of them."""
    return jnp.take_along_axis(values, jnp.minimum(owner, values.shape[-1] - 1), axis=-1)


def layout(batch: Batch) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B R"]]:
    """(which of its row's sequences each token belongs to, its position there, where each response token stands).

    Padding belongs to number S. Beyond the responses, the last one is anywhere from 1 on.
    """
    lengths = batch.prompt_length + batch.response_length
    starts, owner = lengths.cumsum(axis=-1) - lengths, owners(batch)
    segments = _place(lengths, batch.tokens.shape[-1])
    positions = _columns(segments, batch.tokens.shape[-1]) - of_tokens(starts, segments)
    # Response token c of a row stands behind its own prompt and those before it.
    prompts = of_tokens(batch.prompt_length.cumsum(axis=-1), owner)
    at = jnp.minimum(prompts + _columns(owner, owner.shape[-1]), batch.tokens.shape[-1] - 1)
    return segments, positions, jnp.maximum(at, 1)
