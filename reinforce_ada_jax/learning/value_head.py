"""Pass rates estimated from the policy's hidden states: the estimator "value" of the strategy `estimate`.

The other estimator, which needs no model, is in collection/estimators.py; only this one's `estimate` takes weights.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.learning.optimizer import with_standard_promotion
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Execution, Params, hidden_states, merge
from reinforce_ada_jax.types import Pool, Prompt

# Prompts in one forward pass.
PROMPTS_AT_A_TIME = 16
# Learning rate of Adam, and its steps after each iteration; measured on cipher (`prompt_features`).
LEARNING_RATE, STEPS = 3e-2, 8
# Estimates stay this far from 0 and 1, because allocations divide by p and by 1 - p.
MARGIN = 1e-3


class Head(NamedTuple):
    """The linear map from a prompt's features to the log odds of its pass rate."""

    weights: Float[Array | np.ndarray, " D"]
    bias: Float[Array | np.ndarray, ""] | np.float32


@functools.partial(jax.jit, static_argnames=("architecture", "dtype"))
def prompt_features(
    architecture: Architecture, params: Params, tokens: Int[Array, "B T"], length: Int[Array, " B"], *, dtype: DTypeLike
) -> Float[Array, "B D"]:
    """Computes h / D, h the policy's final hidden state at the last token of each right-padded prompt.

    Because h is divided by D, a step of Adam moves the log odds by at most rate * mean |h|, whatever the width. On
    cipher (32 prompts and 256 draws an iteration, 8 steps at rate 0.03; squared error of the estimates in the third
    epoch) h / D has 0.094 at D = 64, and with its features repeated to D = 1536; h / sqrt(D) 0.099 and 0.146; h itself
    0.176 and 0.287. The best constant has 0.105, the best linear head 0.076.

    Results of rows without a token are finite and have no meaning.
    """
    hidden = hidden_states(merge(architecture, params), tokens, execution=Execution(dtype))
    last = jnp.take_along_axis(hidden, jnp.maximum(length - 1, 0)[:, None, None], axis=1)[:, 0]
    return last.astype(jnp.float32) / architecture.hidden_size


def head_loss(
    head: Head, features: Float[Array, "P D"], correct: Float[Array, " P"], drawn: Float[Array, " P"]
) -> Float[Array, ""]:
    """Computes the mean over all draws of the cross-entropy between outcome and estimate.

    - sum_x [k_x log p_x + (N_x - k_x) log(1 - p_x)] / sum_x N_x,   p_x = sigmoid(w . h_x / D + b)

    with k_x = `correct` of N_x = `drawn` draws. A prompt's weight is its number of draws: that is the likelihood, whose
    maximum doesn't depend on the rule that ended the draws. (Equal weights learn cipher's pass rates as well: 0.0943
    and 0.0944.) Rows with 0 draws are padding.
    """
    log_odds = jnp.einsum("PD,D->P", features, head.weights) + head.bias
    # Both logarithms in terms of the log odds: softplus is finite where log(sigmoid) underflows.
    per_prompt = correct * jax.nn.softplus(-log_odds) + (drawn - correct) * jax.nn.softplus(log_odds)
    return per_prompt.sum() / jnp.maximum(drawn.sum(), 1.0)


@functools.partial(jax.jit, static_argnames=("learning_rate", "steps"))
def fit(
    head: Head,
    state: optax.OptState,
    features: Float[Array, "P D"],
    correct: Float[Array, " P"],
    drawn: Float[Array, " P"],
    *,
    learning_rate: float,
    steps: int,
) -> tuple[Head, optax.OptState, Float[Array, ""]]:
    """Takes `steps` steps of Adam on `head_loss`, each on all prompts; returns (head, state, loss before the first)."""

    def one(carry, _):
        head, state = carry
        loss, slope = jax.value_and_grad(head_loss)(head, features, correct, drawn)
        changes, state = with_standard_promotion(optax.adam(learning_rate)).update(slope, state)
        return (cast(Head, optax.apply_updates(head, changes)), state), loss

    (head, state), losses = jax.lax.scan(one, (head, state), length=steps)
    return head, state, losses[0]


