"""The server as its users meet it: a process, gRPC clients, signals; and what it says when it can't begin."""

import asyncio
import contextlib
import dataclasses
import pathlib
import re
import shutil
import signal
import socket
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from reinforce_ada_jax import cli, serve
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving import jetstream
from reinforce_ada_jax.serving.jetstream import server as server_lib
from reinforce_ada_jax.serving.jetstream import servicer as servicer_lib
from reinforce_ada_jax.serving.jetstream.engine import JetStreamEngine
from reinforce_ada_jax.serving.settings import ServerSettings, bind
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.compile_counter import CompileCounter
from tests import forked, standins
from tests.forked import Forked
from tests.running import environment, free_port, refused
from tests.test_docs import code_block

pb2, pb2_grpc = jetstream.protocol()
CIPHER = components_lib.ASSETS / "cipher"
LIMIT = 24
STOP = 2
# Greedy and float32, for the answers of a plain forward pass.
FLAGS = ("--api=grpc", "--dtype=float32", "--greedy", "--port=0", "--max_prompt_tokens=32", "--page_size=8")


@dataclasses.dataclass(eq=False)
class Server:
    """A running server, and what it has said."""

    process: Forked
    stub: Any
    address: str
    started: list[str]
    said: int  # characters of its output that a test has read

    def ask(self, **request: Any) -> tuple[str, list[int], str]:
        """(text, tokens, finish) of one response."""
        call = self.stub.Decode(pb2.DecodeRequest(**request), timeout=60)
        samples = [response.stream_content.samples[0] for response in call]
        tokens = [id for sample in samples for id in sample.token_ids]
        return "".join(sample.text for sample in samples), tokens, dict(call.trailing_metadata())["finish"]

    def stream(self, **request: Any) -> Any:
        """A call that has brought its first token."""
        call = self.stub.Decode(pb2.DecodeRequest(**request), timeout=60)
        assert len(next(call).stream_content.samples[0].token_ids) == 1
        return call

    def line(self) -> str:
        """The next line of its output."""
        line = read_line(self.process, self.said)
        self.said += len(line)
        return line

    def ended(self, within: float) -> tuple[int, str, str]:
        """Exit code, what it said from now on, and all that it said at stderr."""
        code = self.process.wait(within)
        out, errors = self.process.communicate()
        return code, out[self.said :], errors


def read_line(process: Forked, start: int) -> str:
    """The line of a process's output that begins at a character, as soon as it is whole."""
    deadline = time.monotonic() + 60
    while "\n" not in process.said()[start:]:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process.said()[start:].split("\n")[0] + "\n"


