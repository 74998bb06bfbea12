"""Models of benchmarks: random ones of a given shape, and the check that two programs run the same model."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.policy.transformer import Params, distribution

# Limit of `rounding_units`. Correct programs have 0.4 to 1.6 (random models and SmolLM2-135M, against transformers); a
# program whose rotary base is off by a thousandth in one layer has 6 or more.
MOST_UNITS = 3.0


def shaped(shape: str) -> Architecture:
    """Returns the Qwen2 architecture "HIDDENxLAYERS", or a published one by its name.

    It has 8 heads, 4 key/value heads, an MLP 3 times as wide, and a vocabulary of 8192 tokens.

    Raises:
      ValueError: the shape has another form, or the heads don't divide it.
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


def logprobs_with_neighbours(
    architecture: Architecture, params: Params, rows: Sequence[Int[np.ndarray, " T"]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probabilities of all rows, one after the other, and those under `neighbours` of the weights."""

    def of(weights: Params) -> np.ndarray:
        return np.concatenate([logprobs(architecture, weights, row) for row in rows])

    return of(params), of(neighbours(params))


@jax.jit
def neighbours(params: Params) -> Params:
    """Returns float32 weights each of which is the next number above or below, at random."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    targets = [jnp.inf * jax.random.rademacher(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, map(jnp.nextafter, leaves, targets))


def rounding_units(
    ours: Float[np.ndarray, " T"], of_neighbours: Float[np.ndarray, " T"], theirs: Float[np.ndarray, " T"]
) -> float:
    """Returns the distance of two programs' log-probabilities in units of the effect of rounding on this model.

    A token's unit is the change of its log-probability when `neighbours` replace the weights. With them every sum also
    rounds in another way, so two correct programs differ by about as much. The unit includes the effects of depth,
    width and context: for SmolLM2 in contexts of random tokens units are 1e-6 to 1e-4. As one change can be small by
    chance, the unit is no less than the median over the tokens, and no less than one step of float32 at the
    log-probability.

    Args:
      ours: log-probability of each token.
      of_neighbours: those of the same program under `neighbours` of the weights.
      theirs: those of the other program.

    Returns:
      Root mean square over the tokens. It is also large for a program that has only few wrong tokens.
    """
    changes = np.abs(of_neighbours - ours)
    steps = np.spacing(np.abs(theirs).astype(np.float32))
    units = np.sqrt(changes**2 + np.median(changes) ** 2 + steps**2)
    return float(np.sqrt(np.mean(((ours - theirs) / units) ** 2)))


def check_logprobs(
    architecture: Architecture,
    params: Params,
    rows: Sequence[Int[np.ndarray, " T"]],
    theirs: Sequence[Sequence[float] | np.ndarray],
    source: str,
) -> float:
    """Returns `rounding_units` of the log-probabilities of `source`, so that only speeds of one model are compared.

    Args:
      architecture: of the model.
      params: its weights, in float32.
      rows: of tokens.
      theirs: log-probability of each token of a row after the first.
      source: of these, for the error.

    Raises:
      ValueError: the result is above `MOST_UNITS`, or a token is beyond the vocabulary.
    """
    largest = max(int(row.max()) for row in rows)
    if largest >= architecture.vocab_size:
        raise ValueError(f"{source} has token {largest}, the model only {architecture.vocab_size} tokens.")
    gap = rounding_units(*logprobs_with_neighbours(architecture, params, rows), np.concatenate(theirs))
    check_gap("the model's log-probabilities, in units of rounding,", gap, MOST_UNITS, source)
    return gap


def check_gap(what: str, gap: float, limit: float, source: str) -> None:
    """Checks that two programs compute the same.

    Raises:
      ValueError: `gap` is above `limit`, or NaN.
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
