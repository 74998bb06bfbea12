"""Log-probabilities of whole texts: of each token given those before it, and of the most probable tokens there.

One forward pass computes them from tokens alone, so they do not depend on how a text was sampled. The learner's own
passes are in `learner.py` (responses of a batch) and `adapter_learner.py` (targets of the caller's).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.learning.forward import row_settings
from reinforce_ada_jax.learning.micro_batches import padded
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params, head_logits, hidden_states, merge

MAX_TOP = 20
# Logits that exist at a time, of all devices: 64 MiB.
TILE_LOGITS = 2**24


class Scores(NamedTuple):
    """Log-probabilities at each token of a text; nan and -1 at the first one, which nothing predicts."""

    logprobs: Float[np.ndarray, " T"]  # of the token
    top_ids: Int[np.ndarray, "T K"]  # most probable tokens in its place, the first one most probable
    top_logprobs: Float[np.ndarray, "T K"]  # theirs; the same number as in `logprobs` where the token is among them


class Scorer:
    """Program that scores texts under weights of one architecture.

    Attributes:
      program: jitted (weights, tokens [B, T], temperatures [B]) -> (log-probabilities [B, T], ids and log-probabilities
        of the most probable tokens [B, T, K]). Place t has the results for token t + 1; the last place has no meaning.
      least_rows: number that divides B.
    """

    def __init__(self, architecture: Architecture, mesh: Mesh, dtype: DTypeLike):
        """Makes the program; nothing is compiled."""
        self.architecture, self.mesh = architecture, mesh
        self.least_rows = mesh_lib.parts(mesh, "rows")
        self._by_row = {rank: mesh_lib.sharding(mesh, ("rows", *[None] * (rank - 1))) for rank in (1, 2, 3)}
        platform = platform_lib.of_mesh(mesh, LearningConfig(responses_per_row=1), architecture, dtype)
        self._hidden_states = functools.partial(hidden_states, **row_settings(platform, mesh, dtype))
        self.program = jax.jit(self._scores, out_shardings=(self._by_row[2], self._by_row[3], self._by_row[3]))

    def abstract_rows(self, shape: tuple[int, int]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns the shapes of tokens and temperatures, to compile the program with."""
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._by_row[2])
        return tokens, jax.ShapeDtypeStruct(shape[:1], jnp.float32, sharding=self._by_row[1])

    def rows(
        self, texts: Sequence[Int[np.ndarray, " _"]], temperatures: Sequence[float], shape: tuple[int, int]
    ) -> tuple[Any, Any]:
        """Returns tokens and temperatures of padded rows, on the devices."""
        of_rows = np.ones(shape[0], np.float32)
        of_rows[: len(temperatures)] = temperatures
        tokens = padded(texts, shape).astype(np.int32)
        return mesh_lib.place(tokens, self._by_row[2]), mesh_lib.place(of_rows, self._by_row[1])

    def read(self, outputs: Any, lengths: Sequence[int]) -> list[Scores]:
        """Returns the scores of the texts in the first rows of the program's outputs."""
        logprobs, top_ids, top_logprobs = jax.device_get(outputs)
        return [
            Scores(*(_after_first(x[row, : length - 1]) for x in (logprobs, top_ids, top_logprobs)))
            for row, length in enumerate(lengths)
        ]

    def _scores(
        self, params: Params, tokens: Int[Array, "B T"], temperatures: Float[Array, " B"]
    ) -> tuple[Float[Array, "B T"], Int[Array, "B T K"], Float[Array, "B T K"]]:
        """Computes log softmax(z / temperature) at the next token and where it is largest, in tiles of positions."""
        model = merge(self.architecture, params)
        hidden = self._hidden_states(model, tokens)
        targets = jnp.roll(tokens, -1, axis=1)
        (rows, length), vocab_size = tokens.shape, self.architecture.vocab_size
        size = length  # a power of 2
        while size > 1 and rows * size * vocab_size > TILE_LOGITS:
            size //= 2

        def tile(start):
            logits = head_logits(model, jax.lax.dynamic_slice_in_dim(hidden, start, size, 1))
            target = jax.lax.dynamic_slice_in_dim(targets, start, size, 1)[..., None]
            top, top_ids = jax.lax.top_k(logits, min(MAX_TOP, vocab_size))
            # The compiler may compute a sum twice, in different orders. Here a token that is the target and among the
            # most probable has one number, because both are rows of one subtraction.
            chosen = jnp.concatenate([jnp.take_along_axis(logits, target, axis=2), top], axis=2)
            below = (logits - top[..., :1]) / temperatures[:, None, None]
            log_sum = jnp.log(jnp.exp(below).sum(axis=2, keepdims=True))
            logprobs = (chosen - top[..., :1]) / temperatures[:, None, None] - log_sum
            return logprobs[..., 0], top_ids, logprobs[..., 1:]

        tiles = jax.lax.map(tile, jnp.arange(0, length, size))
        return cast(Any, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:]), tiles))


def _after_first(values: np.ndarray) -> np.ndarray:
    """Returns values after an entry for the first token: nan, or -1."""
    nothing = np.nan if np.issubdtype(values.dtype, np.floating) else -1
    return np.concatenate([np.full((1, *values.shape[1:]), nothing, values.dtype), values])
