"""Causal attention over whole rows with JAX's splash attention kernels for TPU: no [T, T] scores exist in HBM.

`attend` has the meaning of `transformer.causal_attend`, forwards and backwards. It takes `mesh` and `interpret` in
addition.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib

# Numbers of positions in a block. The largest that divides the padded row, or the part of one, is taken; rows are
# padded to a multiple of the smallest.
BLOCKS = (512, 384, 256, 128)


def padded_length(tokens: int) -> int:
    """Returns the number of positions of a row after padding."""
    return -(-tokens // BLOCKS[-1]) * BLOCKS[-1]


def block_size(tokens: int) -> int:
    """Returns the number of positions in a block, for rows of `tokens` tokens."""
    return next(block for block in BLOCKS if padded_length(tokens) % block == 0)


def _kernels(length: int, num_heads: int, window: int, context: int, interpret: bool) -> list[Any]:
    """Returns kernels for rows of `context` parts of `length` tokens: one without the window, and one with it, if any.

    Each device takes its part of their masks.
    """
    size, block = context * padded_length(length), block_size(length)
    masks: list[splash.Mask] = [splash.CausalMask((size, size))]
    if window:
        masks.append(splash.LocalMask((size, size), (window - 1, 0), offset=0))
    return [
        splash.make_splash_mha(
            splash.MultiHeadMask([mask] * num_heads),
            block_sizes=splash.BlockSizes(
                block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
                block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=context,
            interpret=interpret,
        )
        for mask in masks
    ]  # fmt: skip


def _local(
    kernels: list[Any],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    slides: Bool[Array, ""] | None,
    sinks: Float[Array, " N"] | None,
    context: int,
) -> Float[Array, "B T N H"]:
    """Computes attention on one device, for its rows, or a part of each, and its heads."""
    length, head_dim = query.shape[1], query.shape[-1]
    # The kernels do not scale scores, so queries are scaled here. Padding is harmless: zero columns change no score,
    # and a row's added positions come after all others. A part of a row has none.
    query = query * jnp.asarray(head_dim**-0.5, query.dtype)
    columns = 64 if head_dim <= 64 else -(-head_dim // 128) * 128  # of a head, as the kernels take it
    padding = (0, 0), (0, padded_length(length) - length), (0, 0), (0, columns - head_dim)
    key, value = mesh_lib.all_parts(key, context), mesh_lib.all_parts(value, context)
    query, key, value = (jnp.pad(x, padding).swapaxes(1, 2) for x in (query, key, value))
    ids = None
    if segment_ids is not None:
        padded_ids = jnp.pad(segment_ids, padding[:2])
        ids = splash.SegmentIds(padded_ids, mesh_lib.all_parts(padded_ids, context))
    attention = [jax.vmap(kernel, in_axes=(0, 0, 0, 0, None)) for kernel in kernels]
    if slides is None:
        mixed = attention[0](query, key, value, ids, sinks)
    else:
        mixed = jax.lax.cond(slides, attention[1], attention[0], query, key, value, ids, sinks)
    mixed = cast(Array, mixed)
    return mixed.swapaxes(1, 2)[:, :length, :, :head_dim].astype(query.dtype)


def attend(query, key, value, layer, segment_ids=None, *, mesh: Mesh, interpret: bool = False):
    """Computes causal attention: a token sees itself and those before it, in its own segment if there are segments.

    Rows are split over `data` and `fsdp`, heads over `tensor`, without communication. In rows that `mesh.cut_rows` has
    cut, each part has a multiple of 128 tokens, and a device reads keys and values of all parts of its rows.
    `interpret` runs the kernels without a TPU.
    """
    heads, row = mesh_lib.spec(("parts", None, "heads", None)), mesh_lib.spec(("parts", None))
    context, num_heads = mesh.shape["context"], query.shape[2] // mesh.shape["tensor"]
    window = 0 if layer.slides is None else layer.window
    kernels = _kernels(query.shape[1], num_heads, window, context, interpret)
    of_masks = [kernel.manual_sharding_spec(NamedSharding(mesh, P(None, "context"))) for kernel in kernels]
    slides = None if layer.slides is None else P()
    sinks = None if layer.sinks is None else mesh_lib.spec(("heads",))
    local = mesh_lib.shard_map(
        functools.partial(_local, context=context),
        mesh,
        in_specs=(of_masks, heads, heads, heads, None if segment_ids is None else row, slides, sinks),
        out_specs=heads,
    )
    return local(kernels, query, key, value, segment_ids, layer.slides, layer.sinks)
