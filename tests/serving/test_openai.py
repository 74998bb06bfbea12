"""The OpenAI-compatible server with real sockets, in one process: `serve --api=openai` has the same parts."""

import asyncio
import contextlib
import dataclasses
import json
import re
import shutil
import signal
import socket
import threading
import time

import httpx
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
import tokenizers

from reinforce_ada_jax import serve
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.rewards import judge
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving import http as http_lib
from reinforce_ada_jax.serving.openai import protocol
from reinforce_ada_jax.serving.openai.app import App
from reinforce_ada_jax.serving.openai.server import Worker
from reinforce_ada_jax.serving.settings import ServerSettings, bind
from reinforce_ada_jax.training.components import ASSETS
from tests import standins
from tests.forked import Forked
from tests.running import environment
from tests.serving.test_tokenizer import wrap
from tests.test_docs import code_block

PROMPT = "рСУш..="
# A template of two lines: content with a letter for each role, and the number of tools.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}="
)
SETTINGS = ServerSettings(
    "cipher=package:cipher", api="openai", dtype="float32", port=0, slots=8, waiting=256, page_size=16,
    max_prompt_tokens=64, max_response_tokens=4096, compilation_cache="", request_mib=1, request_s=60.0,
)  # fmt: skip


def models(folder):
    """The packaged model under two names: as it is, with a chat template, and with no end token."""
    components = serve.build(dataclasses.replace(SETTINGS, model="package:cipher"))
    shutil.copytree(ASSETS / "cipher", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer, engine = Tokenizer.load(folder), components.engine
    endless = Engine(engine.architecture, dataclasses.replace(engine.options, stop_ids=(-1,)), mesh=engine.mesh)

    def load():
        return huggingface.load(components.folder, components.mesh, "float32")[1]

    return [
        http_lib.Served("cipher", folder, tokenizer, engine, load),
        http_lib.Served("endless", folder, tokenizer, endless, load),
    ]


@contextlib.contextmanager
def running(settings, served, worker=None):
    """(client, app) of a server in this process; without a worker it is not ready."""
    app = App(settings, served, threading.Event() if worker is None else worker.wake)
    if worker is not None:
        app.backends = worker.loaded.result()
    listener = bind(settings.host, settings.port)
    server = http_lib.http_server(settings, app.asgi())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=120) as client:
            yield client, app
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return models(tmp_path_factory.mktemp("openai") / "cipher")


@pytest.fixture(scope="module")
def worker(served):
    worker = Worker(served, threading.Event())
    worker.start()
    yield worker
    worker.stop(10)


@pytest.fixture(scope="module")
def server(served, worker):
    with running(SETTINGS, served, worker) as started:
        yield started


@pytest.fixture(scope="module")
def unready(served):
    with running(dataclasses.replace(SETTINGS, api_key="secret"), served) as started:
        yield started


