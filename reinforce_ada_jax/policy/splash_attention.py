"""Causal attention over whole rows as JAX's splash attention kernels for TPU: no [T, T] scores exist in HBM.

Same meaning as `transformer.causal_attend`, forwards and backwards, and the same signature but for the mesh.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib

# Blocks of positions, the largest that divides a row is taken; rows are padded to a multiple of the smallest.
BLOCKS = (512, 384, 256, 128)


def padded_length(tokens: int) -> int:
    """Returns the positions of a row as the kernels see it."""
    return -(-tokens // BLOCKS[-1]) * BLOCKS[-1]


def block_size(tokens: int) -> int:
    """Returns the positions of a block, for rows of `tokens` tokens."""
    return next(block for block in BLOCKS if padded_length(tokens) % block == 0)


def _padded_head(size: int) -> int:
    """Columns of a head as the kernels take it: 64, or lanes of 128."""
    return 64 if size <= 64 else -(-size // 128) * 128


def _local(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    slides: Bool[Array, ""] | None,
    window: int,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    """Computes attention on one device, for its rows and heads."""
    length, num_heads, head_dim = query.shape[1:]
    size, block = padded_length(length), block_size(length)
    # The kernels know no scale. Zero columns change no score, and a row's added positions come after all others.
    query = query * jnp.asarray(head_dim**-0.5, query.dtype)
    padding = (0, 0), (0, size - length), (0, 0), (0, _padded_head(head_dim) - head_dim)
    query, key, value = (jnp.pad(x, padding).swapaxes(1, 2) for x in (query, key, value))
    make_kernel = functools.partial(
        splash.make_splash_mha,
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )  # fmt: skip
    ids = None
    if segment_ids is not None:
        padded_ids = jnp.pad(segment_ids, padding[:2])
        ids = splash.SegmentIds(padded_ids, padded_ids)

    def attention(mask):
        return jax.vmap(make_kernel(splash.MultiHeadMask([mask] * num_heads)))

    whole = attention(splash.CausalMask((size, size)))
    if slides is None:
        mixed = whole(query, key, value, ids)
    else:
        sliding = attention(splash.LocalMask((size, size), (window - 1, 0), offset=0))
        mixed = jax.lax.cond(slides, sliding, whole, query, key, value, ids)
    mixed = cast(Array, mixed)
    return mixed.swapaxes(1, 2)[:, :length, :, :head_dim].astype(query.dtype)


def attend(query, key, value, layer, carry, *, mesh: Mesh, segment_ids=None, interpret: bool = False):
    """Causal attention: a token attends to itself and the tokens before it, in its own segment if there are segments.

    Rows are split over `data` and `fsdp`, heads over `tensor`; nothing passes between devices. Arguments are as of
    `transformer.Attend`; `interpret` runs the kernels without a TPU.
    """
    heads, row = mesh_lib.spec(("rows", None, "heads", None)), mesh_lib.spec(("rows", None))
    local = jax.shard_map(
        functools.partial(_local, window=layer.window, interpret=interpret),
        mesh=mesh,
        in_specs=(heads, heads, heads, None if segment_ids is None else row, None if layer.slides is None else P()),
        out_specs=heads,
        check_vma=False,  # kernels don't say along which axes their results vary
    )
    return local(query, key, value, segment_ids, layer.slides), carry, None
