"""The kernels against plain attention, interpreted: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy import splash_attention, transformer


def make_case(length, heads, kv_heads, head_dim, rows=2):
    rng = np.random.default_rng(0)
    sizes = ((rows, length, heads, head_dim), *[(rows, length, kv_heads, head_dim)] * 2)
    # Larger than unit, so that some scores decide alone and some do not.
    query, key, value = (jnp.asarray(rng.normal(0, 1.5, size), jnp.float32) for size in sizes)
    # Two and four sequences, and padding behind them, all over the blocks' edges.
    ends = np.array([[100, 230, 230, 230], [7, 128, 150, 201]])[:rows]
    segment_ids = (np.arange(length)[None, :, None] >= ends[:, None]).sum(axis=-1).astype(np.int32)
    return (query, key, value), jnp.asarray(segment_ids)


@functools.partial(jax.jit, static_argnames="attend")
def both(arrays, segment_ids, attend):
    """(mixed, gradients of a sum in which every element has a weight of its own)."""

    def weighted(arrays):
        mixed, carry, kept = attend(*arrays, 0, None, segment_ids=segment_ids)
        assert carry is None and kept is None
        return jnp.vdot(mixed, jax.random.normal(jax.random.key(1), mixed.shape)), mixed

    (_, mixed), gradients = jax.value_and_grad(weighted, has_aux=True)(arrays)
    return mixed, gradients


# 240 positions are padded to one block of 256.
@pytest.mark.parametrize(
    ("length", "heads", "head_dim", "segmented", "axes"),
    [
        (240, (2, 1), 64, True, {}),
        (240, (2, 2), 64, False, {}),
        (640, (2, 1), 128, True, {}),  # five blocks of 128
        (240, (4, 2), 16, True, dict(data=1, fsdp=2, tensor=2)),
    ],
)
def test_equals_plain_attention(length, heads, head_dim, segmented, axes):
    arrays, segment_ids = make_case(length, *heads, head_dim)
    segment_ids = segment_ids if segmented else None
    attend = functools.partial(splash_attention.attend, mesh=make_mesh(**axes), interpret=True)
    mixed, gradients = both(arrays, segment_ids, attend)
    wanted, wanted_gradients = both(arrays, segment_ids, transformer.causal_attend)
    np.testing.assert_allclose(mixed, wanted, rtol=2e-5, atol=2e-5)
    for ours, plain in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("length, size, block", [(16, 128, 128), (240, 256, 256), (384, 384, 384), (3072, 3072, 512)])
def test_rows_are_cut_into_blocks(length, size, block):
    assert (splash_attention.padded_length(length), splash_attention.block_size(length)) == (size, block)
