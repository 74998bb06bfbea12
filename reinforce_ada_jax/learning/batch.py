"""Groups to arrays: the border between the host's records and the learner's programs."""

from collections.abc import Sequence

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.types import Response


@struct.dataclass
class Batch:
    """Rows of prompt + response, right-padded; B rows, T = longest prompt + longest response, R = longest response.

    Masks are never stored: `prompt_length` and `response_length` say what counts, whatever ids the padding has.
    """

    tokens: Int[Array, "B T"]
    prompt_length: Int[Array, " B"]
    response_length: Int[Array, " B"]
    advantages: Float[Array, " B"]
    behaviour_logprobs: Float[Array, "B R"]
    old_logprobs: Float[Array, "B R"]
    version: Int[Array, " B"]  # `Response.version`


def make_batch(
    rows: Sequence[tuple[np.ndarray, Response, float]], *, max_prompt_tokens: int, max_response_tokens: int
) -> Batch:
    """A batch of (prompt tokens, response, advantage), in the order given.

    `old_logprobs` starts as the behaviour's, and is replaced by the learner's own before the first update.

    Raises:
      ValueError: a prompt or a response longer than its limit.
    """
    size = len(rows)
    tokens = np.zeros((size, max_prompt_tokens + max_response_tokens), np.int32)
    prompt_length, response_length = np.zeros(size, np.int32), np.zeros(size, np.int32)
    version, advantages = np.zeros(size, np.int32), np.zeros(size, np.float32)
    logprobs = np.zeros((size, max_response_tokens), np.float32)
    for row, (prompt, response, advantage) in enumerate(rows):
        before, length = len(prompt), len(response.tokens)
        if before > max_prompt_tokens or length > max_response_tokens:
            raise ValueError(
                f"a row has {before} prompt and {length} response tokens; the limits are {max_prompt_tokens} and "
                f"{max_response_tokens}."
            )
        tokens[row, :before], tokens[row, before : before + length] = prompt, response.tokens
        prompt_length[row], response_length[row], advantages[row] = before, length, advantage
        logprobs[row, :length], version[row] = response.logprobs, response.version
    return Batch(
        tokens=tokens,
        prompt_length=prompt_length,
        response_length=response_length,
        advantages=advantages,
        behaviour_logprobs=logprobs,
        old_logprobs=logprobs,
        version=version,
    )
