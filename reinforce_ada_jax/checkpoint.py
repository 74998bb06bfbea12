"""The whole state of a run, saved and restored together by Orbax.

One checkpoint a saved iteration: the learner's state (weights, moments, update count) as arrays, and a JSON record with
everything else that the next iteration depends on (the data cursor, the seed). Where adapters are trained, the
weights are theirs alone, and the record names the base. A checkpoint that was not finished when the process died is
never offered for a resume.
"""

import functools
import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from reinforce_ada_jax.learning.learner import Learner, LearnerState
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.transformer import init


def holds_checkpoint(workdir: pathlib.Path) -> bool:
    """Whether there may be something to resume from, without opening anything."""
    return any((workdir / "checkpoints").glob("[0-9]*"))


def fingerprint(workdir: pathlib.Path, iteration: int) -> str:
    """A hash that tells one saved checkpoint from every other, of names and sizes alone: Orbax names its files anew
    whenever it writes them."""
    folder = workdir / "checkpoints" / str(iteration) / "learner"
    files = sorted((str(file.relative_to(folder)), file.stat().st_size) for file in folder.rglob("*") if file.is_file())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def abstract_state(config: ConfigDict, learner: Learner) -> tuple[LearnerState, LearnerState]:
    """Shapes and shardings of the learner's state: what a checkpoint is restored into."""
    dtype = jnp.dtype(config.model.parameter_dtype)
    make = functools.partial(init, learner.architecture)
    if learner.lora is not None:
        make = functools.partial(lora.init, learner.architecture, learner.lora)
    params = jax.eval_shape(lambda key: make(key, dtype=dtype), jax.random.key(0))
    return jax.eval_shape(learner.init, params), learner.shardings(params)


class Checkpoints:
    """The `checkpoints` folder of a work directory."""

    def __init__(self, workdir: pathlib.Path, *, keep: int):
        self.folder = workdir.absolute() / "checkpoints"
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False),
            item_names=("learner", "run"),
        )

    def latest(self) -> int | None:
        """The newest complete iteration, or None."""
        return self._manager.latest_step()

    def iterations(self) -> list[int]:
        """All complete iterations, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, iteration: int, learner: LearnerState, run: dict[str, Any]) -> None:
        """Writes iteration `iteration` and waits until it is complete. A second save of it does nothing."""
        if iteration in self._manager.all_steps():
            return
        items = ocp.args.Composite(learner=ocp.args.StandardSave(learner), run=ocp.args.JsonSave(run))
        self._manager.save(iteration, args=items)
        self._manager.wait_until_finished()

    def restore(
        self, iteration: int, shapes: LearnerState, shardings: LearnerState
    ) -> tuple[LearnerState, dict[str, Any]]:
        """The state of an iteration, every array born where `shardings` says."""
        target = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
        )
        items = ocp.args.Composite(learner=ocp.args.StandardRestore(target), run=ocp.args.JsonRestore())
        restored = self._manager.restore(iteration, args=items)
        return restored.learner, restored.run

    def close(self) -> None:
        """Releases Orbax's threads."""
        self._manager.close()
