"""AdamW with a warm-up and a bound on the gradient's global norm."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.policy.transformer import Params


class AdamParams(NamedTuple):
    """Parameters of one step of AdamW, as PyTorch defines it: floats, or scalars inside a program.

    Attributes:
      learning_rate: factor of the step.
      b1: decay of the first moment.
      b2: decay of the second moment.
      epsilon: added to the root of the second moment.
      weight_decay: decoupled; times the learning rate.
      clip_norm: bound of the gradient's global norm; 0: none.
    """

    learning_rate: Any
    b1: Any
    b2: Any
    epsilon: Any
    weight_decay: Any = 0.0
    clip_norm: Any = 0.0


def warmup_schedule(learning_rate: float, warmup_updates: int) -> optax.Schedule:
    """learning_rate * min(1, (update + 1) / warmup_updates) for update = 0, 1, ...: the first one already moves."""

    def schedule(update):
        return learning_rate * jax.numpy.minimum(1.0, (update + 1) / max(1, warmup_updates))

    return schedule


def cosine_schedule(learning_rate: float, warmup_updates: int, updates: int) -> optax.Schedule:
    """The warm-up of `warmup_schedule`, then learning_rate * (1 + cos(pi x)) / 2, with x from 0 to 1 at `updates`."""
    warmup = warmup_schedule(learning_rate, warmup_updates)

    def schedule(update):
        done = jax.numpy.clip((update - warmup_updates) / max(1, updates - warmup_updates), 0.0, 1.0)
        return warmup(update) * (1 + jax.numpy.cos(jax.numpy.pi * done)) / 2

    return schedule


def make_schedule(learning: LearningConfig, decay_updates: int = 0) -> optax.Schedule:
    """The learning rate of each update: constant after the warm-up, or a cosine to 0 at `decay_updates`, if not 0."""
    if decay_updates:
        return cosine_schedule(learning.learning_rate, learning.warmup_updates, decay_updates)
    return warmup_schedule(learning.learning_rate, learning.warmup_updates)


def with_standard_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `optimizer` for callers with strict promotion of dtypes: Adam raises a float to an integer count."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def adamw(settings: LearningConfig | AdamParams, learning_rate: Any, clip_norm: Any) -> optax.GradientTransformation:
    """AdamW on gradients whose global norm is bounded; of the settings it has betas, epsilon and weight decay.

    Numbers may be arrays of a program: the state has the same structure for all of them.
    """
    return with_standard_promotion(optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            learning_rate, b1=settings.b1, b2=settings.b2, eps=settings.epsilon, weight_decay=settings.weight_decay,
        ),
    ))  # fmt: skip


def make_optimizer(learning: LearningConfig, decay_updates: int = 0) -> optax.GradientTransformation:
    """The optimiser that the `learning` section describes; `decay_updates` is that of `make_schedule`."""
    return adamw(learning, make_schedule(learning, decay_updates), learning.clip_norm)


def state_shardings(optimizer: optax.GradientTransformation, params: Params, shardings: Params, mesh: Mesh):
    """The sharding of the optimiser's state: moments as their weights, counts replicated."""
    shapes = jax.eval_shape(optimizer.init, params)
    replicated = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, shapes, shardings, transform_non_params=lambda _: replicated
    )
