"""The learner's log-probabilities in the bits of the sampler: see `policy/invariant.py`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.policy import experts, invariant
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.invariant import ROWS
from reinforce_ada_jax.policy.transformer import Execution, Params, merge, run


def invariant_logprobs(
    architecture: Architecture, params: Params, batch: Batch, temperature: float
) -> Float[Array, "B R"]:
    """Computes the log-probability of every response token in float32, as the sampler does, bit for bit; 0 elsewhere.

    All sequences of a micro-batch are laid out side by side, without the padding of its rows. Each begins a tile, so
    that all rows of a tile see the same keys. Experts are those of the batch. `params` have no adapters: the sampler
    has merged them.
    """
    model = merge(architecture, params)
    rows, width = batch.tokens.shape
    segments = batch.max_segments
    one_hot = batch.segment_ids[..., None] == jnp.arange(segments)[None, None]
    length = one_hot.sum(axis=1).reshape(-1)  # of each sequence
    in_tiles = invariant.num_tiles(length, ROWS) * ROWS
    first = (jnp.cumsum(in_tiles) - in_tiles).reshape(rows, segments)
    count, size = in_tiles.sum(), -(-rows * (width + segments * (ROWS - 1)) // ROWS) * ROWS

    start = jnp.take_along_axis(first, jnp.minimum(batch.segment_ids, segments - 1), axis=1)
    place = jnp.where(batch.segment_ids < segments, start + batch.positions, size)

    def spread(x):
        return jnp.zeros(size, jnp.int32).at[place].set(x, mode="drop")

    tokens, positions, lengths = spread(batch.tokens), spread(batch.positions), spread(batch.positions + 1)
    routing = experts.FREE
    if batch.experts is not None:  # tokens of older weights have other experts than these weights would choose
        record = jnp.asarray(experts.empty_record(architecture, size)).at[place].set(batch.experts, mode="drop")
        routing = experts.Routing(record[:, None])
    # The start of padding rows is wrong, but nothing reads it: attention reads that of a tile's first row.
    attend = invariant.packed_attend(spread(start), lengths, count)
    execution = Execution(jnp.float32, rowwise=invariant.by_tiles(count))
    hidden, _, _ = run(model, tokens[:, None], positions[:, None], attend, execution=execution, routing=routing)

    # Response tokens come first; each is predicted one row earlier.
    mask = batch.response_mask.reshape(-1)
    order = jnp.argsort(~mask)
    predicting = jnp.take_along_axis(place, batch.response_positions - 1, axis=1).reshape(-1)[order]
    targets = jnp.take_along_axis(batch.tokens, batch.response_positions, axis=1).reshape(-1)[order]
    found = invariant.target_logprobs(
        model, hidden.at[predicting].get(mode="clip"), targets, temperature, mask.sum(dtype=jnp.int32)
    )
    logprobs = jnp.zeros(mask.shape, jnp.float32).at[order].set(found)
    return jnp.where(mask, logprobs, 0).reshape(batch.response_mask.shape)