class ValueHead:
    """A linear head with a sigmoid on the policy's hidden state at the last prompt token.

    It starts at 0, an estimate of 1/2 for every prompt; Adam fits it alone, not the policy, to each iteration's draws.

    Source: arXiv 2510.04996 (Ada-Est); the sizes are our own.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh,
        *,
        dtype: DTypeLike,
        max_prompt_tokens: int,
        learning_rate: float = LEARNING_RATE,
        steps: int = STEPS,
        rows: int = PROMPTS_AT_A_TIME,
    ):
        """Makes a head before its first fit; the head is float32, `dtype` is that of the policy's activations.

        Each `observe` takes `steps` steps of Adam. A pass has `rows` prompts, or the next multiple of data * fsdp.
        """
        self._max_prompt_tokens = max_prompt_tokens
        shards = mesh_lib.parts(mesh, "rows")
        self._rows = -(-rows // shards) * shards
        self._placed = mesh_lib.sharding(mesh, ("rows", None)), mesh_lib.sharding(mesh, ("rows",))
        self._whole = mesh_lib.sharding(mesh, ())
        self._program = functools.partial(prompt_features, architecture, dtype=dtype)
        self._fit = functools.partial(fit, learning_rate=learning_rate, steps=steps)
        self._head = Head(np.zeros(architecture.hidden_size, np.float32), np.float32(0))
        self._optimizer = jax.device_get(optax.adam(learning_rate).init(self._head))
        self._features: dict[str, Float[np.ndarray, " D"]] = {}  # of the prompts last estimated, by id

    def estimate(self, params: Params, prompts: Sequence[Prompt]) -> Float[np.ndarray, " P"]:
        """Returns estimated pass rates in [1e-3, 1 - 1e-3], float64; keeps the prompts' features for `observe`."""
        self._features = {}
        for start in range(0, len(prompts), self._rows):
            chunk = prompts[start : start + self._rows]
            tokens, length = np.zeros((self._rows, self._max_prompt_tokens), np.int32), np.zeros(self._rows, np.int32)
            for row, prompt in enumerate(chunk):
                length[row] = len(prompt.tokens)
                tokens[row, : length[row]] = prompt.tokens
            features = processes.fetch(self._program(params, *map(mesh_lib.place, (tokens, length), self._placed)))
            self._features |= {prompt.id: row for prompt, row in zip(chunk, features, strict=False)}
        features = np.array([self._features[prompt.id] for prompt in prompts], np.float64)
        weights = self._head.weights.astype(np.float64)
        log_odds = features.reshape(len(prompts), len(weights)) @ weights + self._head.bias
        return np.clip(np.exp(-np.logaddexp(0.0, -log_odds)), MARGIN, 1 - MARGIN)

    def observe(self, pools: Sequence[Pool]) -> dict[str, float]:
        """Fits the head to the pools, whose prompts are among those last estimated.

        Returns "estimator/loss" before the fit, or nothing where nothing was drawn.
        """
        if not any(pool.verdicts for pool in pools):
            return {}
        # Padding as that of the prompts: so another number of pools seldom needs another compilation.
        size = -(-len(pools) // self._rows) * self._rows
        features = np.zeros((size, len(self._head.weights)), np.float32)
        correct, drawn = np.zeros(size, np.float32), np.zeros(size, np.float32)
        for row, pool in enumerate(pools):
            features[row] = self._features[pool.prompt.id]
            correct[row], drawn[row] = pool.correct.sum(), len(pool.verdicts)
        # On all devices, as every program of a run: a program on the devices of one process alone may block a pod.
        inputs = self._head, self._optimizer, features, correct, drawn
        fitted = self._fit(*jax.tree.map(lambda x: mesh_lib.place(np.asarray(x), self._whole), inputs))
        self._head, self._optimizer, loss = jax.tree.map(processes.fetch, fitted)
        return {"estimator/loss": float(loss)}

    def to_json(self) -> dict[str, Any]:
        """Returns head and optimiser for a checkpoint; float32 numbers come back unchanged."""
        return {"arrays": [x.tolist() for x in jax.tree.leaves((self._head, self._optimizer))]}

    def load_json(self, saved: Mapping[str, Any]) -> None:
        own, structure = jax.tree.flatten((self._head, self._optimizer))
        arrays = [np.asarray(x, array.dtype)[()] for x, array in zip(saved["arrays"], own, strict=True)]
        self._head, self._optimizer = jax.tree.unflatten(structure, arrays)
