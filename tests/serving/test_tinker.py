"""The Tinker interface with the official client, in one process: `serve --api=tinker` has the same parts."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests import standins

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402
from tinker.types import optimizer  # noqa: E402

from reinforce_ada_jax import serve  # noqa: E402
from reinforce_ada_jax.data.tokenizer import Tokenizer  # noqa: E402
from reinforce_ada_jax.policy import adapter_files, huggingface  # noqa: E402
from reinforce_ada_jax.serving import http as http_lib  # noqa: E402
from reinforce_ada_jax.serving.settings import ServerSettings, bind  # noqa: E402
from reinforce_ada_jax.serving.tinker import adapters as adapters_lib  # noqa: E402
from reinforce_ada_jax.serving.tinker import protocol  # noqa: E402
from reinforce_ada_jax.serving.tinker import server as server_lib  # noqa: E402
from reinforce_ada_jax.serving.tinker import service as service_lib  # noqa: E402
from reinforce_ada_jax.serving.tinker import store as store_lib  # noqa: E402
from reinforce_ada_jax.serving.tinker import worker as worker_lib  # noqa: E402
from reinforce_ada_jax.serving.tinker.app import App  # noqa: E402
from reinforce_ada_jax.training.components import ASSETS  # noqa: E402
from tests.running import ROOT, environment, free_port  # noqa: E402
from tests.test_docs import code_block  # noqa: E402

# The client 0.38.0 leaves the connection of its first request to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed .*127.0.0.1:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CIPHER = ASSETS / "cipher"
KEY = "tml-test"
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8, 9])
TOKENS = [5, 6, 7, 8, 9, 20, 21, 22, 23, 2]


def settings_for(workdir, **changes):
    settings = ServerSettings(
        "cipher=package:cipher", api="tinker", workdir=str(workdir), dtype="float32", port=0, slots=4, page_size=8,
        max_prompt_tokens=16, max_response_tokens=16, adapters=2, max_rank=4, models=6, compilation_cache="",
    )  # fmt: skip
    return dataclasses.replace(settings, **changes)


def served(settings):
    """The packaged model under the name "cipher"."""
    components = serve.build(dataclasses.replace(settings, model="package:cipher"))
    return http_lib.Served(
        "cipher", components.folder, components.tokenizer, components.engine,
        lambda: huggingface.load(components.folder, components.mesh, "float32")[1], tokenizer_id=str(components.folder),
    )  # fmt: skip


@contextlib.contextmanager
def running(settings, started=None):
    """(address, service, worker) of a server in this process; `started` has the parts of an earlier one."""
    service, worker = started or server_lib.start_worker(settings, [served(settings)])
    listener = bind(settings.host, settings.port)
    http = http_lib.http_server(settings, App(service).asgi())
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
    worker.start()
    thread.start()
    while not http.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service, worker
    finally:
        http.should_exit = http.force_exit = True
        thread.join()
        worker.stop(60)


@pytest.fixture(scope="module", autouse=True)
def collected_connections():
    """Collects what the clients left, before pytest does and makes errors of it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(settings_for(tmp_path_factory.mktemp("tinker"), api_key=KEY)) as started:
        yield started


@contextlib.contextmanager
def connected(address):
    """A client of the server; at the end its heartbeats stop, which would go on after the server's end."""
    made = tinker.ServiceClient(base_url=address, api_key=KEY)
    yield made
    made.close(status="success").result()


@pytest.fixture
def client(server):
    with connected(server[0]) as made:
        yield made


@pytest.fixture
def other(server):
    with connected(server[0]) as made:
        yield made


