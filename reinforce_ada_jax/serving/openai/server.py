"""The OpenAI-compatible server from start to end: it listens, loads, compiles, and serves until a signal."""

import asyncio
import functools
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import uvicorn

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.learning.scoring import Scorer
from reinforce_ada_jax.serving import hosts, http
from reinforce_ada_jax.serving.hosts import IDLE_S, DeviceThread, SharedEngine
from reinforce_ada_jax.serving.http import Served
from reinforce_ada_jax.serving.openai.app import App
from reinforce_ada_jax.serving.openai.call import Backend
from reinforce_ada_jax.serving.openai.scoring import ScoreQueue
from reinforce_ada_jax.serving.sampler import Sampler, Weights
from reinforce_ada_jax.serving.settings import ServerSettings, bind


def make_backend(served: Served, wake: threading.Event, number: int) -> Backend:
    """Reads the weights of model `number`, and compiles what sampling runs; scoring is compiled when it is used."""
    engine = served.engine
    shared = SharedEngine(engine, number) if engine.spans_processes else None
    params = engine.decode_weights(served.load()) if shared is None else shared.load(served.load)
    sampler = Sampler(shared or engine, Weights(params))
    sampler.warm_up()
    scorer = Scorer(engine.architecture, engine.mesh, engine.dtype)
    return Backend(sampler, ScoreQueue(scorer, sampler.weights.params, wake))


class Worker(DeviceThread):
    """Makes the backends, then runs windows, and micro-batches between them."""

    def __init__(self, models: Sequence[Served], wake: threading.Event):
        super().__init__(wake)
        self.loaded: Future[dict[str, Backend]] = Future()  # by model, or the error
        self._models = models

    def run(self) -> None:
        try:
            named = {each.name: make_backend(each, self.wake, number) for number, each in enumerate(self._models)}
        except Exception as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(named)
        self.repeat(functools.partial(_turn, named.values()))
        for backend in named.values():
            backend.scoring.close()


def _turn(backends: Collection[Backend]) -> bool:
    """Runs a window and a micro-batch of each model that has work; returns False if there was none."""
    busy = [backend.sampler for backend in backends if backend.sampler.busy]
    for sampler in busy:
        sampler.turn()
    scored = [backend.scoring.turn() for backend in backends]
    return bool(busy) or any(scored)


async def serve(settings: ServerSettings, models: Sequence[Served]) -> tuple[bool, bool]:
    """Serves until a signal comes; returns (the models were loaded, the thread of the devices has ended)."""
    started = time.monotonic()
    with cli.user_input():
        listener = bind(settings.host, settings.port)
    print(http.summary(settings, models, listener.getsockname()[1]), flush=True)
    wake = threading.Event()
    app = App(settings, models, wake)
    server = http.http_server(settings, app.asgi())
    server.on_stop = app.stop
    worker = Worker(models, wake)
    worker.start()
    serving, loaded = asyncio.create_task(server.serve(sockets=[listener])), asyncio.wrap_future(worker.loaded)
    await asyncio.wait((serving, loaded), return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        return False, False
    if loaded.exception() is not None:
        server.should_exit = True
        await serving
    app.backends = loaded.result()
    print(f"ready       after {time.monotonic() - started:.1f} s; Ctrl-C stops", flush=True)
    following = asyncio.create_task(_stop_with_others(server))
    await serving
    following.cancel()
    has_ended = worker.stop(settings.grace_s)
    hosts.end()
    return True, has_ended


async def _stop_with_others(server: uvicorn.Server) -> None:
    while not processes.asked_to_stop():
        await asyncio.sleep(IDLE_S)
    server.should_exit = True


def run(settings: ServerSettings, models: Sequence[Served]) -> None:
    """Serves until SIGINT or SIGTERM; with several processes, process 0 listens, and the others run its windows."""
    if not processes.is_writer():
        http.on_signals(processes.ask_to_stop)
        hosts.follow([each.engine for each in models], [each.load for each in models])
        return
    http.on_signals(lambda: None)  # uvicorn stops at a signal, and raises the signal again after it has stopped
    with cli.user_input():
        was_ready, has_ended = asyncio.run(serve(settings, models))
    print("stopped" if was_ready else "stopped     before it was ready", flush=True)
    if not has_ended:
        http.end_process()
