"""From logits to a token and its log-probability, with randomness that has an address.

The randomness of a token is a function of (run seed, stream, prompt id, draw index, token position) and of nothing
else: not the slot, the number of slots, the window, or who finished first.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from reinforce_ada_jax.policy.transformer import distribution
from reinforce_ada_jax.sampling import blocks as blocks_lib
from reinforce_ada_jax.sampling.blocks import Blocks, DrawnTokens, Keys, Logprobs, Places, first_largest, gumbel
from reinforce_ada_jax.sampling.state import Sampling

# Rows whose noise is computed at a time: on CPUs they stay in a core's own cache.
ROWS = 8


def stream(iteration: int, evaluation: bool = False, benchmark: str = "") -> int:
    """Returns the first word of an address; training, evaluation and each named benchmark share no draw."""
    offset = int.from_bytes(hashlib.blake2b(benchmark.encode(), digest_size=4).digest()) if benchmark else 0
    return (2 * (iteration + offset) + evaluation) % 2**32


def address(stream_word: int, prompt_id: str, draw: int) -> np.ndarray:
    """Returns uint32[4], the address of a response: with the run's seed it decides all its randomness."""
    digest = hashlib.blake2b(prompt_id.encode(), digest_size=8).digest()
    high, low = np.frombuffer(digest, "<u4")
    return np.array([stream_word, high, low, draw], np.uint32)


def draw_keys(seed: Int[Array, ""] | int, addresses: UInt32[Array | np.ndarray, "S 4"]) -> UInt32[Array, "S 2"]:
    """Returns the key data of each response: the run's seed with the address folded in word by word."""

    fold = jax.vmap(lambda key, word: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), word)))
    first = jnp.broadcast_to(jax.random.key_data(jax.random.key(seed)), (addresses.shape[0], 2))
    # A scan over the words, so that the hash is compiled once instead of four times.
    return jax.lax.scan(lambda keys, words: (fold(keys, words), None), first, addresses.T)[0]


def perturbed_scores(logprobs: Logprobs, keys: Keys, positions: Places) -> Float[Array, "S V"]:
    """Returns log pi + Gumbel noise of this draw and position; the argmax is a sample of pi."""
    return logprobs + gumbel(keys, positions, logprobs.shape[1])


def truncated(logprobs: Logprobs, top_k: Int[Array, " S"], top_p: Float[Array, " S"]) -> Float[Array, "S V"]:
    """Sets to -inf all but the `top_k` most probable tokens, and of these all but the smallest set that holds `top_p`.

    The order is that of `transformers`: temperature, then k, then p of what k left. The most probable token always
    stays. Ties with the k-th token stay, too. k = 0 and p = 1 leave everything.
    """
    vocabulary = logprobs.shape[-1]
    rank = jnp.arange(vocabulary)[None]
    descending = jnp.flip(jnp.sort(logprobs, axis=-1), axis=-1)
    within_k = rank < jnp.where(top_k > 0, top_k, vocabulary)[:, None]
    probs = jax.nn.softmax(jnp.where(within_k, descending, -jnp.inf), axis=-1)
    # A token stays while those before it hold less than p; rounding must not cut p = 1.
    within_p = (jnp.cumsum(probs, axis=-1) - probs < top_p[:, None]) | (top_p >= 1.0)[:, None]
    last = jnp.sum(within_k & within_p, axis=-1, keepdims=True) - 1
    threshold = jnp.take_along_axis(descending, jnp.maximum(last, 0), axis=-1)
    return jnp.where(logprobs >= threshold, logprobs, -jnp.inf)


def next_logprobs(logits: Float[Array, "S V"], temperature: Float[Array, " S"]) -> Float[Array, "S V"]:
    """Returns the untruncated log-probabilities of the next token at each slot's temperature; 0 counts as 1."""
    return distribution(logits, jnp.where(temperature == 0, 1.0, temperature)[:, None])


