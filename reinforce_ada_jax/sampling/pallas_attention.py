"""Attention of one new token per slot over pages, as Pallas kernels.

On TPUs it is JAX's own kernel, or ours for pages in int8, sliding windows and attention sinks. On GPUs it is ours.

Same meaning as `paged_attention.paged_attention`, which dispatches here. All kernels read a slot's live pages only, and
run inside `shard_map` over the mesh axis `tensor`, each device with its own heads. Pages are assigned in pages.py and
written in page_writes.py.
"""

import contextlib
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as tpu_kernel
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed.mesh import on_own_part
from reinforce_ada_jax.policy.quantization import Quantized
from reinforce_ada_jax.sampling.paged_attention import FULL_SOFTMAX, Pages, Softmax
from reinforce_ada_jax.sampling.pages import TRITON_TILE, padded_head_dim

# Tokens whose keys and values a TPU core reads at once: 0.5 MiB of VMEM at head dim 128 in bf16, twice buffered. Up to
# 5,120 compile for v5e; a slot's last block is read whole, so larger blocks would read more unused tokens.
TPU_BLOCK_TOKENS = 512
# The TPU kernel keeps the page table in a core's scalar memory. For v5e to tpu7x, 0.97 MiB compile and 1.02 fail.
TPU_SCALAR_BYTES = 2**20
GPU_BLOCK_TOKENS = 64
# Programs that keep a large GPU busy (an H100 has 132 multiprocessors); fewer slots and heads than that split tokens.
GPU_PROGRAMS = 256
# Start value of a maximum. It is finite, so that the difference of two start values is 0.
NO_SCORE = -0.7 * float(jnp.finfo(jnp.float32).max)


def _over_heads(
    attend: Callable[..., jax.Array],
    query: jax.Array | np.ndarray,
    key_pages: Pages | np.ndarray,
    *rest: Pages | jax.Array | np.ndarray,
    mesh: Mesh,
    backend: str,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
) -> jax.Array:
    """Runs `attend` on every device with its own heads, padded to the head dimension of the pool."""
    head_dim, padded_dim = query.shape[-1], key_pages.shape[-1]
    needed = padded_head_dim(head_dim, backend)
    if padded_dim != needed:
        raise ValueError(
            f"pages hold {padded_dim} numbers for a head of dimension {head_dim}, and {backend} reads {needed}: "
            "allocate the pool with padded_head_dim."
        )
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded_dim - head_dim)))
    of_pool, of_query, whole = PartitionSpec("tensor"), PartitionSpec(None, "tensor"), PartitionSpec()
    in_specs = (of_query, of_pool, of_pool, whole, whole, *[of_pool] * (sinks is not None))
    attend = on_own_part(attend, mesh, in_specs=in_specs, out_specs=of_query, always=True)
    rest = rest if sinks is None else (*rest, sinks)
    return attend(query, key_pages, *rest)[..., :head_dim]


def _seen(lengths: jax.Array | np.ndarray, start: jax.Array | np.ndarray | None) -> Int[Array, "S 2"]:
    """Returns the first token that each slot sees, and the end of its tokens."""
    return jnp.stack([jnp.zeros_like(lengths) if start is None else jnp.asarray(start), jnp.asarray(lengths)], axis=1)


# ---- TPU ---------------------------------------------------------------------------------------------------------


