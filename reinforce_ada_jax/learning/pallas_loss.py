"""The sweeps of fused_loss.py as Pallas kernels for TPU: logits live in VMEM, a tile at a time.

Same meaning as `fused_loss.scan_statistics` and `scan_gradients`. Both work on one device, with its rows and its part
of the vocabulary; what neither knows is the mesh.

    statistics   grid (rows, words)   four running numbers a row stay in VMEM
    d_hidden     grid (rows, words)   its sum over words does
    d_head       grid (words, rows)   its sum over rows does

The two gradient kernels make the logits anew, each for itself: five products altogether where four could do, because
one kernel for both would read and write d_hidden or d_head in HBM at every tile.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# Of a core's VMEM, what a kernel may take; the compiler's own limit is 16 MiB for v5e, and tpu7x has 64 in all.
VMEM_BYTES = 56 * 2**20
# The maximum of no logits: finite, so that the difference of two of them is 0.
NO_LOGIT = -0.7 * float(jnp.finfo(jnp.float32).max)


def default_tile(columns: int, dtype: DTypeLike) -> tuple[int, int]:
    """(rows, words) of a tile for hidden states of so many columns.

    Blocks are as wide as these, and two of each are in VMEM: with 512 x 512, bfloat16 and 4,096 columns the kernel of
    d_hidden takes 40 MiB and the logits. Fewer rows mean more traffic: the head is read once for each block of them.
    """
    return (512, 512) if columns * jnp.dtype(dtype).itemsize <= 2 * 4096 else (256, 256)


def _dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """The product over these axes, in float32. HIGHEST keeps float32 factors whole; bfloat16 ones need one pass."""
    whole = left.dtype == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if whole else None,
        preferred_element_type=jnp.float32,
    )


def _on_words(
    words_ref, dtype: jnp.dtype, *, tile: jax.Array, num_words: int, words_axis: int, fold: Callable[..., None]
) -> None:
    """`fold(words, live)` on a tile of the head; `live` says how many of its words there are.

    The last tile may reach beyond the head, and anything stands there: nan times 0 would still be nan, so zeros are
    put in its place. That is a pass over the tile, which the others are spared.
    """
    size = words_ref.shape[words_axis]
    whole, rest = divmod(num_words, size)
    if not rest:
        fold(words_ref[...].astype(dtype), size)
        return

    @pl.when(tile < whole)
    def _():
        fold(words_ref[...].astype(dtype), size)

    @pl.when(tile == whole)
    def _():
        words = words_ref[...]
        beyond = jax.lax.broadcasted_iota(jnp.int32, words.shape, words_axis) >= rest
        fold(jnp.where(beyond, jnp.zeros_like(words), words).astype(dtype), rest)


def _statistics_kernel(
    hidden_ref, words_ref, target_ref, *refs, temperature: float, num_words: int, words_axis: int
) -> None:
    """One tile: the running maximum, sum, weighted sum and target logit of its rows, all [rows, 1]."""
    out_refs, running_refs = refs[:4], refs[4:]
    best_ref, total_ref, weighted_ref, own_ref = running_refs
    tile, size = pl.program_id(1), words_ref.shape[words_axis]

    @pl.when(tile == 0)
    def _():
        best_ref[...] = jnp.full_like(best_ref, NO_LOGIT)
        for ref in (total_ref, weighted_ref, own_ref):
            ref[...] = jnp.zeros_like(ref)

    def fold(words, live):
        logits = _dot(hidden_ref[...], words, 1, 1 - words_axis) / temperature
        column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        own_ref[...] += jnp.sum(jnp.where(column == target_ref[...] - tile * size, logits, 0.0), axis=1, keepdims=True)
        if live < size:
            logits = jnp.where(column < live, logits, NO_LOGIT)
        before = best_ref[...]
        best = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        below = logits - best
        weights = jnp.exp(below)
        products = weights * below if live == size else jnp.where(column < live, weights * below, 0.0)
        shrink = jnp.exp(before - best)
        weighted_ref[...] = (weighted_ref[...] + total_ref[...] * (before - best)) * shrink + jnp.sum(
            products, axis=1, keepdims=True
        )
        total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        best_ref[...] = best

    _on_words(words_ref, hidden_ref.dtype, tile=tile, num_words=num_words, words_axis=words_axis, fold=fold)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        for out_ref, running_ref in zip(out_refs, running_refs, strict=True):
            out_ref[...] = running_ref[...]


def _logit_slopes(hidden, words, live, start, row_refs, temperature, words_axis):
    """d loss / d (undivided logits) of a tile, in the products' dtype; 0 at words that don't exist."""
    target_ref, log_total_ref, entropy_ref, logprob_slope_ref, entropy_slope_ref = row_refs
    logprobs = _dot(hidden, words, 1, 1 - words_axis) / temperature - log_total_ref[...]
    column = jax.lax.broadcasted_iota(jnp.int32, logprobs.shape, 1)
    slopes = jnp.where(column == target_ref[...] - start, logprob_slope_ref[...], 0.0)
    slopes -= jnp.exp(logprobs) * (logprob_slope_ref[...] + entropy_slope_ref[...] * (logprobs + entropy_ref[...]))
    if live < words.shape[words_axis]:
        slopes = jnp.where(column < live, slopes, 0.0)
    return (slopes / temperature).astype(hidden.dtype)


def _d_hidden_kernel(hidden_ref, words_ref, *refs, temperature: float, num_words: int, words_axis: int) -> None:
    """One tile's part of the sum over words."""
    *row_refs, out_ref, sum_ref = refs
    tile, size = pl.program_id(1), words_ref.shape[words_axis]

    @pl.when(tile == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def fold(words, live):
        slopes = _logit_slopes(hidden_ref[...], words, live, tile * size, row_refs, temperature, words_axis)
        sum_ref[...] += _dot(slopes, words, 1, words_axis)

    # Words that don't exist are 0 here, and so are their slopes.
    _on_words(words_ref, hidden_ref.dtype, tile=tile, num_words=num_words, words_axis=words_axis, fold=fold)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...]