def complete(client, **fields):
    answer = client.post("/v1/completions", json={"model": "cipher", "prompt": PROMPT, "max_tokens": 32} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, path="/v1/completions", **fields):
    """The chunks of a stream, which ends with [DONE]."""
    body = {"model": "cipher", "prompt": PROMPT, "max_tokens": 32, "stream": True} | fields
    with client.stream("POST", path, json={name: value for name, value in body.items() if value is not None}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_greedy_completion_with_the_probability_of_each_token(server):
    client, _ = server
    answer = complete(client, temperature=0, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("z1tU", "stop", 0)
    # BOS and 7 letters; 4 letters and the end token.
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
    logprobs = choice["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["z", "1", "t", "U", "<eos>"], [0, 1, 2, 3, 4])
    assert logprobs["token_logprobs"][:4] == pytest.approx([-0.02866, -0.04713, -0.37400, -0.39660], abs=1e-4)
    assert [list(top) for top in logprobs["top_logprobs"]] == [["z"], ["1"], ["t"], ["U"], ["<eos>"]]
    tokens = Tokenizer.load(ASSETS / "cipher").encode(PROMPT).tolist()
    assert complete(client, temperature=0, prompt=tokens)["choices"][0]["text"] == "z1tU"
    several = complete(client, temperature=0, prompt=[PROMPT, "рСУ"], n=2)["choices"]
    assert [each["index"] for each in several] == [0, 1, 2, 3] and [each["text"] for each in several[:2]] == [
        "z1tU"
    ] * 2


@pytest.fixture(scope="module")
def expected():
    """Function (tokens, temperature) -> log-probabilities of every next token, by a plain forward pass."""
    architecture, params = huggingface.load(ASSETS / "cipher")

    def logprobs(tokens, temperature=1.0):
        logits = np.asarray(transformer.logits(architecture, params, jnp.asarray(tokens)[None])[0], np.float64)
        logits /= temperature
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return logprobs


def test_a_prompt_is_echoed_with_the_probabilities_of_its_tokens(server, expected):
    """As evaluation harnesses ask for it: the tokens of a context and an answer, and one drawn token."""
    client, _ = server
    tokenizer = Tokenizer.load(ASSETS / "cipher")
    tokens = tokenizer.encode(PROMPT + "z1tU").tolist()
    logprobs = expected(tokens)
    drawn = int(logprobs[-1].argmax())
    answer = complete(client, prompt=tokens, max_tokens=1, temperature=0, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    assert found["tokens"] == [tokenizer.token(token) for token in [*tokens, drawn]]
    assert choice["text"] == "".join(found["tokens"][:12]) and found["text_offset"][-1] == len(choice["text"])
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    wanted = [logprobs[at, token] for at, token in enumerate([*tokens[1:], drawn])]
    np.testing.assert_allclose(found["token_logprobs"][1:], wanted, atol=1e-4)
    for at, (token, top) in enumerate(zip([*tokens[1:], drawn], found["top_logprobs"][1:], strict=True)):
        greedy = token == logprobs[at].argmax()
        assert (found["token_logprobs"][at + 1] == max(top.values())) == greedy and len(top) == 2 - greedy
    # The prompt alone, as a text: its BOS has no text.
    (alone,) = complete(client, prompt=PROMPT + "z1tU", max_tokens=0, temperature=0.7, logprobs=0, echo=True)["choices"]
    assert (alone["text"], alone["finish_reason"]) == (PROMPT + "z1tU", "length")
    assert alone["logprobs"]["top_logprobs"] is None and alone["logprobs"]["text_offset"] == [0, *range(11)]
    wanted = [expected(tokens, 0.7)[at, token] for at, token in enumerate(tokens[1:])]
    np.testing.assert_allclose(alone["logprobs"]["token_logprobs"][1:], wanted, atol=1e-4)
    # Without log-probabilities it is only text.
    (text,) = complete(client, temperature=0, echo=True)["choices"]
    assert (text["text"], text["logprobs"]) == (f"{PROMPT}z1tU", None)


def test_tokens_that_were_not_drawn_have_probabilities(server, expected):
    client, _ = server
    tokenizer = Tokenizer.load(ASSETS / "cipher")
    fields = dict(seed=3, max_tokens=20, temperature=0.9, n=8)
    texts = [choice["text"] for choice in complete(client, **fields)["choices"]]
    whole = complete(client, logprobs=1, **fields)["choices"]
    assert [choice["text"] for choice in whole] == texts and len(set(texts)) > 1
    rows = [row for chunk in events(client, logprobs=1, **fields) for row in chunk["choices"] if row["logprobs"]]
    not_likely = 0
    for choice, row in zip(whole, sorted(rows, key=lambda row: row["index"]), strict=True):
        streamed = row["logprobs"]  # a stream sends it as a whole; how many texts share a pass may change the rounding
        assert (row["text"], streamed["tokens"]) == (choice["text"], choice["logprobs"]["tokens"])
        assert streamed["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
        assert [[*top] for top in streamed["top_logprobs"]] == [[*top] for top in choice["logprobs"]["top_logprobs"]]
        found, tokens = choice["logprobs"], np.append(tokenizer.encode(PROMPT + choice["text"]), tokenizer.stop_ids)
        assert found["tokens"] == [*choice["text"], "<eos>"] and found["text_offset"] == [*range(len(found["tokens"]))]
        logprobs = expected(tokens, 0.9)[7:-1]
        np.testing.assert_allclose(
            found["token_logprobs"], np.take_along_axis(logprobs, tokens[8:, None], 1)[:, 0], atol=1e-4
        )
        for drawn, likely, top in zip(found["tokens"], logprobs.argmax(-1), found["top_logprobs"], strict=True):
            assert [*top] == [*dict.fromkeys([tokenizer.token(int(likely)), drawn])]
            not_likely += len(top) == 2
    assert not_likely
    body = {"model": "endless", "messages": [{"role": "user", "content": "у"}], "max_tokens": 4, "temperature": 2.0}
    answer = client.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 20}).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [20] * 4
    assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] for entry in content)


def test_many_clients_share_the_scorer_and_some_hang_up(server):
    client, app = server
    prompts = [f"{word}=" for word in ("р", "рС", "рСУ", "рСУш", "рСУ.", "рСУ..")] * 8
    fields = dict(max_tokens=0, echo=True, logprobs=0)
    together = complete(client, prompt=prompts, **fields)["choices"]
    assert [choice["text"] for choice in together] == prompts
    alone = [complete(client, prompt=prompt, **fields)["choices"][0]["logprobs"] for prompt in prompts[:6]]
    for choice, wanted in zip(together, alone * 8, strict=True):
        ours, theirs = (np.array(each["token_logprobs"], float) for each in (choice["logprobs"], wanted))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    body = {"model": "endless", "prompt": prompts[:40], "max_tokens": 4096, "logprobs": 5}
    with httpx.Client(base_url=client.base_url) as rude, pytest.raises(httpx.ReadTimeout):
        rude.post("/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: app.num_open == 0 and app._num_running() == 0)
    assert complete(client, prompt=prompts[0], **fields)["choices"][0]["text"] == prompts[0]


def test_a_seed_is_an_address(server):
    client, _ = server
    texts = [[choice["text"] for choice in complete(client, seed=seed, n=4)["choices"]] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) > 1
    assert [choice["text"] for choice in complete(client, seed=7)["choices"]] == texts[0][:1]
    hot = dict(model="endless", max_tokens=12, temperature=3.0)
    free = {complete(client, **hot)["choices"][0]["text"] for _ in range(3)}
    assert len(free) == 3


def test_a_stream_joined_is_the_whole_answer(server):
    client, _ = server
    fields = dict(model="endless", seed=3, n=2, max_tokens=100, logprobs=0)
    whole = complete(client, **fields)
    chunks = events(client, stream_options={"include_usage": True}, **fields)
    assert len(chunks) > 6  # they came window by window
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"] == {"prompt_tokens": 8, "completion_tokens": 200, "total_tokens": 208}
    for choice in whole["choices"]:
        own = [row for chunk in chunks for row in chunk["choices"] if row["index"] == choice["index"]]
        assert "".join(row["text"] for row in own) == choice["text"] and choice["text"]
        assert [row["finish_reason"] for row in own] == [None] * (len(own) - 1) + ["length"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            parts = [value for row in own if row["logprobs"] for value in row["logprobs"][name]]
            assert parts == choice["logprobs"][name]


def test_a_completion_goes_on_with_its_prompt(served, worker):
    """With a tokenizer that strips the space before the first word of a text, and has a word for each token."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"▁{token}": token for token in range(200)}, "▁0"))
    words.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    named = dataclasses.replace(served[1], tokenizer=wrap(words))
    with running(SETTINGS, [named], worker) as (client, _):
        fields = dict(model="endless", prompt=[5, 6], seed=0, max_tokens=4)
        alone, echoed = (complete(client, echo=echo, **fields)["choices"][0]["text"] for echo in (False, True))
    assert echoed == "5 6" + alone and re.fullmatch(r"( \d+){4}", alone)


def test_a_stop_cuts_exactly_and_ends_the_slot(server):
    client, app = server
    fields = dict(model="endless", seed=5, max_tokens=100)
    text = complete(client, **fields)["choices"][0]["text"]
    stop = text[10:13]
    before = text[: text.index(stop)]
    (choice,) = complete(client, stop=[stop, "no such text"], **fields)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    rows = [row for chunk in events(client, stop=stop, **fields) for row in chunk["choices"]]
    assert "".join(row["text"] for row in rows) == before and rows[-1]["finish_reason"] == "stop"
    # It ends in the device as well: the 4,096 tokens that it may have take as long as ten requests of 400.
    assert complete(client, **(fields | {"max_tokens": 4096, "stop": stop}))["choices"][0]["text"] == before
    running = []
    while len(running) < 4 and 0 not in running:
        complete(client, **(fields | {"max_tokens": 400}))
        running.append(app._num_running())
    assert running[-1] == 0


def test_chat(server):
    """A chat is answered whole and in a stream, with log-probabilities."""
    client, _ = server
    messages = [{"role": "developer", "content": "рС"}, {"role": "user", "content": [{"type": "text", "text": "У"}]}]
    body = {"model": "endless", "messages": messages, "temperature": 0, "max_completion_tokens": 20}
    whole = client.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 1}).json()
    assert whole["object"] == "chat.completion" and whole["usage"]["prompt_tokens"] == len("sрСuУ=")
    (choice,) = whole["choices"]
    text = choice["message"]["content"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None} and text
    tokens = Tokenizer.load(ASSETS / "cipher").encode("sрСuУ=").tolist()[1:]  # the template has no BOS
    plain = complete(client, model="endless", prompt=tokens, max_tokens=20, temperature=0)
    assert plain["choices"][0]["text"] == text
    entries = choice["logprobs"]["content"]
    assert "".join(bytes(entry["bytes"]).decode() for entry in entries) == text
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries)
    deltas = [
        row["delta"]
        for chunk in events(client, "/v1/chat/completions", prompt=None, max_tokens=None, **body)
        for row in chunk["choices"]
    ]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == text
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}] * 3
    answers = [
        client.post("/v1/chat/completions", json=body | {"tools": tools, "tool_choice": choice}).json()
        for choice in ("auto", "none")
    ]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len("sрСuУ3="), len("sрСuУ=")]


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"temperature": "hot"}, 400, "temperature", None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"top_p": 0}, 400, "top_p", None),
        ({"n": 0}, 400, "n", None),
        ({"n": 265}, 400, "n", None),
        ({"max_tokens": 4097}, 400, "max_tokens", None),
        ({"max_tokens": True}, 400, "max_tokens", None),
        ({"prompt": ""}, 200, None, None),  # BOS alone
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": [1, 10**6]}, 400, "prompt", None),
        ({"prompt": [PROMPT, 3]}, 400, "prompt", None),
        ({"prompt": "а" * 65}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "а" * 10**5}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "no such letters: ß"}, 400, None, None),
        ({"logprobs": 21}, 400, "logprobs", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"max_tokens": 0, "echo": True}, 200, None, None),
        ({"stop": ["a"] * 17}, 400, "stop", None),
        ({"stop": ""}, 400, "stop", None),
        ({"echo": "yes"}, 400, "echo", None),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", None),
        ({"presence_penalty": 0, "echo": False, "user": "me", "top_k": 5, "top_p": 0.9}, 200, None, None),
        ({"guided_json": {}}, 400, "guided_json", None),
        ({"top_k": 2**31}, 400, "top_k", None),
    ],
    ids=str,
)
def test_what_is_refused_says_why(server, fields, status, param, code):
    client, _ = server
    answer = client.post("/v1/completions", json={"model": "cipher", "prompt": PROMPT, "max_tokens": 4} | fields)
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert error["message"].endswith(".") and len(error["message"]) < 300 and "/cipher" not in error["message"]


def test_what_is_refused_before_a_model_is_asked(unready):
    client, _ = unready
    key = {"Authorization": "Bearer secret"}
    body = {"model": "cipher", "prompt": PROMPT}
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic secret"}):
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/metrics", headers=headers).status_code == 401
        assert client.get("/nothing", headers=headers).status_code == 401
    early = client.post("/v1/completions", json=body, headers=key)
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    assert client.get("/health").status_code == 503  # without the key
    assert client.get("/nothing", headers=key).json()["error"]["code"] == "not_found"
    assert client.get("/v1/models/other", headers=key).json()["error"]["code"] == "model_not_found"
    assert client.put("/v1/models", headers=key).status_code == 405
    names = [model["id"] for model in client.get("/v1/models", headers=key).json()["data"]]
    assert names == ["cipher", "endless"] and client.get("/v1/models/endless", headers=key).json()["id"] == "endless"


def test_bodies_are_json_of_a_bounded_size_and_come_in_time(server, served, worker):
    client, _ = server
    json_type = {"Content-Type": "application/json"}
    for content, headers, status in (
        (b"{", json_type, 400), (b"\xff", json_type, 400), (b"[" * 10**5, json_type, 400), (b"{}", {}, 415),
        (b"x" * (2**20 + 1), json_type, 413), (b"{}", json_type | {"Content-Encoding": "gzip"}, 415),
    ):  # fmt: skip
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert (answer.status_code, "message" in answer.json()["error"]) == (status, True), content[:9]
    many = b'{"model": "cipher", "prompt": [' + b"7," * 300_000 + b"7]}"
    answer = client.post("/v1/completions", content=many, headers=json_type)
    assert answer.status_code == 413 and "send less at a time" in answer.json()["error"]["message"]
    with running(dataclasses.replace(SETTINGS, request_s=0.2), served, worker) as (client, _):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            slow.sendall(b"Content-Length: 10\r\n\r\n{")
            assert slow.recv(64).startswith(b"HTTP/1.1 408")


def test_the_first_wrong_item_of_a_list_ends_its_check():
    """The others made 250,000 errors of a megabyte, in 7 s of the event loop."""
    kind, items = protocol.CompletionRequest, 250_000 * [{}]
    body = json.dumps({"model": "a", "prompt": items}).encode()
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate_json(body)
    assert caught.value.error_count() < 10
    with pytest.raises(protocol.Invalid, match="prompt: Input should be a valid string"):
        protocol.parse(kind, body)


def test_likely_tokens_are_asked_for_with_log_probabilities():
    """As OpenAI's interface has it: alone the field would have no effect."""
    asked = {"model": "a", "messages": [{"role": "user", "content": "b"}], "top_logprobs": 2}
    with pytest.raises(protocol.Invalid, match="send logprobs=true") as refused:
        _ = protocol.parse(protocol.ChatRequest, json.dumps(asked).encode()).num_top_logprobs
    assert refused.value.param == "top_logprobs"
    for changes, number in (({"logprobs": True}, 2), ({"top_logprobs": 0}, None)):
        body = json.dumps(asked | changes).encode()
        assert protocol.parse(protocol.ChatRequest, body).num_top_logprobs == number


def test_the_first_lines_say_if_texts_may_be_longer_than_the_model_was_made_for(served):
    assert "responses of up to 4,096; the model was made for 64 tokens in all" in http_lib.summary(SETTINGS, served, 1)


def wait_until(condition, within_s=30.0):
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


class Encoder:
    """In place of `Tokenizer.encode`: keeps the prompts, and waits before the first one is encoded."""

    def __init__(self):
        self.prompts, self.begun, self.go_on = [], threading.Event(), threading.Event()

    def encode(self, tokenizer, text, encode=Tokenizer.encode, **rest):
        self.prompts.append(text)
        self.begun.set()
        assert self.go_on.wait(60)
        return encode(tokenizer, text, **rest)


@pytest.fixture
def encoder(monkeypatch):
    encoder = Encoder()

    def encode(tokenizer, text, **rest):
        return encoder.encode(tokenizer, text, **rest)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    return encoder


def test_more_prompts_than_may_be_open_are_refused_before_one_is_encoded(server, encoder):
    answer = server[0].post("/v1/completions", json={"model": "cipher", "prompt": [PROMPT] * 20_000})
    assert answer.status_code == 400 and "20,000 responses are asked for" in answer.json()["error"]["message"]
    assert not encoder.prompts


def test_every_copy_of_a_model_has_slots(served):
    """2 copies of 8 slots, and 256 responses that wait; with the slots of one copy the other would be idle."""
    engine = Engine(served[0].engine.architecture, served[0].engine.options, mesh=mesh_lib.make_mesh(data=2))
    with running(SETTINGS, [dataclasses.replace(served[0], engine=engine)]) as (client, app):
        app.backends = {"cipher": None}  # requests are refused before
        answer = client.post("/v1/completions", json={"model": "cipher", "prompt": PROMPT, "n": 2 * 8 + 256 + 1})
    assert answer.status_code == 400 and "a request may have 1 to 272 (--waiting)" in answer.text


def test_a_prompt_of_another_client_is_encoded_between_those_of_a_long_request(server, encoder, monkeypatch):
    client, app = server

    def admitted(served, num_responses):
        if encoder.begun.is_set():
            encoder.go_on.set()  # the second client is in; the first one's first prompt ends only now

    standins.before(monkeypatch, app, "_admit", admitted)
    many = threading.Thread(target=complete, args=[client], kwargs={"prompt": [PROMPT] * 9, "max_tokens": 1})
    many.start()
    assert encoder.begun.wait(60)
    complete(client, prompt=PROMPT[:-1], max_tokens=1)
    many.join()
    assert encoder.prompts == [PROMPT, PROMPT[:-1], *[PROMPT] * 8]


def test_prompts_of_a_client_that_hangs_up_are_no_longer_encoded(server, encoder):
    client, app = server
    body = json.dumps({"model": "cipher", "prompt": [PROMPT] * 200}).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port)) as rude:
        rude.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        rude.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        assert encoder.begun.wait(60)
    complete_body = {"model": "endless", "prompt": PROMPT, "max_tokens": 1}
    assert client.get("/health").status_code == 200  # the server has seen the end of the connection before this
    encoder.go_on.set()
    assert client.post("/v1/completions", json=complete_body).status_code == 200
    wait_until(lambda: app.num_open == 0)
    assert len(encoder.prompts) < 100


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_hang_up_free_their_slots(server, stream):
    """264 responses of 4,096 tokens are all that may be open; the next client has to wait until they are given up."""
    client, app = server
    body = {"model": "endless", "prompt": PROMPT, "max_tokens": 4096, "n": 264, "stream": stream}
    before = app.metrics.cancelled._value.get()
    with httpx.Client(base_url=client.base_url) as rude:
        if stream:
            with rude.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # without a name it would end here, and with it the connection
                next(lines)
                full = client.post("/v1/completions", json={"model": "cipher", "prompt": PROMPT})
                assert full.status_code == 429 and full.headers["retry-after"] == "1", full.text
                assert full.json()["error"]["code"] == "rate_limit_exceeded" and app._num_running() > 8
        else:
            with pytest.raises(httpx.ReadTimeout):
                rude.post("/v1/completions", json=body, timeout=0.5)
    # Alone on a machine it takes 0.1 s; the responses would take minutes.
    wait_until(lambda: app.num_open == 0 and app._num_running() == 0)
    assert app.metrics.cancelled._value.get() == before + 1
    assert complete(client, temperature=0)["choices"][0]["text"] == "z1tU"


@pytest.mark.slow  # tests above have a few clients at once, and some that hang up
def test_two_hundred_clients_lose_nothing(server):
    """Half of them read streams; each gets what its seed gives to one client alone."""
    client, app = server
    alone = [complete(client, seed=seed)["choices"][0]["text"] for seed in range(20)]

    async def ask(asking, number):
        body = {"model": "cipher", "prompt": PROMPT, "max_tokens": 32, "seed": number % 20, "stream": number % 2 == 0}
        answer = await asking.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if number % 2:
            return answer.json()["choices"][0]["text"]
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        return "".join(row["text"] for chunk in chunks for row in chunk["choices"])

    async def ask_all():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=120, limits=limits) as asking:
            return await asyncio.gather(*(ask(asking, number) for number in range(200)))

    assert asyncio.run(ask_all()) == alone * 10
    assert app.num_open == 0


