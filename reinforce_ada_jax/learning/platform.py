"""Implementations of the learner's programs for a platform: every setting with the value "auto" is resolved here."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.learning import fused_logprobs


@dataclasses.dataclass(frozen=True)
class Platform:
    """Implementations of the learner's programs.

    Attributes:
      head_backend: passes over the vocabulary, a name of `fused_logprobs.BACKENDS`.
      head_tile: (rows, vocab) whose logits exist at a time.
      attention: "jnp", "blocks" (`policy.blocked_attention`) or "splash".
      remat: what the backward pass computes again, a name of `transformer.REMAT`.
      first_moment_dtype: of the optimiser; None: that of the weights.
      interpret: run TPU kernels without a TPU.
    """

    head_backend: str
    head_tile: tuple[int, int]
    attention: str
    remat: str
    first_moment_dtype: str | None
    interpret: bool


def resolve(name: str, learning: LearningConfig, *, hidden_size: int, dtype: DTypeLike) -> Platform:
    """Chooses implementations for the platform `name` ("cpu", "gpu", "tpu"), as far as the settings leave it open.

    Args:
      name: `platform` of the mesh's devices.
      learning: the configuration's section.
      hidden_size: of the policy.
      dtype: of its activations.
    """
    on_tpu, on_cpu = name == "tpu", name == "cpu"
    head_backend = "pallas_tpu" if on_tpu else "scan"

    def chosen(value: str, auto: str) -> str:
        return auto if value == "auto" else value

    first_moment_dtype = learning.first_moment_dtype
    return Platform(
        head_backend=head_backend,
        head_tile=fused_logprobs.default_tile(head_backend, hidden_size, jnp.dtype(dtype)),
        attention=chosen(learning.attention, "splash" if on_tpu else "blocks" if on_cpu else "jnp"),
        remat=chosen(learning.remat, "dots" if on_cpu else "full"),
        first_moment_dtype=None if first_moment_dtype == "auto" else first_moment_dtype,
        interpret=not on_tpu,
    )
