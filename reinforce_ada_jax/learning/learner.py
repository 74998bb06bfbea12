"""The learner: the scoring pass, and the loss of the update (`update.py`). The loop is in `training`.

A minibatch is computed in micro-batches inside compiled programs. Every micro-batch divides by the token and response
counts of the *whole* minibatch, so 1 x 8 and 8 x 1 give the same gradient.

With one update an iteration the old policy is the policy that is updated, and the update computes its own
`old_logprobs`: there is no scoring pass, and the update compares log-probabilities with the engine's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed.compilation import Lower
from reinforce_ada_jax.learning import layer_gather, token_losses
from reinforce_ada_jax.learning import logprob_gap as gap_lib
from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.learning.chain import Chain, loop_bounds, micro_batch, num_live
from reinforce_ada_jax.learning.forward import head_config, row_settings, target_logprobs
from reinforce_ada_jax.learning.invariant_logprobs import invariant_logprobs
from reinforce_ada_jax.learning.optimizer import make_optimizer
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.learning.token_losses import LossConfig
from reinforce_ada_jax.learning.update import LearnerState, UpdatePrograms, Version, expert_sums
from reinforce_ada_jax.policy import experts, invariant, lora, transformer
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.blocked_attention import Shared
from reinforce_ada_jax.policy.transformer import Execution, Params, RowAttend, causal_attend


def scores_in_update(config: Config) -> bool:
    """Returns True with one update an iteration, which then computes the old policy's log-probabilities itself."""
    return config.collection.prompts_per_iteration == config.learning.prompts_per_update


