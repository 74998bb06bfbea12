"""Log-probabilities over the vocabulary, tile by tile: the records of a pass, and the passes for CPU and GPU.

A pass computes the logits of some rows and some of the vocabulary, adds them to running statistics and drops them. An
array [rows, vocab] never exists. The same passes for TPU are in `pallas_logprobs.py`; `fused_logprobs.py` makes one
differentiable function of them. None of the passes knows the mesh.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.policy import rounded

# 4 MiB of logits stay in a CPU's cache: products ran at 200 GFLOP/s on two cores; with tiles of 32 MiB at 100.
TILE = (1024, 1024)
# Start value of a maximum. It is finite, so that the difference of two start values is 0.
NO_LOGIT = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Everything about a computation at the output head that isn't an array."""

    temperature: float  # divides the logits, > 0
    tied: bool  # the head is an embedding [V, D], not [D, V]
    mesh: Mesh | None = None  # its axes split rows and vocabulary; None: one device
    backend: str = "scan"  # "scan" for CPU and GPU, or "pallas_tpu"
    tile: tuple[int, int] = TILE  # (rows, vocab) whose logits exist at a time
    interpret: bool = False  # run Pallas kernels without their device
    frozen_head: bool = False  # the head has no gradient, and none is computed: its cotangent is 0

    @property
    def vocab_axis(self) -> int:
        """Axis of the head that is the vocabulary."""
        return 0 if self.tied else 1


class Statistics(NamedTuple):
    """Statistics of the logits z of each row, over a part of the vocabulary."""

    max_logit: Float[Array, " M"]
    sum_exp: Float[Array, " M"]  # sum exp(z - max_logit)
    weighted: Float[Array, " M"]  # sum exp(z - max_logit) (z - max_logit)
    target_logit: Float[Array, " M"]  # 0 where the target isn't in this part


class Cotangents(NamedTuple):
    """Inputs of the backward pass, of each row."""

    log_sum_exp: Float[Array, " M"]  # of z, over the whole vocabulary
    entropy: Float[Array, " M"]
    d_logprob: Float[Array, " M"]  # d loss / d logprob
    d_entropy: Float[Array, " M"]  # d loss / d entropy


_slice = jax.lax.dynamic_slice_in_dim
_update = jax.lax.dynamic_update_slice_in_dim


def _tiles(length: int, size: int, body: Callable[[Any, int, Any], Any], carry: Any) -> Any:
    """Computes carry = body(start, size, carry) for consecutive tiles of `length`; the last one may be smaller."""
    whole, rest = divmod(length, size)
    if whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, carry: body(i * size, size, carry), carry)
    return body(whole * size, rest, carry) if rest else carry


def dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """Returns the product over these axes, in float32. HIGHEST keeps float32 factors whole; bfloat16 needs one pass."""
    whole = left.dtype == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if whole else None,
        preferred_element_type=jnp.float32,
    )


def tile_logits(config: HeadConfig, hidden: Float[Array, "m D"], head: Float[Array, "_ _"]) -> Float[Array, "m v"]:
    """Returns float32 logits over a part of the head, at the temperature; the product has the hidden states' dtype."""
    return dot(hidden, head, 1, 1 - config.vocab_axis) / config.temperature


def _of_columns(x: Array, y: Array) -> Array:
    """Returns x^T y in float32."""
    plain = functools.partial(dot, left_axis=0, right_axis=0)
    if x.dtype != jnp.bfloat16:
        return plain(x, y)
    return jax.lax.platform_dependent(x, y, cpu=rounded.of_columns, default=plain)


