"""A run's weights as a Hugging Face folder, loadable by `transformers` and by this package.

python -m reinforce_ada_jax.export --workdir=DIR [--iteration=K] --output=HF_DIR
"""

import math
import pathlib

import jax
from absl import flags
from ml_collections import ConfigDict

from reinforce_ada_jax import assembly, command
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.assembly import Parts
from reinforce_ada_jax.checkpoint import Checkpoints, abstract_state, holds_checkpoint
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.transformer import Params


def read_params(workdir: pathlib.Path, config: ConfigDict, parts: Parts, iteration: int | None) -> tuple[int, Params]:
    """(iteration, weights) of a checkpoint, the newest by default.

    Raises:
      ValueError: the work directory has no such checkpoint.
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
        learner = Learner(parts.architecture, config, parts.mesh)
        state, _ = checkpoints.restore(iteration, *abstract_state(config, learner))
        return iteration, state.params
    finally:
        checkpoints.close()


def main(workdir: pathlib.Path, iteration: int | None, output: pathlib.Path) -> None:
    """Writes the folder."""
    with command.user_input():
        file = workdir / "config.json"
        if not file.exists():
            raise ValueError(f"{workdir} is no work directory of a run: it has no config.json.")
        config = config_lib.from_json(file.read_text())
        if math.prod(config.mesh.values()) > jax.device_count():
            config.mesh.update(data=1, fsdp=1, tensor=1)  # a pod's run, exported on a smaller machine
        parts = assembly.parts(config, assembly.model_folder(config.model.path))
        iteration, params = read_params(workdir, config, parts, iteration)
        huggingface.save(output, parts.architecture, params, tokenizer_from=parts.folder)
    print(f"iteration {iteration} of {workdir} written to {output}")


if __name__ == "__main__":
    WORKDIR = flags.DEFINE_string("workdir", None, "A run's work directory.", required=True)
    ITERATION = flags.DEFINE_integer("iteration", None, "Which checkpoint; the newest by default.")
    OUTPUT = flags.DEFINE_string("output", None, "The Hugging Face folder to write; it must not exist.", required=True)
    command.run(lambda: main(pathlib.Path(WORKDIR.value), ITERATION.value, pathlib.Path(OUTPUT.value)))
