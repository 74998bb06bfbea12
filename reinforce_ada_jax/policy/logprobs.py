"""From hidden states to log-probabilities and entropies of tokens, without ever holding [B, T, V]."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.policy.transformer import Decoder, head_logits


def distribution(logits: Float[Array, "... V"], temperature: float) -> Float[Array, "... V"]:
    """Log-probabilities of the untruncated distribution at `temperature`: what is sampled from and what is scored."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)


def token_logprobs(
    model: Decoder, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"], *, temperature: float, chunk: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log pi(target | hidden) and the entropy of pi, at the sampling temperature.

    Works through `chunk` positions of every row at a time, and recomputes a chunk's logits in the backward pass, so
    at most [B, chunk, V] logits exist at any time.

    Args:
      model: from `transformer.merge`.
      hidden: states that predict `targets` (those of the token before each target).
      targets: ids in [0, V).
      temperature: > 0.
      chunk: >= 1.
    """
    length = hidden.shape[1]
    chunk = min(chunk, length)
    padding = -length % chunk

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(inputs):
        hidden, targets = inputs
        logprobs = distribution(head_logits(model, hidden), temperature)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], entropy

    def chunked(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    outputs = jax.lax.map(one_chunk, (chunked(hidden), chunked(targets)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(targets.shape[0], -1)[:, :length] for x in outputs)
