"""Training of adapters by callers that bring their own losses' inputs: forward, backward and Adam as separate programs.

The caller decides when gradients are summed and when the weights change, so that one base serves many adapters. Every
token of a row has a target of its own and may have a weight. `update.py` has the update of a run, which does all of
that.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.micro_batches import micro_batches
from reinforce_ada_jax.learning.optimizer import state_shardings, with_standard_promotion
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.learning.scoring import forward_pass
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.transformer import Params, merge, nest

Number = Any  # a float of the host, or a scalar inside a program


class LossRow(NamedTuple):
    """A sequence and what its loss needs; or B right-padded sequences, with factors of 0 in the padding.

    Attributes:
      tokens: of the sequence.
      targets: token that each position predicts.
      factors: weight of each token for `cross_entropy`, its advantage for the other losses.
      old_logprobs: log-probabilities under the distribution that the targets were sampled from.
    """

    tokens: Int[Array | np.ndarray, "*B T"]
    targets: Int[Array | np.ndarray, "*B T"]
    factors: Float[Array | np.ndarray, "*B T"]
    old_logprobs: Float[Array | np.ndarray, "*B T"]


class Clip(NamedTuple):
    """Bounds of the ratio, for the losses that have them; the defaults are Tinker's."""

    low: Number = 0.8
    high: Number = 1.2


class AdamParams(NamedTuple):
    """Parameters of one step of AdamW, as PyTorch defines it.

    Attributes:
      learning_rate: factor of the step.
      b1: decay of the first moment.
      b2: decay of the second moment.
      epsilon: added to the root of the second moment.
      weight_decay: decoupled; times the learning rate.
      clip_norm: bound of the gradient's global norm; 0: none.
    """

    learning_rate: Number
    b1: Number
    b2: Number
    epsilon: Number
    weight_decay: Number = 0.0
    clip_norm: Number = 0.0


NO_STEP = AdamParams(0.0, 0.9, 0.95, 1e-8)


def _adam(adam: AdamParams) -> optax.GradientTransformation:
    """AdamW with parameters that may be arrays of a program; its state has the same structure for all of them."""
    bound = jnp.where(adam.clip_norm > 0, adam.clip_norm, jnp.inf)
    return with_standard_promotion(optax.chain(
        optax.clip_by_global_norm(cast(float, bound)),
        optax.adamw(adam.learning_rate, b1=adam.b1, b2=adam.b2, eps=adam.epsilon, weight_decay=adam.weight_decay),
    ))  # fmt: skip


def _adam_step(state: "AdapterState", gradients: Params, adam: AdamParams) -> tuple["AdapterState", Float[Array, ""]]:
    changes, optimizer = _adam(adam).update(gradients, state.optimizer, state.params)
    params = cast(Params, optax.apply_updates(state.params, changes))
    return AdapterState(params=params, optimizer=optimizer), optax.tree.norm(gradients)


@struct.dataclass
class AdapterState:
    """Adapters and their optimiser, float32."""

    __no_type_check__ = True

    params: Params
    optimizer: optax.OptState


Terms = Float[Array | np.ndarray, "B T"]


def cross_entropy(logprobs: Terms, factors: Terms, old_logprobs: Terms, clip: Clip) -> Terms:
    """Computes -weight log p."""
    del old_logprobs, clip
    return loss_lib.cross_entropy(logprobs, factors)


def _ratio(logprobs: Terms, factors: Terms, old_logprobs: Terms) -> Terms:
    """exp(log p - log q); 1 at tokens without advantage, whose old log-probabilities may be anything."""
    return jnp.exp(jnp.where(factors == 0, 0.0, logprobs - old_logprobs))


def importance_sampling(logprobs: Terms, factors: Terms, old_logprobs: Terms, clip: Clip) -> Terms:
    """Computes -(p / q) A."""
    del clip
    return -_ratio(logprobs, factors, old_logprobs) * factors


def ppo(logprobs: Terms, factors: Terms, old_logprobs: Terms, clip: Clip) -> Terms:
    """Computes -min((p / q) A, clip(p / q) A) (arXiv 1707.06347)."""
    ratio = _ratio(logprobs, factors, old_logprobs)
    return -jnp.minimum(ratio * factors, jnp.clip(ratio, clip.low, clip.high) * factors)