def test_metrics_and_health(server):
    """Counts of requests and tokens can be read."""
    client, _ = server
    assert client.get("/health").json() == {"status": "ok"}

    def numbers():
        lines = client.get("/metrics").text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    before = numbers()
    complete(client, temperature=0)
    after = numbers()
    added = {name: float(after[name]) - float(before.get(name, 0)) for name in after if after[name] != before.get(name)}
    assert added['reinforce_ada_requests_total{endpoint="completions",status="200"}'] == 1
    assert added["reinforce_ada_prompt_tokens_total"] == 8 and added["reinforce_ada_generated_tokens_total"] == 5
    assert after["reinforce_ada_open_responses"] == "0.0"


def test_the_official_client(server):
    """The code of the document runs with the official client."""
    openai = pytest.importorskip("openai")
    client, _ = server
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x") as asking:
        assert [model.id for model in asking.models.list()] == ["cipher", "endless"]
        code = code_block("how_to/openai.md", "chat.completions")
        names = {"client": asking, "openai": openai}
        lines = [line for line in code.splitlines() if "import" not in line and "OpenAI(" not in line]
        exec("\n".join(lines).replace("mine", "cipher").replace("2 + 2 =", PROMPT), names)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            asking.completions.create(model="other", prompt="a")
        found = asking.completions.create(model="cipher", prompt=PROMPT, echo=True, logprobs=2, max_tokens=0).choices[0]
        assert found.logprobs.token_logprobs[0] is None and len(found.logprobs.top_logprobs[3]) in (2, 3)
        said = asking.chat.completions.create(
            model="cipher", messages=[{"role": "user", "content": "у"}], logprobs=True, top_logprobs=5, max_tokens=1
        ).choices[0]
        assert len(said.logprobs.content[0].top_logprobs) == 5


