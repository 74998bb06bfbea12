"""Training of adapters for callers that give the inputs of the loss: forward, backward and Adam as separate programs.

The caller decides when gradients are summed and when the weights change, so that one base serves many adapters. Every
token of a row has a target of its own and may have a weight. `update.py` has the update of a run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.learning.forward import head_config, row_settings, target_logprobs
from reinforce_ada_jax.learning.micro_batches import micro_batches, padded
from reinforce_ada_jax.learning.optimizer import AdamParams, adamw
from reinforce_ada_jax.learning.token_losses import surrogates
from reinforce_ada_jax.learning.update import LearnerState, state_layout, take_step
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.transformer import Params, hidden_states, merge, nest


class LossRow(NamedTuple):
    """A sequence and what its loss needs; or B right-padded sequences, with factors of 0 in the padding."""

    tokens: Int[Array | np.ndarray, "*B T"]  # of the sequence
    targets: Int[Array | np.ndarray, "*B T"]  # token that each position predicts
    factors: Float[Array | np.ndarray, "*B T"]  # weights for `cross_entropy`, else advantages
    old_logprobs: Float[Array | np.ndarray, "*B T"]  # under the distribution that drew the targets


class Clip(NamedTuple):
    """Bounds of the ratio, for losses that have them: floats, or scalars inside a program; defaults are Tinker's."""

    low: Any = 0.8
    high: Any = 1.2


NO_STEP = AdamParams(0.0, 0.9, 0.95, 1e-8)


def _optimizer(adam: AdamParams) -> optax.GradientTransformation:
    return adamw(adam, adam.learning_rate, jnp.where(adam.clip_norm > 0, adam.clip_norm, jnp.inf))


def _step(state: LearnerState, gradients: Params, adam: AdamParams) -> tuple[LearnerState, Float[Array, ""]]:
    return take_step(_optimizer(adam), state, gradients), optax.tree.norm(gradients)


def _begin(params: Params) -> tuple[optax.OptState, Int[Array, ""]]:
    return _optimizer(NO_STEP).init(params), jnp.int32(0)


Terms = Float[Array | np.ndarray, "*B T"]


LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")


def token_losses(loss: str, logprobs: Terms, row: LossRow, clip: Clip) -> Terms:
    """Computes the loss of each token, with rho = exp(log p - log q) and the row's factors as A.

    cross_entropy         -A log p
    importance_sampling   -rho A
    ppo                   max(-rho A, -clip(rho) A)  (arXiv 1707.06347)
    cispo                 -clip(rho) A log p, with a constant ratio  (arXiv 2506.13585)
    """
    if loss == "cross_entropy":
        return -row.factors * logprobs
    # Where the factor is 0, the ratio is set to 1: old log-probabilities may be anything there.
    ratio = jnp.exp(jnp.where(row.factors == 0, 0.0, logprobs - row.old_logprobs))
    plain, clipped = surrogates(ratio, row.factors, clip.low, clip.high)
    if loss == "importance_sampling":
        return plain
    return jnp.maximum(plain, clipped) if loss == "ppo" else jax.lax.stop_gradient(clipped) * logprobs


class _Programs(NamedTuple):
    """Jitted functions over adapters of one size."""

    zeros: Any
    begin: Any
    forward: Any
    forward_backward: Any
    step: Any