@contextlib.contextmanager
def running(folder: pathlib.Path, *flags: str):
    """The command, as soon as it is ready; killed at the end if it is still there."""
    command = ["-m", "reinforce_ada_jax.serve", f"--model={folder}", *FLAGS, *flags]
    process, lines = Forked(command, environment()), [""]
    try:
        while not lines[-1].startswith("ready"):
            lines.append(read_line(process, len("".join(lines))))
        text = "".join(lines)
        address = re.search(r"127\.0\.0\.1:\d+", text)
        assert address, text
        with grpc.insecure_channel(address[0]) as channel:
            yield Server(process, pb2_grpc.OrchestratorStub(channel), address[0], lines[1:], len(text))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server():
    with running(CIPHER, "--slots=3", f"--max_response_tokens={LIMIT}") as started:
        yield started


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """The packaged model, but that what ends its responses is a token that it never takes."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(CIPHER, folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        changed = text.replace('"eos_token_id": 2', '"eos_token_id": 0').replace('"<eos>"', '"<pad>"')
        assert changed != text
        (folder / name).write_text(changed)
    return folder


@pytest.fixture(scope="module")
def greedy():
    """tokens -> what a plain forward pass takes after them, LIMIT tokens."""
    architecture, params = huggingface.load(CIPHER)

    def decode(prompts: list[list[int]]) -> list[list[int]]:
        rows, lengths = np.zeros((len(prompts), 64), np.int32), np.array([len(prompt) for prompt in prompts])
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = prompt
        for turn in range(LIMIT):
            logits = transformer.logits(architecture, params, rows)
            place = lengths + turn
            rows[np.arange(len(rows)), place] = np.argmax(logits[np.arange(len(rows)), place - 1], axis=-1)
        return [row[length : length + LIMIT].tolist() for row, length in zip(rows, lengths, strict=True)]

    return decode


@pytest.fixture(scope="module")
def questions(greedy):
    """(text, tokens, greedy continuation): words of the task, and others of 1 to 32 tokens."""
    tokenizer = Tokenizer.load(CIPHER)
    problems = [problem["problem"] for problem in cipher.problems("heldout")[:8]]
    # A BOS comes before each; 31 letters are the longest prompt, 16 tokens and 17 two buckets.
    texts = [*problems, *(("".join(problems))[:length] for length in (1, 3, 15, 16, 31))]
    prompts = [tokenizer.encode(text).tolist() for text in texts]
    assert {len(prompt) for prompt in prompts} >= {2, 8, 16, 17, 32}
    return list(zip(texts, prompts, greedy(prompts), strict=True))


def until_stop(tokens: list[int], max_tokens: int) -> tuple[list[int], str]:
    """(tokens, finish) of a response: JetStream leaves the stop token out."""
    end = tokens.index(STOP) if STOP in tokens else len(tokens)
    return tokens[: min(end, max_tokens)], "stop" if end < max_tokens else "length"


def refusal(stub, request, **call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as ended:
        list(stub.Decode(request, timeout=60, **call))
    return ended.value.code(), ended.value.details()


# ---- a server that runs ------------------------------------------------------------------------------------------


def test_it_says_what_it_serves_and_where(server):
    text = "".join(server.started)
    assert [line.split()[0] for line in server.started] == [
        "model", "mesh", "memory", "lengths", "sampling", "address", "ready",
    ]  # fmt: skip
    for part in (str(CIPHER), "2 '<eos>'", "3 slots", "sampling    greedy, seed 0", "for this machine"):
        assert part in text
    assert server.stub.HealthCheck(pb2.HealthCheckRequest()).is_live


def test_concurrent_clients_get_what_direct_decoding_gives(server, questions):
    """39 requests at once on 3 slots: each prompt with three limits, as text and as tokens."""
    tokenizer, wanted, requests = Tokenizer.load(CIPHER), [], []
    for index, (text, prompt, continuation) in enumerate(questions):
        for max_tokens in (1, 2 + index % 4, LIMIT):
            tokens, finish = until_stop(continuation, max_tokens)
            by_text = (index + max_tokens) % 2 == 0
            content = dict(text_content=dict(text=text)) if by_text else dict(token_content=dict(token_ids=prompt))
            requests.append(content | dict(max_tokens=max_tokens))
            wanted.append((tokenizer.decode(np.array(tokens, np.int32)) if by_text else "", tokens, finish))
    with ThreadPoolExecutor(len(requests)) as clients:
        answers = list(clients.map(lambda request: server.ask(**request), requests))
    assert answers == wanted
    # The test is about something: ends of both kinds, and lengths from nothing on.
    assert {finish for *_, finish in wanted} == {"stop", "length"}
    assert len({len(tokens) for _, tokens, _ in wanted}) > 5


def test_the_client_of_the_documentation(server, capsys):
    text = code_block("how_to/serve.md", "DecodeRequest").replace("127.0.0.1:9000", server.address)
    exec(compile(text, "docs/how_to/serve.md", "exec"), {})
    said, _, finish = server.ask(text_content={"text": "рСУш..="}, max_tokens=16)
    assert capsys.readouterr().out == f"{said} {finish}\n" and said


def test_what_is_refused_leaves_the_server_alive(server, questions):
    """Each of these kills JetStream's process where they reach its threads, or waits forever."""
    text, _, continuation = questions[0]
    refused = [
        pb2.DecodeRequest(text_content=dict(text="." * 32), max_tokens=1),  # 33 tokens with BOS
        pb2.DecodeRequest(token_content=dict(token_ids=[3] * 33), max_tokens=1),
        pb2.DecodeRequest(text_content=dict(text=""), max_tokens=1),
        pb2.DecodeRequest(max_tokens=1),
        pb2.DecodeRequest(text_content=dict(text=text), max_tokens=LIMIT + 1),
        pb2.DecodeRequest(text_content=dict(text=text)),
    ]
    words = ["33 tokens", "33 tokens", "empty", "empty", f"max_tokens is {LIMIT + 1}", "max_tokens is 0"]
    for request, part in zip(refused, words, strict=True):
        code, details = refusal(server.stub, request)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and part in details
    code, details = refusal(server.stub, refused[0], metadata=(("temperature", "0"),))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "'temperature'" in details
    assert server.ask(text_content=dict(text=text), max_tokens=LIMIT)[1:] == until_stop(continuation, LIMIT)


