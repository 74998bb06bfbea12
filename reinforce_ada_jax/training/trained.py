"""Weights that a run trained, read from its checkpoints by commands other than `train`."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax.numpy as jnp

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.policy import adapter_files, huggingface, lora
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.training.checkpoint import Checkpoints, abstract_state, holds_checkpoint
from reinforce_ada_jax.training.components import Components


@contextlib.contextmanager
def _opened(workdir: pathlib.Path, config: Config) -> Iterator[Checkpoints]:
    if not holds_checkpoint(workdir):
        raise ValueError(f"{workdir} holds no checkpoint: train first, or name another --workdir.")
    checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def newest_iteration(workdir: pathlib.Path, config: Config) -> int:
    """Returns the iteration of the newest finished checkpoint; ValueError if there is none."""
    with _opened(workdir, config) as checkpoints:
        newest = checkpoints.latest()
    if newest is None:
        raise ValueError(f"{workdir} holds no finished checkpoint: train on, or name another --workdir.")
    return newest


def read_trained(
    workdir: pathlib.Path, config: Config, components: Components, iteration: int | None
) -> tuple[int, Params]:
    """Returns (iteration, trained weights or adapters) of a checkpoint, by default the newest.

    Raises:
      ValueError: the work directory has no such checkpoint, or the base of the adapters changed.
    """
    with _opened(workdir, config) as checkpoints:
        available = checkpoints.iterations()
        iteration = checkpoints.latest() if iteration is None else iteration
        if iteration is None or iteration not in available:
            raise ValueError(
                f"{workdir} holds no finished checkpoint of iteration {iteration}; there are "
                f"{', '.join(map(str, available)) or 'none'}."
            )
        learner = Learner(components.architecture, config, components.mesh)
        state, record = checkpoints.restore(iteration, *abstract_state(config, learner))
        if learner.lora is not None:
            adapter_files.check_base(components.folder, record["base"])
        return iteration, state.params


def read_policy(
    workdir: pathlib.Path, config: Config, components: Components, iteration: int | None, base_dtype: str
) -> tuple[int, Params]:
    """Returns (iteration, weights of the policy): as `read_trained`, adapters over their base, read in `base_dtype`."""
    iteration, params = read_trained(workdir, config, components, iteration)
    adapters = lora.make(config.lora.rank, config.lora.alpha, config.lora.projections)
    if adapters is None:
        return iteration, params
    base = huggingface.load(components.folder, components.mesh, jnp.dtype(base_dtype))[1]
    return iteration, lora.adapted(base, params, adapters)
