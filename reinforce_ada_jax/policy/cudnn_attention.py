"""Causal attention over whole rows with cuDNN's kernels for NVIDIA GPUs: no [T, T] scores exist in memory.

`attend` has the meaning of `transformer.causal_attend`, forwards and backwards, and two more arguments.

Rows of one sequence go through JAX's public function. Packed rows go through the internal function below it, which
takes the offsets and lengths of sequences. The public function would need a mask, which is a bias of [T, T] for each
row: cuDNN reads it for every head, and computes its gradient. The padding of a row is one more sequence: every position
has a defined result and a defined gradient.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # sequences in a row have no public function
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib

# Requirements of JAX and cuDNN, from `check_is_flash_attention` in the module `cudnn` that is imported above.
AMPERE, HOPPER = (8, 0), (9, 0)
MOST_HEAD_DIM = {AMPERE: 128, HOPPER: 256}


def version_of(capability: str) -> tuple[int, int]:
    """Returns a compute capability as numbers, (9, 0) for "9.0"; (0, 0) of a device without one."""
    parts = capability.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else (0, 0)


def refusal(capability: str, dtype: DTypeLike, head_dim: int, *, packed: bool) -> str:
    """Returns why these kernels can't compute an attention; empty where they can.

    `capability` is the `compute_capability` of a GPU, "9.0" of an H100; any other text means a device without cuDNN.
    `packed`: rows have several sequences.
    """
    version = version_of(capability)
    if version == (0, 0):
        return "the device has no cuDNN"
    if version < AMPERE:
        return f"compute capability {capability} is below 8.0"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes no {jnp.dtype(dtype)}"
    most = MOST_HEAD_DIM[HOPPER if version >= HOPPER else AMPERE]
    if head_dim % 8 or head_dim > most:
        return f"head dimension {head_dim} is not a multiple of 8 up to {most}"
    if packed and version < HOPPER:
        return f"packed rows need compute capability 9.0, not {capability}"
    return ""


def sequences(segment_ids: Int[Array, "B T"], max_segments: int) -> tuple[Int[Array, "B M"], Int[Array, "B _"]]:
    """Returns lengths and first positions of the sequences of each row, padding included.

    Both are -1 where there is no sequence. There is one more position than lengths, as JAX expects it. Ids ascend in
    each row, from 0 to at most `max_segments`. The id of padding is `max_segments`.
    """
    is_own = segment_ids[:, :, None] == jnp.arange(max_segments + 1)[None, None]
    lengths = jnp.sum(is_own, axis=1, dtype=jnp.int32)
    first = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1) - lengths, -1)
    return jnp.where(lengths > 0, lengths, -1), jnp.pad(first, ((0, 0), (0, 1)), constant_values=-1)


def _local(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    max_segments: int,
) -> Float[Array, "B T N H"]:
    """Computes attention on one device, for its rows and heads."""
    if segment_ids is None:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    if query.size >= 2**31:
        raise ValueError(
            f"a micro-batch has {query.size:,} numbers of queries on a device; cuDNN's offsets end at 2,147,483,647: "
            "raise learning.micro_batches, or set learning.attention to 'blocks'."
        )
    lengths, offsets = sequences(segment_ids, max_segments)
    # JAX before 0.11.1 multiplies the offsets of keys by the number of query heads, so keys are repeated to that
    # number.
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    mixed = cudnn.dot_product_attention(
        query, key, value, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
        scale=query.shape[-1] ** -0.5, mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip
    return cast(Array, mixed)


def attend(query, key, value, layer, segment_ids=None, *, mesh: Mesh, max_segments: int):
    """Computes causal attention: a token sees itself and those before it, in its own segment if there are segments.

    Rows are split over `data` and `fsdp`, heads over `tensor`; nothing passes between devices. Segment ids ascend in
    each row, with at most `max_segments` sequences. Raises ValueError for packed rows with 2^31 numbers of queries or
    more on a device.
    """
    del layer  # no layer slides or has sinks: `platform.resolve` refuses such models
    heads, row = mesh_lib.spec(("rows", None, "heads", None)), mesh_lib.spec(("rows", None))
    local = mesh_lib.shard_map(
        functools.partial(_local, max_segments=max_segments),
        mesh,
        in_specs=(heads, heads, heads, None if segment_ids is None else row),
        out_specs=heads,
    )
    return local(query, key, value, segment_ids)
