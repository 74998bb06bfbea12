"""Attention of one new token per slot over pages of keys and values: one signature, several backends.

Keys and values of all layers share one pool [K, L * pages, page_size, H]; page p of layer l stands at l * pages + p.
Backends are chosen by name (`BACKENDS`): `jnp` gathers a slot's pages into one row, and runs on any device.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BACKENDS = ("jnp",)


def paged_attention(
    query: Float[Array, "S N H"],
    key_pages: Float[Array, "K pages page_size H"],
    value_pages: Float[Array, "K pages page_size H"],
    lengths: Int[Array, " S"],
    table: Int[Array, "S width"],
    *,
    backend: str,
) -> Float[Array, "S N H"]:
    """softmax(q k / sqrt(H)) v over the first `lengths[s]` tokens of slot s; zeros where the length is 0.

    Args:
      query: the new token's, rotated.
      key_pages: the pool, the new token's key already written.
      value_pages: likewise.
      lengths: tokens that each slot may see, the new one included; at most width * page_size.
      table: physical pages of each slot in order; entries beyond its length must be valid page numbers.
      backend: one of `BACKENDS`.
    """
    if backend != "jnp":
        raise ValueError(f"attention backend {backend!r} is not one of {', '.join(BACKENDS)}.")
    slots, width = table.shape

    def rows(pages):
        kv_heads, _, page_size, head_size = pages.shape
        gathered = pages[:, table]  # K S width page_size H
        return gathered.reshape(kv_heads, slots, width * page_size, head_size).transpose(1, 2, 0, 3)

    mixed = jax.nn.dot_product_attention(
        query[:, None], rows(key_pages), rows(value_pages), key_value_seq_lengths=jnp.maximum(lengths, 1)
    )[:, 0]
    return jnp.where(lengths[:, None, None] > 0, mixed, 0)


def write_token(
    pages: Float[Array, "K pages page_size H"],
    new: Float[Array, "S K H"],
    page: Int[Array, " S"],
    offset: Int[Array, " S"],
) -> Float[Array, "K pages page_size H"]:
    """Puts one token's keys (or values) of every slot at (page, offset).

    All leading dimensions are indexed: leaving one as a slice makes XLA copy the whole pool.
    """
    heads = jnp.arange(pages.shape[0])[:, None]
    return pages.at[heads, page[None, :], offset[None, :]].set(new.transpose(1, 0, 2).astype(pages.dtype))
