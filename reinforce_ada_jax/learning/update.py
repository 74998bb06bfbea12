"""One optimizer step on a minibatch: the sums over its micro-batches, and the programs that compute them.

A short update is one program. A long one is a chain of programs: `begin`, then `accumulate` for a few micro-batches at
a time, then `finish`. Only `finish` takes the arrays of the old state, so the host can abandon an update before it.

On a mesh over several slices each slice has sums of its own, with an axis for the slices in front, until `finish` adds
them up: the gradient passes the network between slices once an update.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed.compilation import Lower
from reinforce_ada_jax.learning import layer_gather
from reinforce_ada_jax.learning import logprob_gap as gap_lib
from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.learning.chain import Chain, loop_bounds, micro_batch, num_live
from reinforce_ada_jax.learning.logprob_gap import LogprobGap
from reinforce_ada_jax.learning.optimizer import state_shardings
from reinforce_ada_jax.policy import experts
from reinforce_ada_jax.policy.record import Record
from reinforce_ada_jax.policy.transformer import Params

Version = Int[Array | np.ndarray, ""] | np.integer


class LearnerState(Record):
    """State between updates, or its shapes or shardings; `params` is what is trained: all weights, or the adapters."""

    params: Params
    optimizer: optax.OptState
    updates: Int[Array, ""]


def state_layout(
    optimizer: optax.GradientTransformation, params: Params, param_shardings: Params, mesh: Mesh
) -> LearnerState:
    """Returns the sharding of each part of a state, in the shape of the state."""
    return LearnerState(
        params=param_shardings,
        optimizer=state_shardings(optimizer, params, param_shardings, mesh),
        updates=cast(Array, NamedSharding(mesh, PartitionSpec())),
    )


def take_step(optimizer: optax.GradientTransformation, state: LearnerState, gradients: Params) -> LearnerState:
    """Returns the state after one step of the optimiser."""
    changes, moments = optimizer.update(gradients, state.optimizer, state.params)
    params = cast(Params, optax.apply_updates(state.params, changes))
    return LearnerState(params=params, optimizer=moments, updates=state.updates + 1)


class UpdateMetrics(NamedTuple):
    """Metrics of one update: means over tokens of the whole minibatch, except where a field says otherwise.

    Where responses with advantage 0 are left out, those of `ESTIMATES` are estimates: the computed responses stand for
    the others (`loss.metric_weights`). The other means are exact.
    """

    loss: Float[Array, ""]  # the loss
    entropy: Float[Array, ""]  # of the policy
    clip_fraction: Float[Array, ""]  # tokens where the clipped ratio decides
    dual_clip_fraction: Float[Array, ""]  # tokens where the dual clip decides
    approx_kl: Float[Array, ""]  # of the old policy and this one
    kl: Float[Array, ""]  # of this policy and the reference, by `learning.kl_kind`; 0 where there is none
    computed_share: Float[Array, ""]  # share of tokens that are computed, not left out
    grad_norm: Float[Array, ""]  # global norm of the gradient, before it is clipped
    finite: Bool[Array, ""]  # loss, gradient and the gap below are finite
    weights_finite: Bool[Array, ""]  # the new weights are: a step of finite numbers may overflow
    gap: LogprobGap | None = None  # of engine and learner; None where `old_logprobs` are given
    expert_load_max: Float[Array, ""] | None = None  # tokens of the largest expert over the mean; mean over layers
    expert_idle_share: Float[Array, ""] | None = None  # experts without a token; None in a model without experts


# Metrics that are summed over micro-batches.
MEANS = ("loss", "entropy", "clip_fraction", "dual_clip_fraction", "approx_kl", "kl")
# Those of them that `loss.metric_weights` weighs: without a computed response they have no value.
ESTIMATES = ("entropy", "approx_kl")


EXPERT_METRICS = ("expert_load_max", "expert_idle_share")
# Those that have no value in an update without a computed response.
NEED_RESPONSES = (*ESTIMATES, *EXPERT_METRICS)
EXPERT_TOKENS = "expert_tokens"  # beside `MEANS`: tokens of each expert of each layer, [L, E]


def expert_sums(load: Float[Array, "L E"] | None) -> dict[str, Float[Array, "L E"]]:
    """Returns what a micro-batch adds to the sums, beside `MEANS`."""
    return {} if load is None else {EXPERT_TOKENS: load}


class Sums(NamedTuple):
    """Sums over the micro-batches so far, or their shapes or shardings; over several slices those of each slice."""

    gradients: Any  # of the loss, in the layout of the weights
    means: Any  # those of `MEANS`, and `EXPERT_TOKENS`
    gap: Any  # of `UpdateMetrics`


def _counts(batch: Batch) -> loss_lib.Denominators:
    """Returns the denominators of the whole minibatch, including responses that are left out."""
    counted = batch.left_out.sum(axis=(0, 1))
    num_rows = (batch.response_length > 0).sum() + counted[1]
    return loss_lib.make_denominators(batch.response_length.sum() + counted[0], num_rows)


class UpdatePrograms:
    """Jitted programs of an update; a call makes one update.

    Attributes:
      micro_batches_per_program: in a chain; an update with at most this number is one program.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        param_shardings: Params,
        *,
        gathered: tuple[Callable[[Params], Params], Params] | None,
        expert_shape: tuple[int, int] | None,
        gap_limits: gap_lib.GapLimits | None,
        micro_batches_per_program: int,
    ):
        """Makes the programs; nothing is compiled.

        `loss_fn` maps (weights, base, micro-batch, `loss.metric_weights`, counts, policy version) to (loss, (means,
        gap)). `gathered` are a function that returns the copy of the layers' weights that all micro-batches share, and
        the copy's shardings; None: there is none. `expert_shape` is (layers, experts); None: the model has no experts.
        """
        self.micro_batches_per_program = micro_batches_per_program
        self._loss_fn, self._optimizer, self._mesh, self._gap_limits = loss_fn, optimizer, mesh, gap_limits
        self._gathered_layers, gathered_shardings = (None, None) if gathered is None else gathered
        self._param_shardings, self._expert_shape = param_shardings, expert_shape
        self._replicated = NamedSharding(mesh, PartitionSpec())
        # The old state is donated: weights and moments are updated in place. The base under adapters is not: it stays.
        self._whole = jax.jit(self._in_one_program, donate_argnames="state")
        begun_shardings = gathered_shardings, self._sums_shardings(), self._replicated
        self._chain = Chain(self._begun, self._accumulated, begun_shardings, micro_batches_per_program)
        self._finish = jax.jit(self._finished, donate_argnames="state")

    def _sums_shardings(self) -> Sums:
        """Returns the layout of `Sums`: gradients have that of the weights."""
        if mesh_lib.num_slices(self._mesh) == 1:
            return Sums(self._param_shardings, self._replicated, self._replicated)

        def of_slices(of_one: NamedSharding) -> NamedSharding:
            return NamedSharding(self._mesh, PartitionSpec(mesh_lib.SLICE, *of_one.spec))

        others = of_slices(self._replicated)
        return Sums(jax.tree.map(of_slices, self._param_shardings), others, others)

    def shardings(self, params: Params) -> LearnerState:
        """Returns the sharding of each part of the state, in the shape of the state."""
        return state_layout(self._optimizer, params, self._param_shardings, self._mesh)

    def is_chain(self, batch: Batch) -> bool:
        """Returns True where the update on a minibatch is made by several programs."""
        return self._chain.num_programs(batch) > 1

    def __call__(
        self,
        state: LearnerState,
        batch: Batch,
        base: Params | None = None,
        policy_version: Version | None = None,
        between: Callable[[], None] | None = None,
    ) -> tuple[LearnerState, UpdateMetrics]:
        """Makes one optimiser step on one minibatch of `Learner.put`, or leaves the state as it was.

        The arrays of `state` are donated. The state keeps its values if the loss or the gradient is not finite. If
        the batch has no `old_logprobs`, it also keeps them if a log-probability is not finite, or differs from the
        engine's by more than rounding (`logprob_gap.gap_limits`). Only responses of this `policy_version` were drawn
        from the weights of `state` and are compared; None: all are. `base` are the weights under adapters.

        `between` is as for `Chain.sums`; `state` still has its arrays where it raises.
        """
        if not self.is_chain(batch):
            return self._whole(state, batch, base, policy_version)
        sums = self._chain.sums(state.params, batch, base, policy_version, between=between)
        return self._finish(state, batch, sums)

    def programs(self, state: LearnerState, batch: Batch, base: Params | None) -> dict[str, Lower]:
        """Returns the programs of an update, lowered on demand for abstract arguments; "update" has the loop."""
        version = np.int32(0)
        if not self.is_chain(batch):
            return {"update": lambda: self._whole.lower(state, batch, base, version)}
        programs, sums = self._chain.programs(("begin update", "update"), state.params, batch, base, version)
        return programs | {"finish update": lambda: self._finish.lower(state, batch, sums)}

    # ---- the computation ---------------------------------------------------------------------------------------------

    def _begun(self, params: Params, batch: Batch) -> tuple[Params | None, Sums, Int[Array, ""]]:
        """Returns the copy that micro-batches share, sums that are 0, and the number of micro-batches with a token."""
        none = None if self._expert_shape is None else jnp.zeros(self._expert_shape, jnp.float32)
        means = dict.fromkeys(MEANS, jnp.float32(0)) | expert_sums(none)
        no_gap = LogprobGap(*[jnp.float32(0)] * 4) if batch.old_logprobs is None else None
        zeros = Sums(jax.tree.map(jnp.zeros_like, params), means, no_gap)
        if (slices := mesh_lib.num_slices(self._mesh)) > 1:
            zeros = jax.tree.map(lambda x: jnp.zeros((slices, *x.shape), x.dtype), zeros)
        return None if self._gathered_layers is None else self._gathered_layers(params), zeros, num_live(batch)

    def _accumulated(
        self,
        sums: Sums,
        params: Params,
        layers: Params | None,
        batch: Batch,
        base: Params | None,
        policy_version: Version | None,
        first: Int[Array, ""] | None = None,
    ) -> Sums:
        """Returns the sums after one program, which adds micro-batches from `first` on; None: all."""
        counted = batch.left_out.sum(axis=(0, 1))
        metric_weights = loss_lib.metric_weights(batch.advantages, batch.response_mask, counted[0])
        bounds = loop_bounds(batch, first, self.micro_batches_per_program)
        whole, by_row, own = (PartitionSpec(*axes) for axes in ((), (None, mesh_lib.SLICE), (mesh_lib.SLICE,)))
        return mesh_lib.on_each_slice(
            self._loop, self._mesh, in_specs=(own, whole, whole, by_row, by_row, whole), out_specs=own
        )(sums, (params, layers), base, batch, metric_weights, (_counts(batch), policy_version, bounds))

    def _loop(
        self,
        sums: Sums,
        weights: tuple[Params, Params | None],
        base: Params | None,
        batch: Batch,
        metric_weights: Float[Array, "M B R"],
        of_update: tuple[loss_lib.Denominators, Version | None, tuple[Any, Int[Array, ""]]],
    ) -> Sums:
        """Adds the micro-batches within the bounds; each slice adds its part of their rows to its own sums."""
        (params, layers), (counts, policy_version, bounds) = weights, of_update
        read = params if layers is None else params | layers
        has_slices = mesh_lib.num_slices(self._mesh) > 1
        if has_slices:
            sums = jax.tree.map(lambda x: x[0], sums)
        summed = jax.tree.map(jax.new_ref, sums.gradients)
        vjp: Any = jax.vjp  # its declared type lacks `with_refs`

        def add(total: Any, gradient: Array) -> None:
            total[...] += gradient

        def accumulate(index: Int[Array, ""], metrics: tuple[Any, Any]) -> tuple[Any, Any]:
            of_rows = jax.lax.dynamic_index_in_dim(metric_weights, index, keepdims=False)
            micro = micro_batch(batch, index)
            loss, slope, (means, gap) = vjp(
                lambda read: self._loss_fn(read, base, micro, of_rows, counts, policy_version), read, has_aux=True
            )
            if layers is None:
                slope.with_refs(summed)(jnp.ones_like(loss))  # each layer adds its gradient to the sums in place
            else:
                (gradients,) = slope(jnp.ones_like(loss))
                gradients = layer_gather.scattered(gradients, params, self._param_shardings)
                jax.tree.map(add, summed, gradients)
            means = jax.tree.map(jnp.add, metrics[0], means)
            return means, gap if gap is None else gap_lib.combined(metrics[1], gap)

        means, gap = jax.lax.fori_loop(*bounds, accumulate, (sums.means, sums.gap))
        sums = Sums(jax.tree.map(lambda total: total[...], summed), means, gap)
        return jax.tree.map(lambda x: x[None], sums) if has_slices else sums

    def _finished(self, state: LearnerState, batch: Batch, sums: Sums) -> tuple[LearnerState, UpdateMetrics]:
        """Returns the state after a step with the summed gradients, or as it was, and the metrics."""
        if mesh_lib.num_slices(self._mesh) > 1:  # the sums over all slices
            total = jax.tree.map(lambda x: x.sum(0), sums)
            gradients = jax.lax.with_sharding_constraint(total.gradients, self._param_shardings)
            gap = total.gap and total.gap._replace(largest=sums.gap.largest.max())
            sums = Sums(gradients, total.means, gap)
        gradients, gap = sums.gradients, sums.gap
        computed = batch.response_length.sum().astype(jnp.float32) / _counts(batch).num_tokens
        grad_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(sums.means["loss"]) & jnp.isfinite(grad_norm)
        allowed = finite
        if gap is not None:
            allowed = finite = finite & (gap.num_not_finite == 0)
            if (limits := self._gap_limits) is not None:
                allowed = finite & limits.hold(gap.total / jnp.maximum(gap.num_tokens, 1), gap.largest)
        # A branch works in place; a choice between old and new arrays would hold both.
        step = functools.partial(take_step, self._optimizer)
        new = jax.lax.cond(allowed, step, lambda state, _: state, state, gradients)
        new = jax.lax.with_sharding_constraint(new, self.shardings(state.params))
        # This reads the chosen weights: if the choice waited for it, the device would hold two copies of the state.
        weights_finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new.params)]).all()
        means = dict(sums.means)
        tokens = means.pop(EXPERT_TOKENS, None)
        of_experts = {} if tokens is None else experts.load_metrics(tokens)
        return new, UpdateMetrics(
            **means, **of_experts, computed_share=computed, grad_norm=grad_norm, finite=finite,
            weights_finite=weights_finite, gap=gap,
        )  # fmt: skip

    def _in_one_program(
        self, state: LearnerState, batch: Batch, base: Params | None, policy_version: Version | None
    ) -> tuple[LearnerState, UpdateMetrics]:
        """Makes an update in one program."""
        layers, zeros, _ = self._begun(state.params, batch)
        return self._finished(state, batch, self._accumulated(zeros, state.params, layers, batch, base, policy_version))
