"""Models of benchmarks: random ones of a given shape, and the check that two programs run the same model."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.policy.transformer import Params, distribution

LOGPROB_TOLERANCE = 1e-4


def shaped(shape: str) -> Architecture:
    """Returns the Qwen2 architecture "HIDDENxLAYERS", or a published one by its name.

    It has 8 heads, 4 key/value heads, an MLP 3 times as wide, and 8192 tokens.

    Raises:
      ValueError: the shape isn't written so, or the heads don't divide it.
    """
    if shape in PUBLISHED:
        return from_hf(PUBLISHED[shape])
    hidden, _, layers = shape.partition("x")
    if not (hidden.isdecimal() and layers.isdecimal() and int(hidden) % 16 == 0 and int(layers) > 0):
        raise ValueError(f"--shape={shape} must be HIDDENxLAYERS such as 512x8, HIDDEN a multiple of 16.")
    return from_hf(dict(
        model_type="qwen2", vocab_size=8192, hidden_size=int(hidden), intermediate_size=3 * int(hidden),
        num_hidden_layers=int(layers), num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
        max_position_embeddings=1024, rope_theta=1e6,
    ))  # fmt: skip


def smallest() -> Architecture:
    """Returns a model that costs next to nothing, for benchmarks of the scheduling."""
    return from_hf(dict(
        model_type="qwen2", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    ))  # fmt: skip


def logprobs(architecture: Architecture, params: Params, tokens: Int[np.ndarray, " T"]) -> Float[np.ndarray, " T-1"]:
    """Returns the log-probability of each token after the first, by the plain float32 forward pass."""
    table = distribution(transformer.logits(architecture, params, jnp.asarray(tokens[None])), 1.0)[0]
    return np.asarray(jnp.take_along_axis(table[:-1], jnp.asarray(tokens[1:, None]), axis=1))[:, 0]


def check_logprobs(
    architecture: Architecture, params: Params, tokens: np.ndarray, expected: np.ndarray, source: str
) -> float:
    """Returns the largest difference from the log-probabilities of `source`: only one model's speeds are compared.

    Raises:
      ValueError: it is above 1e-4, or a token is beyond the vocabulary.
    """
    if tokens.max() >= architecture.vocab_size:
        raise ValueError(f"{source} has token {tokens.max()}, the model only {architecture.vocab_size} tokens.")
    gap = float(np.abs(logprobs(architecture, params, tokens) - expected).max())
    check_gap("the model's log-probabilities", gap, LOGPROB_TOLERANCE, source)
    return gap


def check_gap(what: str, gap: float, limit: float, source: str) -> None:
    """Checks that two programs compute the same.

    Raises:
      ValueError: `gap` is above `limit`, or no number.
    """
    if not gap <= limit:
        raise ValueError(
            f"{what} and those of {source} differ by up to {gap:.2g}, the limit is {limit:g}: it is another model or "
            "update, and its speed says nothing. Both must compute the same from the folder --model."
        )


def describe(architecture: Architecture) -> dict[str, Any]:
    """Returns the sizes that a report names."""
    names = ("family", "vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(architecture, name) for name in (*names, "num_parameters")}
