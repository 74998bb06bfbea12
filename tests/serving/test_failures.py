"""Failures of the device side of a server: each reaches the clients that wait for it."""

import asyncio
import pathlib
import threading
import types
import weakref
from unittest import mock

import httpx
import numpy as np
import pytest

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.serving import hosts
from reinforce_ada_jax.serving.http import Served
from reinforce_ada_jax.serving.openai import server
from reinforce_ada_jax.serving.openai.app import App
from reinforce_ada_jax.serving.openai.call import Backend
from reinforce_ada_jax.serving.openai.scoring import ScoreQueue
from reinforce_ada_jax.serving.sampler import SampleJob, Sampler, Weights
from reinforce_ada_jax.serving.settings import ServerSettings
from tests.serving.test_tokenizer import of_bytes

OPTIONS = EngineOptions(
    slots=1, window=4, page_size=4, pages=9, open_prompts=1, prefill_tokens=8, max_prompt_tokens=8,
    max_response_tokens=8, stop_ids=(0,), seed=0, dtype="float32", attention="jnp",
)  # fmt: skip


class State:
    """Pages of a decode state, which fill a device."""


class FailingEngine:
    """Counts the states that exist when one is made; no window runs."""

    options, replicas = OPTIONS, 1

    def __init__(self):
        self.states = weakref.WeakSet()
        self.alive = []

    def init_decode_state(self):
        self.alive.append(len(self.states))
        self.states.add(state := State())
        return state

    def set_terms(self, state, terms):
        return state

    def decode_window(self, params, state, inputs):
        raise RuntimeError("out of memory")

    def fetch_outputs(self, outputs):
        raise AssertionError


def test_after_an_error_the_old_state_goes_before_the_new_one_comes():
    engine, found = FailingEngine(), []
    sampler = Sampler(engine, Weights({}))
    sampler.submit(SampleJob("", np.array([3], np.int32), 1, SamplingParams(1), (), 0, found.append))
    sampler.turn()
    assert [str(error) for error in found] == ["out of memory"] and not sampler.busy
    assert engine.alive == [0, 0]


class LostAdapters(Weights):
    """Adapters that cannot be read, for a reason that concerns no other request."""

    def use(self, adapter, in_use):
        raise OSError("no such device")


def test_an_adapter_that_cannot_be_read_fails_its_request_alone():
    """Left in the queue it would fail all requests, at every turn."""
    engine, found = FailingEngine(), []
    sampler = Sampler(engine, LostAdapters({}))
    sampler.submit(SampleJob("", np.array([3], np.int32), 1, SamplingParams(1), (), 0, found.append, "lost"))
    sampler.turn()
    assert [str(error) for error in found] == ["no such device"] and not sampler.busy
    assert engine.alive == [0]


class FailingSampler(Sampler):
    """Fails before the request's handler waits."""

    num_running = 0

    def __init__(self):
        self.engine = types.SimpleNamespace(options=OPTIONS)

    def submit(self, job):
        job.done(RuntimeError("out of memory"))

    def cancel(self, job, index=None):
        pass


def served():
    engine = mock.Mock(spec=Engine, options=OPTIONS, spans_processes=False)
    engine.architecture, engine.mesh = types.SimpleNamespace(vocab_size=9), mesh_lib.make_mesh()
    return Served("m", pathlib.Path("m"), of_bytes(), engine, dict)


@pytest.mark.parametrize("stream", [False, True])
def test_an_early_error_is_no_answer(stream):
    app = App(ServerSettings("m=folder", api="openai", max_response_tokens=8), [served()], threading.Event())

    async def ask():
        app.backends = {"m": Backend(FailingSampler(), mock.Mock(spec=ScoreQueue))}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi()), base_url="http://test") as client:
            body = {"model": "m", "prompt": [3], "max_tokens": 1, "stream": stream}
            return await client.post("/v1/completions", json=body)

    answer = asyncio.run(ask())
    assert answer.status_code == (200 if stream else 500) and "RuntimeError: out of memory" in answer.text
    assert app.num_open == 0


def test_a_server_without_its_device_thread_ends(monkeypatch, capsys):
    """Otherwise it would accept requests that nobody answers."""
    ended = threading.Event()
    codes = []
    monkeypatch.setattr(hosts.os, "_exit", lambda code: (codes.append(code), ended.set()))

    class Lost(FailingSampler):
        busy = True

        def turn(self):
            raise RuntimeError("the device is lost")

    backend = Backend(Lost(), mock.Mock(spec=ScoreQueue))
    monkeypatch.setattr(server, "make_backend", lambda *_: backend)
    worker = server.Worker([served()], threading.Event())
    worker.start()
    assert ended.wait(30) and codes == [cli.STOPPED]
    worker.stop(30)
    assert "the device is lost" in capsys.readouterr().err
