"""Batches: the responses of groups as padded or packed arrays, made on the host."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt

from reinforce_ada_jax.policy import experts
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.record import Record
from reinforce_ada_jax.types import Response

if TYPE_CHECKING:
    AnyArray = Array | np.ndarray
else:  # programs are also lowered for batches without data
    AnyArray = Array | np.ndarray | jax.ShapeDtypeStruct


class Example(NamedTuple):
    """One response as the update sees it, with the tokens of its prompt and its advantage."""

    prompt: Int32[np.ndarray, " T"]
    response: Response
    advantage: float = 0.0
    regularization: float = 1.0  # factor of its entropy and KL in the loss


class Batch(Record):
    """Rows of T tokens, each of up to S segments (prompt + response) side by side, padded on the right.

    B rows, T = longest prompt + longest response. Arrays of response tokens have R columns, in the order of the row:
    those of the first response, of the second, ... An unpacked batch has S = 1 and R = longest response; a packed one
    has R = T. Masks and ids are made from lengths, whatever token ids the padding has.

    Response tokens are those that the policy sampled. Tokens of an environment (`Response.segments`) are inputs, as the
    prompt's are: they are in `tokens` alone, and no loss, length or metric has them.

    A row without response tokens is padding; rows with tokens come first. `Learner.put` cuts the rows into
    micro-batches, and every array then has their axis in front.

    Responses whose advantage is 0 may be left out of the rows (`make_batch`). Denominators still count them.

    `old_logprobs` are the behaviour's until the batch is scored. If they are None, the update takes those that it
    computes itself, and all ratios are 1.

    `experts` are those that the sampler chose (`Response.experts`), in a model that has some.
    """

    tokens: Int[AnyArray, "*M B T"]  # of all segments
    positions: Int[AnyArray, "*M B T"]  # of each token in its own segment, from 0; 0 in padding
    segment_ids: Int[AnyArray, "*M B T"]  # the token's segment in its row, from 0; S in padding
    response_positions: Int[AnyArray, "*M B R"]  # index in the row of each response token; 1 beyond the responses
    response_segment_ids: Int[AnyArray, "*M B R"]  # the response token's segment; S beyond the responses
    response_mask: Bool[AnyArray, "*M B R"]  # True at response tokens, the stop tokens included
    response_length: Int[AnyArray, "*M B S"]  # response tokens of each segment
    advantages: Float[AnyArray, "*M B R"]  # that of the response, at each of its tokens
    policy_version: Int[AnyArray, "*M B R"]  # that drew each response token
    behaviour_logprobs: Float[AnyArray, "*M B R"]  # under the distribution the tokens were sampled from
    old_logprobs: Float[AnyArray, "*M B R"] | None  # before the first update
    left_out: Int[AnyArray, "*M B 2"]  # counts of tokens and responses without a row, at the first row; 0 at the others
    reference_logprobs: Float[AnyArray, "*M B R"] | None = None  # under the reference policy, where there is a KL term
    regularization: Float[AnyArray, "*M B R"] | None = None  # factor of the token's entropy and KL in the loss; None: 1
    experts: UInt[AnyArray, "*M B T LC"] | None = None  # of each token, to be replayed; None: the learner chooses

    @property
    def max_segments(self) -> int:
        """S, the most responses of a row."""
        return self.response_length.shape[-1]

    def segment_one_hot(self) -> Bool[AnyArray, "*M B R S"] | None:
        """True where a response token belongs to its row's response s; None where a row is one response."""
        if self.max_segments == 1:
            return None
        ids = self.response_segment_ids[..., None]
        return ids == np.arange(self.max_segments, dtype=np.int32).reshape(*[1] * (ids.ndim - 1), -1)


def pack(lengths: Sequence[int], row_tokens: int, per_row: int) -> list[list[int]]:
    """Assigns sequences, by their index, to rows: the longest first, each to the first row that has room for it.

    Where `per_row` sets no limit, first-fit decreasing needs at most 11/9 of the fewest possible rows, and one more
    (Yue, 1991). Each sequence has at most `row_tokens` tokens. With `per_row` 1 each has a row of its own, in the order
    given.
    """
    if per_row == 1:
        return [[index] for index in range(len(lengths))]
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    return _first_fit(order, lengths, row_tokens, per_row, max_rows=len(lengths))


def _first_fit(
    order: Sequence[int], lengths: Sequence[int], row_tokens: int, per_row: int, max_rows: int
) -> list[list[int]]:
    """Assigns sequences, in order, each to the first row that has room for it; those that fit nowhere are left out."""
    rows: list[list[int]] = []
    room, free = np.full(max_rows, row_tokens), np.full(max_rows, per_row)
    for index in order:
        fits = (room >= lengths[index]) & (free > 0)
        row = int(np.argmax(fits)) if max_rows else 0
        if not fits[row : row + 1].any():
            continue
        room[row] -= lengths[index]
        free[row] -= 1
        rows += [[]] * (row == len(rows))
        rows[row] = [*rows[row], index]
    return rows