def datum(tokens=TOKENS, **inputs):
    """The sequence as a datum; by default every token after the prompt's has weight 1."""
    if not inputs:
        inputs = {"weights": [0.0] * 4 + [1.0] * (len(tokens) - 5)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def trained(client, rank=2, seed=0, steps=1, tokens=TOKENS, learning_rate=1e-2):
    """A training client after some steps on one sequence, and the losses before each."""
    made = client.create_lora_training_client(base_model="cipher", rank=rank, seed=seed).result()
    losses = []
    for _ in range(steps):
        forward, step = (
            made.forward_backward([datum(tokens)], "cross_entropy"),
            made.optim_step(types.AdamParams(learning_rate=learning_rate)),
        )
        losses.append(forward.result().metrics["loss:sum"])
        step.result()
    return made, losses


def greedy(sampler, n=1):
    found = sampler.sample(PROMPT, n, types.SamplingParams(max_tokens=8, temperature=0.0)).result()
    return [list(sequence.tokens) for sequence in found.sequences]


def test_a_script_of_public_calls(server, client):
    """Create, sample, forward_backward, optim_step, save, load, sample: the loss falls, and the sample is learned."""
    (model,) = tinker.RestClient(base_url=server[0], api_key=KEY).get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == ("cipher", 32)
    before = client.create_sampling_client(base_model="cipher").result()
    training, losses = trained(client, rank=4, steps=12)
    assert losses[-1] < losses[0] / 10
    info = training.get_info()
    assert (info.lora_rank, info.model_data.model_name, info.model_data.tokenizer_id) == (4, "cipher", str(CIPHER))
    path = training.save_state("last").result().path
    sampler = training.save_weights_and_get_sampling_client().result()
    assert greedy(sampler) == [TOKENS[5:]] != greedy(before)
    # The checkpoint goes on as the model would have.
    again = client.create_training_client_from_state_with_optimizer(path).result()
    both = []
    for each in (training, again):
        each.forward_backward([datum()], "cross_entropy").result()
        each.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        both.append(each.forward([datum()], "cross_entropy").result())
    assert both[0].metrics == both[1].metrics
    # Engine and learner agree on log-probabilities.
    after = training.save_weights_and_get_sampling_client().result()
    logprobs = after.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    assert logprobs[0] is None
    np.testing.assert_array_equal(logprobs[1:], both[0].loss_fn_outputs[0]["logprobs"].data)
    (sequence,) = after.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, temperature=0.0)).result().sequences
    assert sequence.stop_reason == "stop"
    np.testing.assert_allclose(sequence.logprobs, logprobs[5:], atol=1e-4)


