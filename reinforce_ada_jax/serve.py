"""Serves models to the clients of OpenAI and of tinker, or over JetStream's gRPC protocol.

    python -m reinforce_ada_jax.serve --model=NAME=HF_DIR --port=8000
    python -m reinforce_ada_jax.serve --model=package:cipher --greedy
    python -m reinforce_ada_jax.serve --model=HF_DIR --api=tinker --workdir=DIR --port=8000
    python -m reinforce_ada_jax.serve --model=HF_DIR --api=grpc --port=9000

The engine is the one that training samples with. The first SIGINT (Ctrl-C) or SIGTERM stops it when the running
responses have ended, or --grace_s seconds have; a second one stops it at once. No request of the interfaces
openai and grpc reads or writes a file; clients of tinker save adapters in --workdir.
"""

import asyncio
import dataclasses
import functools
import signal
from typing import TYPE_CHECKING, Any

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.config import Config, DataConfig, MeshConfig, ModelConfig, SamplingConfig
from reinforce_ada_jax.distributed import command
from reinforce_ada_jax.serving.settings import INTERFACES, ServerSettings, bind

if TYPE_CHECKING:
    from reinforce_ada_jax.policy.transformer import Params
    from reinforce_ada_jax.training.components import Components


def build(settings: ServerSettings) -> "Components":
    """Returns the components of the model folder; no weight is read."""
    from reinforce_ada_jax.distributed import mesh, processes
    from reinforce_ada_jax.training import components as components_lib
    from reinforce_ada_jax.training import host_memory

    grpc, replicas = settings.api == "grpc", settings.replicas
    if not replicas or processes.count() > 1:
        replicas = max(len(mesh.available_devices()) // settings.tensor, 1)
    config = Config(
        seed=settings.seed,
        model=ModelConfig(compute_dtype=settings.dtype),
        mesh=MeshConfig(data=replicas, tensor=settings.tensor),
        data=DataConfig(max_prompt_tokens=settings.max_prompt_tokens),
        sampling=SamplingConfig(
            slots=settings.slots, page_size=settings.page_size, max_response_tokens=settings.max_response_tokens,
            # JetStream returns to the host after every token.
            window=1 if grpc else 16, drafts=0 if grpc else None,
        ),
    )  # fmt: skip
    config = components_lib.for_devices(config, model=settings.model)
    components = components_lib.build(config, components_lib.model_folder(settings.model))
    host_memory.check(components.engine, components.architecture.num_parameters * components.engine.dtype.itemsize)
    return components


def _weights(components: "Components") -> "Params":
    from reinforce_ada_jax.policy import huggingface
    from reinforce_ada_jax.reporting.progress import watched

    return huggingface.load(components.folder, components.mesh, components.engine.dtype, watched)[1]


def serve_http(settings: ServerSettings) -> None:
    """Makes all checks that need no weights, then serves over HTTP."""
    from reinforce_ada_jax.distributed.program_cache import keep_programs

    with cli.user_input():
        settings.check()
        try:
            from reinforce_ada_jax.serving.http import Served

            if settings.api == "tinker":
                from reinforce_ada_jax.serving.tinker import server
            else:
                from reinforce_ada_jax.serving.openai import server
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--api={settings.api} needs more packages ({error}): pip install 'reinforce_ada_jax[{settings.api}]'."
            ) from error
        keep_programs(settings.compilation_cache)
        served = []
        for name, folder in settings.model_folders().items():
            components = build(dataclasses.replace(settings, model=folder))
            load = functools.partial(_weights, components)
            served.append(Served(
                name, components.folder, components.tokenizer, components.engine, load,
                # With NAME=FOLDER, clients find the tokenizer by NAME.
                tokenizer_id=str(components.folder.absolute()) if name == folder else None,
            ))  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    server.run(settings, served)


def check_processes(settings: ServerSettings) -> None:
    """Ends the process if the interface can't be served by several processes."""
    from reinforce_ada_jax.distributed import processes

    # All processes must launch the same programs in the same order, but only process 0 knows the requests.
    reasons = {
        "grpc": "JetStream's driver starts programs in several threads, in an order of its own",
        "tinker": "only process 0 knows which adapters clients train, and in which order",
    }
    if processes.count() > 1 and settings.api in reasons:
        with cli.user_input():
            raise ValueError(
                f"--api={settings.api} is for one process, and there are {processes.count()}: {reasons[settings.api]}. "
                "Start one process, or --api=openai."
            )


def serve_grpc(settings: ServerSettings) -> None:
    """Makes all checks that need no weights, then serves JetStream's interface."""
    from reinforce_ada_jax.distributed.program_cache import keep_programs
    from reinforce_ada_jax.serving import jetstream

    with cli.user_input():
        settings.check()
        try:
            jetstream.orchestrator()
        except ModuleNotFoundError as error:
            raise ValueError(f"serving needs more packages ({error}): {jetstream.REMEDY}") from error
        # These import JetStream and gRPC.
        from reinforce_ada_jax.serving.jetstream import server
        from reinforce_ada_jax.serving.jetstream.engine import JetStreamEngine

        bind(settings.host, settings.port).close()  # gRPC needs ten lines to say that it can't listen
        keep_programs(settings.compilation_cache)
        components = build(settings)
        engine = JetStreamEngine(components.engine, components.tokenizer, settings.sampling)
    # Until the server handles signals itself, one ends the process without a stack trace: there is nothing to save.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(server.serve(settings, components.folder, engine, functools.partial(_weights, components)))


def main(settings: ServerSettings) -> None:
    """Serves one of the three interfaces."""
    check_processes(settings)
    if settings.api == "grpc":
        serve_grpc(settings)
    else:
        serve_http(settings)


def define_flags() -> None:
    for field in dataclasses.fields(ServerSettings):
        if field.name == "model":
            flags.DEFINE_multi_string("model", None, field.metadata["text"], required=True)
        else:
            cli.DEFINE[field.type](field.name, field.default, field.metadata["text"])


def settings_from_flags() -> ServerSettings:
    values: dict[str, Any] = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(ServerSettings)}
    values["model"] = ",".join(values["model"])
    return ServerSettings(**values)


if __name__ == "__main__":
    define_flags()
    ONLY = {name for names in INTERFACES.values() for name in names}
    EVERY = {*flags.FLAGS, "distributed"} - ONLY
    command.run(lambda: main(settings_from_flags()), {"Flags of every interface": EVERY, **INTERFACES})