def sample(
    logprobs: Logprobs,
    keys: Keys,
    positions: Places,
    sampling: Sampling,
    count: Int[Array, ""] | int | None = None,
    at_a_time: int = ROWS,
    mesh: Mesh | None = None,
    blocks: Blocks | None = None,
) -> DrawnTokens:
    """Samples one token for each of the first `count` slots; also returns its untruncated log-probability.

    Log-probabilities are those of `next_logprobs`. Temperature 0 takes the most probable token. A loop takes
    `at_a_time` slots and ends after the first `count` (None: all); results of other slots may be anything. With `mesh`
    the vocabulary is split over `tensor`. With `blocks`, by default those of a large vocabulary, it is sampled in two
    levels (blocks.py).
    """
    num_slots, vocabulary = logprobs.shape
    arguments = logprobs, keys, positions, sampling
    rows = min(at_a_time, num_slots)
    if blocks is None and vocabulary > blocks_lib.LARGEST_IN_ONE_LEVEL:
        blocks = blocks_lib.split(vocabulary)
    sample_rows = _sample_rows
    if blocks is not None:
        sample_rows = functools.partial(_sample_in_two_levels, at_a_time=at_a_time, mesh=mesh, blocks=blocks)
    if blocks is not None and rows == num_slots:
        # Without a loop: XLA for TPUs would move single slices out of its body, which is the same in each iteration.
        sampled = sample_rows(*arguments)
        wanted = jnp.arange(num_slots) < (num_slots if count is None else count)
        return jax.tree.map(lambda x: jnp.where(wanted, x, 0), sampled)

    def some_rows(index, sampled):
        start = jnp.minimum(index * rows, num_slots - rows)
        chosen = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, rows), arguments)
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, start, axis=0),
            sampled, sample_rows(*chosen),
        )  # fmt: skip

    iterations = -(-(num_slots if count is None else count) // rows)
    return jax.lax.fori_loop(
        0, iterations, some_rows, (jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, jnp.float32))
    )


def _is_cut(sampling: Sampling) -> Bool[Array, " S"]:
    return (sampling.top_k > 0) | (sampling.top_p < 1)


def _sample_rows(logprobs: Logprobs, keys: Keys, positions: Places, sampling: Sampling) -> DrawnTokens:
    # Sorting a vocabulary is expensive; training never does.
    allowed = jax.lax.cond(
        jnp.any(_is_cut(sampling)), lambda: truncated(logprobs, sampling.top_k, sampling.top_p), lambda: logprobs
    )
    noisy = perturbed_scores(allowed, keys, positions)
    scores = jnp.where((sampling.temperature == 0)[:, None], logprobs, noisy)
    tokens = first_largest(scores)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def _sample_in_two_levels(
    logprobs: Logprobs,
    keys: Keys,
    positions: Places,
    sampling: Sampling,
    at_a_time: int,
    mesh: Mesh | None,
    blocks: Blocks,
) -> DrawnTokens:
    """Samples in two levels where nothing is cut and the temperature is not 0, and else in one."""
    # The number of rows is fixed, and nothing outside is fused: rounding must not depend on the number of slots.
    more = max(0, at_a_time - len(positions))
    padded = [jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)) for x in (logprobs, keys, positions)]
    sampled = blocks_lib.sample(*jax.lax.optimization_barrier(padded), blocks=blocks, mesh=mesh)
    sampled = jax.tree.map(lambda x: x[: len(positions)], jax.lax.optimization_barrier(sampled))
    cut, greedy = _is_cut(sampling), sampling.temperature == 0

    def draw_of_cut():
        allowed = truncated(logprobs, sampling.top_k, sampling.top_p)
        return first_largest(perturbed_scores(allowed, keys, positions))

    def some_in_one_level():
        best = first_largest(logprobs)
        drawn = jax.lax.cond(jnp.any(cut & ~greedy), draw_of_cut, lambda: best)
        tokens = jnp.where(greedy, best, jnp.where(cut, drawn, sampled[0]))
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]

    return jax.lax.cond(jnp.any(cut | greedy), some_in_one_level, lambda: sampled)