def tpu_blocks(width: int, page_size: int) -> tuple[int, int]:
    """Returns (blocks, pages of each) that cover a table of `width` pages; a block has about `TPU_BLOCK_TOKENS`."""
    blocks = -(-width // max(1, TPU_BLOCK_TOKENS // page_size))
    return blocks, -(-width // blocks)


def megacore_mode(num_cores: int, slots: int, kv_heads: int) -> str | None:
    """Returns how two cores that are one device (v4, v5p) share a step of JAX's kernel; None: one core computes all."""
    if num_cores != 2:
        return None
    return "batch" if slots % 2 == 0 else "kv_head" if kv_heads % 2 == 0 else None


def pallas_tpu(
    query: Float[Array | np.ndarray, "S N H"],
    key_pages: Pages | np.ndarray,
    value_pages: Pages | np.ndarray,
    lengths: Int[Array | np.ndarray, " S"],
    table: Int[Array | np.ndarray, "S width"],
    softmax: Softmax = FULL_SOFTMAX,
    *,
    mesh: Mesh,
    interpret: bool = False,
) -> Float[Array, "S N H"]:
    """Computes `paged_attention` with JAX's own kernel, which rounds keys and values to bfloat16.

    Values beyond a slot's length must be finite: the kernel masks scores by adding to them. Pages in int8 have a kernel
    of their own: JAX's would make scales as wide as the head, four times the size of the pages. Windows and sinks use
    it too: a slot then sees its tokens from `softmax.start` on, which is in its first page.

    Raises:
      ValueError: the pool isn't `padded_head_dim` wide, or the page table is too large for a TPU's scalar memory.
    """
    slots, width = table.shape
    page_size = key_pages.shape[2]
    blocks, block_pages = tpu_blocks(width, page_size)
    is_own = isinstance(key_pages, Quantized) or softmax.start is not None or softmax.sinks is not None
    table_bytes = 4 * slots * (blocks * block_pages + 1 + is_own)
    if table_bytes >= TPU_SCALAR_BYTES:
        raise ValueError(
            f"a page table of {slots} slots and {width} pages each takes {table_bytes:,} bytes, and a TPU's scalar "
            f"memory has {TPU_SCALAR_BYTES:,}: raise sampling.page_size, or lower sampling.slots."
        )

    table = jnp.pad(table, ((0, 0), (0, blocks * block_pages - width)))
    num_cores = getattr(mesh.devices.flat[0], "num_cores", 1)  # CPUs have none
    if is_own:
        own = functools.partial(_tpu_own, block_pages=block_pages, scale=query.shape[-1] ** -0.5, interpret=interpret)
        seen = _seen(lengths, softmax.start)
        return _over_heads(
            own, query, key_pages, value_pages, seen, table, mesh=mesh, backend="pallas_tpu", sinks=softmax.sinks
        )

    def attend(query, key_pages, value_pages, lengths, table):
        # True chooses the generic interpreter; the annotation omits this value. The simulator of a TPU, which gave the
        # mode its name, can hang on two cores.
        mode = pltpu.force_tpu_interpret_mode(True) if interpret else contextlib.nullcontext()  # type: ignore[arg-type]
        # The kernel promotes bfloat16 to float32, and does not compile with products of whole float32 numbers.
        with mode, jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("default"):
            return tpu_kernel(
                query, key_pages, value_pages, lengths, table, pages_per_compute_block=block_pages,
                megacore_mode=megacore_mode(num_cores, slots, key_pages.shape[0]),
            )  # fmt: skip

    # In float32, so that nothing is rounded by the scale (the kernel has none) or between blocks: it keeps the running
    # result in the query's dtype.
    scaled = query.astype(jnp.float32) / math.sqrt(query.shape[-1])
    mixed = _over_heads(attend, scaled, key_pages, value_pages, lengths, table, mesh=mesh, backend="pallas_tpu")
    return mixed.astype(query.dtype)


def _tpu_kernel(
    seen_ref,  # [slots * 2]: for each slot the first token that it sees, and the end of its tokens
    table_ref,  # [slots * width]
    inputs,  # queries, [K, group, H], and sinks of the same shape, one number along H; or None
    pools,  # keys and values, each [K, pages, page_size, H], or Quantized; not yet read
    mixed_ref,  # [K, group, H]
    buffers,  # of the same structure: two blocks of pages, [2, block_pages, K, ...]
    arrived,  # [2]
    *,
    scale: float,
):
    """Computes all heads of one slot: online softmax over blocks of pages; the next block is copied meanwhile."""
    slot, (query_ref, sinks_ref) = pl.program_id(0), inputs
    first_token, length = seen_ref[2 * slot], seen_ref[2 * slot + 1]
    width = 2 * table_ref.shape[0] // seen_ref.shape[0]
    _, block_pages, _, page_size, head_dim = jax.tree.leaves(buffers[0])[0].shape
    block_tokens, group, dtype = block_pages * page_size, query_ref.shape[1], query_ref.dtype
    num_blocks = pl.cdiv(length, block_tokens)

    def copies(block):
        for index in range(block_pages):
            page = table_ref[slot * width + block * block_pages + index]
            for pool, buffer in zip(jax.tree.leaves(pools), jax.tree.leaves(buffers), strict=True):
                target = buffer.at[block % 2, index]
                yield pltpu.make_async_copy(pool.at[:, page], target, arrived.at[block % 2])

    def start(block):
        for copy in copies(block):
            copy.start()

    def one_block(block, carry):
        pl.when(block + 1 < num_blocks)(lambda: start(block + 1))
        for copy in copies(block):
            copy.wait()
        shape = (block_pages, group, page_size)
        token = block * block_tokens + page_size * jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        token = token + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        live = (token >= first_token) & (token < length)

        def load(buffer, head):
            """Returns the numbers of a head, and their scales; 1 where the pages have none."""
            if not isinstance(buffer, Quantized):
                return buffer[block % 2, :, head].astype(dtype), 1.0
            values, scale = (array[block % 2, :, head] for array in (buffer.values, buffer.scale))
            return values.astype(jnp.float32).astype(dtype), scale

        def one_head(head, mixed, max_score, total):
            (key, key_scale), (value, value_scale) = (load(buffer, head) for buffer in buffers)
            query = jnp.broadcast_to(query_ref[head][None], (block_pages, group, head_dim))
            dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            scores = jnp.where(live, dot("pgh,pth->pgt", query, key) * (scale * key_scale), NO_SCORE)
            new_max = jnp.maximum(max_score, jnp.max(scores, axis=(0, 2), keepdims=True))
            weights = jnp.exp(scores - new_max)
            shrink = jnp.exp(max_score - new_max)
            new = jnp.sum(dot("pgt,pth->pgh", (weights * value_scale).astype(dtype), value), axis=0, keepdims=True)
            total = total * shrink + jnp.sum(weights, axis=(0, 2), keepdims=True)
            return mixed * shrink + new, new_max, total

        return tuple(one_head(head, *own) for head, own in enumerate(carry))

    pl.when(num_blocks > 0)(lambda: start(0))
    begin = _without_tokens(query_ref.shape, sinks_ref)
    for head, (mixed, _, total) in enumerate(jax.lax.fori_loop(0, num_blocks, one_block, begin)):
        mixed_ref[head] = (mixed / jnp.where(total > 0, total, 1.0))[0].astype(dtype)


def _without_tokens(shape, sinks_ref):
    """Returns (mixed, largest score, sum) of each head of [K, group, H] before any token."""
    kv_heads, group, head_dim = shape
    none = jnp.zeros((1, group, head_dim), jnp.float32), jnp.zeros((1, group, 1), jnp.float32)
    if sinks_ref is None:
        return ((none[0], jnp.full((1, group, 1), NO_SCORE, jnp.float32), none[1]),) * kv_heads
    return tuple((none[0], sinks_ref[head][None, :, :1], none[1] + 1) for head in range(kv_heads))


def _tpu_own(query, key_pages, value_pages, *rest, block_pages: int, scale: float, interpret: bool):
    """Returns attention of all slots, on one device; `rest` are tokens that are seen, table, and sinks if any."""
    seen, table, *sinks = rest
    (slots, heads, padded_dim), kv_heads = query.shape, key_pages.shape[0]
    query = query.reshape(slots, kv_heads, heads // kv_heads, padded_dim)
    own = pl.BlockSpec((None, *query.shape[1:]), lambda s, *_: (s, 0, 0, 0))
    pools = (key_pages, value_pages)
    sinks = jnp.broadcast_to(sinks[0].reshape(*query.shape[1:3], 1), query.shape[1:]) if sinks else None
    of_sinks = None if sinks is None else pl.BlockSpec(sinks.shape, lambda s, *_: (0, 0, 0))

    def two_blocks(pool):
        heads, _, *page = pool.shape
        return pltpu.VMEM((2, block_pages, heads, *page), pool.dtype)

    mixed = pl.pallas_call(
        functools.partial(_tpu_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(slots,),
            in_specs=[(own, of_sinks), jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pools)],
            out_specs=own,
            scratch_shapes=[jax.tree.map(two_blocks, pools), pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        # A slot needs nothing of another one: where two cores are one device, each has half of them.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="paged_attention_own",
    )(seen.reshape(-1), table.reshape(-1), (query, sinks), pools)
    return mixed.reshape(slots, heads, padded_dim)


# ---- GPU ---------------------------------------------------------------------------------------------------------


def _gpu_kernel(
    query_ref,  # [rows, H]
    pools,  # keys and values, each [pages, page_size, H], or Quantized; not yet read
    seen_ref,  # [2]: the first token that the slot sees, and the end of its tokens
    table_ref,  # [width]
    mixed_ref,  # [rows, H]
    max_score_ref,  # [rows]
    total_ref,  # [rows]
    *,
    scale: float,
):
    """Computes one split of a slot and kv head: softmax numerators times values, the maximum score, and their sum."""
    split, num_splits = pl.program_id(2), pl.num_programs(2)
    page_size, start, length = pools[0].shape[1], seen_ref[0], seen_ref[1]
    query = query_ref[...]

    def load(ref, page, offset):
        """Returns the numbers of these tokens, and their scales; 1 where the pages have none."""
        if isinstance(ref, Quantized):
            return ref.values[page, offset].astype(query.dtype), ref.scale[page, 0, offset]
        return ref[page, offset].astype(query.dtype), jnp.ones(page.shape, jnp.float32)

    def one_block(block, carry):
        mixed, max_score, total = carry
        token = block * GPU_BLOCK_TOKENS + jnp.arange(GPU_BLOCK_TOKENS)
        live = (token >= start) & (token < length)
        # Beyond the length the last live token is read again, so no other number needs to be finite.
        token = jnp.minimum(token, length - 1)
        page, offset = table_ref[token // page_size], token % page_size
        (key, key_scale), (value, value_scale) = (load(ref, page, offset) for ref in pools)
        # HIGHEST keeps float32 products whole (Triton's own choice is TF32); it means nothing for bfloat16.
        dot = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        scores = jnp.where(live[None], dot(query, key.T) * (scale * key_scale)[None], NO_SCORE)
        new_max = jnp.maximum(max_score, scores.max(axis=1))
        weights = jnp.exp(scores - new_max[:, None])  # 0 where dead: every block that is looked at has a live token
        shrink = jnp.exp(max_score - new_max)
        mixed = mixed * shrink[:, None] + dot((weights * value_scale[None]).astype(query.dtype), value)
        return mixed, new_max, total * shrink + weights.sum(axis=1)

    first_block, num_blocks = start // GPU_BLOCK_TOKENS, pl.cdiv(length, GPU_BLOCK_TOKENS)
    share = pl.cdiv(num_blocks - first_block, num_splits)
    first = first_block + split * share
    num_rows = query.shape[0]
    nothing = (
        jnp.zeros(query.shape, jnp.float32),
        jnp.full(num_rows, NO_SCORE, jnp.float32),
        jnp.zeros(num_rows, jnp.float32),
    )
    last = jnp.minimum(first + share, num_blocks)
    mixed_ref[...], max_score_ref[...], total_ref[...] = jax.lax.fori_loop(first, last, one_block, nothing)


def pallas_gpu(
    query: Float[Array | np.ndarray, "S N H"],
    key_pages: Pages | np.ndarray,
    value_pages: Pages | np.ndarray,
    lengths: Int[Array | np.ndarray, " S"],
    table: Int[Array | np.ndarray, "S width"],
    softmax: Softmax = FULL_SOFTMAX,
    *,
    mesh: Mesh,
    interpret: bool = False,
) -> Float[Array, "S N H"]:
    """Computes `paged_attention` as flash decoding (Dao et al. 2023) in Triton: online softmax in float32.

    With `softmax.start`, a token of its first page, a slot sees its tokens from there on.

    A program reads the live tokens of one slot and kv head; where slots and heads are few, several share them. The
    kernel shipped with JAX is deprecated since 0.11, and rounds unnormalised parts to the query's dtype.

    Raises:
      ValueError: the pool isn't `padded_head_dim` wide.
    """
    scale = 1 / math.sqrt(query.shape[-1])

    def attend(query, key_pages, value_pages, seen, table, sinks=None):
        (slots, heads, padded_dim), kv_heads = query.shape, key_pages.shape[0]
        group = heads // kv_heads
        rows = max(TRITON_TILE, 1 << (group - 1).bit_length())
        blocks = -(-table.shape[1] * key_pages.shape[2] // GPU_BLOCK_TOKENS)
        splits = max(1, min(blocks, GPU_PROGRAMS // (slots * kv_heads)))
        query = query.reshape(slots, kv_heads, group, padded_dim)
        query = jnp.pad(query, ((0, 0), (0, 0), (0, rows - group), (0, 0)))

        def part(*shape):
            """A block of one slot, kv head and split."""
            return pl.BlockSpec((None, None, None, *shape), lambda s, k, i: (s, k, i, *[0] * len(shape)))

        pool = jax.tree.map(lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda s, k, i: (k, 0, 0, 0)), key_pages)
        one_query = pl.BlockSpec((None, None, rows, padded_dim), lambda s, k, i: (s, k, 0, 0))
        one_seen = pl.BlockSpec((None, 2), lambda s, k, i: (s, 0))
        one_table = pl.BlockSpec((None, table.shape[1]), lambda s, k, i: (s, 0))
        shape = (slots, kv_heads, splits, rows)
        mixed, max_score, total = pl.pallas_call(
            functools.partial(_gpu_kernel, scale=scale),
            grid=(slots, kv_heads, splits),
            in_specs=[one_query, (pool, pool), one_seen, one_table],
            out_specs=[part(rows, padded_dim), part(rows), part(rows)],
            out_shape=[
                jax.ShapeDtypeStruct((*shape, padded_dim), jnp.float32),
                jax.ShapeDtypeStruct(shape, jnp.float32),
                jax.ShapeDtypeStruct(shape, jnp.float32),
            ],
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="paged_attention",
        )(query, (key_pages, value_pages), seen, table)
        largest = max_score.max(axis=2, keepdims=True)
        if sinks is not None:
            sinks = jnp.pad(sinks.reshape(1, kv_heads, 1, group), ((0, 0), (0, 0), (0, 0), (0, rows - group)))
            largest = jnp.maximum(largest, sinks)
        weight = jnp.exp(max_score - largest)
        total = jnp.sum(total * weight, axis=2)
        if sinks is not None:
            total = total + jnp.exp(sinks - largest)[:, :, 0]
        mixed = jnp.sum(mixed * weight[..., None], axis=2) / jnp.where(total > 0, total, 1)[..., None]
        return mixed[:, :, :group].reshape(slots, heads, padded_dim)

    seen = _seen(lengths, softmax.start)
    mixed = _over_heads(
        attend, query, key_pages, value_pages, seen, table, mesh=mesh, backend="pallas_gpu", sinks=softmax.sinks
    )
    return mixed.astype(query.dtype)
