"""`bench.serve`: processor time of sampling through `serve --api=tinker`, beside that of the engine alone.

The server runs in this process, and the client in another one, with one request for each slot at a time. The engine
alone has all requests from the start, and weights without adapters. Engine and server take turns. Processor seconds are
those of all threads of a process: other programs change them less than the elapsed time.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import flags

from bench import command_line, engines, inputs, workloads
from bench.json_subprocess import JsonSubprocess
from bench.measuring import median_ratio, processor_seconds
from bench.workloads import Workload
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.serving.settings import ServerSettings, bind
from reinforce_ada_jax.training.components import ASSETS

CLIENT = pathlib.Path(__file__).parent / "baselines" / "tinker_client.py"
MODEL = "model"
WINDOW = 16  # as in `serve`
RANK = 32


@contextlib.contextmanager
def server(
    settings: ServerSettings, architecture: Architecture, params: Params, options: EngineOptions
) -> Iterator[str]:
    """Yields the address of a server of the weights, in threads of this process.

    Raises:
      ValueError: the packages of the server are not there.
    """
    try:
        from reinforce_ada_jax.serving import http as http_lib  # noqa: PLC0415  (an extra)
        from reinforce_ada_jax.serving.tinker.app import App  # noqa: PLC0415
        from reinforce_ada_jax.serving.tinker.server import start_worker  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ValueError(f"`serve` needs more packages ({error}): pip install 'reinforce_ada_jax[tinker]'.") from error
    engine = Engine(architecture, options, mesh=mesh_lib.make_mesh())
    # Nothing is encoded or decoded: any tokenizer will do.
    folder = ASSETS / "cipher"
    model = http_lib.Served(MODEL, folder, Tokenizer.load(folder), engine, lambda: params)
    service, worker = start_worker(settings, [model])
    listener, http = bind(settings.host, settings.port), http_lib.http_server(settings, App(service).asgi())
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
    worker.start()
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        http.should_exit = http.force_exit = True
        thread.join()
        worker.stop(60)


def measure(
    architecture: Architecture, params: Params, workload: Workload, options: EngineOptions, repeat: int, workdir: str
) -> dict[str, Any]:
    """Returns processor seconds, and the medians of their ratios to the engine's; a first turn is not counted."""
    rollouts, weights = engines.make_rollouts(architecture, params, options, 1)
    settings = ServerSettings(
        MODEL, api="tinker", port=0, workdir=workdir, dtype=options.dtype, slots=options.slots, max_rank=RANK,
        waiting=max(256, options.slots),
    )  # fmt: skip
    tokens = int(workload.lengths.sum())
    client_seconds: list[float] = []
    with server(settings, architecture, weights, options) as address, contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(JsonSubprocess("tinker", [sys.executable, str(CLIENT)])))
        described = client.ask(
            "load", address=address, model=MODEL, rank=RANK, at_once=options.slots,
            prompts=[prompt.tokens.tolist() for prompt in workload.prompts], lengths=workload.lengths.tolist(),
        )  # fmt: skip

        def through_server(adapter: bool) -> None:
            answer = client.ask("run", adapter=adapter)
            if answer["lengths"] != workload.lengths.reshape(-1).tolist():
                raise RuntimeError("responses of the server have other lengths than prescribed.")
            client_seconds.append(answer["cpu_seconds"])

        runs: dict[str, Callable[[int], object]] = {
            "engine": lambda turn: engines.check_lengths(
                engines.draw(rollouts, weights, workload, stream=turn), workload
            ),
            "base": lambda _: through_server(False),
            "adapter": lambda _: through_server(True),
        }
        seconds = processor_seconds(runs, repeat)
    medians = {name: float(np.median(found)) for name, found in seconds.items()}
    requests = workload.lengths.size
    return {
        "tokens": tokens, "requests": requests,
        **{f"{name}_cpu_s": found for name, found in medians.items()},
        **{f"all_{name}_cpu_s": found for name, found in seconds.items()},
        "client_cpu_s": float(np.median(client_seconds[2:])),
        **{f"{name}_ratio": median_ratio(seconds[name], seconds["engine"]) for name in ("base", "adapter")},
        "base_ms_per_request": 1e3 * (medians["base"] - medians["engine"]) / requests,
        **described,
    }  # fmt: skip


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures the model and the workload of the flags."""
    architecture = inputs.architecture_of(options)
    lengths = inputs.response_lengths(options, default=128)
    workload = workloads.synthetic(
        options.requests or 256, options.samples, options.prompt_tokens or 64, lengths, architecture.vocab_size,
        options.seed,
    )  # fmt: skip
    engine_options = dataclasses.replace(engines.engine_options(workload, options), window=WINDOW)
    params = inputs.random_weights(options, architecture, options.dtype)
    with tempfile.TemporaryDirectory() as workdir:
        found = measure(architecture, params, workload, engine_options, options.repeat or 3, workdir)
    return found | engines.describe(architecture, engine_options, 1)


if __name__ == "__main__":
    command_line.start("serve", run)
