"""A run's weights as a Hugging Face folder, loadable by `transformers` and by this package.

python -m reinforce_ada_jax.export --workdir=DIR [--iteration=K] --output=HF_DIR
python -m reinforce_ada_jax.export --workdir=DIR [--iteration=K] --adapter --output=PEFT_DIR

Adapters are merged into their base, or, with --adapter, written alone, as `peft` reads them.
"""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config, MeshConfig
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.policy import adapter_files, huggingface, lora
from reinforce_ada_jax.policy.transformer import Params, param_shardings
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.checkpoint import Checkpoints, abstract_state, holds_checkpoint
from reinforce_ada_jax.training.components import Components


def read_trained(
    workdir: pathlib.Path, config: Config, components: Components, iteration: int | None
) -> tuple[int, Params]:
    """(iteration, what was trained: weights, or adapters) of a checkpoint, the newest by default.

    Raises:
      ValueError: the work directory has no such checkpoint, or the adapters' base isn't where it was.
    """
    if not holds_checkpoint(workdir):
        raise ValueError(f"{workdir} holds no checkpoint: train first, or name another --workdir.")
    checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
    try:
        available = checkpoints.iterations()
        iteration = checkpoints.latest() if iteration is None else iteration
        if iteration not in available:
            raise ValueError(
                f"{workdir} holds no finished checkpoint of iteration {iteration}; there are "
                f"{', '.join(map(str, available)) or 'none'}."
            )
        learner = Learner(components.architecture, config, components.mesh)
        state, record = checkpoints.restore(iteration, *abstract_state(config, learner))
        if learner.lora is not None:
            adapter_files.check_base(components.folder, record["base"])
        return iteration, state.params
    finally:
        checkpoints.close()


def read_params(
    workdir: pathlib.Path, config: Config, components: Components, iteration: int | None, base_dtype: str
) -> tuple[int, Params]:
    """(iteration, weights) as of `read_trained`; adapters stand over their base, read in `base_dtype`."""
    iteration, params = read_trained(workdir, config, components, iteration)
    adapters = lora.from_settings(config.lora)
    if adapters is None:
        return iteration, params
    base = huggingface.load(components.folder, components.mesh, jnp.dtype(base_dtype))[1]
    return iteration, lora.adapted(base, params, adapters)


def main(workdir: pathlib.Path, iteration: int | None, output: pathlib.Path, adapter: bool = False) -> None:
    """Writes the folder."""
    with cli.user_input():
        file = workdir / "config.json"
        if not file.exists():
            raise ValueError(f"{workdir} is no work directory of a run: it has no config.json.")
        config = config_lib.from_json(file.read_text())
        if math.prod(dataclasses.asdict(config.mesh).values()) > jax.device_count():
            config = dataclasses.replace(config, mesh=MeshConfig())  # a pod's run, exported on a smaller machine
        components = components_lib.build(config, components_lib.model_folder(config.model.path))
        adapters = lora.from_settings(config.lora)
        if adapter and adapters is None:
            raise ValueError(f"{workdir} trained all weights (lora.rank is 0): export them without --adapter.")
        if adapter:
            iteration, params = read_trained(workdir, config, components, iteration)
            adapter_files.save(output, components.architecture, params, adapters, base=components.folder)
        else:
            iteration, params = read_params(workdir, config, components, iteration, config.model.parameter_dtype)
            merge = jax.jit(lora.merged, out_shardings=param_shardings(components.architecture, components.mesh))
            whole = params if adapters is None else merge(params)
            huggingface.save(output, components.architecture, whole, tokenizer_from=components.folder)
    print(f"iteration {iteration} of {workdir} written to {output}")


if __name__ == "__main__":
    WORKDIR = flags.DEFINE_string("workdir", None, "A run's work directory.", required=True)
    ITERATION = flags.DEFINE_integer("iteration", None, "Which checkpoint; the newest by default.")
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    ADAPTER = flags.DEFINE_bool("adapter", False, "Write the adapters alone, in PEFT's format.")
    cli.run(lambda: main(pathlib.Path(WORKDIR.value), ITERATION.value, pathlib.Path(OUTPUT.value), ADAPTER.value))
