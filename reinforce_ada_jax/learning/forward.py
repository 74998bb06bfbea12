"""The forward pass that learners and scores share: rows over a mesh, and the log-probabilities of target tokens."""

import functools
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.platform import Platform, activation_dtype
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.policy import blocked_attention, cudnn_attention, rounded
from reinforce_ada_jax.policy.transformer import Decoder, Execution, RowAttend, causal_attend


def choose_attention(platform: Platform, mesh: Mesh) -> RowAttend:
    """Returns the attention that a platform names."""
    if platform.attention == "jnp":
        return causal_attend
    if platform.attention == "blocks":
        is_cut = mesh.shape["context"] > 1
        return functools.partial(blocked_attention.attend_parts, mesh=mesh) if is_cut else blocked_attention.attend
    if platform.attention == "cudnn":
        return functools.partial(cudnn_attention.attend, mesh=mesh, max_segments=platform.max_segments)
    from reinforce_ada_jax.policy import splash_attention  # noqa: PLC0415  (importing Pallas takes a fifth of a second)

    return functools.partial(splash_attention.attend, mesh=mesh, interpret=platform.interpret)


def row_settings(platform: Platform, mesh: Mesh, dtype: DTypeLike) -> dict[str, Any]:
    """Returns the keyword arguments of `hidden_states` for rows, or parts of them, that are split over a mesh."""
    # The embedding is split over `fsdp` along D. Without a constraint the compiler splits activations the same way and
    # sums them between devices in every product (8 times the traffic of gathering weights), and every device computes
    # the attention of all rows.
    by_row = mesh_lib.sharding(mesh, ("parts", None, None))
    name = mesh.devices.flat[0].platform
    execution = Execution(activation_dtype(dtype, name), rounded.applies(dtype, name), platform.remat, by_row)
    return dict(attend=choose_attention(platform, mesh), execution=execution)


def head_config(platform: Platform, mesh: Mesh, *, tied: bool, temperature: float, frozen: bool) -> HeadConfig:
    """Returns the computation at the output head that a platform names; `frozen`: the head has no gradient."""
    return HeadConfig(
        temperature=temperature, tied=tied, mesh=mesh if mesh.size > 1 else None,
        backend=platform.head_backend, tile=platform.head_tile, frozen_head=frozen,
    )  # fmt: skip


def target_logprobs(
    head: HeadConfig, model: Decoder, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes the log-probabilities of targets, and the entropies where hidden states predict them."""
    return token_logprobs(head, hidden, model.embedding[...] if head.tied else model.head[...], targets)
