"""AdamW with a warm-up and a bound on the gradient's global norm."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.policy.transformer import Params


class AdamParams(NamedTuple):
    """Parameters of one step of AdamW, as PyTorch defines it: floats, or scalars inside a program."""

    learning_rate: Any  # factor of the step
    b1: Any  # decay of the first moment
    b2: Any  # decay of the second moment
    epsilon: Any  # added to the root of the second moment
    weight_decay: Any = 0.0  # decoupled; times the learning rate
    clip_norm: Any = 0.0  # bound of the gradient's global norm; 0: none


def warmup_schedule(learning_rate: float, warmup_updates: int) -> optax.Schedule:
    """Returns learning_rate * min(1, (update + 1) / warmup_updates) for update = 0, 1, ...: never 0."""

    def schedule(update):
        return learning_rate * jax.numpy.minimum(1.0, (update + 1) / max(1, warmup_updates))

    return schedule


def make_schedule(learning: LearningConfig, num_updates: int) -> optax.Schedule:
    """Returns the learning rate of each update: that of `warmup_schedule`, which `learning.schedule` may let fall to 0.

    It is then multiplied by 1 - x ("linear") or (1 + cos(pi x)) / 2 ("cosine"). x rises from 0 at the end of the
    warm-up to 1 at update `num_updates`, which is behind the last one.
    """
    warmup_updates = learning.warmup_updates
    warmup = warmup_schedule(learning.learning_rate, warmup_updates)
    if learning.schedule not in ("linear", "cosine"):
        return warmup

    def schedule(update):
        done = jax.numpy.clip((update - warmup_updates) / max(1, num_updates - warmup_updates), 0.0, 1.0)
        left = 1 - done if learning.schedule == "linear" else (1 + jax.numpy.cos(jax.numpy.pi * done)) / 2
        return warmup(update) * left

    return schedule


def with_standard_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `optimizer` for callers with strict promotion of dtypes: Adam raises a float to an integer count."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def clip(clip_norm: Any) -> optax.GradientTransformation:
    """Returns a bound of the gradient's global norm.

    Optax's own divides by the norm, and XLA stores what was divided: a second gradient. A product with a factor is not
    stored.
    """

    def bounded(gradients: optax.Updates, _: optax.Params | None = None) -> optax.Updates:
        factor = jax.numpy.minimum(1.0, clip_norm / optax.tree.norm(gradients))
        return jax.tree.map(lambda x: x * factor, gradients)

    return optax.stateless(bounded)


def adamw(settings: LearningConfig | AdamParams, learning_rate: Any, clip_norm: Any) -> optax.GradientTransformation:
    """Returns AdamW on gradients with a bounded global norm; `settings` give betas, epsilon and weight decay.

    Numbers may be arrays of a program: the state has the same structure for all of them.
    """
    return with_standard_promotion(optax.chain(
        clip(clip_norm),
        optax.adamw(
            learning_rate, b1=settings.b1, b2=settings.b2, eps=settings.epsilon, weight_decay=settings.weight_decay,
        ),
    ))  # fmt: skip


def make_optimizer(learning: LearningConfig, num_updates: int) -> optax.GradientTransformation:
    """Returns the optimiser that the `learning` section describes, for a run of `num_updates` updates."""
    return adamw(learning, make_schedule(learning, num_updates), learning.clip_norm)


def state_shardings(optimizer: optax.GradientTransformation, params: Params, shardings: Params, mesh: Mesh):
    """Returns the sharding of the optimiser's state: moments as their weights, counts replicated."""
    shapes = jax.eval_shape(optimizer.init, params)
    replicated = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, shapes, shardings, transform_non_params=lambda _: replicated
    )
