"""Implementations of the learner's programs for a platform: every setting with the value "auto" is resolved here."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from reinforce_ada_jax.config import Config, LearningConfig
from reinforce_ada_jax.learning import fused_logprobs

# Tokens of a micro-batch on CPUs: its activations stay in the caches, and its products are as fast as larger ones.
CPU_TOKENS = 2048


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


def micro_rows(name: str, config: Config, row_shards: int) -> int:
    """Returns the rows of a micro-batch: those of a minibatch of whole groups, divided.

    Args:
      name: as for `resolve`.
      config: with `learning.micro_batches` 0, the largest micro-batch of at most 2,048 tokens on CPUs that divides the
        minibatch, or that of one row for each device; elsewhere the minibatch.
      row_shards: devices that share the rows of a micro-batch.
    """
    rows = config.learning.prompts_per_update * config.collection.group_size
    if config.learning.micro_batches or name != "cpu":
        return rows // max(1, config.learning.micro_batches)
    row_tokens = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    valid = [size for size in range(row_shards, rows + 1, row_shards) if rows % size == 0]
    return max([size for size in valid if size * row_tokens <= CPU_TOKENS], default=valid[0])
