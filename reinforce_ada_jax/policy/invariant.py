"""Forward passes whose bits depend only on a token and the tokens before it, not on other rows of the program.

How a compiled product or sum rounds depends on its shape. So every row is computed in a tile of `ROWS` rows, and its
attention in tiles of `KEYS` keys, in ascending order. The loop over tiles has the same body in every program, and the
compiler fuses nothing across a loop. The number of iterations is known at run time only; otherwise the compiler would
remove a loop of one iteration. Sampler and learner call these functions in their own layouts.

There are only forward passes: the loops cannot be differentiated. The equality was measured for float32 on CPUs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from reinforce_ada_jax.policy.transformer import (
    FULL_LAYER,
    Attend,
    Decoder,
    LayerPlace,
    Rowwise,
    distribution,
    head_logits,
)

ROWS, KEYS = 16, 32
SMALLEST = float(jnp.finfo(jnp.float32).min)  # finite: the difference of two of them is 0

# read(tile) -> (keys, values) of the KEYS tokens from tile * KEYS on, for each row of a tile.
Read = Callable[[Int[Array, ""]], tuple[Float[Array, "K ROWS KEYS H"], Float[Array, "K ROWS KEYS H"]]]


def check_platform(name: str) -> None:
    """Raises ValueError for a platform other than the CPU."""
    if name != "cpu":
        raise ValueError(
            f"model.numerics is 'invariant', and the devices are of the platform {name}: how its products round is not "
            "known to depend on the tile alone. Set JAX_PLATFORMS=cpu, or model.numerics to 'fast'."
        )


def num_tiles(count: Int[Array, "..."] | int, size: int) -> Any:
    """Returns the number of tiles that hold `count` rows or keys."""
    return (count + size - 1) // size


def whole_tiles(x: Float[Array, "M ..."] | Int[Array, "M ..."] | UInt[Array, "M ..."]) -> Array:
    """Returns the rows, padded with rows of zeros to whole tiles."""
    return jnp.pad(x, [(0, -x.shape[0] % ROWS)] + [(0, 0)] * (x.ndim - 1))


def by_tiles(count: Int[Array, ""]) -> Rowwise:
    """Returns a `Rowwise` that computes the tiles of the first `count` rows; later tiles are zeros."""

    def apply(function: Callable[..., Any], *rows: Array) -> Any:
        padded = [whole_tiles(x) for x in rows]
        shapes = jax.eval_shape(function, *[x[:ROWS] for x in padded])
        results = jax.tree.map(lambda x: jnp.zeros((padded[0].shape[0], *x.shape[1:]), x.dtype), shapes)

        def one_tile(index, results):
            tile = [jax.lax.dynamic_slice_in_dim(x, index * ROWS, ROWS) for x in padded]
            new = jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(tile)))
            return jax.tree.map(
                lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, index * ROWS, axis=0), results, new
            )

        results = jax.lax.fori_loop(0, num_tiles(count, ROWS), one_tile, results)
        return jax.tree.map(lambda x: x[: rows[0].shape[0]], results)

    return apply


def attention(
    query: Float[Array, "ROWS N H"],
    lengths: Int[Array, " ROWS"],
    num_kv_heads: int,
    read: Read,
    layer: LayerPlace = FULL_LAYER,
) -> Float[Array, "ROWS N H"]:
    """Computes softmax(q k / sqrt(H)) v over the first `lengths[r]` tokens of each row of a tile; zeros if 0.

    In a sliding layer a row sees only the last of these tokens (`LayerPlace.reach`). The sinks of a layer are scores of
    keys without values.

    A tile of keys beyond a row's length changes none of its bits: sums are multiplied by 1, and zeros are added.
    """
    _, num_heads, head_dim = query.shape
    grouped = (query * head_dim**-0.5).reshape(ROWS, num_kv_heads, num_heads // num_kv_heads, head_dim).swapaxes(0, 1)

    def add(index, partial):
        seen = layer.sees(index * KEYS + jnp.arange(KEYS)[None], lengths[:, None])
        inputs = jax.lax.optimization_barrier((*read(index), seen, partial))
        return jax.lax.optimization_barrier(_add_keys(grouped, *inputs))

    none = jnp.zeros(grouped.shape[:3], jnp.float32)
    partial = none + SMALLEST, none, jnp.zeros(grouped.shape, jnp.float32)
    if layer.sinks is not None:
        partial = jnp.broadcast_to(layer.sinks.reshape(num_kv_heads, 1, -1), none.shape), none + 1, partial[2]
    _, total, mixed = jax.lax.fori_loop(0, num_tiles(jnp.max(lengths), KEYS), add, partial)
    mixed = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return mixed.swapaxes(0, 1).reshape(query.shape)


def _add_keys(
    query: Float[Array, "K ROWS G H"],
    keys: Float[Array, "K ROWS KEYS H"],
    values: Float[Array, "K ROWS KEYS H"],
    seen: Bool[Array, "ROWS KEYS"],
    partial: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """Adds a tile of keys to an online softmax: the largest score, the sum of weights and of weighted values."""
    largest, total, mixed = partial
    scores = jnp.einsum("KRGH,KRTH->KRGT", query, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[None, :, None], scores, -jnp.inf)
    overall = jnp.maximum(largest, scores.max(-1))
    weights, scale = jnp.exp(scores - overall[..., None]), jnp.exp(largest - overall)
    # A weight of 0 times NaN or infinity is NaN, and unwritten places may hold anything.
    values = jnp.where(seen[None, :, :, None], values, 0)
    new = jnp.einsum("KRGT,KRTH->KRGH", weights, values, preferred_element_type=jnp.float32)
    return overall, total * scale + weights.sum(-1), mixed * scale[..., None] + new


def packed_attend(start: Int[Array, " M"], lengths: Int[Array, " M"], count: Int[Array, ""]) -> Attend:
    """Returns the attention of sequences that follow each other in one column of rows; each begins a new tile.

    The sequence of a row begins at the row `start`, and the row sees `lengths` tokens, itself included; 0 in padding.
    """

    def attend(query, key, value, layer, carry):
        # Keys beyond the last row are read, but no row sees them.
        keys, values = (jnp.pad(x[:, 0].swapaxes(0, 1), ((0, 0), (0, KEYS), (0, 0))) for x in (key, value))

        def one_tile(query, start, lengths):
            def read(tile):
                def tokens(x):
                    some = jax.lax.dynamic_slice_in_dim(x, start[0] + tile * KEYS, KEYS, axis=1)
                    return jnp.broadcast_to(some[:, None], (x.shape[0], ROWS, *some.shape[1:]))

                return tokens(keys), tokens(values)

            return attention(query, lengths, key.shape[2], read, layer)

        return by_tiles(count)(one_tile, query[:, 0], start, lengths)[:, None], carry, None

    return attend


def target_logprobs(
    model: Decoder, hidden: Float[Array, "M 1 D"], targets: Int[Array, " M"], temperature: float, count: Int[Array, ""]
) -> Float[Array, " M"]:
    """Computes the log-probability of each row's target, for the tiles of the first `count` rows."""

    def all_logprobs(hidden, temperature):
        return distribution(head_logits(model, hidden)[:, 0], temperature[:, None])

    def one_tile(hidden, targets, temperature):
        # The same loop as in the sampler, here with one iteration: if the sum were fused with the choice of targets, it
        # would round differently. An array [M, V] never exists.
        logprobs = by_tiles(jnp.minimum(count, ROWS))(all_logprobs, hidden, temperature)
        return jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]

    # The temperatures depend on data: the compiler would replace division by a constant with a product by its
    # reciprocal.
    temperatures = jnp.where(targets < 0, 1.0, jnp.float32(temperature))
    return by_tiles(count)(one_tile, hidden, targets, temperatures)
