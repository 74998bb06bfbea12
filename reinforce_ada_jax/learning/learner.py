"""The learner: its state, the scoring pass and the update. Pure programs; the loop is in train.py.

A minibatch is worked through in micro-batches inside one compiled program. Every micro-batch divides by the token and
row counts of the *whole* minibatch, so 1 x 8 and 8 x 1 give the same gradient.

A minibatch has a fixed number of rows, of which any number may be padding at its end. The loop over micro-batches ends
at the last one that has a token, so padding costs memory, not time, and how much of it there is compiles nothing anew.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import batch as batch_lib
from reinforce_ada_jax.learning import fused_loss
from reinforce_ada_jax.learning.batch import Batch, response_mask
from reinforce_ada_jax.learning.optimizer import make_optimizer, state_shardings
from reinforce_ada_jax.policy import lora, splash_attention
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import (
    Attend,
    Params,
    ShardingConstraint,
    causal_attend,
    hidden_states,
    merge,
    param_shardings,
    unconstrained,
)


@struct.dataclass
class LearnerState:
    """What an update reads and gives anew. `params` is what is trained: the policy's weights, or its adapters alone."""

    params: Params
    optimizer: optax.OptState
    updates: Int[Array, ""]


class UpdateMetrics(NamedTuple):
    """Of one update; token means, but for the loss, the norm and the verdict."""

    loss: Float[Array, ""]
    entropy: Float[Array, ""]
    clip_fraction: Float[Array, ""]
    dual_clip_fraction: Float[Array, ""]
    approx_kl: Float[Array, ""]  # of the old policy and this one
    kl: Float[Array, ""]  # of this policy and the reference, by `learning.kl_kind`; 0 where there is none
    grad_norm: Float[Array, ""]
    finite: Bool[Array, ""]


# What micro-batches add up to, in a pytree as `_loss` gives it.
MEANS = tuple(name for name in UpdateMetrics._fields if name not in ("grad_norm", "finite"))


def num_live(batch: Batch) -> Int[Array, ""]:
    """How many micro-batches there are up to the last one with a token."""
    live = (batch.response_length > 0).any(axis=(1, 2))
    return jnp.max(jnp.where(live, 1 + jnp.arange(live.size), 0))


def micro_batch(batch: Batch, index: Int[Array, ""]) -> Batch:
    """One micro-batch of many."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)


def response_logprobs(
    architecture: Architecture,
    params: Params,
    batch: Batch,
    *,
    dtype: DTypeLike,
    temperature: float,
    mesh: Mesh | None = None,
    backend: str = "scan",
    frozen_head: bool = False,
    attend: Attend = causal_attend,
    remat: str = "full",
    constrain: ShardingConstraint = unconstrained,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Log-probability of every response token, and the entropy where it was chosen; anything beyond the response.

    Only the hidden states that predict a response token meet the output head: R of T positions.
    """
    model = merge(architecture, params)
    segments, positions, at = batch_lib.layout(batch)
    packed = batch.response_length.shape[-1] > 1
    hidden = hidden_states(
        model, batch.tokens, positions=positions, segment_ids=segments if packed else None,
        attend=attend, dtype=dtype, remat=remat, constrain=constrain,
    )  # fmt: skip
    targets = jnp.take_along_axis(batch.tokens, at, axis=1)
    # A token is predicted one position earlier.
    predicting = constrain(jnp.take_along_axis(hidden, (at - 1)[..., None], axis=1))
    tied = architecture.tied_embedding
    return fused_loss.head_statistics(
        predicting, model.embedding[...] if tied else model.head[...], targets,
        temperature=temperature, tied=tied, mesh=mesh, backend=backend, frozen_head=frozen_head,
    )  # fmt: skip


def importance_cap(config: Config) -> float | None:
    """`learning.truncated_is_cap`; where responses may have been drawn with earlier weights, there is always one."""
    cap = config.learning.truncated_is_cap
    return 2.0 if cap is None and config.collection.overlap_iterations else cap