# Each loss is a program; tests/learning/test_adapter_learner.py has all of them, token by token.
@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "importance_sampling", "cispo")]
)
def test_losses_are_those_of_the_formulas(client, loss):
    training, _ = trained(client)
    advantages, old = np.array([0.0] * 4 + [1, 2, -1, -2, 0.5], np.float32), np.full(9, -4.0, np.float32)
    logprobs = np.array(training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    ratio = np.exp(logprobs - old)

    def expected(low, high):
        clipped = np.clip(ratio, low, high)
        return {
            "importance_sampling": -(ratio * advantages).sum(),
            "ppo": -np.minimum(ratio * advantages, clipped * advantages).sum(),
            "cispo": -(clipped * advantages * logprobs).sum(),
        }[loss]

    def found(*settings):
        given = datum(logprobs=old.tolist(), advantages=advantages.tolist())
        return training.forward_backward([given], loss, *settings).result().metrics["loss:sum"]

    assert found() == pytest.approx(expected(0.8, 1.2), rel=1e-5)
    if loss == "ppo":
        wider = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
        assert found(wider) == pytest.approx(expected(0.5, 3.0), rel=1e-5)


def test_bounds_of_a_loss_are_numbers_in_either_field():
    """The first clients had the older field alone; a text is no bound."""
    message = protocol.pb2.ForwardBackwardRequest(model_id="a", seq_id=1, loss_fn="ppo")
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
    for name in ("target_tokens", "logprobs", "advantages"):
        row.loss_fn_inputs[name].dense = np.zeros(2, np.float32).tobytes()
        row.loss_fn_inputs[name].dtype = protocol.pb2.DTYPE_FLOAT32

    def clip():
        return protocol.parse_loss_request(message.SerializeToString(), vocab_size=9, max_tokens=9).clip

    message.loss_fn_config["clip_low_threshold"] = 0.5
    assert (clip().low, clip().high) == (0.5, 1.2)
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.25
    assert clip().low == 0.25
    message.loss_fn_config_v2["clip_high_threshold"].text = "3"
    with pytest.raises(ValueError, match="clip_high_threshold = '3'; it must be a number"):
        clip()


def test_a_checkpoint_is_not_loaded_for_another_optimizer(tmp_path):
    service = service_lib.Service(settings_for(tmp_path), tmp_path, {})
    asked = types.LoadWeightsRequest(
        session_id="a", model_seq_id=0, path="tinker://a/weights/b", optimizer=False,
        optimizer_config=optimizer.DimuonOptimizerConfig(),
    )  # fmt: skip
    request = store_lib.RequestRow(1, "a:train:0:0", "a:train:0", 0, "load_weights", asked.model_dump_json().encode())
    with pytest.raises(ValueError, match="the optimizer is 'dimuon'; this server has adamw"):
        worker_lib.Worker(service)._load_weights(request)
    service.store.close()


@pytest.mark.slow  # test_lora.py has rows with adapters of their own
def test_two_clients_with_two_adapters_get_what_each_gets_alone(client, other):
    words = [TOKENS, [5, 6, 7, 8, 9, 30, 31, 2]]

    def train_and_draw(made, tokens):
        training, losses = trained(made, steps=6, tokens=tokens)
        sampler = training.save_weights_and_get_sampling_client().result()
        drawn = [
            sampler.sample(PROMPT, 3, types.SamplingParams(max_tokens=8, seed=seed)) for seed in range(4)
        ]  # at the same time
        sequences = [sequence for each in drawn for sequence in each.result().sequences]
        return losses, [list(each.tokens) for each in sequences], np.concatenate([each.logprobs for each in sequences])

    alone = [train_and_draw(made, tokens) for made, tokens in zip((client, other), words, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(train_and_draw, (client, other), words))
    for one, two in zip(alone, together, strict=True):
        assert one[:2] == two[:2]
        np.testing.assert_allclose(one[2], two[2], atol=1e-5)
    assert alone[0][1] != alone[1][1]
    other.close(status="success").result()


def test_seeds_stops_and_lengths(client):
    sampler = client.create_sampling_client(base_model="cipher").result()

    def drawn(n=4, **sampling):
        found = sampler.sample(PROMPT, n, types.SamplingParams(**{"max_tokens": 8} | sampling)).result().sequences
        return [(each.stop_reason, list(each.tokens)) for each in found]

    assert drawn(seed=3) == drawn(seed=3) != drawn(seed=4)
    assert drawn(n=2, seed=3) == drawn(seed=3)[:2]
    ((_, whole),) = drawn(n=1, temperature=0.0)
    assert drawn(n=1, temperature=0.0, stop=[whole[2]]) == [("stop", whole[: whole.index(whole[2]) + 1])]
    # A text that a stop contains may end in the middle of the response; none at all: not even the end token ends it.
    text = Tokenizer.load(CIPHER).decode(np.array(whole[:3]))
    assert drawn(n=1, temperature=0.0, stop=text) == [("stop", whole[:3])]
    ends = [tokens for reason, tokens in drawn(n=16, seed=0) if reason == "stop"]
    assert ends and all(tokens[-1] == 2 for tokens in ends)
    assert {(reason, len(tokens)) for reason, tokens in drawn(n=16, seed=0, stop=[])} == {("length", 8)}


@pytest.mark.filterwarnings("ignore:.*load_state:FutureWarning")
def test_what_is_refused_says_why(client, server):
    training, _ = trained(client)
    sampler = client.create_sampling_client(base_model="cipher").result()
    long = types.ModelInput.from_ints([5] * 17)
    for call, why in {
        lambda: training.forward_backward([datum()], "dro"): "loss_fn is 'dro'; this server has cross_entropy, impor",
        lambda: training.forward_backward([datum([5] * 40)], "cross_entropy"): "datum 0 has 39 tokens; this server ta",
        lambda: training.forward_backward([datum([500] * 6)], "cross_entropy"): "datum 0 has token ids outside of the",
        lambda: training.forward_backward([datum(target_tokens=[2**32 + 5] * 9)], "cross_entropy"): "outside of the v",
        lambda: training.forward_backward([datum()], "ppo"): r"ppo takes target_tokens, logprobs, advantages\.",
        lambda: training.forward_backward([datum(weights=[np.nan] * 9)], "cross_entropy"): "that are not finite",
        lambda: training.optim_step(types.AdamParams()): "optim_step needs a gradient: call forward_backward first",
        lambda: training.save_state("../up"): r"the name '\.\./up' is not allowed",
        # Refused before it had its place in the queue, it would stop all requests after it.
        lambda: training.load_state("tinker://a/weights/b"): "there is no checkpoint 'tinker://a/weights/b'",
        lambda: training.optim_step(types.AdamParams(learning_rate=np.nan)): "the request is no OptimStepRequest",
        lambda: sampler.sample(long, 1, types.SamplingParams(max_tokens=1)): "the prompt has 17 tokens, this server t",
        lambda: sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=99)): "max_tokens is 99; it must be 1 to 16",
        lambda: sampler.sample(PROMPT, 1, types.SamplingParams(stop=[2**31])): "stop has token ids outside of the voc",
        lambda: sampler.sample(PROMPT, 1, types.SamplingParams(top_k=2**31)): "top_k at least 0 and below ",
        lambda: sampler.sample(types.ModelInput.from_ints([2**31]), 1, types.SamplingParams()): "outside of the vocab",
        lambda: sampler.sample(PROMPT, 10**12, types.SamplingParams()): "num_samples is 1000000000000; it must be 1",
        lambda: sampler.sample(PROMPT, 1, types.SamplingParams(), topk_sample_logprobs=2): "does not compute it",
        lambda: client.create_lora_training_client("cipher", rank=64): "the rank of the adapters is 64; this server ta",
    }.items():
        with pytest.raises(tinker.RequestFailedError, match=why):
            call().result(timeout=60)
    for call, why in {
        lambda: client.create_lora_training_client("other"): "base_model is 'other'; this server has cipher",
        lambda: client.create_sampling_client(model_path="tinker://a/weights/b"): "there is no checkpoint",
    }.items():
        with pytest.raises(tinker.APIStatusError, match=why):
            call().result()
    # Nothing of it broke the clients.
    assert training.forward_backward([datum()], "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0
    assert greedy(sampler)
    with pytest.raises(tinker.AuthenticationError, match="the API key is not that of this server"):
        tinker.ServiceClient(base_url=server[0], api_key="tml-other").create_sampling_client(base_model="cipher")
    # More models than there may be.
    models = [client.create_lora_training_client("cipher", rank=1).result() for _ in range(5)]
    with pytest.raises(tinker.RequestFailedError, match=r"6 models are in training, and more may not \(--models\)"):
        client.create_lora_training_client("cipher", rank=1).result()
    assert len(models) == 5


def test_checkpoints_can_be_listed_fetched_and_deleted(server, client, tmp_path):
    training, _ = trained(client)
    weights = training.save_state("a", user_metadata={"by": "me"}).result().path
    external = training.save_weights_external("b").result().path
    rest = tinker.RestClient(base_url=server[0], api_key=KEY)
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [(each.checkpoint_type, each.user_metadata) for each in listed] == [
        ("training", {"by": "me"}), ("external", None),
    ]  # fmt: skip
    info = rest.get_weights_info_by_tinker_path(weights).result()
    assert (info.base_model, info.lora_rank, info.train_unembed, info.train_attn) == ("cipher", 2, False, True)
    urls = rest.get_external_weights_urls(external).result().urls
    for name, url in urls.items():
        (tmp_path / name).write_bytes(urllib.request.urlopen(url).read())
    chosen, _ = adapter_files.load(tmp_path, huggingface.read_config(CIPHER))
    assert chosen.rank == 2
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(urls["adapter_config.json"].replace("key=", "key=0"))
    refused.value.close()
    rest.delete_checkpoint_from_tinker_path(weights).result()
    with pytest.raises(tinker.APIStatusError, match="there is no checkpoint"):
        client.create_training_client_from_state(weights).result()
    runs = rest.list_training_runs().result()
    assert runs.training_runs[0].training_run_id == training.model_id


def test_a_failure_after_the_last_token_is_that_of_its_request(server, client, monkeypatch):
    """The adapters are on the devices when their checkpoint is deleted; the log-probabilities of the prompt need it."""
    training, _ = trained(client)
    path = training.save_weights_for_sampler("gone").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    assert greedy(sampler)
    other, (_, service, _) = client.create_sampling_client(base_model="cipher").result(), server

    def delete(job):
        if job.adapter:  # the two requests may come in any order
            service.remove_checkpoint(path)

    standins.before(monkeypatch, service.bases["cipher"].sampler, "submit", delete)
    terms = types.SamplingParams(max_tokens=8, temperature=0.0)
    failing = sampler.sample(PROMPT, 1, terms, include_prompt_logprobs=True)
    beside = other.sample(PROMPT, 2, terms)
    with pytest.raises(tinker.RequestFailedError, match="the weights of this sampling client are no longer there"):
        failing.result(timeout=60)
    assert [len(each.tokens) for each in beside.result(timeout=60).sequences] == [8, 8]


def test_a_request_for_a_deleted_checkpoint_leaves_no_place_taken(server, client):
    training, _ = trained(client)
    path = training.save_weights_for_sampler("deleted").result().path
    sampler, (_, service, _) = client.create_sampling_client(model_path=path).result(), server
    service.remove_checkpoint(path)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=8)).result(timeout=60)
    assert not service.samples.waiting


