"""The HTTP server of the Tinker interface from start to end: it listens, loads, recovers, and serves until a signal."""

import asyncio
import dataclasses
import pathlib
import time

from reinforce_ada_jax import cli
from reinforce_ada_jax.learning.adapter_learner import AdapterLearner
from reinforce_ada_jax.policy import adapter_files
from reinforce_ada_jax.policy.lora import TARGETS, Lora, adapter_shapes
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving import http
from reinforce_ada_jax.serving.http import Served
from reinforce_ada_jax.serving.sampler import Sampler
from reinforce_ada_jax.serving.settings import ServerSettings, bind
from reinforce_ada_jax.serving.tinker.adapters import AdapterBank
from reinforce_ada_jax.serving.tinker.app import App
from reinforce_ada_jax.serving.tinker.service import ALPHA, MAX_STOPS, Base, Service
from reinforce_ada_jax.serving.tinker.worker import Worker

NO_TOKEN = -1


def make_base(settings: ServerSettings, served: Served) -> Base:
    """Reads the weights of a model, and makes its learner and its sampler."""
    options = served.engine.options
    if len(options.stop_ids) > MAX_STOPS:
        raise ValueError(f"{served.folder} names {len(options.stop_ids)} end tokens; there may be {MAX_STOPS}.")
    stop_ids = options.stop_ids + (NO_TOKEN,) * (MAX_STOPS - len(options.stop_ids))
    architecture, mesh = served.engine.architecture, served.engine.mesh
    size = Lora(settings.max_rank, ALPHA, tuple(TARGETS))
    adapter_shapes(architecture, size)  # refuses models with experts before any weight is read
    adapter_files.check_family(architecture, "Serve another model.")
    params = served.load()
    engine = Engine(architecture, dataclasses.replace(options, stop_ids=stop_ids), mesh=mesh)
    bank = AdapterBank(engine, params, size, settings.adapters)
    learner = AdapterLearner(architecture, params, mesh, engine.dtype)
    parts = vars(dataclasses.replace(served, engine=engine))
    return Base(**parts, learner=learner, bank=bank, sampler=Sampler(engine, bank))


def start_worker(settings: ServerSettings, models: list[Served]) -> tuple[Service, Worker]:
    """Reads weights, restores the models of the work directory, and compiles sampling; the thread is not started."""
    bases = {served.name: make_base(settings, served) for served in models}
    service = Service(settings, pathlib.Path(settings.workdir).absolute(), bases)
    worker = Worker(service)
    worker.recover()
    for base in bases.values():
        base.sampler.warm_up()
    return service, worker


def run(settings: ServerSettings, models: list[Served]) -> None:
    started = time.monotonic()
    with cli.user_input():
        listener = bind(settings.host, settings.port)
        print(http.summary(settings, models, listener.getsockname()[1]), flush=True)
        service, worker = start_worker(settings, models)
    worker.start()
    app = App(service)
    server = http.http_server(settings, app.asgi())
    server.on_stop = app.stop
    server.on_listening = lambda: print(
        f"ready       after {time.monotonic() - started:.1f} s; Ctrl-C stops", flush=True
    )
    http.on_signals(lambda: None)  # uvicorn stops at a signal, and raises the signal again after it has stopped
    asyncio.run(server.serve(sockets=[listener]))
    has_ended = worker.stop(settings.grace_s)
    print("stopped     requests that were accepted for training run at the next start", flush=True)
    if not has_ended:
        http.end_process()