def _is_target(logits: Float[Array, "m v"], targets: Int[Array, " m"], start: int | Array) -> Array:
    """Returns True at each row's target, where it is in the part of the vocabulary that begins at `start`."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == (targets - start)[:, None]


def statistics(
    config: HeadConfig, hidden: Float[Array, "M D"], head: Float[Array, "_ _"], targets: Int[Array, " M"]
) -> Statistics:
    """Computes the statistics over this head, whole or a part; targets count from its first entry."""

    def add_tile(hidden, targets, start, size, sums: Statistics) -> Statistics:
        logits = tile_logits(config, hidden, _slice(head, start, size, config.vocab_axis).astype(hidden.dtype))
        max_logit = jnp.maximum(sums.max_logit, logits.max(axis=1))
        shrink, below = jnp.exp(sums.max_logit - max_logit), logits - max_logit[:, None]
        weights = jnp.exp(below)
        gap = sums.max_logit - max_logit
        return Statistics(
            max_logit=max_logit,
            sum_exp=sums.sum_exp * shrink + weights.sum(axis=1),
            weighted=(sums.weighted + sums.sum_exp * gap) * shrink + (weights * below).sum(axis=1),
            target_logit=sums.target_logit + jnp.where(_is_target(logits, targets, start), logits, 0.0).sum(axis=1),
        )

    def rows_tile(row, size, found):
        zeros = jnp.zeros(size, jnp.float32)
        of_rows = _tiles(
            head.shape[config.vocab_axis],
            config.tile[1],
            functools.partial(add_tile, _slice(hidden, row, size), _slice(targets, row, size)),
            Statistics(zeros + NO_LOGIT, zeros, zeros, zeros),
        )
        return jax.tree.map(lambda all_rows, some: _update(all_rows, some, row, 0), found, of_rows)

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    return _tiles(hidden.shape[0], config.tile[0], rows_tile, Statistics(zeros, zeros, zeros, zeros))


def gradients(
    config: HeadConfig,
    hidden: Float[Array, "M D"],
    head: Float[Array, "_ _"],
    targets: Int[Array, " M"],
    cotangents: Cotangents,
    dtype: DTypeLike,
) -> tuple[Float[Array, "M D"], Float[Array, "_ _"] | None]:
    """Computes (d_hidden in float32, d_head in `dtype`) over this head, whole or a part; a frozen head's is None.

    The outer loop is over the vocabulary, the inner one over rows. So a tile's part of d_head is summed in float32 and
    written once, only d_hidden is carried, and no second d_head exists.
    """
    vocab_axis = config.vocab_axis

    def vocab_tile(start, size, carry):
        d_hidden, d_head = carry
        part = _slice(head, start, size, vocab_axis).astype(hidden.dtype)

        def rows_tile(row, rows, carry):
            d_hidden, d_part = carry
            x, target, of_rows = jax.tree.map(lambda x: _slice(x, row, rows), (hidden, targets, cotangents))
            log_sum_exp, entropy, d_logprob, d_entropy = (x[:, None] for x in of_rows)
            logprobs = tile_logits(config, x, part) - log_sum_exp
            # d logprob = 1[target] - p, d entropy = -p (log p + entropy); and all logits were divided.
            d_logits = jnp.where(_is_target(logprobs, target, start), d_logprob, 0.0)
            d_logits -= jnp.exp(logprobs) * (d_logprob + d_entropy * (logprobs + entropy))
            d_logits = (d_logits / config.temperature).astype(x.dtype)
            d_x = dot(d_logits, part, 1, vocab_axis)
            d_hidden = _update(d_hidden, _slice(d_hidden, row, rows) + d_x, row, 0)
            if config.frozen_head:
                return d_hidden, None
            return d_hidden, d_part + (_of_columns(d_logits, x) if config.tied else _of_columns(x, d_logits))

        zeros = None if config.frozen_head else jnp.zeros(part.shape, jnp.float32)
        d_hidden, d_part = _tiles(hidden.shape[0], config.tile[0], rows_tile, (d_hidden, zeros))
        if config.frozen_head:
            return d_hidden, None
        return d_hidden, _update(d_head, d_part.astype(dtype), start, vocab_axis)

    zeros = jnp.zeros(hidden.shape, jnp.float32), None if config.frozen_head else jnp.zeros(head.shape, dtype)
    return _tiles(head.shape[vocab_axis], config.tile[1], vocab_tile, zeros)
