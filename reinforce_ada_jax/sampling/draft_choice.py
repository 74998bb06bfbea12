"""The choice of drafts: how many guesses a decode step verifies, and whether an engine guesses at all.

One more row makes a step longer, and a right guess gives one more token. A step verifies the number of guesses that
gives the most tokens per time. The chance that a guess is right is counted for each prompt. The time comes from a
formula and not from measurements, so equal runs choose equally.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Bool, Int

from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling.pages import ArrayLike
from reinforce_ada_jax.sampling.state import EngineOptions, Slots, kv_token_bytes

# A chance of 1. Chances are integers, so that numpy and XLA add them alike.
CERTAIN = 1024
# Counted guesses of a prompt at which all are halved, so that recent ones count more.
RECENT = 64
# Rows that take as long to multiply as the weights take to read. CPU: measured on one core, in float32
# (docs/performance.md). The others follow from published FLOP/s and bandwidth in bfloat16 (TPU v5e, H100).
BALANCED_ROWS = {"cpu": 8, "tpu": 240, "gpu": 290}
# Guesses for a slot where `sampling.drafts` is not set and drafts pay.
DRAFTS = 3
# Smaller weights stay in a CPU's caches, and each row then costs the same.
LEAST_WEIGHT_BYTES = 2**25

# One for each guess of each slot.
Flags = Bool[ArrayLike, "S drafts"]
Numbers = Int[ArrayLike, "S drafts"]


def with_drafts(options: EngineOptions, architecture: Architecture, drafts: int | None, platform: str) -> EngineOptions:
    """Returns the options of an engine that guesses at most `drafts` tokens for a slot; None: where that pays.

    It pays on CPUs where the weights don't fit into the caches and there are few slots. With many slots, rows are idle
    only at the end, and the window computes few rows there without drafts. On accelerators it was not measured.
    """
    itemsize = 1 if options.weight_dtype == "int8" else jnp.dtype(options.dtype).itemsize
    weight_bytes, balanced_rows = architecture.num_parameters * itemsize, BALANCED_ROWS.get(platform, 1)
    if drafts is None:
        pays = platform == "cpu" and weight_bytes >= LEAST_WEIGHT_BYTES and options.slots < balanced_rows
        drafts = DRAFTS if pays else 0
    if not drafts:
        return options
    token_bytes = kv_token_bytes(architecture, options.dtype, options.attention, options.kv_dtype)
    return dataclasses.replace(
        options, drafts=drafts, draft_rows=balanced_rows, row_time=1 / balanced_rows,
        token_time=token_bytes / weight_bytes,
    )  # fmt: skip


def step_sizes(options: EngineOptions) -> tuple[int, ...]:
    """Returns the numbers of rows for which a window contains the model, ascending."""
    most = min(options.slots * (options.drafts + 1), options.draft_rows)
    return tuple(sorted({*options.widths, max(options.slots, most)}))


def recent(counts: Int[ArrayLike, "R 2"]) -> Int[ArrayLike, "R 2"]:
    """Returns the counts of guesses, halved where there are many."""
    return counts >> (counts[:, :1] >= RECENT).astype(counts.dtype)


def chances(counts: Int[ArrayLike, "S 2"], num_drafts: int) -> Numbers:
    """Returns the chances, of `CERTAIN`, that a slot's first guess is right, its first two are, and so on.

    `counts` are the recent guesses for the slot's prompt, and the right ones of them. Guesses are counted whether they
    are verified or not, so none is verified only to learn. Without counts the first chance is 1/4.
    """
    first = (counts[:, 1] + 1) * CERTAIN // (counts[:, 0] + 4)
    each = [first]
    for _ in range(num_drafts - 1):
        each.append(each[-1] * first // CERTAIN)
    return jnp.stack(each, axis=1)


def choose(
    fits: Flags, chance: Numbers, slots: Slots, options: EngineOptions, sizes: Sequence[int]
) -> tuple[Flags, Int[ArrayLike, ""]]:
    """Chooses the guesses with which a step makes the most tokens per time; returns them and the step's rows.

    The unit of time is one reading of the weights. A step takes 1, plus `row_time` for each of its rows, used or not,
    plus `token_time` for each cached token that it reads. So a guess in an idle row, which costs nothing, is verified.

    Guesses that fit are the first ones of each slot. `slots` are those before the step, whose rows are one of `sizes`.
    """

    def real(x):
        return jnp.asarray(x, jnp.float32)

    # The most probable first; of equal ones those that come first in their slots.
    value = jnp.where(fits, chance, 0).T.reshape(-1)
    order = jnp.argsort(-value, stable=True)
    rank = jnp.argsort(order, stable=True).reshape(fits.shape[::-1]).T
    num_active, allowed = jnp.sum(slots.active, dtype=jnp.int32), jnp.asarray(sizes, jnp.int32)
    rows = num_active + jnp.arange(1 + value.shape[0], dtype=jnp.int32)
    tokens = CERTAIN * num_active + jnp.pad(jnp.cumsum(value[order], dtype=jnp.int32), (1, 0))
    index = jnp.minimum(jnp.sum(allowed[None] < rows[:, None], axis=1), len(sizes) - 1)
    cached = jnp.sum(jnp.where(slots.active, slots.position + 1, 0), dtype=jnp.int32)
    cached = real(cached) / real(jnp.maximum(num_active, 1))
    time = 1 + real(options.row_time) * real(allowed[index]) + real(options.token_time) * cached * real(rows)
    best = jnp.argmax(jnp.where(rows <= sizes[-1], real(tokens) / time, real(0)))
    return fits & (rank < best), jnp.asarray(allowed[index[best]])