def test_the_command_answers_early_and_ends_with_a_signal():
    command = ["-m", "reinforce_ada_jax.serve", "--api=openai", "--model=cipher=package:cipher", "--port=0"]
    options = ["--dtype=float32", "--slots=4", "--page_size=16", "--max_prompt_tokens=16", "--max_response_tokens=16"]
    options += ["--grace_s=1", "--waiting=6000"]
    process = Forked(command + options, environment())
    try:
        wait_until(lambda: process.said().count("\n") >= 3)
        model, memory, serving = process.said().splitlines()[:3]
        assert model.startswith("model       cipher: ") and memory.startswith("memory      cache ")
        address = serving.split()[1].rstrip(",")
        wait_until(lambda: _status(address) == 503)
        wait_until(lambda: process.said().count("\n") >= 4)
        assert process.said().splitlines()[3].startswith("ready") and _status(address) == 200
        # Five thousand responses, which take longer than --grace_s: the stream ends in order, with an error.
        body = {"model": "cipher", "prompt": [PROMPT] * 5, "n": 1000, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGINT)
            *_, last = (line for line in lines if line)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "not_ready" and "the server stops" in error["message"]
        assert process.wait(30) == 0
        out, err = process.communicate()
        stopping = "stopping    1 s are left for requests not yet answered: 1"
        assert out.splitlines()[4:] == [stopping, "stopped"] and "Traceback" not in err and "Exception" not in err, err
    finally:
        process.kill()


