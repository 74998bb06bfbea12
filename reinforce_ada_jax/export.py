"""Writes the weights of a run as a Hugging Face folder.

    python -m reinforce_ada_jax.export --workdir=DIR [--iteration=40] --output=HF_DIR
    python -m reinforce_ada_jax.export --workdir=DIR [--iteration=40] --adapter --output=PEFT_DIR

`transformers` and this package load the folder. Adapters are merged into their base or, with --adapter, written alone
in the format of `peft`.
"""

import contextlib
import dataclasses
import math

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config, EnvironmentConfig, MeshConfig
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.distributed import command
from reinforce_ada_jax.files import buckets, local_copy


def main(workdir: buckets.Named, iteration: int | None, output: buckets.Named, adapter: bool = False) -> None:
    from reinforce_ada_jax.distributed import processes
    from reinforce_ada_jax.policy import adapter_files, huggingface, lora, weight_files
    from reinforce_ada_jax.training import components as components_lib
    from reinforce_ada_jax.training.trained import merged, read_trained, streamed

    named, target = workdir, output
    with cli.user_input(), contextlib.ExitStack() as stack:
        workdir, _ = stack.enter_context(local_copy.opened(named))
        config = config_lib.read(workdir)
        if config is None:
            raise ValueError(f"{named} is no work directory of a run: it has no config.json. Name another --workdir.")
        check_output("--output", output, folder=True)
        if processes.is_writer():
            output = stack.enter_context(buckets.output(target, new=True))
            weight_files.check_new(output)
        # Neither the mesh of the run nor its environments need to be on this machine.
        config = dataclasses.replace(_on_this_machine(config), environment=EnvironmentConfig())
        components = components_lib.build(config, components_lib.model_folder(config.model.path))
        adapters = lora.make(config.lora)
        if adapter and adapters is None:
            raise ValueError(f"{named} trained all weights (lora.rank is 0): export them without --adapter.")
        architecture, folder = components.architecture, components.folder
        if adapter:
            adapter_files.check_family(architecture, "Export whole weights, without --adapter.")
        if adapters is None:
            with streamed(workdir, config, components, iteration) as (found, shapes, read):
                huggingface.save(output, architecture, shapes, read=read, tokenizer_from=folder)
        else:
            found, trained = read_trained(workdir, config, components, iteration)
            if adapter:
                adapter_files.save(output, architecture, trained, adapters, base=folder)
            else:
                huggingface.save(output, architecture, merged(config, components, trained), tokenizer_from=folder)
        processes.any_of(False)  # waits until process 0 has written everything
    if processes.is_writer():
        print(f"iteration {found} of {named} written to {target}")


def _on_this_machine(config: Config) -> Config:
    """Returns the configuration of a run with a mesh that fits the devices that are available."""
    from reinforce_ada_jax.distributed import processes
    from reinforce_ada_jax.distributed.mesh import available_devices

    needed, found = math.prod(config.mesh.axes.values()) + config.mesh.sampler, len(available_devices())
    if processes.count() > 1 and needed != found:
        return dataclasses.replace(config, mesh=MeshConfig(fsdp=found))
    if needed > found:
        return dataclasses.replace(config, mesh=MeshConfig())  # a pod's run, exported on a smaller machine
    return config


if __name__ == "__main__":
    WORKDIR = flags.DEFINE_string("workdir", None, "A run's work directory.", required=True)
    ITERATION = flags.DEFINE_integer("iteration", None, "Which checkpoint; the newest by default.")
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    ADAPTER = flags.DEFINE_bool("adapter", False, "Write the adapters alone, in PEFT's format.")
    command.run(lambda: main(buckets.named(WORKDIR.value), ITERATION.value, buckets.named(OUTPUT.value), ADAPTER.value))