def response_logprobs(
    architecture: Architecture,
    params: Params,
    batch: Batch,
    head: HeadConfig,
    *,
    execution: Execution,
    attend: RowAttend = causal_attend,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"], Float[Array, "L E"] | None]:
    """Computes log-probabilities of response tokens, entropies of their distributions, and loads of experts.

    Beyond the responses the first two are arbitrary. The head is applied only to the R of T hidden states that predict
    a response token. In rows that are cut over `context` it is applied to all of them, so that none is gathered. The
    load is the number of tokens of each expert, without padding; None in a model without experts.
    """
    parts = 1 if head.mesh is None else head.mesh.shape["context"]
    cut, join = (functools.partial(function, count=parts) for function in (mesh_lib.cut_rows, mesh_lib.join_rows))
    model, routing = transformer.merge(architecture, params), experts.FREE
    if batch.shared_ids is not None:  # rows are whole (`platform.row_layout`)
        attend = functools.partial(attend, shared=Shared(batch.shared_ids, batch.positions))
    if architecture.num_experts:
        replayed = None if batch.experts is None else cut(batch.experts)
        routing = experts.Routing(replayed, counted=cut(batch.segment_ids) < batch.max_segments)
    hidden, load = transformer.hidden_states_and_load(
        model, cut(batch.tokens), positions=cut(batch.positions),
        segment_ids=cut(batch.segment_ids) if batch.max_segments > 1 else None,
        attend=attend, execution=execution, routing=routing,
    )  # fmt: skip
    if parts > 1:
        assert head.mesh is not None
        of_tokens = target_logprobs(head, model, hidden, cut(jnp.roll(batch.tokens, -1, axis=1)))
        by_row = mesh_lib.sharding(head.mesh, ("rows", None))
        joined = (jax.lax.with_sharding_constraint(join(x), by_row) for x in of_tokens)
        logprobs, entropy = (jnp.take_along_axis(x, batch.response_positions - 1, axis=1) for x in joined)
        return logprobs, entropy, load
    targets = jnp.take_along_axis(batch.tokens, batch.response_positions, axis=1)
    # A token is predicted one position earlier.
    predicting = execution.constrain(jnp.take_along_axis(hidden, (batch.response_positions - 1)[..., None], axis=1))
    return *target_logprobs(head, model, predicting, targets), load


def loss_config(config: Config) -> LossConfig:
    """Returns the loss that the configuration describes.

    Where responses may have been drawn with earlier weights or in int8, the importance weight always has a cap. If none
    is configured, the cap is 2. Then only responses of earlier weights are weighed, or all of them in int8. With a
    configured cap all are weighed.
    """
    names = {field.name for field in dataclasses.fields(LossConfig)} - {"loss", "row_tokens"}
    loss = LossConfig(
        **{name: getattr(config.learning, name) for name in names},
        loss=token_losses.load(config.learning.loss),
        row_tokens=config.sampling.max_response_tokens,
    )
    is_off_policy = config.collection.overlap != "none" or config.draws_ahead or config.draws_in_int8
    if loss.truncated_is_cap is None and is_off_policy:
        return dataclasses.replace(loss, truncated_is_cap=2.0)
    return loss


class Learner:
    """The compiled programs of one run: `init`, `score`, `update`."""

    def __init__(self, architecture: Architecture, config: Config, mesh: Mesh):
        """Makes the programs; nothing is compiled."""
        self.architecture, self.mesh = architecture, mesh
        platform = mesh.devices.flat[0].platform
        self.layout = platform_lib.row_layout(mesh, config, architecture)
        self.micro_rows = platform_lib.micro_rows_on(mesh, config, architecture)
        self._is_invariant = config.model.numerics == "invariant"
        if self._is_invariant:
            invariant.check_platform(platform)
        self.lora = lora.make(config.lora)
        dtype = jnp.dtype(config.model.compute_dtype)
        self.platform = platform_lib.of_mesh(mesh, config.learning, architecture, dtype)
        platform_lib.check_parts(self.platform, mesh, config)
        self._loss_config = loss_config(config)
        # True if responses whose advantage is 0 have a gradient, too.
        self.loss_needs_all = token_losses.has_slope_without_advantage(self._loss_config.loss)
        self._weighs_all = config.learning.truncated_is_cap is not None or config.draws_in_int8
        self._optimizer = make_optimizer(config.learning, config.num_updates)
        self._temperature = config.sampling.temperature
        self._logprobs = functools.partial(
            response_logprobs,
            architecture,
            head=head_config(
                self.platform, mesh,
                tied=architecture.tied_embedding, temperature=self._temperature, frozen=self.lora is not None,
            ),
            **row_settings(self.platform, mesh, dtype),
        )  # fmt: skip
        if self.lora is None:
            self.param_shardings = transformer.param_shardings(architecture, mesh)
        else:
            self.param_shardings = lora.shardings(architecture, self.lora, mesh)
        self.gathers_once = self.lora is None and layer_gather.is_chosen(architecture, mesh, config)
        self._gathered_layers = functools.partial(layer_gather.gathered, architecture, mesh, dtype=dtype)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        gathered_shardings = layer_gather.shardings(architecture, mesh) if self.gathers_once else None
        self.update = UpdatePrograms(
            self._loss,
            self._optimizer,
            mesh,
            self.param_shardings,
            gathered=None if gathered_shardings is None else (self._gathered_layers, gathered_shardings),
            expert_shape=(architecture.num_layers, architecture.num_experts) if architecture.num_experts else None,
            gap_limits=gap_lib.gap_limits(config),
            micro_batches_per_program=platform_lib.update_program(mesh, config, architecture),
        )
        self.shardings = self.update.shardings
        # Scoring takes a third of the time of an update.
        self._scores_per_program = 3 * self.update.micro_batches_per_program
        by_row = mesh_lib.sharding(mesh, (None, "batch", None))
        self._score_all = jax.jit(self._score, out_shardings=by_row)
        begun_shardings = gathered_shardings, by_row, self._replicated
        self.scoring = Chain(self._scores_begun, self._scores_added, begun_shardings, self._scores_per_program)

    def init(self, params: Params) -> LearnerState:
        """Returns the state before the first update; it holds the arrays of `params` themselves."""
        optimizer = jax.jit(self._optimizer.init, out_shardings=self.shardings(params).optimizer)(params)
        # A program makes this: `compile_check` traces it for devices that do not exist, on which nothing can be placed.
        updates = jax.jit(lambda: jnp.int32(0), out_shardings=self._replicated)()
        return LearnerState(params=params, optimizer=optimizer, updates=updates)

    def policy(self, params: Params, base: Params | None) -> Params:
        """Returns the weights to score with and to decode from: `params`, over the frozen base if they are adapters."""
        if self.lora is None:
            return params
        assert base is not None
        return lora.adapted(base, params, self.lora)

    def put(self, batch: Batch) -> Batch:
        """Places the batch on the devices, cut into micro-batches of consecutive rows, split over `data` and `fsdp`.

        Along `context` the arrays are whole: they are numbers of tokens, small beside activations.

        Raises ValueError for a number of rows that is no multiple of `micro_rows`, or 0.
        """
        rows = len(batch.tokens)
        if rows == 0 or rows % self.micro_rows:
            raise ValueError(
                f"a batch of {rows} rows cannot be cut into micro-batches of {self.micro_rows}: pad it with empty rows "
                "to a multiple of that (make_batch's num_rows)."
            )

        def put(x):
            x = x.reshape(-1, self.micro_rows, *x.shape[1:])
            return mesh_lib.place(x, mesh_lib.sharding(self.mesh, (None, "batch", *[None] * (x.ndim - 2))))

        return jax.tree.map(put, batch)

    def _exact_logprobs(self, params: Params, micro: Batch) -> Float[Array, "B R"]:
        """Returns the sampler's log-probabilities of a micro-batch, bit for bit; adapters are merged, as there."""
        return invariant_logprobs(self.architecture, lora.merged(params), micro, self._temperature)

    def score(self, params: Params, batch: Batch, between: Callable[[], None] | None = None) -> Float[Array, "M B R"]:
        """Returns the learner's own log-probabilities of the sampled tokens; 0 beyond the responses.

        The batch is from `put`. `between` is as for `Chain.sums`, where there are several programs.
        """
        if self.scoring.num_programs(batch) == 1:
            return self._score_all(params, batch)
        return self.scoring.sums(params, batch, between=between)

    def score_programs(self, params: Params, batch: Batch) -> dict[str, Lower]:
        """Returns the programs of `score`, lowered on demand for abstract arguments; "score" has the loop."""
        if self.scoring.num_programs(batch) == 1:
            return {"score": lambda: self._score_all.lower(params, batch)}
        return self.scoring.programs(("begin scores", "score"), params, batch)[0]

    def _scores_begun(self, params: Params, batch: Batch) -> tuple[Params | None, Float[Array, "M B R"], Any]:
        """Returns the copy that micro-batches share, no scores, and the number of micro-batches with a token."""
        layers = self._gathered_layers(params) if self.gathers_once else None
        return layers, jnp.zeros(batch.behaviour_logprobs.shape, jnp.float32), num_live(batch)

    def _scores_added(
        self,
        scored: Float[Array, "M B R"],
        params: Params,
        layers: Params | None,
        batch: Batch,
        first: Int[Array, ""] | None = None,
    ) -> Float[Array, "M B R"]:
        """Returns the scores after one program, which adds those from micro-batch `first` on; None: all."""

        def loop(scored: Any, params: Params, batch: Batch, bounds: tuple[Any, Int[Array, ""]]) -> Any:
            def one(index: Int[Array, ""], scored: Float[Array, "M B R"]) -> Float[Array, "M B R"]:
                micro = micro_batch(batch, index)
                exact = self._is_invariant
                logprobs = self._exact_logprobs(params, micro) if exact else self._logprobs(params, micro)[0]
                logprobs = jnp.where(micro.response_mask, logprobs, 0.0)
                return jax.lax.dynamic_update_index_in_dim(scored, logprobs, index, axis=0)

            return jax.lax.fori_loop(*bounds, one, scored)

        whole, by_row = PartitionSpec(), PartitionSpec(None, mesh_lib.SLICE)
        scores = mesh_lib.on_each_slice(loop, self.mesh, in_specs=(by_row, whole, by_row, whole), out_specs=by_row)
        params = params if layers is None else params | layers
        return scores(scored, params, batch, loop_bounds(batch, first, self._scores_per_program))

    def _score(self, params: Params, batch: Batch) -> Float[Array, "M B R"]:
        layers, zeros, _ = self._scores_begun(params, batch)
        return self._scores_added(zeros, params, layers, batch)

    def _loss(
        self,
        params: Params,
        base: Params | None,
        micro: Batch,
        metric_weights: Float[Array, "B R"],
        counts: loss_lib.Denominators,
        policy_version: Version | None,
    ):
        """Computes (loss, (means, gap)) of a micro-batch."""
        policy = self.policy(params, base)
        logprobs, entropy, load = self._logprobs(policy, micro)
        if self._is_invariant:
            # The sum has the value of `exact` and the slope of `logprobs`: the added difference is exactly 0.
            exact = self._exact_logprobs(jax.lax.stop_gradient(policy), micro)
            logprobs = jax.lax.stop_gradient(exact) + (logprobs - jax.lax.stop_gradient(logprobs))
        is_fresh = micro.response_mask if policy_version is None else micro.policy_version == policy_version
        # The old policy is the policy that is updated: the ratio is 1, and its slope is that of logprobs.
        old_logprobs = logprobs if micro.old_logprobs is None else micro.old_logprobs
        behaviour_logprobs = micro.behaviour_logprobs
        if self._loss_config.truncated_is_cap is not None and not self._weighs_all:
            behaviour_logprobs = jnp.where(is_fresh, old_logprobs, behaviour_logprobs)  # a weight of exactly 1
        sampled = loss_lib.SampledTokens(
            old_logprobs=old_logprobs, advantages=micro.advantages, mask=micro.response_mask,
            behaviour_logprobs=behaviour_logprobs, reference_logprobs=micro.reference_logprobs,
            regularization=micro.regularization, segment_one_hot=micro.segment_one_hot(),
        )  # fmt: skip
        loss, means = loss_lib.policy_loss(
            self._loss_config, logprobs, entropy, sampled, counts=counts, metric_weights=metric_weights
        )
        gap = None
        if micro.old_logprobs is None:
            gap = gap_lib.logprob_gap(logprobs, micro.behaviour_logprobs, micro.response_mask, is_fresh)
        return loss, (means | {"loss": loss} | expert_sums(load), gap)