class Learner:
    """The compiled programs of one run: `init`, `score`, `update`."""

    def __init__(self, architecture: Architecture, config: Config, mesh: Mesh):
        self.architecture, self.mesh = architecture, mesh
        self._optimizer = make_optimizer(config.learning)
        self._learning = config.learning
        # Rows of a micro-batch: those of a minibatch of whole groups, divided.
        rows = config.learning.prompts_per_update * config.collection.group_size
        self.micro_rows = rows // config.learning.micro_batches
        self._importance_cap = importance_cap(config)
        dtype = jnp.dtype(config.model.compute_dtype)
        on_tpu = mesh.devices.flat[0].platform == "tpu"
        self.head_backend = "pallas_tpu" if on_tpu else "scan"
        self.attention = config.learning.attention
        if self.attention == "auto":
            self.attention = "splash" if on_tpu else "jnp"
        self.remat = config.learning.remat
        if self.remat == "auto":
            self.remat = "dots" if mesh.devices.flat[0].platform == "cpu" else "full"
        attend = functools.partial(splash_attention.attend, mesh=mesh, interpret=not on_tpu)
        self.head_tile = fused_loss.default_tile(self.head_backend, architecture.hidden_size, dtype)
        self._logprobs = functools.partial(
            response_logprobs,
            architecture,
            dtype=dtype,
            temperature=config.sampling.temperature,
            mesh=mesh if mesh.size > 1 else None,
            backend=self.head_backend,
            frozen_head=config.lora.rank > 0,
            attend=attend if self.attention == "splash" else causal_attend,
            remat=self.remat,
            # The embedding is split over `fsdp` along D. Left alone, the compiler splits activations the same way, sums
            # them between devices in every product (8 times the traffic of gathering weights) and has every device
            # compute the attention of all rows.
            constrain=functools.partial(
                jax.lax.with_sharding_constraint, shardings=mesh_lib.sharding(mesh, ("rows", None, None))
            ),
        )
        self.lora = lora.from_settings(config.lora)
        self.param_shardings = (
            param_shardings(architecture, mesh) if self.lora is None else lora.shardings(architecture, self.lora, mesh)
        )
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.score = jax.jit(self._score, out_shardings=mesh_lib.sharding(mesh, (None, "rows", None)))
        # The old state is donated: weights and moments are updated in place. The base under adapters is not: it stays.
        self.update = jax.jit(self._update, donate_argnums=0)

    def shardings(self, params: Params) -> LearnerState:
        """Where each part of the state lives, in the shape of the state."""
        return LearnerState(
            params=self.param_shardings,
            optimizer=state_shardings(self._optimizer, params, self.param_shardings, self.mesh),
            updates=self._replicated,
        )

    def init(self, params: Params) -> LearnerState:
        """The state before the first update, over these very arrays."""
        optimizer = jax.jit(self._optimizer.init, out_shardings=self.shardings(params).optimizer)(params)
        updates = jax.jit(lambda: jnp.int32(0), out_shardings=self._replicated)()
        return LearnerState(params=params, optimizer=optimizer, updates=updates)

    def policy(self, params: Params, base: Params | None) -> Params:
        """The weights to score with and to decode from: what is trained, over the frozen base where that is adapters.

        Raises:
          ValueError: adapters without a base, or a base without adapters.
        """
        if (base is None) != (self.lora is None):
            rank = 0 if self.lora is None else self.lora.rank
            raise ValueError(
                f"lora.rank is {rank}, and the base is {'missing' if base is None else 'given'}: adapters are trained "
                "over the weights that they adapt, and all weights over none."
            )
        return params if self.lora is None else lora.adapted(base, params, self.lora)

    def put(self, batch: Batch) -> Batch:
        """The batch on the devices, cut into micro-batches of consecutive rows, each split over `data` and `fsdp`.

        Raises:
          ValueError: a number of rows that is no multiple of `micro_rows`, or 0.
        """
        rows = len(batch.tokens)
        if rows == 0 or rows % self.micro_rows:
            raise ValueError(
                f"a batch of {rows} rows cannot be cut into micro-batches of {self.micro_rows} (learning."
                "prompts_per_update * collection.group_size / learning.micro_batches): pad it with empty rows to a "
                "multiple of that (make_batch's num_rows)."
            )

        def place(x):
            x = x.reshape(-1, self.micro_rows, *x.shape[1:])
            return mesh_lib.place(x, mesh_lib.sharding(self.mesh, (None, "rows", *[None] * (x.ndim - 2))))

        return jax.tree.map(place, batch)

    def _score(self, params: Params, batch: Batch) -> Float[Array, "M B R"]:
        """The learner's own log-probabilities of the sampled tokens; 0 beyond the response."""

        def one(index, scored):
            logprobs, _ = self._logprobs(params, micro_batch(batch, index))
            return jax.lax.dynamic_update_index_in_dim(scored, logprobs, index, axis=0)

        zeros = jnp.zeros(batch.behaviour_logprobs.shape, jnp.float32)
        return jnp.where(response_mask(batch), jax.lax.fori_loop(0, num_live(batch), one, zeros), 0.0)

    def _loss(self, params: Params, base: Params | None, micro: Batch, num_tokens, num_rows):
        logprobs, entropy = self._logprobs(self.policy(params, base), micro)
        learning, owner = self._learning, batch_lib.owners(micro)
        loss, means = fused_loss.policy_loss(
            logprobs,
            entropy,
            old_logprobs=micro.old_logprobs,
            reward=batch_lib.of_tokens(micro.reward, owner),
            baseline=batch_lib.of_tokens(micro.baseline, owner),
            weight=batch_lib.of_tokens(micro.weight, owner),
            mask=response_mask(micro),
            members=batch_lib.members(micro),
            clip_low=learning.clip_low,
            clip_high=learning.clip_high,
            dual_clip=learning.dual_clip,
            aggregation=learning.aggregation,
            ratio=learning.ratio,
            behaviour_logprobs=micro.behaviour_logprobs,
            truncated_is_cap=self._importance_cap,
            reference_logprobs=micro.reference_logprobs,
            kl_kind=learning.kl_kind,
            kl_coefficient=learning.kl_coefficient,
            entropy_coefficient=learning.entropy_coefficient,
            num_tokens=num_tokens,
            num_rows=num_rows,
        )
        return loss, means | {"loss": loss}

    def _update(
        self, state: LearnerState, batch: Batch, base: Params | None = None
    ) -> tuple[LearnerState, UpdateMetrics]:
        """One optimiser step on one minibatch. A non-finite loss or gradient leaves the state as it was.

        Args:
          state: before.
          batch: of `put`.
          base: the weights under the adapters, where adapters are trained; they have no gradient.

        Raises:
          ValueError: `learning.kl_coefficient` is not 0, and the batch has no `reference_logprobs`; or see `policy`.
        """
        if self._learning.kl_coefficient and batch.reference_logprobs is None:
            raise ValueError(
                f"learning.kl_coefficient is {self._learning.kl_coefficient}, but the batch has no reference_logprobs: "
                "score it with the reference's weights first, or set the coefficient to 0."
            )
        lengths = batch.response_length
        num_tokens, num_rows = (jnp.maximum(x.sum(), 1).astype(jnp.float32) for x in (lengths, lengths > 0))
        gradient = jax.grad(self._loss, has_aux=True)

        def accumulate(index, sums):
            micro = micro_batch(batch, index)
            return jax.tree.map(jnp.add, sums, gradient(state.params, base, micro, num_tokens, num_rows))

        means = dict.fromkeys(MEANS, jnp.float32(0))
        zeros = (jax.tree.map(jnp.zeros_like, state.params), means)
        gradients, means = jax.lax.fori_loop(0, num_live(batch), accumulate, zeros)
        grad_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm)
        changes, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        new = LearnerState(
            params=optax.apply_updates(state.params, changes), optimizer=optimizer, updates=state.updates + 1
        )
        new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        # The layout is named at the exit: a state that came back laid out otherwise would compile everything once more.
        new = jax.lax.with_sharding_constraint(new, self.shardings(state.params))
        return new, UpdateMetrics(**means, grad_norm=grad_norm, finite=finite)