def test_messages_beyond_any_prompt_are_not_read(server, questions):
    text, _, continuation = questions[1]
    long = pb2.DecodeRequest(text_content=dict(text="." * 10**6), max_tokens=1)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        code, details = refusal(server.stub, long, compression=compression)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details
    assert server.ask(text_content=dict(text=text), max_tokens=LIMIT)[1:] == until_stop(continuation, LIMIT)


def listening(pid: int) -> set[str]:
    """Every address:port on which a process listens, IPv4 and IPv6."""
    inodes = set()
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(descriptor.readlink()))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                digits, port = fields[1].split(":")
                words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
                address = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")  # IPv4 on an IPv6 socket
                found.add(f"{address}:{int(port, 16)}")
    return found


def test_it_listens_on_this_machine_and_nowhere_else(server):
    assert ServerSettings(model="package:cipher").host == "127.0.0.1"
    assert listening(server.process.pid) == {server.address}


@pytest.mark.parametrize(
    "method",
    [
        # What other servers of this protocol have: adapters read from paths, profiles written to some.
        "jetstream_proto.MultiAdapterManager/LoadAdapter",
        "jetstream_proto.MultiAdapterManager/ListAdapters",
        "jetstream_proto.Orchestrator/LoadLoRA",
        "jetstream_proto.Orchestrator/StartProfile",
        "tensorflow.ProfilerService/Profile",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "../../etc/passwd",
    ],
)
def test_there_is_nothing_but_decoding_and_health(server, method):
    assert [each.name for each in pb2.DESCRIPTOR.services_by_name["Orchestrator"].methods] == ["Decode", "HealthCheck"]
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as ended:
        channel.unary_unary(f"/{method}")(b"\n\x0b/etc/passwd", timeout=30)
    assert ended.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert server.stub.HealthCheck(pb2.HealthCheckRequest()).is_live


def test_headers_without_an_end_are_refused(server, questions):
    text, _, continuation = questions[2]
    request = pb2.DecodeRequest(text_content=dict(text=text), max_tokens=LIMIT)
    code, _ = refusal(server.stub, request, metadata=(("x-long", "a" * 10**6),))
    assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    assert server.ask(text_content=dict(text=text), max_tokens=LIMIT)[1:] == until_stop(continuation, LIMIT)


def test_its_port_is_taken(server, capsys):
    port = int(server.address.split(":")[1])
    shown = refused(capsys, serve.main, ServerSettings("package:cipher", "grpc", port=port))
    assert shown.out == "" and shown.err.startswith(f"error: cannot listen on 127.0.0.1, port {port} (Address already")


def test_gRPC_itself_shares_no_port(server):  # noqa: N802
    async def bind():
        with pytest.raises(ValueError, match="cannot listen on 127.0.0.1:"):
            servicer_lib.make_server(server.address, 8)

    asyncio.run(bind())


def test_an_interrupt_ends_an_idle_server(server):
    """The last test of this server."""
    server.process.send_signal(signal.SIGINT)
    code, said, errors = server.ended(within=10)
    assert code == 0
    assert re.fullmatch(r"stopped     \d+ answered, \d+ tokens\n", said)
    # Nothing but what compiles, and the line that comes every ten seconds: JetStream would have logged every token.
    assert all("answered" in line or line.startswith("compiling ") for line in errors.splitlines())


# ---- hang-ups and signals ----------------------------------------------------------------------------------------

LONG = 4096  # about 7 s where this was written


def test_hang_ups_free_their_slots_and_a_signal_lets_responses_end(endless, questions):
    flags = ("--slots=2", f"--max_response_tokens={LONG}", "--grace_s=30")
    (text, _, first), (other, _, second), *_ = questions
    with running(endless, *flags) as server:
        began = time.monotonic()
        for _ in range(6):
            server.stream(text_content=dict(text=text), max_tokens=LONG).cancel()
        with ThreadPoolExecutor(4) as clients:
            asked = [
                clients.submit(server.ask, text_content=dict(text=question), max_tokens=12)
                for question in (text, other, text, other)
            ]
            answers = [answer.result() for answer in asked]
        seconds = time.monotonic() - began
        # Past the stop token of the model as it is, this one goes on.
        assert [tokens for _, tokens, _ in answers] == [first[:12], second[:12]] * 2
        # Six of them on two slots would have taken three times LONG turns: 21 s where this takes 0.3.
        assert seconds < 10, f"{seconds:.1f} s"

        call = server.stream(text_content=dict(text=text), max_tokens=300)
        server.process.send_signal(signal.SIGTERM)
        assert server.line() == "stopping    30 s are left for requests not yet answered: 1\n"
        with pytest.raises(grpc.RpcError) as ended:  # nobody new is let in
            with grpc.insecure_channel(server.address) as channel:
                list(pb2_grpc.OrchestratorStub(channel).Decode(pb2.DecodeRequest(max_tokens=1), timeout=60))
        assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        tokens = [id for response in call for id in response.stream_content.samples[0].token_ids]
        assert len(tokens) == 299 and dict(call.trailing_metadata())["finish"] == "length"
        code, said, errors = server.ended(within=10)
        assert code == 0 and said.startswith("stopped     5 answered")
        assert "Traceback" not in errors


