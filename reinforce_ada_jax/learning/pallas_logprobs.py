"""The passes of `scan_logprobs.py` as Pallas kernels for TPU: logits live in VMEM, a tile at a time.

Same meaning as `scan_logprobs.statistics` and `scan_logprobs.gradients`, on one device, with its rows and its part of
the vocabulary.

    statistics   grid (rows, vocab)   four running numbers a row stay in VMEM
    d_hidden     grid (rows, vocab)   its sum over the vocabulary stays in VMEM
    d_head       grid (vocab, rows)   its sum over rows stays in VMEM

Each of the two gradient kernels computes the logits again: five products altogether where four could do, because one
kernel for both would read and write d_hidden or d_head in HBM at every tile.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.learning.scan_logprobs import NO_LOGIT, Cotangents, HeadConfig, Statistics, dot, tile_logits

# Largest share of a core's VMEM for a kernel; the compiler's own limit is 16 MiB for v5e, and tpu7x has 64 in all.
VMEM_BYTES = 56 * 2**20


def statistics(
    config: HeadConfig, hidden: Float[Array, "M D"], head: Float[Array, "_ _"], targets: Int[Array, " M"]
) -> Statistics:
    """Computes `scan_logprobs.statistics`. M and the vocabulary may have any size: blocks are filled up."""
    kernel = functools.partial(_statistics_kernel, config, head.shape[config.vocab_axis])
    rows = jax.ShapeDtypeStruct((hidden.shape[0] + -hidden.shape[0] % config.tile[0], 1), jnp.float32)
    found = _run(config, kernel, "head_statistics", hidden, head, (targets,), [("row", rows)] * 4)
    return Statistics(*(x[: hidden.shape[0], 0] for x in found))


def gradients(
    config: HeadConfig,
    hidden: Float[Array, "M D"],
    head: Float[Array, "_ _"],
    targets: Int[Array, " M"],
    cotangents: Cotangents,
    dtype: DTypeLike,
) -> tuple[Float[Array, "M D"], Float[Array, "_ _"] | None]:
    """Computes `scan_logprobs.gradients`: (d_hidden in float32, d_head in `dtype`), both summed in float32."""
    num_rows, hidden_size = hidden.shape
    inputs = hidden, head, (targets, *cotangents)
    padded = jax.ShapeDtypeStruct((num_rows + -num_rows % config.tile[0], hidden_size), jnp.float32)
    kernel = functools.partial(_d_hidden_kernel, config, head.shape[config.vocab_axis])
    (d_hidden,) = _run(config, kernel, "head_d_hidden", *inputs, [("hidden", padded)])
    if config.frozen_head:
        return d_hidden[:num_rows], None
    kernel, of_head = functools.partial(_d_head_kernel, config), jax.ShapeDtypeStruct(head.shape, dtype)
    (d_head,) = _run(config, kernel, "head_d_head", *inputs, [("head", of_head)], vocab_outside=True)
    return d_hidden[:num_rows], d_head


def _run(
    config: HeadConfig,
    kernel: Callable[..., None],
    name: str,
    hidden: Array,
    head: Array,
    row_arrays: tuple[Array, ...],
    outputs: list[tuple[str, jax.ShapeDtypeStruct]],
    *,
    vocab_outside: bool = False,
) -> Sequence[Array]:
    """Runs a kernel over all tiles; each output, with its kind of block, has a float32 block in VMEM to sum in."""
    rows, vocab = config.tile
    padding = -hidden.shape[0] % rows
    grid = (hidden.shape[0] + padding) // rows, pl.cdiv(head.shape[config.vocab_axis], vocab)
    if vocab_outside:
        grid = grid[::-1]

    width = hidden.shape[1]
    shapes = {"row": (rows, 1), "hidden": (rows, width), "head": (vocab, width) if config.tied else (width, vocab)}
    indices = {"row": lambda r, v: (r, 0), "hidden": lambda r, v: (r, 0)}
    indices["head"] = (lambda r, v: (v, 0)) if config.tied else (lambda r, v: (0, v))

    def block(kind: str) -> pl.BlockSpec:
        return pl.BlockSpec(shapes[kind], lambda *at: indices[kind](*(at[::-1] if vocab_outside else at)))

    # Padding rows have zeros everywhere, also as cotangents.
    padded = [jnp.pad(x, ((0, padding), (0, 0))) for x in (hidden, *(x[:, None] for x in row_arrays))]
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[block("hidden"), block("head"), *[block("row")] * len(row_arrays)],
        out_specs=[block(kind) for kind, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        scratch_shapes=[pltpu.VMEM(shapes[kind], jnp.float32) for kind, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=config.interpret,
        name=name,
    )(padded[0], head, *padded[1:])


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _on_part(config: HeadConfig, vocab_size: int, head_ref, dtype, tile, fold: Callable[[Array, int], None]) -> None:
    """Calls `fold(part, live)` with a tile of the head, of which `live` vocabulary entries exist.

    The last tile may reach beyond the head, where memory holds anything. What lies there is set to 0, because nan
    times 0 would still be nan. Only this tile needs the extra pass.
    """
    size = head_ref.shape[config.vocab_axis]
    whole, rest = divmod(vocab_size, size)
    if not rest:
        fold(head_ref[...].astype(dtype), size)
        return

    @pl.when(tile < whole)
    def _():
        fold(head_ref[...].astype(dtype), size)

    @pl.when(tile == whole)
    def _():
        part = head_ref[...]
        beyond = jax.lax.broadcasted_iota(jnp.int32, part.shape, config.vocab_axis) >= rest
        fold(jnp.where(beyond, jnp.zeros_like(part), part).astype(dtype), rest)


def _statistics_kernel(config: HeadConfig, vocab_size: int, hidden_ref, head_ref, target_ref, *refs) -> None:
    """Adds one tile to the running maximum, sum, weighted sum and target logit of its rows, all [rows, 1]."""
    out_refs, running_refs = refs[:4], refs[4:]
    max_ref, sum_ref, weighted_ref, target_logit_ref = running_refs
    tile, size = pl.program_id(1), head_ref.shape[config.vocab_axis]

    @pl.when(tile == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, NO_LOGIT)
        for ref in (sum_ref, weighted_ref, target_logit_ref):
            ref[...] = jnp.zeros_like(ref)

    def fold(part, live):
        logits = tile_logits(config, hidden_ref[...], part)
        column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        is_target = column == target_ref[...] - tile * size
        target_logit_ref[...] += jnp.sum(jnp.where(is_target, logits, 0.0), axis=1, keepdims=True)
        if live < size:
            logits = jnp.where(column < live, logits, NO_LOGIT)
        before = max_ref[...]
        max_logit = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        below = logits - max_logit
        weights = jnp.exp(below)
        products = weights * below if live == size else jnp.where(column < live, weights * below, 0.0)
        shrink = jnp.exp(before - max_logit)
        weighted_ref[...] = (weighted_ref[...] + sum_ref[...] * (before - max_logit)) * shrink + jnp.sum(
            products, axis=1, keepdims=True
        )
        sum_ref[...] = sum_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        max_ref[...] = max_logit

    _on_part(config, vocab_size, head_ref, hidden_ref.dtype, tile, fold)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        for out_ref, running_ref in zip(out_refs, running_refs, strict=True):
            out_ref[...] = running_ref[...]


def _d_logits(config: HeadConfig, hidden: Array, part: Array, live: int, start, row_refs) -> Array:
    """Returns d loss / d (undivided logits) of a tile, in the products' dtype; 0 at entries that don't exist."""
    target_ref, log_sum_exp_ref, entropy_ref, d_logprob_ref, d_entropy_ref = row_refs
    logprobs = tile_logits(config, hidden, part) - log_sum_exp_ref[...]
    column = jax.lax.broadcasted_iota(jnp.int32, logprobs.shape, 1)
    d_logits = jnp.where(column == target_ref[...] - start, d_logprob_ref[...], 0.0)
    d_logits -= jnp.exp(logprobs) * (d_logprob_ref[...] + d_entropy_ref[...] * (logprobs + entropy_ref[...]))
    if live < part.shape[config.vocab_axis]:
        d_logits = jnp.where(column < live, d_logits, 0.0)
    return (d_logits / config.temperature).astype(hidden.dtype)


def _d_hidden_kernel(config: HeadConfig, vocab_size: int, hidden_ref, head_ref, *refs) -> None:
    """Adds one tile's part to the sum over the vocabulary."""
    *row_refs, out_ref, sum_ref = refs
    tile, size = pl.program_id(1), head_ref.shape[config.vocab_axis]

    @pl.when(tile == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def fold(part, live):
        d_logits = _d_logits(config, hidden_ref[...], part, live, tile * size, row_refs)
        sum_ref[...] += dot(d_logits, part, 1, config.vocab_axis)

    # Entries that don't exist are 0 here, and so are their logits' gradients.
    _on_part(config, vocab_size, head_ref, hidden_ref.dtype, tile, fold)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...]


def _d_head_kernel(config: HeadConfig, hidden_ref, head_ref, *refs) -> None:
    """Adds one tile's part to the sum over rows. Results for entries that don't exist are not written."""
    *row_refs, out_ref, sum_ref = refs
    tile, size = pl.program_id(0), head_ref.shape[config.vocab_axis]

    @pl.when(pl.program_id(1) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    hidden = hidden_ref[...]
    part = head_ref[...].astype(hidden.dtype)
    d_logits = _d_logits(config, hidden, part, size, tile * size, row_refs)
    sum_ref[...] += dot(d_logits, hidden, 0, 0) if config.tied else dot(hidden, d_logits, 0, 0)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