def pack_without_zeros(
    lengths: Sequence[int], is_zero: Bool[np.ndarray, " N"], row_tokens: int, per_row: int, micro_rows: int
) -> list[list[int]]:
    """Assigns sequences to rows as `pack` does, but leaves out those that are zero where this saves a micro-batch.

    Zero sequences contribute nothing to the gradient. They fill free room in the micro-batches that the others need, in
    the order given. This costs no time, and metrics take these as a sample of all zero sequences.
    """
    whole = pack(lengths, row_tokens, per_row)
    others = np.flatnonzero(~is_zero).tolist()
    rows = [[others[index] for index in row] for row in pack([lengths[index] for index in others], row_tokens, per_row)]
    max_rows = micro_rows * -(-len(rows) // micro_rows)
    if len(whole) <= max_rows:
        return whole
    order = [index for row in rows for index in row] + np.flatnonzero(is_zero).tolist()
    return _first_fit(order, lengths, row_tokens, per_row, max_rows)


def _lengths(examples: Sequence[Example], max_prompt_tokens: int, max_response_tokens: int) -> list[int]:
    """Returns the tokens of each example with its prompt; raises ValueError where they are beyond the limits."""
    lengths = []
    for example in examples:
        before, length = len(example.prompt), len(example.response.tokens)
        if not 0 < before <= max_prompt_tokens or length > max_response_tokens:
            raise ValueError(
                f"a row has {before} prompt and {length} response tokens; the limits are 1 to {max_prompt_tokens} and "
                f"{max_response_tokens}."
            )
        lengths.append(before + length)
    return lengths


def make_batch(
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    num_rows: int | None = None,
    per_row: int = 1,
    micro_rows: int | None = None,
    regularized: bool = False,
    architecture: Architecture | None = None,
) -> Batch:
    """Makes a batch of the examples, packed into rows, and empty rows up to `num_rows`; None: as many as are needed.

    A row has at most `per_row` responses; with 1 each has a row, in the order of the examples. With `micro_rows`, the
    rows of a micro-batch, examples whose advantage is 0 are left out where this saves one (`pack_without_zeros`). With
    `regularized` the batch has the examples' `regularization`. If `architecture` has experts, it has the examples'
    experts.

    Raises ValueError for a prompt or a response longer than its limit, a prompt without a token, or more rows than
    `num_rows`.
    """
    row_tokens = max_prompt_tokens + max_response_tokens
    lengths = _lengths(examples, max_prompt_tokens, max_response_tokens)
    with np.errstate(over="ignore"):  # the update reports values that aren't finite
        advantage = np.array([example.advantage for example in examples], np.float64).astype(np.float32)
    if micro_rows is None:
        rows = pack(lengths, row_tokens, per_row)
    else:
        rows = pack_without_zeros(lengths, advantage == 0, row_tokens, per_row, micro_rows)
    size = len(rows) if num_rows is None else num_rows
    if len(rows) > size:
        raise ValueError(f"{len(rows)} rows are more than the {size} rows of the batch: raise num_rows.")
    columns = max_response_tokens if per_row == 1 else row_tokens
    tokens, positions, segment_ids = np.zeros((3, size, row_tokens), np.int32)
    response_positions, response_segment_ids, policy_version = np.zeros((3, size, columns), np.int32)
    segment_ids[:], response_segment_ids[:], response_positions[:] = per_row, per_row, 1
    response_length = np.zeros((size, per_row), np.int32)
    advantages, logprobs, regularization = np.zeros((3, size, columns), np.float32)
    left_out = np.zeros((size, 2), np.int32)
    chosen = None
    if architecture is not None and architecture.num_experts:
        chosen = experts.empty_record(architecture, size, row_tokens)
    for index in set(range(len(examples))).difference(*rows):
        left_out[0] += examples[index].response.num_sampled, len(examples[index].response.tokens) > 0
    for row, indices in enumerate(rows):
        start = column = 0
        for segment, index in enumerate(indices):
            prompt, response = examples[index][:2]
            before, length = len(prompt), len(response.tokens)
            here = row, slice(start, start + before + length)
            tokens[here] = np.concatenate([prompt, response.tokens])
            positions[here], segment_ids[here] = np.arange(before + length), segment
            if chosen is not None and response.experts is not None:
                chosen[row, start : start + len(response.experts)] = response.experts
            sampled, count = response.sampled, response.num_sampled
            response_length[row, segment] = count
            there = row, slice(column, column + count)
            response_positions[there] = start + before + np.flatnonzero(sampled)
            response_segment_ids[there], policy_version[there] = segment, response.token_versions[sampled]
            advantages[there], logprobs[there] = advantage[index], response.logprobs[sampled]
            regularization[there] = examples[index].regularization
            start, column = start + before + length, column + count
    return Batch(
        tokens=tokens, positions=positions, segment_ids=segment_ids, response_positions=response_positions,
        response_segment_ids=response_segment_ids, response_mask=response_segment_ids < per_row,
        response_length=response_length, advantages=advantages, policy_version=policy_version,
        behaviour_logprobs=logprobs, old_logprobs=logprobs, left_out=left_out,
        regularization=regularization if regularized else None, experts=chosen,
    )  # fmt: skip
