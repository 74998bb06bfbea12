"""Causal attention in blocks of queries, for CPUs: keys after a block get no scores, and no scores are stored.

`attend` has the meaning and signature of `transformer.causal_attend`; `attend_parts` takes rows that are cut over
devices. The backward pass computes the probabilities again, from the log-sum-exp of each query's scores, as in
FlashAttention-2 (arXiv 2307.08691, section 3). The query heads of a key head are rows of one product, and scores keep
one layout throughout: XLA transposes the scores of `causal_attend` several times.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy.rounded import whole_products
from reinforce_ada_jax.policy.transformer import ATTENTION_RESULT, LayerPlace

# Scores of 64 queries stay in a core's cache. Each block is compiled separately, so long rows have larger blocks, at
# most 4.
MIN_BLOCK, MAX_BLOCKS = 64, 4
MASKED = -1e30  # finite, so that the difference of two of them is 0

Queries = Float[Array, "B K G T H"]  # G query heads for each key head
Keys = Float[Array, "B K _ H"]  # of a whole row, even if the queries are those of a part of it
Segments = Int[Array, "B T"] | None
Sinks = Float[Array, "K G"] | None  # as `LayerPlace.sinks`


class Shared(NamedTuple):
    """Segments that several others of a row continue."""

    ids: Int[Array | np.ndarray, "B T"]  # of the segment that a token sees beside its own, or its own
    positions: Int[Array | np.ndarray, "B T"]  # of each token in its sequence, by which windows reach


class Visible(NamedTuple):
    """Positions of queries among keys: a query sees keys of its segments, within reach and not after itself."""

    segment_ids: Segments  # of queries
    reach: Int[Array, ""] | None  # as `LayerPlace.reach`
    key_segment_ids: Segments = None  # of the whole row, if the queries are those of a part; None: as `segment_ids`
    first: Int[Array, ""] | None = None  # place of the part in the row; None: the queries are those of the whole row
    shared: Shared | None = None  # a row has prompts once for several segments

    def end(self, key: Array, end: int) -> int:
        """Returns the number of keys that queries before `end` may see, as far as the compiler knows."""
        return end if self.first is None else key.shape[2]


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """Yields the (first, end) positions of each block of queries, which sees the keys before its end."""
    size = max(MIN_BLOCK, -(-length // MAX_BLOCKS))
    return ((first, min(first + size, length)) for first in range(0, length, size))


def _product(equation: str, left: Array, right: Array) -> Array:
    with whole_products(left.dtype):
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _rows(x: Array, first: int, end: int) -> Array:
    """Returns the positions of a block, with the query heads of a key head as rows of one product: [B, K, R, ...]."""
    return jax.lax.slice_in_dim(x, first, end, axis=3).reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(query: Queries, key: Keys, sees: Visible, first: int, end: int) -> Float[Array, "B K R S"]:
    """Returns the scores of a block with the keys before its end."""
    last = sees.end(key, end)
    scores = _product("BKRH,BKSH->BKRS", _rows(query, first, end), key[:, :, :last])
    query_place, key_place = jnp.arange(first, end)[:, None], jnp.arange(last)[None]
    if sees.first is not None:
        query_place = query_place + sees.first
    seen = (query_place >= key_place)[None]
    if sees.reach is not None:
        distance = (query_place - key_place)[None]
        if sees.shared is not None:
            distance = sees.shared.positions[:, first:end, None] - sees.shared.positions[:, None, :last]
        seen = seen & (distance < sees.reach)
    if sees.segment_ids is not None:
        of_keys = sees.segment_ids if sees.key_segment_ids is None else sees.key_segment_ids
        own = sees.segment_ids[:, first:end, None] == of_keys[:, None, :last]
        if sees.shared is not None:
            own = own | (sees.shared.ids[:, first:end, None] == of_keys[:, None, :last])
        seen = seen & own
    by_head = scores.reshape(*query.shape[:3], end - first, last)
    return jnp.where(seen[:, None, None], by_head, MASKED).reshape(scores.shape)


@jax.custom_vjp
def _attention(query: Queries, key: Keys, value: Keys, sinks: Sinks, sees: Visible) -> Queries:
    return _forward(query, key, value, sinks, sees)[0]


def _forward(query, key, value, sinks, sees):
    mixed, log_sums = [], []
    for first, end in _blocks(query.shape[3]):
        scores = _scores(query, key, sees, first, end)
        largest = scores.max(axis=-1, keepdims=True)
        sink = None if sinks is None else jnp.repeat(sinks, end - first, axis=1)[None, :, :, None]
        largest = largest if sink is None else jnp.maximum(largest, sink)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        total = total if sink is None else total + jnp.exp(sink - largest)
        block = _product("BKRS,BKSH->BKRH", weights.astype(value.dtype), value[:, :, : sees.end(key, end)]) / total
        mixed.append(block.astype(query.dtype).reshape(*query.shape[:3], end - first, -1))
        log_sums.append((largest + jnp.log(total)).reshape(*query.shape[:3], end - first, 1))
    result = checkpoint_name(jnp.concatenate(mixed, axis=3), ATTENTION_RESULT)
    log_sum = checkpoint_name(jnp.concatenate(log_sums, axis=3), ATTENTION_RESULT)
    return result, (query, key, value, sinks, sees, result, log_sum)


def _backward(residuals, d_mixed):
    query, key, value, sinks, sees, mixed, log_sum = residuals
    # The gradient of the softmax needs the sum of p dp over keys. It equals the sum of mixed * d_mixed over the head.
    weighted = (mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    d_sinks = None
    if sinks is not None:  # the key of a sink has the value 0, so its dp is 0
        d_sinks = -(jnp.exp(sinks[None, :, :, None, None] - log_sum) * weighted).sum(axis=(0, 3, 4))
    d_query, d_key, d_value = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for first, end in _blocks(query.shape[3]):
        last = sees.end(key, end)
        before = ((0, 0), (0, 0), (0, key.shape[2] - last), (0, 0))
        probabilities = jnp.exp(_scores(query, key, sees, first, end) - _rows(log_sum, first, end))
        d_block = _rows(d_mixed, first, end)
        d_probabilities = _product("BKRH,BKSH->BKRS", d_block, value[:, :, :last])
        d_scores = (probabilities * (d_probabilities - _rows(weighted, first, end))).astype(query.dtype)
        more = _product("BKRS,BKRH->BKSH", probabilities.astype(value.dtype), d_block)
        d_value = d_value + jnp.pad(more, before)
        d_key = d_key + jnp.pad(_product("BKRS,BKRH->BKSH", d_scores, _rows(query, first, end)), before)
        block = _product("BKRS,BKSH->BKRH", d_scores, key[:, :, :last])
        d_query.append(block.reshape(*query.shape[:3], end - first, -1))
    d_query = jnp.concatenate(d_query, axis=3)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), d_sinks, None


_attention.defvjp(_forward, _backward)


def attend(query, key, value, layer, segment_ids: Segments = None, *, shared: Shared | None = None):
    """Computes causal attention: a token sees itself and those before it, in its own segment if there are segments.

    With `shared` it also sees those before it in the segment that its own continues.
    """
    return _attend(query, key, value, layer.sinks, Visible(segment_ids, layer.reach, shared=shared))


def attend_parts(query, key, value, layer, segment_ids: Segments = None, *, mesh: Mesh):
    """Computes attention for rows that `mesh.cut_rows` has cut; each device reads the keys and values of all parts."""
    count = mesh.shape["context"]

    def local(query, key, value, segment_ids, slides, sinks):
        key, value = mesh_lib.all_parts(key, count), mesh_lib.all_parts(value, count)
        of_keys = None if segment_ids is None else mesh_lib.all_parts(segment_ids, count)
        first = jax.lax.axis_index("context") * query.shape[1]
        reach = LayerPlace(0, layer.window, slides).reach
        return _attend(query, key, value, sinks, Visible(segment_ids, reach, of_keys, first))

    heads, row = mesh_lib.spec(("parts", None, "heads", None)), mesh_lib.spec(("parts", None))
    in_specs = (heads, heads, heads, row, PartitionSpec(), mesh_lib.spec(("heads",)))
    over_mesh = mesh_lib.shard_map(local, mesh, in_specs=in_specs, out_specs=heads)
    return over_mesh(query, key, value, segment_ids, layer.slides, layer.sinks)


def _attend(query, key, value, sinks, sees: Visible):
    rows, length, num_heads, head_dim = query.shape
    query = query * jnp.asarray(head_dim**-0.5, query.dtype)
    query = query.reshape(rows, length, key.shape[2], -1, head_dim).transpose(0, 2, 3, 1, 4)
    sinks = None if sinks is None else sinks.reshape(query.shape[1:3])
    mixed = _attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), sinks, sees)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, num_heads, head_dim)