def test_a_silent_session_ends_alone(server, client, other):
    address, service, _ = server
    training, _ = trained(client)
    lost, _ = trained(other)
    # Its client dies before it has sent the request before this one, which so can never run.
    step = {"model_id": lost.model_id, "seq_id": 50, "adam_params": {}}
    future = posted(address, "/api/v1/optim_step", step)[1]
    assert service.store.num_waiting() == {lost.model_id: 1}
    service.seen[lost.model_id.split(":")[0]] -= 1000
    service.end_silent_sessions()
    assert service.store.num_waiting() == {}
    _, answer = posted(address, "/api/v1/retrieve_future", {"request_id": future["request_id"]})
    assert "no heartbeat came for 300 s (--session_s). Create a training client" in answer["error"]
    with pytest.raises(
        tinker.APIStatusError, match=r"no heartbeat came for 300 s \(--session_s\)\. Create a training cl"
    ):
        lost.forward_backward([datum()], "cross_entropy").result()
    assert training.forward_backward([datum()], "cross_entropy").result().metrics


def test_a_session_that_ends_during_a_heartbeat_stays_ended(tmp_path, monkeypatch):
    """Back among the sessions it would count against their limit, with nothing left of its models."""
    service = service_lib.Service(settings_for(tmp_path), tmp_path, {})
    asked = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
    session = service.create_session(asked).session_id
    check, ending = service._check_session, threading.Thread(target=service.end_session, args=(session, "of a test"))

    def ends_after(checked):
        check(checked)
        ending.start()
        ending.join(0.2)

    monkeypatch.setattr(service, "_check_session", ends_after)
    service.heartbeat(session)
    ending.join()
    assert session not in service.seen
    service.store.close()


