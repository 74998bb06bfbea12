"""Batches: the responses of groups as padded or packed arrays, made on the host."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt

from reinforce_ada_jax.learning.packing import RowLayout, SharedPrompts, pack, pack_without_zeros
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

    B rows, T = longest prompt + longest response, or more (`RowLayout.tokens`). Arrays of response tokens have R
    columns, in the order of the row: those of the first response, of the second, ... An unpacked batch has S = 1 and
    R = longest response; a packed one has R = T. Masks and ids are made from lengths, whatever token ids the padding
    has.

    Where responses share prompts (`RowLayout`), a prompt without its last token is a segment of its own, before those
    of its responses. Its id is -1, or -2, ... for the next prompt of the row.

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
    positions: Int[AnyArray, "*M B T"]  # of each token in its prompt and response, from 0; 0 in padding
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
    # Segment of the shared prompt that a token sees beside its own segment, or its own. None: no row shares a prompt.
    shared_ids: Int[AnyArray, "*M B T"] | None = None

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


class _Piece(NamedTuple):
    """Tokens that follow each other in a row."""

    tokens: Int32[np.ndarray, " T"]
    first: int  # position of the first one
    segment: int  # as `Batch.segment_ids`
    shared: int  # as `Batch.shared_ids`


def _shared_prompts(examples: Sequence[Example]) -> SharedPrompts:
    """Returns the prompts of examples, numbered by their tokens."""
    numbers: dict[bytes, int] = {}
    of_each = [numbers.setdefault(example.prompt.tobytes(), len(numbers)) for example in examples]
    tokens = [len(example.prompt) - 1 for example in examples]
    return SharedPrompts(np.array(of_each, np.int64), np.array(tokens, np.int64))


def _pieces(examples: Sequence[Example], prompts: Sequence[int] | None) -> Iterator[_Piece]:
    """Yields the pieces of a row; `prompts` are the numbers of the examples' prompts, None: none is shared."""
    begun: dict[int, int] = {}
    for segment, (prompt, response) in enumerate(example[:2] for example in examples):
        text, own, shared = np.concatenate([prompt, response.tokens]), 0, segment
        if prompts is not None and len(prompt) > 1:
            own, number = len(prompt) - 1, prompts[segment]
            if number not in begun:
                begun[number] = -1 - len(begun)
                yield _Piece(text[:own], 0, begun[number], begun[number])
            shared = begun[number]
        yield _Piece(text[own:], own, segment, shared)


def make_batch(
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    num_rows: int | None = None,
    layout: RowLayout | None = None,
    micro_rows: int | None = None,
    regularized: bool = False,
    architecture: Architecture | None = None,
) -> Batch:
    """Makes a batch of the examples, packed into rows, and empty rows up to `num_rows`; None: as many as are needed.

    Without a `layout` each example has a row, in their order. With `micro_rows`, the rows of a micro-batch, examples
    whose advantage is 0 are left out where this saves one (`pack_without_zeros`). With `regularized` the batch has the
    examples' `regularization`. If `architecture` has experts, it has the examples' experts, and prompts can't be
    shared.

    Raises ValueError for a prompt or a response longer than its limit, a prompt without a token, more rows than
    `num_rows`, or prompts that are to be shared in a model with experts.
    """
    layout = RowLayout() if layout is None else layout
    if layout.shares_prompts and architecture is not None and architecture.num_experts:
        raise ValueError(f"rows can't share prompts in a model with experts ({architecture.family}).")
    row_tokens, per_row = layout.row_tokens(max_prompt_tokens + max_response_tokens), layout.per_row
    lengths = _lengths(examples, max_prompt_tokens, max_response_tokens)
    shared = _shared_prompts(examples) if layout.shares_prompts else None
    with np.errstate(over="ignore"):  # the update reports values that aren't finite
        advantage = np.array([example.advantage for example in examples], np.float64).astype(np.float32)
    if micro_rows is None:
        rows = pack(lengths, row_tokens, per_row, shared)
    else:
        rows = pack_without_zeros(lengths, advantage == 0, row_tokens, per_row, micro_rows, shared)
    size = max(len(rows), micro_rows or 0) if num_rows is None else num_rows
    if len(rows) > size:
        raise ValueError(f"{len(rows)} rows are more than the {size} rows of the batch: raise num_rows.")
    columns = max_response_tokens if per_row == 1 else row_tokens
    tokens, positions, segment_ids, shared_ids = np.zeros((4, size, row_tokens), np.int32)
    response_positions, response_segment_ids, policy_version = np.zeros((3, size, columns), np.int32)
    segment_ids[:], shared_ids[:], response_segment_ids[:], response_positions[:] = per_row, per_row, per_row, 1
    response_length = np.zeros((size, per_row), np.int32)
    advantages, logprobs, regularization = np.zeros((3, size, columns), np.float32)
    left_out = np.zeros((size, 2), np.int32)
    chosen = None
    if architecture is not None and architecture.num_experts:
        chosen = experts.empty_record(architecture, size, row_tokens)
    for index in set(range(len(examples))).difference(*rows):
        left_out[0] += examples[index].response.num_sampled, len(examples[index].response.tokens) > 0
    for row, indices in enumerate(rows):
        end = column = 0
        prompts = None if shared is None else shared.numbers[indices].tolist()
        for piece in _pieces([examples[index] for index in indices], prompts):
            start, end, segment = end, end + len(piece.tokens), piece.segment
            here = row, slice(start, end)
            tokens[here], positions[here] = piece.tokens, piece.first + np.arange(end - start)
            segment_ids[here], shared_ids[here] = segment, piece.shared
            if segment < 0:
                continue
            index, response = indices[segment], examples[indices[segment]].response
            if chosen is not None and response.experts is not None:
                chosen[row, start : start + len(response.experts)] = response.experts
            sampled, count = response.sampled, response.num_sampled
            response_length[row, segment] = count
            there = row, slice(column, column + count)
            response_positions[there] = end - len(response.tokens) + np.flatnonzero(sampled)
            response_segment_ids[there], policy_version[there] = segment, response.token_versions[sampled]
            advantages[there], logprobs[there] = advantage[index], response.logprobs[sampled]
            regularization[there] = examples[index].regularization
            column += count
    return Batch(
        tokens=tokens, positions=positions, segment_ids=segment_ids, response_positions=response_positions,
        response_segment_ids=response_segment_ids, response_mask=response_segment_ids < per_row,
        response_length=response_length, advantages=advantages, policy_version=policy_version,
        behaviour_logprobs=logprobs, old_logprobs=logprobs, left_out=left_out,
        regularization=regularization if regularized else None, experts=chosen,
        shared_ids=shared_ids if layout.shares_prompts else None,
    )  # fmt: skip