def cispo(logprobs: Terms, factors: Terms, old_logprobs: Terms, clip: Clip) -> Terms:
    """Computes -clip(p / q) A log p, with a constant ratio (arXiv 2506.13585)."""
    ratio = jnp.clip(_ratio(logprobs, factors, old_logprobs), clip.low, clip.high)
    return -jax.lax.stop_gradient(ratio) * factors * logprobs


LOSSES = {"cross_entropy": cross_entropy, "importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo}


def token_losses(loss: str, logprobs: Float[np.ndarray, " T"], row: LossRow, clip: Clip) -> Float[np.ndarray, " T"]:
    """Returns the loss of each token of a row whose log-probabilities are known."""
    return np.asarray(LOSSES[loss](logprobs[None], row.factors[None], row.old_logprobs[None], clip)[0])


def padded(sequences: Sequence[LossRow], shape: tuple[int, int]) -> LossRow:
    """Returns the sequences as the first rows of a micro-batch."""
    batch = LossRow(*(np.zeros(shape, kind) for kind in (np.int32, np.int32, np.float32, np.float32)))
    for row, sequence in enumerate(sequences):
        for of_rows, values in zip(batch, sequence, strict=True):
            of_rows[row, : len(values)] = values
    return batch


class _Programs(NamedTuple):
    """Jitted functions over adapters of one size."""

    zeros: Any
    init_optimizer: Any
    forward: Any
    forward_backward: Any
    step: Any


class AdapterLearner:
    """The compiled programs of one base: `init`, `forward`, `forward_backward`, `step`."""

    def __init__(self, architecture: Architecture, base: Params, mesh: Mesh, dtype: DTypeLike):
        """Makes the programs over the weights `base`, which stay as they are; nothing is compiled."""
        self.architecture, self.base, self.mesh = architecture, base, mesh
        self.least_rows = mesh.shape["data"] * mesh.shape["fsdp"]
        platform = platform_lib.of_mesh(mesh, LearningConfig(responses_per_row=1), architecture, dtype)
        self._head = HeadConfig(
            temperature=1.0, tied=architecture.tied_embedding, mesh=mesh if mesh.size > 1 else None,
            backend=platform.head_backend, tile=platform.head_tile, frozen_head=True,
        )  # fmt: skip
        self._hidden_states = forward_pass(platform, mesh, dtype)
        self._programs_of = functools.cache(self._make_programs)

    def init(self, chosen: Lora, seed: int) -> AdapterState:
        """Returns adapters that change nothing yet, before their first step."""
        return self.with_new_optimizer(lora.init(self.architecture, chosen, jax.random.key(seed), self.mesh), chosen)

    def with_new_optimizer(self, params: Params, chosen: Lora) -> AdapterState:
        """Returns the state of adapters before their first step."""
        return AdapterState(params=params, optimizer=self._programs_of(chosen).init_optimizer(params))

    def shardings(self, chosen: Lora) -> AdapterState:
        """Returns the sharding of each part of a state, in the shape of the state."""
        params = lora.shardings(self.architecture, chosen, self.mesh)
        shapes = {name: shape for name, (shape, _) in lora.adapter_shapes(self.architecture, chosen).items()}
        abstract = nest({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})
        return AdapterState(params=params, optimizer=state_shardings(_adam(NO_STEP), abstract, params, self.mesh))

    def _make_programs(self, chosen: Lora) -> _Programs:
        state = self.shardings(chosen)
        by_row, whole = mesh_lib.sharding(self.mesh, ("rows", None)), mesh_lib.sharding(self.mesh, ())
        # Layouts are named at the exits: adapters in another layout would compile everything again.
        return _Programs(
            zeros=jax.jit(functools.partial(jax.tree.map, jnp.zeros_like), out_shardings=state.params),
            init_optimizer=jax.jit(_adam(NO_STEP).init, out_shardings=state.optimizer),
            forward=jax.jit(functools.partial(self._logprobs, chosen), out_shardings=by_row),
            # The sums so far are donated: they have the size of the adapters.
            forward_backward=jax.jit(
                functools.partial(self._accumulate, chosen), static_argnames="loss", donate_argnames="sums",
                out_shardings=(state.params, (by_row, by_row)),
            ),
            step=jax.jit(_adam_step, out_shardings=(state, whole)),
        )  # fmt: skip

    def forward(self, params: Params, chosen: Lora, sequences: Sequence[LossRow]) -> list[Float[np.ndarray, " T"]]:
        """Returns the log-probabilities of each sequence's targets."""
        found: dict[int, np.ndarray] = {}
        forward = self._programs_of(chosen).forward
        for indices, rows in self._micro_batches(sequences):
            logprobs = np.asarray(forward(params, self.base, rows))
            found |= {index: logprobs[row, : len(sequences[index].tokens)] for row, index in enumerate(indices)}
        return [found[index] for index in range(len(sequences))]

    def forward_backward(
        self, params: Params, sums: Params | None, chosen: Lora, sequences: Sequence[LossRow], loss: str, clip: Clip
    ) -> tuple[Params, list[Float[np.ndarray, " T"]], list[Float[np.ndarray, " T"]]]:
        """Adds the gradient of the summed loss to `sums`.

        Args:
          params: adapters.
          sums: of the gradients so far, whose arrays are used up; None: none yet.
          chosen: sizes of the adapters.
          sequences: that the loss is of.
          loss: a name of `LOSSES`.
          clip: its bounds.

        Returns:
          The sums, the log-probabilities of each sequence's targets, and the loss of each token.
        """
        programs = self._programs_of(chosen)
        if sums is None:
            sums = programs.zeros(params)
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        bounds = Clip(*(np.float32(bound) for bound in clip))
        for indices, rows in self._micro_batches(sequences):
            sums, outputs = programs.forward_backward(params, sums, self.base, rows, bounds, loss=loss)
            logprobs, losses = jax.device_get(outputs)
            for row, index in enumerate(indices):
                length = len(sequences[index].tokens)
                found[index] = logprobs[row, :length], losses[row, :length]
        both = [found[index] for index in range(len(sequences))]
        return cast(Params, sums), [logprobs for logprobs, _ in both], [losses for _, losses in both]

    def step(self, state: AdapterState, sums: Params, chosen: Lora, adam: AdamParams) -> tuple[AdapterState, float]:
        """Makes one step of AdamW; returns the new state and the norm of the gradient.

        Raises:
          ValueError: the gradient is not finite.
        """
        new, norm = self._programs_of(chosen).step(state, sums, AdamParams(*(np.float32(value) for value in adam)))
        if not np.isfinite(norm):
            raise ValueError(
                f"the norm of the gradient is {norm}: the weights stay as they were, and the gradient is dropped. Look "
                "for values that are not finite, or very large, in the inputs of the losses."
            )
        return new, float(norm)

    def _micro_batches(self, sequences: Sequence[LossRow]) -> Iterator[tuple[list[int], LossRow]]:
        """Yields (indices of the sequences, their rows on the devices)."""
        sharding = mesh_lib.sharding(self.mesh, ("rows", None))
        for indices, shape in micro_batches([len(each.tokens) for each in sequences], self.least_rows):
            rows = padded([sequences[index] for index in indices], shape)
            yield indices, LossRow(*(mesh_lib.place(cast(np.ndarray, x), sharding) for x in rows))

    def _logprobs(self, chosen: Lora, params: Params, base: Params, rows: LossRow) -> Terms:
        model = merge(self.architecture, lora.adapted(base, params, chosen))
        hidden = self._hidden_states(model, rows.tokens)
        head = model.embedding[...] if self._head.tied else model.head[...]
        return token_logprobs(self._head, hidden, head, cast(Array, rows.targets))[0]

    def _accumulate(
        self, chosen: Lora, params: Params, sums: Params, base: Params, rows: LossRow, clip: Clip, *, loss: str
    ) -> tuple[Params, tuple[Terms, Terms]]:
        def total(params):
            logprobs = self._logprobs(chosen, params, base, rows)
            losses = LOSSES[loss](logprobs, rows.factors, rows.old_logprobs, clip)
            return losses.sum(), (logprobs, losses)

        gradients, outputs = jax.grad(total, has_aux=True)(params)
        return jax.tree.map(jnp.add, sums, gradients), outputs
