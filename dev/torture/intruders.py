"""Attacks from outside: model folders, data files, bytes for parsers, code in gradings, and clients of the server."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import grpc

from dev.torture import server
from dev.torture.bench import Bench
from reinforce_ada_jax import cli
from reinforce_ada_jax.rewards import code
from reinforce_ada_jax.rewards.loading import Made
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.serving import jetstream
from reinforce_ada_jax.types import Verdict
from tests import test_mistakes
from tests.forked import Forked
from tests.hostile import model_folders
from tests.hostile import parsers as parsers_lib
from tests.rewards import graders as graders_lib
from tests.rewards import test_forged_verdicts as forged_lib
from tests.running import environment

BATCH = 10


def _trials(bench: Bench, kind: str, limit: int) -> None:
    """Tries seeds in batches, each in a process of its own."""
    first = limit * bench.seed
    for start in range(first, first + limit, BATCH):
        if not bench.goes_on():
            return
        program = f"from tests.hostile import trials; trials.main({kind!r}, {start}, {start + BATCH})"
        process = Forked(["-c", program], environment())
        out, err = process.communicate()
        found = {trial["seed"]: trial for trial in map(json.loads, out.splitlines())}
        for seed in range(start, start + BATCH):
            trial = found.get(seed, {"harm": "", "problem": f"no verdict; the process ended: {err[-300:]}", "said": ""})
            with bench.case(f"{kind}, seed {seed}: {trial['harm']}"):
                assert not trial["problem"], f"{trial['problem']}: {trial['said']}"


def folders(bench: Bench) -> None:
    """200 hostile model folders: refused in one line, below 10 s and 1 GB."""
    _trials(bench, "folders", 200)


def files(bench: Bench) -> None:
    """100 hostile data files: refused in one line, below 10 s and 1 GB."""
    _trials(bench, "files", 100)


def parsers(bench: Bench) -> None:
    """Cases of hypothesis for every parser: a result, or the one error that it documents."""
    batch = 0
    while bench.goes_on():
        for name in parsers_lib.PARSERS:
            with bench.case(f"{name}, batch {batch}"):
                parsers_lib.fuzz(name, 100, bench.scratch, 1000 * bench.seed + batch)
        batch += 1


def commands(bench: Bench) -> None:
    """Hostile model folders given to the commands themselves, and mistakes of their users: a short message."""
    whole, seed = model_folders.write_whole(bench.scratch / "whole"), 10**6 * (bench.seed + 1)
    names = ("train", "prepare", "evaluate")
    (bench.scratch / "problems.jsonl").write_text('{"problem": "1 + 1 = ?", "answer": "2"}\n')
    while bench.goes_on():
        folder, name = bench.scratch / str(seed) / "model", names[seed % len(names)]
        harm = model_folders.write(whole, folder, seed)
        paths = {"train": [f"--workdir={folder.parent / 'run'}"], "evaluate": [f"--model={folder}", "--samples=2"]}
        paths["prepare"] = [f"--input={bench.scratch / 'problems.jsonl'}", f"--output={folder.parent / 'out.jsonl'}"]
        paths["prepare"] += ["--samples=2"]
        if name == "evaluate":
            paths[name] += [f"--benchmarks={bench.scratch / 'problems.jsonl'}"]
        flags = ["--config=configs/tiny.py", f"--config.model.path={folder}", "--config.data.template=qwen_math"]
        flags += [f"--config.data.prompts={bench.scratch / 'problems.jsonl'}", "--config.data.max_prompt_tokens=512"]
        with bench.case(f"{name} of seed {seed}: {harm}"):
            process = Forked(["-m", f"reinforce_ada_jax.{name}", *flags, *paths[name]], environment())
            try:
                _, err = process.communicate(timeout=120)
            except subprocess.TimeoutExpired as error:
                process.kill()
                process.communicate()
                raise AssertionError("it did not end within 120 s") from error
            errors = [line for line in err.splitlines() if line.startswith("error: ")]
            assert process.returncode == cli.BAD_INPUT, (process.returncode, err[-1500:])
            assert len(errors) == 1 and "Traceback" not in err and "panicked" not in err, err[-1500:]
        for number, mistake in enumerate(bench.rng.sample(test_mistakes.MISTAKES, 3)):
            place = bench.scratch / str(seed) / f"mistake-{number}"
            place.mkdir()
            with bench.case(f"the mistake: {mistake['title']}"):
                test_mistakes.check(mistake, place)
        seed += 1


# Deeds of `tests.rewards.graders.obedient`, with the reason in the verdict; "writes" means to the worker's socket.
DEEDS = {
    ("loop", "x"): "timeout", ("power", "x"): "timeout", ("sleep", "x"): "timeout", ("abort", "x"): "crash",
    ("exit", "x"): "crash", ("raise", "x"): "error", ("system_exit", "x"): "error", ("recurse", "x"): "error",
    ("memory", "x"): "error", ("none", "x"): "error", ("nan", "x"): "error", ("text", "x"): "error",
    ("writes_half", ""): "timeout", ("closes", ""): "crash", ("daemon_and_hang", "t"): "timeout",
    ("daemon_and_exit", "t"): "crash", ("child", "t"): "timeout",
    **{("writes", written): "crash" for written in graders_lib.WRITTEN if written != "writes_half"},
}  # fmt: skip


def graders(bench: Bench) -> None:
    """Gradings that crash, hang, start processes and forge verdicts, between honest ones, whose verdicts stay."""
    output, programs = bench.scratch / "graders.txt", forged_lib.FORGED | forged_lib.HONEST
    settings = {"time_limit_s": 20.0, "max_tests": 0, "limits": forged_lib.LIMITS}
    of_code = VerifierPool(Made(f"{code.__name__}:grader", settings), workers=2, time_limit_s=20.0, output=output)
    with of_code, VerifierPool(graders_lib.obedient, workers=2, time_limit_s=1.0, output=output) as pool:
        while bench.goes_on():
            pairs = [bench.rng.choice((*DEEDS, ("a", "a"), ("b", "a"))) for _ in range(8)]
            with bench.case(f"gradings {pairs}"):
                right = [pair == ("a", "a") for pair in pairs]
                reasons = [DEEDS.get(pair, "") for pair in pairs]
                verdicts = pool.grade_all(pairs)
                assert verdicts == list(map(Verdict, right, map(float, right), reasons)), verdicts
            names = bench.rng.sample(sorted(programs), 8)
            given = [(f"```python\n{programs[name][1]}\n```", "", {"test_list": [programs[name][0]]}) for name in names]
            with bench.case(f"programs {names}"):
                rewards = [verdict.reward for verdict in of_code.grade_all(given)]
                assert rewards == [float(name in forged_lib.HONEST) for name in names], rewards


SERVED = (
    "--model=package:cipher", "--api=grpc", "--greedy", "--slots=2", "--max_prompt_tokens=32", "--page_size=8",
    "--max_response_tokens=16", "--waiting=8", "--request_s=1", "--peer_calls=32",
)  # fmt: skip


def _noise(address: str, rng: random.Random) -> None:
    """A connection that says nothing, or no HTTP/2, and ends."""
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2) as connection:
        connection.sendall(rng.choice((b"", b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(rng.randrange(1, 5000)))))
        time.sleep(rng.uniform(0, 0.05))


def _rude_call(address: str, rng: random.Random) -> None:
    """A call with bytes that are no request, with a request that is refused, without one, or one that hangs up."""
    pb2, _ = jetstream.protocol()
    long = "А" * rng.randrange(40, 10_000)
    content = rng.choice((
        rng.randbytes(rng.randrange(0, 300)), pb2.DecodeRequest(max_tokens=2**31 - 1).SerializeToString(),
        pb2.DecodeRequest(text_content={"text": long}, max_tokens=4).SerializeToString(),
        pb2.DecodeRequest(token_content={"token_ids": [-1] * 5}, max_tokens=4).SerializeToString(),
        pb2.DecodeRequest(text_content={"text": "АБ="}, max_tokens=16).SerializeToString(), None,
    ))  # fmt: skip
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError, StopIteration):
        if content is None:
            next(channel.stream_stream("/jetstream_proto.Orchestrator/Decode")(iter(_never())))
        call = channel.unary_stream("/jetstream_proto.Orchestrator/Decode")(content or b"", timeout=20)
        if rng.random() < 0.3:
            call.cancel()
        list(call)


def _never() -> Iterator[bytes]:
    """Requests that do not come while their call is open."""
    time.sleep(1.5)
    yield from ()


def _ask(address: str) -> list[int]:
    """Returns the tokens of an ordinary request."""
    pb2, pb2_grpc = jetstream.protocol()
    request = pb2.DecodeRequest(text_content={"text": "рСУш..="}, max_tokens=16)
    for _ in range(40):
        try:
            with grpc.insecure_channel(address) as channel:
                call = pb2_grpc.OrchestratorStub(channel).Decode(request, timeout=60)
                return [token for part in call for token in part.stream_content.samples[0].token_ids]
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error  # others have all its turns
            time.sleep(0.1)
    raise AssertionError("no turn within 4 s")


def clients(bench: Bench) -> None:
    """Clients that hang up, send no request or no sense; ordinary requests and health checks are answered."""
    pb2, pb2_grpc = jetstream.protocol()
    with server.ready(bench, *SERVED) as (process, port), concurrent.futures.ThreadPoolExecutor(16) as rude:
        address = f"127.0.0.1:{port}"
        expected, descriptors = _ask(address), pathlib.Path(f"/proc/{process.pid}/fd")
        before = len(os.listdir(descriptors))
        while bench.goes_on():
            seeds = [bench.rng.random() for _ in range(100)]
            with bench.case("a hundred clients"):
                calls = [
                    rude.submit(bench.rng.choice((_noise, _rude_call)), address, random.Random(seed)) for seed in seeds
                ]
                with grpc.insecure_channel(address) as channel:
                    health = pb2_grpc.OrchestratorStub(channel)
                    while not all(call.done() for call in calls):
                        assert health.HealthCheck(pb2.HealthCheckRequest(), timeout=20).is_live
                        time.sleep(0.05)
                for call in calls:
                    call.result()
                assert _ask(address) == expected
        with bench.case("the end of the server"):
            deadline = time.monotonic() + 30
            while len(os.listdir(descriptors)) > before + 2 and time.monotonic() < deadline:
                time.sleep(0.2)
            assert len(os.listdir(descriptors)) <= before + 2, (
                f"{len(os.listdir(descriptors))} descriptors, {before} before"
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            errors = (bench.scratch / "server.txt").read_text()
            assert "Traceback" not in errors, errors[-1500:]