def _d_head_kernel(hidden_ref, words_ref, *refs, temperature: float, words_axis: int) -> None:
    """One tile's part of the sum over rows. Words that don't exist give rubbish, which isn't written."""
    *row_refs, out_ref, sum_ref = refs
    tile, size = pl.program_id(0), words_ref.shape[words_axis]

    @pl.when(pl.program_id(1) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    hidden = hidden_ref[...]
    words = words_ref[...].astype(hidden.dtype)
    slopes = _logit_slopes(hidden, words, size, tile * size, row_refs, temperature, words_axis)
    sum_ref[...] += _dot(slopes, hidden, 0, 0) if words_axis == 0 else _dot(hidden, slopes, 0, 0)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


class _Call:
    """What the three kernels have in common: padded rows, and the blocks of a tile."""

    def __init__(self, hidden, head, row_arrays, *, tied: bool, tile: tuple[int, int], interpret: bool):
        self.rows, self.words = tile
        self.num_rows, self.columns = hidden.shape
        self.words_axis = 0 if tied else 1
        self.num_words = head.shape[self.words_axis]
        padding = -self.num_rows % self.rows
        self.row_blocks, self.word_blocks = (self.num_rows + padding) // self.rows, pl.cdiv(self.num_words, self.words)
        # Rows that are added have zeros everywhere, slopes included.
        columns = [jnp.pad(x[:, None], ((0, padding), (0, 0))) for x in row_arrays]
        self.arguments = jnp.pad(hidden, ((0, padding), (0, 0))), head, *columns
        self.interpret = interpret

    def blocks(self, row: Callable[[int, int], int], word: Callable[[int, int], int]):
        """Specs of a block of hidden states, of the head and of a number a row, given where a program stands."""
        of_hidden = pl.BlockSpec((self.rows, self.columns), lambda *at: (row(*at), 0))
        if self.words_axis == 0:
            of_head = pl.BlockSpec((self.words, self.columns), lambda *at: (word(*at), 0))
        else:
            of_head = pl.BlockSpec((self.columns, self.words), lambda *at: (0, word(*at)))
        return of_hidden, of_head, pl.BlockSpec((self.rows, 1), lambda *at: (row(*at), 0))

    def run(self, kernel, name, grid, in_specs, out_specs, out_shape, scratch):
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            interpret=self.interpret,
            name=name,
        )(*self.arguments)


