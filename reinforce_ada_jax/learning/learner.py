"""The learner: its state, the scoring pass and the update. Pure programs; the loop is in train.py.

A minibatch is worked through in micro-batches inside one compiled program. Every micro-batch divides by the token and
row counts of the *whole* minibatch, so 1 x 8 and 8 x 1 give the same gradient.
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
from ml_collections import ConfigDict

from reinforce_ada_jax import mesh as mesh_lib
from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.learning.optimizer import make_optimizer, state_shardings
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.logprobs import token_logprobs
from reinforce_ada_jax.policy.transformer import Params, hidden_states, merge, param_shardings


@struct.dataclass
class LearnerState:
    """What an update reads and gives anew."""

    params: Params
    optimizer: optax.OptState
    updates: Int[Array, ""]


class UpdateMetrics(NamedTuple):
    """Of one update; token means, but for the loss, the norm and the verdict."""

    loss: Float[Array, ""]
    entropy: Float[Array, ""]
    clip_fraction: Float[Array, ""]
    dual_clip_fraction: Float[Array, ""]
    approx_kl: Float[Array, ""]
    grad_norm: Float[Array, ""]
    finite: Bool[Array, ""]


def response_mask(batch: Batch) -> Bool[Array, "B R"]:
    """True at response tokens, the stop token included."""
    return jnp.arange(batch.behaviour_logprobs.shape[1])[None] < batch.response_length[:, None]


def response_logprobs(
    architecture: Architecture, params: Params, batch: Batch, *, dtype: DTypeLike, temperature: float, chunk: int
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Log-probability of every response token, and the entropy where it was chosen; anything beyond the response.

    Only the hidden states that predict a response token meet the output head: R of T positions.
    """
    model = merge(architecture, params)
    hidden = hidden_states(model, batch.tokens, dtype=dtype, remat=True)
    # Position j of a response is token prompt_length + j of its row, predicted one position earlier.
    position = batch.prompt_length[:, None] + jnp.arange(batch.behaviour_logprobs.shape[1])[None]
    targets = jnp.take_along_axis(batch.tokens, position, axis=1, mode="clip")
    predicting = jnp.take_along_axis(hidden, (position - 1)[..., None], axis=1, mode="clip")
    return token_logprobs(model, predicting, targets, temperature=temperature, chunk=chunk)


def importance_cap(config: ConfigDict) -> float | None:
    """`learning.truncated_is_cap`; where responses may have been drawn with earlier weights, there is always one."""
    cap = config.learning.truncated_is_cap
    return 2.0 if cap is None and config.collection.overlap_iterations else cap


class Learner:
    """The compiled programs of one run: `init`, `score`, `update`."""

    def __init__(self, architecture: Architecture, config: ConfigDict, mesh: Mesh):
        self.architecture, self.mesh = architecture, mesh
        self._optimizer = make_optimizer(config.learning)
        self._micro_batches = config.learning.micro_batches
        self._learning = config.learning
        self._importance_cap = importance_cap(config)
        self._logprobs = functools.partial(
            response_logprobs,
            architecture,
            dtype=jnp.dtype(config.model.compute_dtype),
            temperature=config.sampling.temperature,
            chunk=config.learning.logprob_chunk,
        )
        self.param_shardings = param_shardings(architecture, mesh)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.score = jax.jit(self._score, out_shardings=mesh_lib.sharding(mesh, ("rows", None)))
        # The old state is donated: weights and moments are updated in place.
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
        return LearnerState(params=params, optimizer=optimizer, updates=jax.device_put(jnp.int32(0), self._replicated))

    def put(self, batch: Batch) -> Batch:
        """The batch on the devices, rows split over `data` and `fsdp`."""
        rows = {1: mesh_lib.sharding(self.mesh, ("rows",)), 2: mesh_lib.sharding(self.mesh, ("rows", None))}
        return jax.tree.map(lambda x: jax.device_put(x, rows[x.ndim]), batch)

    def _split(self, batch: Batch) -> Batch:
        """[B, ...] -> [micro-batches, B / micro-batches, ...], each micro-batch spread over all row shards."""

        def one(x):
            x = x.reshape(-1, self._micro_batches, *x.shape[1:]).swapaxes(0, 1)
            axes = (None, "rows", *[None] * (x.ndim - 2))
            return jax.lax.with_sharding_constraint(x, mesh_lib.sharding(self.mesh, axes))

        return jax.tree.map(one, batch)

    def _score(self, params: Params, batch: Batch) -> Float[Array, "B R"]:
        """The learner's own log-probabilities of the sampled tokens; 0 beyond the response."""
        logprobs = jax.lax.map(lambda micro: self._logprobs(params, micro)[0], self._split(batch))
        logprobs = logprobs.swapaxes(0, 1).reshape(batch.behaviour_logprobs.shape)
        return jnp.where(response_mask(batch), logprobs, 0.0)

    def _loss(self, params: Params, micro: Batch, num_tokens, num_rows):
        logprobs, entropy = self._logprobs(params, micro)
        mask, learning = response_mask(micro), self._learning
        terms = loss_lib.policy_terms(
            logprobs,
            micro.old_logprobs,
            jnp.broadcast_to(micro.advantages[:, None], logprobs.shape),
            mask,
            clip_low=learning.clip_low,
            clip_high=learning.clip_high,
            dual_clip=learning.dual_clip,
            behaviour_logprobs=micro.behaviour_logprobs,
            truncated_is_cap=self._importance_cap,
        )

        def aggregate(values, aggregation):
            return loss_lib.aggregate(values, mask, aggregation, num_tokens=num_tokens, num_rows=num_rows)

        entropy_mean = aggregate(entropy, "token-mean")
        loss = aggregate(terms.loss, learning.aggregation)
        if learning.entropy_coefficient:
            loss = loss - learning.entropy_coefficient * aggregate(entropy, learning.aggregation)
        means = [aggregate(x, "token-mean") for x in (terms.clipped, terms.dual_clipped, terms.old_minus_new)]
        return loss, (loss, entropy_mean, *means)

    def _update(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, UpdateMetrics]:
        """One optimiser step on one minibatch. A non-finite loss or gradient leaves the state as it was."""
        num_tokens, num_rows = loss_lib.denominators(response_mask(batch))
        gradient = jax.grad(self._loss, has_aux=True)

        def accumulate(carry, micro):
            return jax.tree.map(jnp.add, carry, gradient(state.params, micro, num_tokens, num_rows)), None

        zeros = (jax.tree.map(jnp.zeros_like, state.params), (jnp.float32(0),) * 5)
        (gradients, sums), _ = jax.lax.scan(accumulate, zeros, self._split(batch))
        grad_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(sums[0]) & jnp.isfinite(grad_norm)
        changes, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        new = LearnerState(
            params=optax.apply_updates(state.params, changes), optimizer=optimizer, updates=state.updates + 1
        )
        new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        # The layout is named at the exit: a state that came back laid out otherwise would compile everything once more.
        new = jax.lax.with_sharding_constraint(new, self.shardings(state.params))
        return new, UpdateMetrics(*sums, grad_norm=grad_norm, finite=finite)