def test_a_base_that_is_no_longer_served_is_refused(tmp_path):
    """A session lives on when the server starts again, also with other models."""
    service = service_lib.Service(settings_for(tmp_path), tmp_path, {})
    asked = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
    session = service.create_session(asked).session_id
    service.store.add_sampler(store_lib.SamplerRow(f"{session}:sample:0", session, "gone", None))
    ended = dict(next_seq=1, state_seq=0, created=0.0, ended="its client closed it")
    service.store.add_model(store_lib.ModelRow("model", "old", "gone", 2, ("q_proj",), {}, **ended))
    request = types.SampleRequest(
        sampling_session_id=f"{session}:sample:0", seq_id=0, prompt=PROMPT, num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
    )  # fmt: skip
    for ask in (lambda: service.sample(request), lambda: service.get_info("model")):
        with pytest.raises(http_lib.Refusal, match="base_model is 'gone'") as refused:
            ask()
        assert refused.value.status == 400
    assert not service.samples.waiting
    service.store.close()


def test_a_model_of_a_session_that_ends_meanwhile_is_not_made(server, monkeypatch):
    """Nothing would end it: it would take a place of --models, also after every later start."""
    _, service, worker = server
    learner = service.bases["cipher"].learner
    asked = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
    session, init = service.create_session(asked).session_id, learner.init

    def ends_meanwhile(*arguments):
        service.end_session(session, "its client closed it")
        return init(*arguments)

    monkeypatch.setattr(learner, "init", ends_meanwhile)
    asked = types.CreateModelRequest(
        session_id=session, model_seq_id=1, base_model="cipher", lora_config=types.LoraConfig(rank=2)
    )
    future = service.create(session, 1, "create_model", asked.model_dump_json().encode())
    while (result := service.result(future)) is None:
        time.sleep(0.01)
    assert json.loads(result.body)["error"] == f"session {session} has ended."
    assert service.store.model(f"{session}:train:1") is None and f"{session}:train:1" not in worker.models


def test_a_client_that_hangs_up_while_it_sends_is_no_error(tmp_path):
    service, sent = service_lib.Service(settings_for(tmp_path), tmp_path, {}), []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/api/v1/telemetry", "headers": [], "query_string": b""}
    asyncio.run(App(service).asgi()(scope, receive, send))
    assert sent[0]["status"] == 499
    service.store.close()