def statistics(
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " M"],
    *,
    temperature: float,
    tied: bool,
    tile: tuple[int, int],
    interpret: bool = False,
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """(max z, sum exp(z - max), sum exp(z - max) (z - max), z of the target or 0) of every row's logits z.

    Args:
      hidden: of M tokens; of any number, and so are words: blocks are filled up.
      head: the output head [D, V], or with `tied` the embedding [V, D]; cast to the dtype of `hidden` in VMEM.
      targets: counted from the first word of `head`; others may be anywhere.
      temperature: divides the logits.
      tied: which layout `head` has.
      tile: (rows, words) of a block.
      interpret: run without a TPU.
    """
    call = _Call(hidden, head, (targets,), tied=tied, tile=tile, interpret=interpret)
    of_hidden, of_head, of_row = call.blocks(lambda i, j: i, lambda i, j: j)
    kernel = functools.partial(
        _statistics_kernel, temperature=temperature, num_words=call.num_words, words_axis=call.words_axis
    )
    column = jax.ShapeDtypeStruct((call.row_blocks * call.rows, 1), jnp.float32)
    grid = call.row_blocks, call.word_blocks
    specs = [of_hidden, of_head, of_row]
    found = call.run(kernel, "head_statistics", grid, specs, [of_row] * 4, [column] * 4, [(call.rows, 1)] * 4)
    return tuple(x[: call.num_rows, 0] for x in found)


def gradients(
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " M"],
    log_total: Float[Array, " M"],
    entropy: Float[Array, " M"],
    logprob_slope: Float[Array, " M"],
    entropy_slope: Float[Array, " M"],
    *,
    temperature: float,
    tied: bool,
    tile: tuple[int, int],
    dtype: DTypeLike,
    interpret: bool = False,
    frozen_head: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "V D"] | Float[Array, "D V"] | None]:
    """(d_hidden in float32, d_head in `dtype`), both summed in float32.

    Args:
      hidden: as for `statistics`, like `head`, `targets`, `temperature`, `tied`, `tile` and `interpret`.
      log_total: log sum exp of the row's logits, over the whole vocabulary.
      entropy: of the row, over the whole vocabulary.
      logprob_slope: d loss / d logprob.
      entropy_slope: d loss / d entropy.
      dtype: of d_head.
      frozen_head: None in place of d_head.
    """
    row_arrays = targets, log_total, entropy, logprob_slope, entropy_slope
    call = _Call(hidden, head, row_arrays, tied=tied, tile=tile, interpret=interpret)
    settings = dict(temperature=temperature, words_axis=call.words_axis)

    of_hidden, of_head, of_row = call.blocks(lambda i, j: i, lambda i, j: j)
    d_hidden = call.run(
        functools.partial(_d_hidden_kernel, num_words=call.num_words, **settings),
        "head_d_hidden",
        (call.row_blocks, call.word_blocks),
        [of_hidden, of_head, *[of_row] * 5],
        of_hidden,
        jax.ShapeDtypeStruct((call.row_blocks * call.rows, call.columns), jnp.float32),
        [(call.rows, call.columns)],
    )
    if frozen_head:
        return d_hidden[: call.num_rows], None
    of_hidden, of_head, of_row = call.blocks(lambda j, i: i, lambda j, i: j)
    d_head = call.run(
        functools.partial(_d_head_kernel, **settings),
        "head_d_head",
        (call.word_blocks, call.row_blocks),
        [of_hidden, of_head, *[of_row] * 5],
        of_head,
        jax.ShapeDtypeStruct(head.shape, dtype),
        [(call.words, call.columns) if tied else (call.columns, call.words)],
    )
    return d_hidden[: call.num_rows], d_head
