"""Adapters and optimiser states in the work directory: folders that `peft` reads, with the optimiser beside them."""

import os
import pathlib
import shutil
from typing import cast

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from reinforce_ada_jax.files import durable
from reinforce_ada_jax.learning.adapter_learner import AdapterLearner, AdapterState
from reinforce_ada_jax.policy import adapter_files, lora
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.transformer import Params, nest

OPTIMIZER = "optimizer.safetensors"


def save(
    folder: pathlib.Path, learner: AdapterLearner, chosen: Lora, state: AdapterState, base: pathlib.Path,
    *, optimizer: bool,
) -> None:  # fmt: skip
    """Writes adapters to `folder`, in place of what is there, and the optimiser's state if wanted."""
    shutil.rmtree(folder, ignore_errors=True)  # of a request that a kill broke off
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    adapter_files.save(partial, learner.architecture, state.params, chosen, base=base)
    if optimizer:
        leaves = jax.device_get(jax.tree.leaves(state.optimizer))
        arrays = {str(number): np.asarray(leaf) for number, leaf in enumerate(leaves)}
        save_file(arrays, partial / OPTIMIZER)
    for file in partial.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    durable.sync_names(partial)
    partial.rename(folder)
    durable.sync_names(folder.parent)


def load_params(folder: pathlib.Path, learner: AdapterLearner) -> tuple[Lora, Params]:
    """Returns what the adapters of a folder are, and their arrays on the devices."""
    chosen, matrices = adapter_files.load(folder, learner.architecture)
    layout = lora.shardings(learner.architecture, chosen, learner.mesh)
    return chosen, cast(Params, jax.device_put(nest(matrices), layout))


def load(folder: pathlib.Path, learner: AdapterLearner, *, optimizer: bool) -> tuple[Lora, AdapterState]:
    """Returns what the adapters of a folder are, and their state; with a new optimiser unless the stored is wanted.

    Raises:
      ValueError: the folder has no state of an optimiser, and it is wanted.
    """
    chosen, params = load_params(folder, learner)
    state = learner.with_new_optimizer(params, chosen)
    if not optimizer:
        return chosen, state
    if not (folder / OPTIMIZER).exists():
        raise ValueError(
            "this checkpoint has weights only: load it without the optimizer, or a path that save_state returned."
        )
    arrays = load_file(folder / OPTIMIZER)
    leaves, structure = jax.tree.flatten(state.optimizer)
    stored = [jax.device_put(arrays[str(number)], leaf.sharding) for number, leaf in enumerate(leaves)]
    return chosen, AdapterState(params=params, optimizer=jax.tree.unflatten(structure, stored))