def test_gradients_and_results_survive_a_restart(tmp_path, server):
    """The same calls to one server, and to one that starts again between any two, end with the same bits."""
    weights = []
    for restarts in (False, True):
        settings = settings_for(tmp_path / str(restarts))
        with contextlib.ExitStack() as stack:
            port = free_port()

            def start(settings=settings, port=port, stack=stack):
                return stack.enter_context(running(dataclasses.replace(settings, port=port)))

            address, *_ = start()
            made = tinker.ServiceClient(base_url=address, api_key=KEY)
            training, _ = trained(made, steps=1)
            sampler = training.save_weights_and_get_sampling_client().result()
            for _ in range(2):
                training.forward_backward([datum()], "cross_entropy").result()
                if restarts:
                    stack.pop_all().close()
                    start()
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            assert greedy(sampler)
            path = training.save_state("end").result().path
            made.close(status="success").result()
        model, kind, name = path.removeprefix("tinker://").split("/")
        folder = tmp_path / str(restarts) / "checkpoints" / model / kind / name
        weights.append(
            [(folder / file).read_bytes() for file in ("adapter_model.safetensors", "optimizer.safetensors")]
        )
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_ten_kills_between_and_during_requests_change_no_bit(tmp_path):
    """The command itself, killed with SIGKILL, against one that is not."""

    def start(workdir, port):
        command = [
            sys.executable, "-m", "reinforce_ada_jax.serve", "--api=tinker", "--model=cipher=package:cipher",
            "--dtype=float32", f"--port={port}", f"--workdir={workdir}", "--max_prompt_tokens=16",
            "--max_response_tokens=16", "--page_size=8", "--slots=4",
        ]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        assert any(line.startswith("ready") for line in process.stdout)
        return process

    found = []
    for kills in (0, 10):
        workdir, port, left = tmp_path / str(kills), free_port(), kills
        process = start(workdir, port)

        def kill():
            nonlocal process, left
            if left:
                left -= 1
                process.kill()
                process.communicate()
                process = start(workdir, port)  # noqa: B023  (called in this iteration only)

        try:
            client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
            training = client.create_lora_training_client("cipher", rank=4).result()
            kill()
            losses = []
            for _ in range(3):
                futures = [training.forward_backward([datum()] * 2, "cross_entropy") for _ in range(2)]
                time.sleep(0.3)
                kill()  # they are accepted, and run or not
                losses += [future.result().metrics for future in futures]
                step = training.optim_step(types.AdamParams(learning_rate=1e-2))
                kill()
                step.result()
                kill()
            sampler = training.save_weights_and_get_sampling_client().result()
            drawn = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=8, seed=1))
            kill()  # the client asks again
            sequences = [list(each.tokens) for each in drawn.result().sequences]
            path = training.save_state("end").result().path
            folder = workdir / "checkpoints" / path.removeprefix("tinker://")
            files = [(folder / name).read_bytes() for name in ("adapter_model.safetensors", "optimizer.safetensors")]
            found.append((losses, sequences, files))
            client.close(status="success").result()
            assert not left
            process.send_signal(signal.SIGTERM)
            assert "stopped" in process.communicate(timeout=60)[0]
        finally:
            process.kill()
            process.communicate()
    assert found[0] == found[1]


def test_the_page_is_what_a_client_does(server):
    code = code_block("how_to/tinker.md", "tinker.ServiceClient")
    code = code.replace("http://127.0.0.1:8000", server[0]).replace("tml-local", KEY).replace("rank=32", "rank=4")
    names = {}
    exec(
        code.replace("Qwen/Qwen3-4B-Instruct-2507", "cipher").replace("[9707, 11]", "[9, 11]").replace("1879", "18"),
        names,
    )
    assert greedy(names["sampler"])
    names["service"].close(status="success").result()


