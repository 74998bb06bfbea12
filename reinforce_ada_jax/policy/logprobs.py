"""The distribution that tokens are sampled from and scored by."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def distribution(logits: Float[Array, "... V"], temperature: float | Float[Array, "... 1"]) -> Float[Array, "... V"]:
    """Log-probabilities of the untruncated distribution at `temperature`: what is sampled from and what is scored."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
