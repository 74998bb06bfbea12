"""From logits to a token and its log-probability, with randomness that has an address.

The randomness of a token is a function of (run seed, stream, prompt id, draw index, token position) and of nothing
else: not the slot, the number of slots, the window, or who finished first.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from reinforce_ada_jax.policy.logprobs import distribution

ADDRESS_WORDS = 4


def stream(iteration: int, evaluation: bool = False) -> int:
    """The first word of an address: training and evaluation of one iteration never share a draw."""
    return 2 * iteration + evaluation


def address(stream_word: int, prompt_id: str, draw: int) -> np.ndarray:
    """uint32[4]: where the randomness of one response lives, under the run's seed."""
    digest = hashlib.blake2b(prompt_id.encode(), digest_size=8).digest()
    high, low = np.frombuffer(digest, "<u4")
    return np.array([stream_word, high, low, draw], np.uint32)


def draw_keys(seed: Int[Array, ""], addresses: UInt32[Array, "S 4"]) -> UInt32[Array, "S 2"]:
    """The key data of each response: the run's seed with the address folded in word by word."""

    fold = jax.vmap(lambda key, word: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), word)))
    first = jnp.broadcast_to(jax.random.key_data(jax.random.key(seed)), (addresses.shape[0], 2))
    # A scan over the words, for the compiler's sake: it meets the hash once in place of four times.
    return jax.lax.scan(lambda keys, words: (fold(keys, words), None), first, addresses.T)[0]


def perturbed_scores(
    logprobs: Float[Array, "S V"], keys: UInt32[Array, "S 2"], positions: Int[Array, " S"]
) -> Float[Array, "S V"]:
    """log pi + Gumbel noise of this draw and position; the argmax is a sample of pi."""

    def noise(key_data, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), position)
        return jax.random.gumbel(key, logprobs.shape[-1:], jnp.float32)

    return logprobs + jax.vmap(noise)(keys, positions)


def sample(
    logits: Float[Array, "S V"],
    keys: UInt32[Array, "S 2"],
    positions: Int[Array, " S"],
    temperature: Float[Array, ""],
    *,
    greedy: bool,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """One token per slot, and its log-probability under the untruncated distribution at `temperature`.

    Args:
      logits: of the next token.
      keys: from `draw_keys`.
      positions: index of the new token within its response, from 0.
      temperature: > 0.
      greedy: take the most probable token in place of a sample.
    """
    logprobs = distribution(logits, temperature)
    scores = logprobs if greedy else perturbed_scores(logprobs, keys, positions)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
