"""Groups to arrays: the border between the host's records and the learner's programs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

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
    """Rows of prompt + response, right-padded; B rows, T = longest prompt + longest response, R = longest response.

    Masks are never stored: `prompt_length` and `response_length` say what counts, whatever ids the padding has.
    A row without response tokens is padding; rows with tokens come first. `Learner.put` cuts the rows into
    micro-batches, and every array then has their axis in front.
    """

    tokens: Int[Array, "*M B T"]
    prompt_length: Int[Array, "*M B"]
    response_length: Int[Array, "*M B"]
    reward: Float[Array, "*M B"]
    baseline: Float[Array, "*M B"]
    weight: Float[Array, "*M B"]
    behaviour_logprobs: Float[Array, "*M B R"]
    old_logprobs: Float[Array, "*M B R"]
    version: Int[Array, "*M B"]  # `Response.version`
    reference_logprobs: Float[Array, "*M B R"] | None = None  # where there is a KL term; else nothing is held


def make_batch(
    rows: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    num_rows: int | None = None,
) -> Batch:
    """A batch of the examples, in the order given, and empty rows up to `num_rows`.

    `old_logprobs` starts as the behaviour's, and is replaced by the learner's own before the first update.

    Args:
      rows: what the batch is made of.
      max_prompt_tokens: limit of a prompt.
      max_response_tokens: limit of a response, R.
      num_rows: rows of the batch, B; None: as many as are given.

    Raises:
      ValueError: a prompt or a response longer than its limit, or more rows than `num_rows`.
    """
    size = len(rows) if num_rows is None else num_rows
    if len(rows) > size:
        raise ValueError(f"{len(rows)} rows are more than the {size} that the batch is to have: raise num_rows.")
    tokens = np.zeros((size, max_prompt_tokens + max_response_tokens), np.int32)
    prompt_length, response_length = np.zeros(size, np.int32), np.zeros(size, np.int32)
    version, worth = np.zeros(size, np.int32), np.zeros((3, size), np.float32)
    logprobs = np.zeros((size, max_response_tokens), np.float32)
    for row, (prompt, response, *of_response) in enumerate(rows):
        before, length = len(prompt), len(response.tokens)
        if before > max_prompt_tokens or length > max_response_tokens:
            raise ValueError(
                f"a row has {before} prompt and {length} response tokens; the limits are {max_prompt_tokens} and "
                f"{max_response_tokens}."
            )
        tokens[row, :before], tokens[row, before : before + length] = prompt, response.tokens
        prompt_length[row], response_length[row], worth[:, row] = before, length, of_response
        logprobs[row, :length], version[row] = response.logprobs, response.version
    return Batch(
        tokens=tokens,
        prompt_length=prompt_length,
        response_length=response_length,
        reward=worth[0],
        baseline=worth[1],
        weight=worth[2],
        behaviour_logprobs=logprobs,
        old_logprobs=logprobs,
        version=version,
    )
