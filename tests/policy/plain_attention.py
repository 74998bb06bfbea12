"""An attention beside plain attention: arrays with sequences of many lengths, and values with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from reinforce_ada_jax.distributed.mesh import cut_rows, join_rows
from reinforce_ada_jax.policy.transformer import LayerPlace, causal_attend


def make_case(length, heads, kv_heads, head_dim, rows=2, *, sinks=False):
    """((query, key, value), segment ids); with sinks a fourth array, [heads]."""
    rng = np.random.default_rng(0)
    sizes = ((rows, length, heads, head_dim), *[(rows, length, kv_heads, head_dim)] * 2)
    # Larger than unit, so that some scores decide alone and some do not.
    query, key, value = (jnp.asarray(rng.normal(0, 1.5, size), jnp.float32) for size in sizes)
    # Two and four sequences, and padding behind them, all over the blocks' edges.
    ends = np.array([[100, 230, 230, 230], [7, 128, 150, 201]])[:rows]
    segment_ids = (np.arange(length)[None, :, None] >= ends[:, None]).sum(axis=-1).astype(np.int32)
    arrays = query, key, value
    if sinks:  # some far below all scores, some far above
        arrays = *arrays, jnp.linspace(-20.0, 20.0, heads)
    return arrays, jnp.asarray(segment_ids)


@functools.partial(jax.jit, static_argnames=("attend", "window"))
def _both(arrays, segment_ids, attend, window, slides):
    """(mixed, gradients of a sum in which every element has a weight of its own)."""

    def weighted(arrays):
        place = LayerPlace(0, window, slides, *arrays[3:])
        mixed = attend(*arrays[:3], place, segment_ids)
        return jnp.vdot(mixed, jax.random.normal(jax.random.key(1), mixed.shape)), mixed

    (_, mixed), gradients = jax.value_and_grad(weighted, has_aux=True)(arrays)
    return mixed, gradients


def in_parts(attend, count):
    """An attention of whole rows by one of their parts."""

    def whole(*arguments):
        *arrays, layer, segment_ids = arguments  # sinks are in the layer
        parts, ids = [cut_rows(x, count) for x in arrays], None if segment_ids is None else cut_rows(segment_ids, count)
        return join_rows(attend(*parts, layer, ids), count)

    return whole


def check_attention(attend, arrays, segment_ids, window=0, slides=None):
    """Fails if values or gradients differ from those of plain attention by more than rounding."""
    mixed, gradients = _both(arrays, segment_ids, attend, window, slides)
    wanted, wanted_gradients = _both(arrays, segment_ids, causal_attend, window, slides)
    np.testing.assert_allclose(mixed, wanted, rtol=2e-5, atol=2e-5)
    for ours, plain in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=1e-4)