def _status(address):
    try:
        return httpx.get(f"{address}/health").status_code
    except httpx.ConnectError:
        return None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "0.0.0.0"}, "lets other machines in, and there is no --api_key: set one."),
        ({"api_key": "two words"}, "without spaces"),
        ({"model": "a=x,a=y"}, "different names"),
    ],
)
def test_settings_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **changes).check()
    dataclasses.replace(SETTINGS, host="0.0.0.0", api_key="secret").check()


def test_a_judge_may_be_a_model_of_this_server(server, tmp_path):
    client, _ = server
    settings = {
        "url": f"{client.base_url}/v1", "model": "cipher", "template": "{{ response }}", "score": r"(\d+)",
        "range": (0.0, 1e6), "parameters": '{"temperature": 0, "max_tokens": 8}',
    }  # fmt: skip
    limits = {"cache": str(tmp_path / "judge.sqlite3"), "time_limit_s": 60.0}
    with contextlib.closing(judge.Judge(settings, **limits)) as grade:
        # The model deciphers these two words without a mistake.
        assert [grade(word, "", {}).reward for word in ("яяяяяя", "ееееее", "яяяяяя")] == [0.777777, 0.333333, 0.777777]
    with contextlib.closing(judge.Judge(settings | {"model": "another"}, **limits)) as grade:
        with pytest.raises(judge.JudgeFailed, match="refused the request with status 404"):
            grade("яяяяяя", "", {})
