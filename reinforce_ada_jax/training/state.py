"""State of a run between two iterations: everything that the next iteration depends on.

A checkpoint holds exactly a `RunState`: Orbax saves the arrays of `learner` and `sampler`, and `to_record` makes a JSON
record of the rest. What a run reads again at each start, and must find unchanged, is its identity (training/resume.py).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from reinforce_ada_jax.collection.averages import Averages
from reinforce_ada_jax.collection.serialization import partial_from_text, partial_to_text
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed.compilation import with_shardings
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.transformer import Params, init, param_shardings
from reinforce_ada_jax.training.save_times import num_bytes
from reinforce_ada_jax.types import PartialRollouts


@dataclasses.dataclass(frozen=True, eq=False)
class RunState:
    """State after `iteration` finished iterations."""

    learner: LearnerState  # weights, or adapters, moments and update count, on the devices
    selection: Mapping[str, Any]  # state of the choice of prompts, as JSON
    iteration: int = 0  # number of finished iterations
    skipped_in_a_row: int = 0  # updates that were not finite, since the last one that was made
    partial_rollouts: Mapping[str, PartialRollouts] = dataclasses.field(default_factory=dict)  # of the next prompts
    estimator: Mapping[str, Any] | None = None  # state of the estimator of pass rates, as JSON; None without one
    pending: Mapping[str, float] | None = None  # metrics not written yet: an evaluation is missing
    evaluation: float | None = None  # mean avg@k of these weights over the benchmarks; None if they were not evaluated
    sampler_weights: Params | None = None  # older weights, to draw the next iteration from; None: the current ones
    averages: Averages = dataclasses.field(default_factory=Averages)  # decayed averages over the iterations so far

    @property
    def donated(self) -> bool:
        """True once an update has taken the arrays: this state can't be saved any more."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.learner))

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, in all processes together."""
        return num_bytes((self.learner, self.sampler_weights))


# Fields that are JSON already.
_PLAIN = ("selection", "skipped_in_a_row", "pending", "estimator")


def to_record(state: RunState) -> dict[str, Any]:
    """Returns the state as JSON, without arrays, and without what `Checkpoints.save` adds (iteration, evaluation)."""
    plain = {name: getattr(state, name) for name in _PLAIN}
    others = {"partial_rollouts": partial_to_text(state.partial_rollouts), "averages": dict(state.averages.sums)}
    return plain | others


def from_record(learner: LearnerState, record: Mapping[str, Any], sampler: Params | None = None) -> RunState:
    """Returns the state that a checkpoint's arrays and record describe."""
    return RunState(
        learner, **{name: record[name] for name in (*_PLAIN, "iteration", "evaluation")}, sampler_weights=sampler,
        partial_rollouts=partial_from_text(record["partial_rollouts"]),
        averages=Averages({name: (total, count) for name, (total, count) in record["averages"].items()}),
    )  # fmt: skip


def abstract_state(learner: Learner) -> LearnerState:
    """Returns shapes, dtypes and shardings of the learner's state, to restore a checkpoint into."""
    make = functools.partial(init, learner.architecture)
    if learner.lora is not None:
        make = functools.partial(lora.init, learner.architecture, learner.lora)
    params = jax.eval_shape(lambda key: make(key, dtype=jnp.float32), jax.random.key(0))
    return with_shardings(jax.eval_shape(learner.init, params), learner.shardings(params))


def abstract_base(config: Config, learner: Learner) -> Params | None:
    """Returns the frozen weights under adapters without arrays, as `components.load_params` places them; None: none."""
    if learner.lora is None:
        return None
    make = functools.partial(init, learner.architecture, dtype=jnp.dtype(config.model.compute_dtype))
    return with_shardings(jax.eval_shape(make, jax.random.key(0)), param_shardings(learner.architecture, learner.mesh))