def posted(address, path, body=b"{}", key=KEY, method="POST", parsed=True, **headers):
    """(status, answer) of a request, or the status alone; a body that is no bytes is sent as JSON."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}{path}", content, {"X-API-Key": key, **headers}, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return (answer.status, json.load(answer)) if parsed else answer.status
    except urllib.error.HTTPError as error:
        with error:
            return (error.code, json.load(error)) if parsed else error.code


def test_requests_that_wait_have_a_limit_and_can_be_cancelled(server, monkeypatch):
    address, service, _ = server
    post = functools.partial(posted, address)
    begin = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    session = post("/api/v1/create_session", begin)[1]["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "cipher"}
    sampler = post("/api/v1/create_sampling_session", asked)[1]["sampling_session_id"]
    limits = {"waiting": 2, "sessions": len(service.seen) + 1}
    monkeypatch.setattr(service, "settings", dataclasses.replace(service.settings, **limits))
    monkeypatch.setattr(service.bases["cipher"].sampler, "submit", lambda job: None)  # nothing is answered

    def sample(number, **changes):
        request = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "sampling_params": {}}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        return post("/api/v1/asample", request | {"prompt": prompt} | changes)

    def result(number):
        return post("/api/v1/retrieve_future", {"request_id": f"{sampler}:{number}"})

    assert [sample(number)[0] for number in (0, 1, 1)] == [200, 200, 200]  # the third is the second, sent again
    status, answer = sample(2)
    assert (status, answer["detail"]) == (429, "2 requests of this session are waiting (--waiting): try again later.")
    # Another session has its own share, of two sessions one each.
    second = post("/api/v1/create_session", begin)[1]["session_id"]
    theirs = post("/api/v1/create_sampling_session", asked | {"session_id": second})[1]["sampling_session_id"]
    assert [sample(number, sampling_session_id=theirs)[0] for number in (0, 1)] == [200, 429]
    service.end_session(second, "of this test")
    assert post("/api/v1/create_session", begin)[0] == 200
    status, answer = post("/api/v1/create_session", begin)
    assert status == 429 and "more may not (--sessions)" in answer["detail"]
    for _ in range(2):  # the second time there is nothing to cancel
        assert post("/api/v1/cancel_future", {"request_id": f"{sampler}:0"}) == (200, {})
        assert result(0) == (200, {"error": "the client cancelled this request.", "category": "user"})
    assert sample(2, sampling_params={"stop": ""})[0] == 200
    assert result(2)[1]["error"].startswith("stop has an empty text")
    service.end_session(session, "of this test")
    assert result(1)[1]["error"] == f"session {session} has ended: of this test."
    assert sample(3)[0] == 404 and result(3)[0] == 410


def opened(service):
    """A session of a service without HTTP, and a row of a model in it that no worker trains."""
    session = service.create_session(
        types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
    ).session_id
    model = store_lib.ModelRow(f"{session}:train:0", session, "cipher", 2, ("q_proj",), {}, 1, 0, time.time(), None)
    service.store.add_model(model)
    return session, model.id


def test_a_gap_before_requests_takes_no_place_of_other_clients(tmp_path):
    """64 requests after one that never comes were all that could wait, and kept all other clients out."""
    service = service_lib.Service(settings_for(tmp_path, waiting=64), tmp_path, {})
    (_, rude), (_, other) = opened(service), opened(service)
    taken = 0
    for seq in range(1000, 0, -1):  # all but the first, which the others wait for
        with contextlib.suppress(http_lib.Refusal):
            taken += bool(seq > 1 and service.submit(rude, seq, "optim_step", b"{}"))
    assert taken == 63  # 2 to 64
    for seq in range(32, 0, -1):  # of two models each has half
        service.submit(other, seq, "optim_step", b"{}")
    with pytest.raises(http_lib.Refusal, match=r"seq_id is 33, the model's next request is 1, and 32 may wait") as late:
        service.submit(other, 33, "optim_step", b"{}")
    assert late.value.status == 429
    assert service.submit(rude, 1, "optim_step", b"{}") == f"{rude}:1"  # always taken: it lets the others run
    for seq in (2**63, 10**400, -1):
        with pytest.raises(http_lib.Refusal, match="must number the requests of a model from 1") as wrong:
            service.submit(rude, seq, "optim_step", b"{}")
        assert wrong.value.status == 400 and len(str(wrong.value)) < 120
    service.store.close()


def test_a_full_disk_refuses_requests_and_keeps_those_that_were_accepted(server, client, capsys, monkeypatch):
    """SQLite itself says that there is no space: its file may have no further page."""
    address, service, _ = server
    training, _ = trained(client)
    standins.constants(monkeypatch, worker_lib, IDLE_S=0.05)
    (pages,) = service.store._run("PRAGMA page_count")[0]
    service.store._run(f"PRAGMA max_page_count={pages}")
    body = {"model_id": training.model_id, "seq_id": 3, "adam_params": {}, "padding": "x" * 10**5}
    status, answer = posted(address, "/api/v1/optim_step", body)
    assert (status, answer["detail"]) == (507, "The disk of --workdir is full: free some space. Nothing was accepted.")
    # A request that was accepted before the disk was full waits for space, and is then answered once.
    full = [True]

    def fill(*_, **__):
        if full[0]:
            full[0] = False
            service.store._run("INSERT INTO sessions VALUES (?, ?)", "x" * 10**6, None)

    service.store._run(f"PRAGMA max_page_count={pages + 8}")
    standins.before(monkeypatch, service.store, "finish", fill)
    losses = [training.forward_backward([datum()], "cross_entropy").result(timeout=60).metrics["loss:sum"]]
    service.store._run("PRAGMA max_page_count=1000000")
    monkeypatch.undo()
    losses.append(training.forward([datum()], "cross_entropy").result(timeout=60).metrics["loss:sum"])
    assert not full[0] and losses[0] == losses[1]
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("Requests wait until then") == 1


def test_weights_that_are_overwritten_are_never_gone(server, client, monkeypatch):
    """A kill at any moment leaves the old weights or the new ones under their path."""
    training, _ = trained(client)
    path = training.save_state("kept").result().path
    folder = server[1].folder(path)
    before, worker = (folder / "adapter_model.safetensors").read_bytes(), server[2]
    model = worker.models[training.model_id]

    class Killed(BaseException):
        pass

    def save():
        adapters_lib.save(
            folder, model.base.learner, model.lora, model.state, model.base.folder, optimizer=True
        )  # fmt: skip

    def dying(count):
        """Lets `count` changes of names happen, and dies before the next."""
        rename, left = pathlib.Path.rename, [count]

        def renamed(source, target):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return rename(source, target)

        return renamed

    for count in (0, 1):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(pathlib.Path, "rename", dying(count))
            save()
        adapters_lib.recover(folder)
        assert (folder / "adapter_model.safetensors").read_bytes() == before
    save()
    assert sorted(each.name for each in folder.parent.iterdir()) == ["kept"]


def test_ready_is_said_when_clients_can_connect(tmp_path, monkeypatch):
    """The line came up to a second before, and a client that waited for it was refused."""
    connected_to, service = [], service_lib.Service(settings_for(tmp_path), tmp_path, {})
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    address = "127.0.0.1", free_port()

    def said(line, **_):
        if line.startswith("ready"):
            with socket.create_connection(address, timeout=60) as connection:
                connected_to.append(connection.getpeername())
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(server_lib, "start_worker", lambda *_: (service, server_lib.Worker(service)))
    monkeypatch.setattr("builtins.print", said)
    server_lib.run(settings_for(tmp_path, port=address[1]), [])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert connected_to == [address]


def test_limits_of_the_listener(server, tmp_path):
    status = functools.partial(posted, server[0], parsed=False)
    assert status("/api/v1/healthz", None, method="GET") == 200
    assert status("/api/v1/healthz", None, key="", method="GET") == 401
    # What the event loop parses is small: 2**20 bytes of JSON, and not more values than a prompt and the rest have.
    assert status("/api/v1/create_session", b" " * 2**20) == 422
    assert status("/api/v1/create_session", b" " * (2**20 + 1)) == 413
    assert [status("/api/v1/asample", b"[%s7]" % (b"7," * number)) for number in (4000, 5000)] == [422, 413]
    assert [status("/api/v1/forward_backward", b"\xff" * (2**23 + more)) for more in (0, 1)] == [422, 413]
    assert [status("/api/v1/create_session", body) for body in (b"", b"[]", b"[" * 4000, b"\xff")] == [422] * 4
    assert status("/api/v1/create_session", **{"Content-Encoding": "gzip"}) == 415
    assert status("/api/v1/forward_backward", b"\xff" * 100) == 422
    assert status("/api/v1/weights_info", b"7") == 422
    assert status("/api/v1/billing/usage/events", None, method="GET") == 404
    assert status("/files/../../service.sqlite", None, method="GET") == 403
    for changes, why in (
        ({"host": "0.0.0.0"}, r"--host=0\.0\.0\.0 lets other machines in, and there is no --api_key"),
        ({"api_key": "secret"}, "--api_key must begin with tml-"),
        ({"workdir": ""}, "--api=tinker needs --workdir=DIR"),
        ({"model": "a=b,a=c"}, "with different names"),
    ):
        with pytest.raises(ValueError, match=why):
            dataclasses.replace(settings_for(tmp_path), **changes).check()
    with pytest.raises(ValueError, match="stop the other server of this --workdir"):
        store_lib.Store(server[1].workdir)
