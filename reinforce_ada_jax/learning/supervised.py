"""The learner of supervised training: the programs of `Learner` with the cross-entropy of responses as the loss."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.update import MEANS, Version, expert_sums
from reinforce_ada_jax.policy.transformer import Params


class SupervisedLearner(Learner):
    """A `Learner` whose loss is -log p of the response tokens, each times its `Batch.advantages`, aggregated.

    Batches have `old_logprobs` of any value: nothing is compared with a sampler.
    """

    def _loss(
        self,
        params: Params,
        base: Params | None,
        micro: Batch,
        metric_weights: Float[Array, "B R"],
        counts: loss_lib.Denominators,
        policy_version: Version | None,
    ):
        """Computes (loss, (means, None)) of a micro-batch; the metrics of ratios are 0."""
        del metric_weights, policy_version
        logprobs, entropy, load = self._logprobs(self.policy(params, base), micro)
        mask, segments = micro.response_mask, micro.segment_one_hot()

        def mean(values: loss_lib.Tokens, aggregation: str) -> Float[Array, ""]:
            row_tokens = self._loss_config.row_tokens
            return loss_lib.aggregate(
                values, mask, aggregation, counts, row_tokens=row_tokens, segment_one_hot=segments
            )

        loss = mean(-micro.advantages * jnp.where(mask, logprobs, 0.0), self._loss_config.aggregation)
        means = dict.fromkeys(MEANS, jnp.zeros_like(loss)) | {"entropy": mean(entropy, "token-mean"), "loss": loss}
        return loss, (jax.lax.stop_gradient(means) | expert_sums(load), None)
