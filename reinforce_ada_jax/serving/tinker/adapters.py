"""Adapters in the work directory, as folders that `peft` reads, with the optimiser's state; and adapters to decode."""

import collections
import pathlib
import shutil
from collections.abc import Callable, Collection
from typing import cast

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from reinforce_ada_jax.files import durable
from reinforce_ada_jax.learning.adapter_learner import AdapterLearner
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy import adapter_files, lora
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.transformer import Params, nest
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving.sampler import NO_ADAPTER, Weights

OPTIMIZER = "optimizer.safetensors"


def save(
    folder: pathlib.Path, learner: AdapterLearner, chosen: Lora, state: LearnerState, base: pathlib.Path,
    *, optimizer: bool,
) -> None:  # fmt: skip
    """Writes adapters to `folder`, and with `optimizer` its state; they replace earlier files.

    The earlier files stay until the new ones are complete; `recover` restores them after a kill in between.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover(folder)
    partial, aside = folder.with_name(f".{folder.name}.partial"), _aside(folder)
    shutil.rmtree(partial, ignore_errors=True)  # of a request that a kill broke off
    try:
        adapter_files.save(partial, learner.architecture, state.params, chosen, base=base)
        if optimizer:
            leaves = jax.device_get(jax.tree.leaves((state.optimizer, state.updates)))
            arrays = {str(number): np.asarray(leaf) for number, leaf in enumerate(leaves)}
            save_file(arrays, partial / OPTIMIZER)
        for path in (*partial.iterdir(), partial):
            durable.sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs this space for later writes
        raise
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    durable.sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f".{folder.name}.aside")


def recover(folder: pathlib.Path) -> None:
    """Restores adapters that `save` has moved aside, if it was killed before the new ones were in their place."""
    if folder.exists():
        shutil.rmtree(_aside(folder), ignore_errors=True)
    elif _aside(folder).exists():
        _aside(folder).rename(folder)


def load_params(folder: pathlib.Path, learner: AdapterLearner) -> tuple[Lora, Params]:
    """Returns rank, scale and targets of a folder's adapters (`Lora`), and their arrays on the devices."""
    chosen, matrices = adapter_files.load(folder, learner.architecture)
    layout = lora.shardings(learner.architecture, chosen, learner.mesh)
    return chosen, cast(Params, jax.device_put(nest(matrices), layout))


def load(folder: pathlib.Path, learner: AdapterLearner, *, optimizer: bool) -> tuple[Lora, LearnerState]:
    """Returns the `Lora` and the state of a folder's adapters; the optimiser is the stored one or, by default, new."""
    chosen, params = load_params(folder, learner)
    state = learner.with_new_optimizer(params, chosen)
    if not optimizer:
        return chosen, state
    if not (folder / OPTIMIZER).exists():
        raise ValueError(
            "this checkpoint has weights only: load it without the optimizer, or a path that save_state returned."
        )
    arrays = load_file(folder / OPTIMIZER)
    leaves, structure = jax.tree.flatten((state.optimizer, state.updates))
    stored = [jax.device_put(arrays[str(number)], leaf.sharding) for number, leaf in enumerate(leaves)]
    moments, updates = jax.tree.unflatten(structure, stored)
    return chosen, LearnerState(params=params, optimizer=moments, updates=updates)


class AdapterBank(Weights):
    """Weights of a base, and at most `num_adapters` adapters; `size` is the rank and the targets of the largest."""

    load: Callable[[str], tuple[Lora, Params]]  # name -> `Lora` and arrays of adapters; set before the first use

    def __init__(self, engine: Engine, base: Params, size: Lora, num_adapters: int):
        weights = engine.decode_weights(base)
        super().__init__(lora.bank(weights, engine.architecture, size, num_adapters, engine.dtype))
        self._places: collections.OrderedDict[str, int] = collections.OrderedDict()  # last used at the end
        self._free = list(range(num_adapters))[::-1]

    def use(self, adapter: str, in_use: Collection[str]) -> bool:
        if not adapter:
            return True
        if adapter in self._places:
            self._places.move_to_end(adapter)
            return True
        if not self._free:
            unused = next((each for each in self._places if each not in in_use), None)
            if unused is None:
                return False
            self._free.append(self._places.pop(unused))
        chosen, params = self.load(adapter)
        place = self._free[-1]  # still free where the adapter does not fit
        self.params = lora.put_into_bank(self.params, params, chosen, place)
        self._places[adapter] = self._free.pop()
        return True

    def place(self, adapter: str) -> int:
        return self._places.get(adapter, NO_ADAPTER)
