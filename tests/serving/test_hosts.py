"""`serve --api=openai` as several processes on loopback answers as one process does."""

import functools
import os
import queue
import re
import signal
import threading
import time

import httpx
import numpy as np
import pytest

from reinforce_ada_jax import cli, serve
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving import hosts as serving_hosts
from reinforce_ada_jax.serving.sampler import Sampled, SampleJob, Sampler, Weights
from reinforce_ada_jax.serving.settings import ServerSettings
from tests import hosts, standins
from tests.running import refused

SERVE = [
    "-m", "reinforce_ada_jax.serve", "--model=cipher=package:cipher", "--api=openai", "--port=0", "--dtype=float32",
    "--slots=4", "--page_size=16", "--max_prompt_tokens=64", "--max_response_tokens=64",
]  # fmt: skip


def address_of(processes) -> str:
    """Waits until process 0 is ready; returns its address."""
    deadline = time.monotonic() + 300
    while "\nready " not in (said := processes[0].said()):
        assert time.monotonic() < deadline and processes[0].poll() is None, said
        time.sleep(0.1)
    found = re.search(r"http://\S+:\d+", said)
    assert found is not None, said
    return found[0]


def answers(address: str) -> list[str]:
    """Texts of ten requests with seeds, five responses each: they are on the replicas of both processes."""
    texts = []
    with httpx.Client(base_url=address, timeout=120) as client:
        for seed in range(10):
            fields = {"model": "cipher", "prompt": "рСУш..=", "n": 5, "seed": seed, "max_tokens": 24}
            choices = client.post("/v1/completions", json=fields).raise_for_status().json()["choices"]
            texts += [choice["text"] for choice in choices]
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_two_processes_answer_as_one_and_end_together(number):
    found = []
    for count in (1, 2):
        processes = hosts.start(SERVE, count, devices=count)
        try:
            address = address_of(processes)
            found.append(answers(address))
            scored = {"model": "cipher", "prompt": "рСУш..=", "logprobs": 3, "max_tokens": 1}
            response = httpx.post(f"{address}/v1/completions", json=scored, timeout=120)
            assert response.status_code == (200 if count == 1 else 400), response.text
            processes[-1].send_signal(number)  # of the process that does not listen, where there are two
            codes = [process.wait(60) for process in processes]
        finally:
            for process in processes:
                process.kill()
                print(*process.communicate(timeout=60))
        expected = [0] * count if number == signal.SIGTERM else [*[RESTART] * (count - 1), -signal.SIGKILL]
        assert codes == expected
    assert len(set(found[0])) > 5 and found[0] == found[1]


SETTINGS = ServerSettings(
    "package:cipher", api="openai", dtype="float32", slots=4, page_size=16, max_prompt_tokens=16, max_response_tokens=16
)


def sampled(sampler: Sampler) -> list[list[int]]:
    """Tokens of responses to four prompts, two each."""
    found: dict[int, list[Sampled]] = {}
    for seed in range(4):
        tokens = np.array([3, 4, 5 + seed], np.int32)
        keep = functools.partial(found.__setitem__, seed)
        sampler.submit(SampleJob("", tokens, 2, SamplingParams(12), (2,), seed, keep))
    while sampler.busy:
        sampler.turn()
    return [response.tokens.tolist() for seed in range(4) for response in found[seed]]


@pytest.fixture
def as_two_processes(monkeypatch):
    """as_two_processes() -> messages to process 0 and to process 1: what the caller's threads send and receive."""

    def begin() -> list[queue.Queue]:
        to = [queue.Queue(), queue.Queue()]
        standins.of_processes(
            monkeypatch,
            count=lambda: 2,
            send=lambda process, message: to[process].put(message),
            receive=lambda process: to[1 - process].get(timeout=60),
        )
        return to

    return begin


def test_process_0_runs_the_windows_of_all(as_two_processes):
    components = serve.build(SETTINGS)
    engine = components.engine

    def load():
        return huggingface.load(components.folder, components.mesh, "float32")[1]

    expected = sampled(Sampler(engine, Weights(engine.decode_weights(load()))))
    to = as_two_processes()
    follower = threading.Thread(target=serving_hosts.follow, args=([engine], [load]))
    follower.start()
    shared = serving_hosts.SharedEngine(engine, 0)
    sampler = Sampler(shared, Weights(shared.load(load)))
    assert sampled(sampler) == expected and shared.replicas == 2
    serving_hosts.end()
    follower.join(60)
    assert not follower.is_alive() and to[0].empty() and to[1].empty()


def test_an_error_in_process_0_ends_it(monkeypatch, as_two_processes, capsys):
    """The others are in the same program, and no later one would begin there."""

    def leave(code):
        raise SystemExit(code)

    engine = serve.build(SETTINGS).engine
    standins.failing(monkeypatch, engine, "decode_window", RuntimeError("out of memory"))
    as_two_processes()
    monkeypatch.setattr(os, "_exit", leave)
    nothing = [serving_hosts._no_inputs(engine)] * 2
    window = serving_hosts.SharedEngine(engine, 0).decode_window
    shown = refused(capsys, window, {}, engine.init_decode_state(), nothing, code=cli.STOPPED)
    assert "RuntimeError: out of memory" in shown.err


@pytest.mark.parametrize(("api", "reason"), [("grpc", "JetStream's driver"), ("tinker", "which adapters")])
def test_interfaces_of_one_process_are_refused_by_name(api, reason, as_two_processes, capsys):
    as_two_processes()
    said = refused(capsys, serve.main, ServerSettings("package:cipher", api=api)).err
    assert f"error: --api={api} is for one process, and there are 2: " in said and reason in said


def test_a_message_holds_the_arrays_of_a_tree():
    tree = [{"b": np.arange(6).reshape(2, 3), "a": np.array(True)}]
    action, model, leaves = serving_hosts.from_bytes(serving_hosts.to_bytes("window", 3, tree))
    assert (action, model) == ("window", 3)
    assert leaves[0].item() is True and leaves[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert serving_hosts.from_bytes(serving_hosts.to_bytes("end", 0)) == ("end", 0, [])