@pytest.mark.slow  # the test above lets responses end; test_openai.py has the end of a grace
def test_grace_ends_and_a_second_signal_ends_everything(endless, questions):
    text = questions[0][0]
    for grace_s, signals, code in ((0.1, [signal.SIGTERM], 0), (1000, [signal.SIGTERM, signal.SIGINT], 128 + 2)):
        flags = ("--slots=2", f"--max_response_tokens={LONG}", f"--grace_s={grace_s}")
        with running(endless, *flags) as server:
            call = server.stream(text_content=dict(text=text), max_tokens=LONG)
            for number in signals:
                server.process.send_signal(number)
                if number == signals[0]:
                    assert server.line().startswith("stopping ")
            ended, _, errors = server.ended(within=60)
            assert ended == code
            assert "Traceback" not in errors
            with pytest.raises(grpc.RpcError):  # the client gets an error
                list(call)


# ---- what cannot begin -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model": "Qwen/Qwen2.5-1.5B"}, ["Qwen/Qwen2.5-1.5B is not a folder", "can't be fetched"]),
        ({"model": "."}, ["config.json"]),
        ({"model": "a,b=c"}, ["--api=grpc serves one model", "--model is 'a,b=c'", "give one folder"]),
        ({"model": "package:chiper"}, ["there is no model 'package:chiper'", "package:cipher"]),
        ({"port": 70_000}, ["--port is 70000", "0 to 65,535"]),
        ({"host": "no host"}, ["cannot listen on no host", "choose another"]),
        ({"slots": 0}, ["--slots is 0", "at least 1"]),
        ({"max_prompt_tokens": 40_000}, ["--max_prompt_tokens is 40000", "1 to 32,768"]),
        ({"max_response_tokens": 0}, ["--max_response_tokens is 0"]),
        ({"page_size": 0}, ["--page_size is 0"]),
        ({"waiting": -1}, ["--waiting is -1"]),
        ({"peer_calls": 0}, ["--peer_calls is 0"]),
        ({"request_s": 0.0}, ["--request_s is 0.0", "above 0"]),
        ({"temperature": -0.5}, ["--temperature is -0.5"]),
        ({"temperature": float("nan")}, ["--temperature is nan"]),
        ({"top_k": -1}, ["--top_k is -1"]),
        ({"top_p": 1.5}, ["--top_p is 1.5", "at most 1"]),
        ({"top_p": 0.0}, ["--top_p is 0.0", "above 0"]),
        ({"greedy": True, "temperature": 0.7}, ["--greedy", "--temperature=0.7", "drop one"]),
        ({"dtype": "float16"}, ["--dtype is 'float16'", "float32, bfloat16"]),
        ({"grace_s": -1.0}, ["--grace_s is -1.0"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_settings_that_are_refused(capsys, changes, parts):
    settings = ServerSettings(**({"model": "package:cipher", "api": "grpc", "port": 0} | changes))
    shown = refused(capsys, serve.main, settings)
    assert shown.out == "" and shown.err.startswith("error: ") and len(shown.err.splitlines()) < 15
    assert all(part in shown.err for part in parts), shown.err


def test_flags_belong_to_interfaces():
    """Requests of the tinker client always name their sampling: flags for it would have no effect."""
    tinker = ServerSettings("a", "tinker", workdir="w", request_s=5.0)
    tinker.check()
    for changes in ({"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}, {"greedy": True}):
        with pytest.raises(ValueError, match="is a flag of --api=openai and --api=grpc, and --api is 'tinker'"):
            dataclasses.replace(tinker, **changes).check()
    ServerSettings("package:cipher", "grpc", temperature=0.5, top_k=5, request_s=5.0).check()


def test_weights_that_do_not_fit(tmp_path, capfd):
    """They are read after the address is taken: the message is the same."""
    shutil.copytree(CIPHER, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    before = signal.getsignal(signal.SIGINT)
    try:
        shown = refused(capfd, serve.main, ServerSettings(str(tmp_path / "model"), "grpc", port=0, slots=2)).err
    finally:
        signal.signal(signal.SIGINT, before)
    assert shown.startswith("error: ") and str(tmp_path) in shown and "safetensors" in shown
    assert "Traceback" not in shown


def test_without_jetstream_the_remedy_is_named(monkeypatch, capsys):
    standins.without_packages(monkeypatch, "jetstream")
    monkeypatch.setattr(jetstream, "orchestrator", jetstream.orchestrator.__wrapped__)
    shown = refused(capsys, serve.main, ServerSettings("package:cipher", "grpc", port=0))
    assert "pip install --no-deps google-jetstream==0.2.2" in shown.err


@pytest.mark.parametrize(
    ("flags", "part"), [(["--model=none", "--slots=0"], "--slots is 0"), (["--port=9"], "--model must have a value")]
)
def test_flags(flags, part):
    """A wrong flag ends the command in one screen."""
    result = forked.run(["-m", "reinforce_ada_jax.serve", *flags], environment())
    assert (result.returncode, result.stdout) == (cli.BAD_INPUT, "")
    assert result.stderr.startswith("error: ") and part in result.stderr and len(result.stderr.splitlines()) < 15


# ---- the engine behind it ----------------------------------------------------------------------------------------


def jetstream_engine(settings):
    """(components, engine) as the command makes them."""
    components = serve.build(settings)
    return components, JetStreamEngine(components.engine, components.tokenizer, settings.sampling)


def test_settings_reach_the_engine():
    settings = ServerSettings(
        "package:cipher", "grpc", slots=5, max_prompt_tokens=9, max_response_tokens=20, page_size=4, temperature=0.5,
        top_k=3, top_p=0.9, dtype="float32", seed=7,
    )  # fmt: skip
    options = serve.build(settings).engine.options
    assert (options.slots, options.max_prompt_tokens, options.max_response_tokens) == (5, 9, 20)
    assert (options.page_size, options.dtype, options.seed, options.stop_ids) == (4, "float32", 7, (2,))
    assert options.pages > 5 * 8  # 29 tokens in pages of 4, for every slot at once
    assert settings.sampling == SamplingParams(max_tokens=20, temperature=0.5, top_k=3, top_p=0.9)
    assert dataclasses.replace(settings, greedy=True, temperature=1.0).sampling.temperature == 0


@pytest.mark.slow  # test_rollouts.py has an engine that compiles nothing after its first session
def test_after_the_warm_up_nothing_is_compiled():
    # With the sizes of `server`, whose programs these are.
    settings = ServerSettings(
        "package:cipher", "grpc", slots=3, page_size=8, max_prompt_tokens=32, max_response_tokens=LIMIT, dtype="float32"
    )
    components, engine = jetstream_engine(settings)
    params = engine.load_params(huggingface.load(components.folder, components.mesh, "float32")[1])
    server_lib.warm_up(engine, params)
    compilations = CompileCounter()
    state = engine.init_decode_state()
    for slot, length in enumerate((3, 30)):
        tokens, _ = engine.build_tokenizer(None).encode("a" * (length - 1), max_prefill_length=64)
        state = engine.insert(engine.prefill(params=params, padded_tokens=tokens, true_length=length), state, slot=slot)
    state, result = engine.generate(params, state)
    assert result.convert_to_numpy().get_result_at_slot(1).valid[0, 0] == 1
    assert compilations.since_last() == 0


def test_the_status_line_comes_only_when_there_is_news(monkeypatch, capsys):
    counts = servicer_lib.Counts()

    async def run():
        reporting = asyncio.create_task(
            server_lib.print_status(types.SimpleNamespace(counts=counts, running=2, waiting=1))
        )
        await asyncio.sleep(0.1)
        silent = capsys.readouterr().err
        counts.answered, counts.tokens = 3, 40
        await asyncio.sleep(0.2)
        reporting.cancel()
        return silent

    standins.constants(monkeypatch, server_lib, STATUS_EVERY_S=0.01)
    assert asyncio.run(run()) == ""
    line = "3 answered, 2 running, 1 waiting, 0 refused, 0 hung up; 4,000.0 tokens/s\n"  # 40 tokens in 0.01 s
    assert capsys.readouterr().err == line


def test_a_public_address_is_called_that():
    settings = ServerSettings("package:cipher", "grpc", slots=1, host="0.0.0.0")
    components, engine = jetstream_engine(settings)
    assert "0.0.0.0:9000, gRPC without encryption or passwords: anyone who reaches it may use it" in server_lib.summary(
        settings, components.folder, engine, 9000
    )
    assert ServerSettings("m", host="::1").address == "[::1]"


def test_bind_lets_a_free_port_through():
    bind("127.0.0.1", free_port()).close()
