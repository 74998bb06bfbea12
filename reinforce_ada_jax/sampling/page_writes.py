"""Writes into the pages of keys and values: tokens of a step, whole prompts, and copies of pages.

Where heads are split over `tensor`, every device writes its own; XLA alone would gather the values of all devices.
Which page a token goes to is decided in pages.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed.mesh import on_own_part
from reinforce_ada_jax.policy.quantization import Quantized, quantize
from reinforce_ada_jax.sampling.paged_attention import Pages, Pools, pad_head_dim
from reinforce_ada_jax.sampling.pages import NULL, num_pages
from reinforce_ada_jax.sampling.state import Prefix

WHOLE, BY_HEAD = PartitionSpec(), PartitionSpec("tensor")

New = Float[Array, "S K H"]  # keys (or values) of one token of every slot
Places = Int[Array, " S"]


def write_tokens(pools: Pools, keys: New, values: New, page: Places, offset: Places, mesh: Mesh | None = None) -> Pools:
    """Puts keys and values at (page, offset); tokens may share a page."""

    def write(pools, keys, values, page, offset):
        return write_token(pools[0], keys, page, offset), write_token(pools[1], values, page, offset)

    new = PartitionSpec(None, "tensor")
    write = on_own_part(write, mesh, in_specs=(BY_HEAD, new, new, WHOLE, WHOLE), out_specs=BY_HEAD)
    return write(pools, keys, values, page, offset)


def write_token(pages: Pages, new: New, page: Places, offset: Places) -> Pages:
    """Puts keys (or values) at (page, offset); tokens may share a page.

    All leading dimensions are indexed: leaving one as a slice makes XLA copy the whole pool. Scales are written as rows
    of a page, after the new token's scale is set to 0: XLA for TPUs would transpose all scales to write single numbers.
    """
    kv_heads, num_pages, page_size, _ = pages.shape
    heads, page = jnp.arange(kv_heads)[:, None], page[None]
    row = ((heads * num_pages + page) * page_size + offset[None]).reshape(-1)
    new = _finite(pad_head_dim(new, pages)).transpose(1, 0, 2)

    def put(whole, values):
        rows = whole.reshape(-1, whole.shape[-1])
        values = values.reshape(-1, whole.shape[-1]).astype(whole.dtype)
        return rows.at[row].set(values, mode="drop", wrap_negative_indices=False).reshape(whole.shape)

    if not isinstance(pages, Quantized):
        return put(pages, new)
    rounded = quantize(new, (-1,))
    here = jnp.arange(page_size)[None, None] == offset[None, :, None]
    cleared = pages.scale.at[heads, page, 0].min(jnp.where(here, 0, jnp.inf))
    return Quantized(
        values=put(pages.values, rounded.values),
        scale=cleared.at[heads, page, 0].max(jnp.where(here, rounded.scale[..., None], 0)),
    )


def write_pages(
    pages: Pages, new: Float[Array, "... page_size H"], heads: Int[Array, "..."], page: Int[Array, "..."]
) -> Pages:
    """Puts keys (or values) of whole pages at (head, page), which broadcast to the leading dimensions of `new`."""
    new = _finite(pad_head_dim(new, pages))
    if not isinstance(pages, Quantized):
        return pages.at[heads, page].set(new.astype(pages.dtype))
    rounded = quantize(new, (-1,))
    return Quantized(
        values=pages.values.at[heads, page].set(rounded.values),
        scale=pages.scale.at[heads, page, 0].set(rounded.scale),
    )


def _finite(new: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns keys or values with 0 in place of what is not finite.

    A page has several owners in turn. Attention multiplies the numbers of an earlier owner by a weight of 0, which
    would not hide NaN. If the token's hidden state is not finite, its log-probabilities show it. If only its key or
    value is not, as with a broken bias, the learner's log-probabilities show it.
    """
    return jnp.where(jnp.isfinite(new), new, 0)


def fill_pages(pools: Pools, prefix: Prefix, table: Int[Array, "B width"], mesh: Mesh | None = None) -> Pools:
    """Writes prompts into the pages of their table rows; the last token and padding are never read."""
    num_layers, rows, tokens = prefix.keys.shape[:3]
    all_pages, page_size = pools[0].shape[1:3]
    count = num_pages(tokens, page_size)
    page = jnp.pad(table, ((0, 0), (0, max(0, count - table.shape[1]))), constant_values=NULL)[:, :count]
    layer = jnp.arange(num_layers)[:, None, None] * (all_pages // num_layers)

    def fill(pages, new, page):
        kv_heads = pages.shape[0]
        padded = jnp.pad(new, ((0, 0), (0, 0), (0, count * page_size - tokens), (0, 0), (0, 0)))
        by_page = padded.reshape(num_layers, rows, count, page_size, kv_heads, -1).transpose(4, 0, 1, 2, 3, 5)
        return write_pages(pages, by_page, jnp.arange(kv_heads)[:, None, None, None], page)

    new = PartitionSpec(None, None, None, "tensor")
    fill = on_own_part(fill, mesh, in_specs=(BY_HEAD, new, WHOLE), out_specs=BY_HEAD)
    page = (layer + page[None])[None]
    return fill(pools[0], prefix.keys, page), fill(pools[1], prefix.values, page)


def copy_pages(
    pools: Pools, source: Int[Array, "L S"], target: Int[Array, "L S"], count: Int[Array, ""], mesh: Mesh | None = None
) -> Pools:
    """Copies page source[:, i] to target[:, i], of all layers, for the first `count`: one loop iteration for each."""

    def copy(pools, source, target):
        # All leading dimensions indexed, as in `write_token`: a slice here would copy the whole pool.
        heads = jnp.arange(pools[0].shape[0])[:, None]
        new, old = (heads, target[None]), (heads, source[None])
        return jax.tree.map(lambda pool: pool.at[new].set(pool[old]), pools)

    copy = on_own_part(copy, mesh, in_specs=(BY_HEAD, WHOLE, WHOLE), out_specs=BY_HEAD)
    return jax.lax.fori_loop(0, count, lambda i, pools: copy(pools, source[:, i], target[:, i]), pools)