class AdapterLearner:
    """The compiled programs of one base: `init`, `forward`, `forward_backward`, `step`."""

    def __init__(self, architecture: Architecture, base: Params, mesh: Mesh, dtype: DTypeLike):
        """Makes the programs over the weights `base`, which stay as they are; nothing is compiled."""
        self.architecture, self.base, self.mesh = architecture, base, mesh
        self.least_rows = mesh_lib.parts(mesh, "rows")
        platform = platform_lib.of_mesh(mesh, LearningConfig(responses_per_row=1), architecture, dtype)
        self._head = head_config(platform, mesh, tied=architecture.tied_embedding, temperature=1.0, frozen=True)
        self._hidden_states = functools.partial(hidden_states, **row_settings(platform, mesh, dtype))
        self._programs_of = functools.cache(self._make_programs)

    def init(self, chosen: Lora, seed: int) -> LearnerState:
        """Returns adapters that change nothing yet, before their first step."""
        return self.with_new_optimizer(lora.init(self.architecture, chosen, jax.random.key(seed), self.mesh), chosen)

    def with_new_optimizer(self, params: Params, chosen: Lora) -> LearnerState:
        """Returns the state of adapters before their first step."""
        optimizer, updates = self._programs_of(chosen).begin(params)
        return LearnerState(params=params, optimizer=optimizer, updates=updates)

    def shardings(self, chosen: Lora) -> LearnerState:
        """Returns the sharding of each part of a state, in the shape of the state."""
        params = lora.shardings(self.architecture, chosen, self.mesh)
        shapes = {name: shape for name, (shape, _) in lora.adapter_shapes(self.architecture, chosen).items()}
        abstract = nest({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})
        return state_layout(_optimizer(NO_STEP), abstract, params, self.mesh)

    def _make_programs(self, chosen: Lora) -> _Programs:
        state = self.shardings(chosen)
        by_row, whole = mesh_lib.sharding(self.mesh, ("rows", None)), mesh_lib.sharding(self.mesh, ())
        # Output layouts are fixed: adapters in another layout would compile everything again.
        return _Programs(
            zeros=jax.jit(functools.partial(jax.tree.map, jnp.zeros_like), out_shardings=state.params),
            begin=jax.jit(_begin, out_shardings=(state.optimizer, state.updates)),
            forward=jax.jit(functools.partial(self._logprobs, chosen), out_shardings=by_row),
            # The sums so far are donated: they have the size of the adapters.
            forward_backward=jax.jit(
                functools.partial(self._accumulate, chosen), static_argnames="loss", donate_argnames="sums",
                out_shardings=(state.params, (by_row, by_row)),
            ),
            step=jax.jit(_step, out_shardings=(state, whole)),
        )  # fmt: skip

    def forward(self, params: Params, chosen: Lora, sequences: Sequence[LossRow]) -> list[Float[np.ndarray, " T"]]:
        """Returns the log-probabilities of each sequence's targets."""
        forward = self._programs_of(chosen).forward
        return [logprobs for (logprobs,) in self._map(lambda rows: [forward(params, self.base, rows)], sequences)]

    def forward_backward(
        self, params: Params, sums: Params | None, chosen: Lora, sequences: Sequence[LossRow], loss: str, clip: Clip
    ) -> tuple[Params, list[Float[np.ndarray, " T"]], list[Float[np.ndarray, " T"]]]:
        """Adds the gradient of the summed loss to `sums`, whose arrays are donated; None: there are no sums yet.

        The loss is a name of `LOSSES`. Returns the sums, the log-probabilities of each sequence's targets, and the loss
        of each token.
        """
        programs = self._programs_of(chosen)
        if sums is None:
            sums = programs.zeros(params)
        bounds = Clip(*(np.float32(bound) for bound in clip))

        def add(rows: LossRow) -> Sequence[Terms]:
            nonlocal sums
            sums, outputs = programs.forward_backward(params, sums, self.base, rows, bounds, loss=loss)
            return outputs

        both = self._map(add, sequences)
        return cast(Params, sums), [logprobs for logprobs, _ in both], [losses for _, losses in both]

    def step(self, state: LearnerState, sums: Params, chosen: Lora, adam: AdamParams) -> tuple[LearnerState, float]:
        """Makes one step of AdamW; returns the new state and the gradient's norm. ValueError if it is not finite."""
        new, norm = self._programs_of(chosen).step(state, sums, AdamParams(*(np.float32(value) for value in adam)))
        if not np.isfinite(norm):
            raise ValueError(
                f"the norm of the gradient is {norm}: the weights stay as they were, and the gradient is dropped. Look "
                "for values that are not finite, or very large, in the inputs of the losses."
            )
        return new, float(norm)

    def _map(
        self, program: Callable[[LossRow], Sequence[Terms]], sequences: Sequence[LossRow]
    ) -> list[list[Float[np.ndarray, " T"]]]:
        """Runs a program on micro-batches; returns its outputs at the tokens of each sequence."""
        by_row, found = mesh_lib.sharding(self.mesh, ("rows", None)), {}
        for indices, shape in micro_batches([len(each.tokens) for each in sequences], self.least_rows):
            columns = zip(*(sequences[index] for index in indices), strict=True)
            rows = LossRow(*(mesh_lib.place(padded(column, shape), by_row) for column in columns))
            outputs = jax.device_get(program(rows))
            for row, index in enumerate(indices):
                found[index] = [x[row, : len(sequences[index].tokens)] for x in outputs]
        return [found[index] for index in range(len(sequences))]

    def _logprobs(self, chosen: Lora, params: Params, base: Params, rows: LossRow) -> Terms:
        model = merge(self.architecture, lora.adapted(base, params, chosen))
        hidden = self._hidden_states(model, rows.tokens)
        return target_logprobs(self._head, model, hidden, cast(Array, rows.targets))[0]

    def _accumulate(
        self, chosen: Lora, params: Params, sums: Params, base: Params, rows: LossRow, clip: Clip, *, loss: str
    ) -> tuple[Params, tuple[Terms, Terms]]:
        def total(params):
            logprobs = self._logprobs(chosen, params, base, rows)
            losses = token_losses(loss, logprobs, rows, clip)
            return losses.sum(), (logprobs, losses)

        gradients, outputs = jax.grad(total, has_aux=True)(params)
        return jax.tree.map(jnp.add, sums, gradients), outputs
