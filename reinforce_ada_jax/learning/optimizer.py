"""AdamW with a warm-up and a bound on the gradient's global norm."""

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.policy.transformer import Params


def warmup_schedule(learning_rate: float, warmup_updates: int) -> optax.Schedule:
    """learning_rate * min(1, (update + 1) / warmup_updates) for update = 0, 1, ...: the first one already moves."""

    def schedule(update):
        return learning_rate * jax.numpy.minimum(1.0, (update + 1) / max(1, warmup_updates))

    return schedule


def with_standard_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `optimizer` for callers with strict promotion of dtypes: Adam raises a float to an integer count."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def make_optimizer(learning: LearningConfig, first_moment_dtype: str | None = None) -> optax.GradientTransformation:
    """The optimiser that the `learning` section describes; `first_moment_dtype` None: that of the weights."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(learning.clip_norm),
        optax.adamw(
            warmup_schedule(learning.learning_rate, learning.warmup_updates),
            b1=learning.b1,
            b2=learning.b2,
            eps=learning.epsilon,
            weight_decay=learning.weight_decay,
            mu_dtype=first_moment_dtype,
        ),
    )
    return with_standard_promotion(optimizer)


def state_shardings(optimizer: optax.GradientTransformation, params: Params, shardings: Params, mesh: Mesh):
    """The sharding of the optimiser's state: moments as their weights, counts replicated."""
    shapes = jax.eval_shape(optimizer.init, params)
    replicated = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, shapes, shardings, transform_non_params=lambda _: replicated
    )
