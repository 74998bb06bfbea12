"""Floods of the HTTP servers: endless headers, JSON of 30 MB, gaps in queues, and a signal while one is busy."""

import contextlib
import http.client
import json
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

from dev.torture import server
from dev.torture.bench import Bench
from tests.running import ROOT, environment

FILES = 1024  # that the server may have open, fewer than there are sockets
SOCKETS = 1500
ANSWER_S = 1.0  # in which a client beside a flood is answered
MEMORY_MB = 200  # that may be left of a flood
OPTIONS = ["--slots=4", "--max_prompt_tokens=64", "--page_size=16", "--max_response_tokens=64"]


@contextlib.contextmanager
def _server(bench: Bench, api: str, *options: str) -> Iterator[tuple[subprocess.Popen, tuple[str, int]]]:
    """A server that is ready, with few files, and its address."""
    model = "--model=cipher=package:cipher"
    with server.ready(bench, f"--api={api}", model, *OPTIONS, *options, most_files=FILES) as (process, port):
        yield process, ("127.0.0.1", port)


def _ask(address: tuple[str, int], method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", "X-API-Key": "tml-a"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _memory_mb(process: subprocess.Popen) -> int:
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) // 1024


class _Health:
    """Asks for the server's health, one request after another; `slowest` is the longest answer in seconds."""

    def __init__(self, address: tuple[str, int], path: str):
        self.slowest, self.num_asked = 0.0, 0
        self._address, self._path, self._stopping = address, path, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopping.wait(0.02):
            begun = time.monotonic()
            try:
                assert _ask(self._address, "GET", self._path)[0] == 200
            except OSError:
                self.slowest = 1e9
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.num_asked += 1

    def __enter__(self) -> "_Health":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


def _endless_headers(address: tuple[str, int], rng: random.Random) -> None:
    """1,500 sockets with headers, bytes at a time; those that are closed come again."""
    sockets: list[socket.socket | None] = [None] * SOCKETS
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        for place in rng.sample(range(SOCKETS), SOCKETS):
            try:
                if sockets[place] is None:
                    sockets[place] = socket.create_connection(address, timeout=2)
                    sockets[place].sendall(b"GET / HTTP/1.1\r\nX-a: ")
                sockets[place].sendall(b"a")
            except OSError:
                if sockets[place] is not None:
                    sockets[place].close()
                sockets[place] = None
    for each in filter(None, sockets):
        each.close()


def _large_bodies(address: tuple[str, int], rng: random.Random, path: str) -> None:
    """Bodies of 30 MB, or with as many values as are parsed, which are refused."""
    begin = b'{"model": "cipher", "prompt": '
    body = rng.choice((
        b"%s[%s7]}" % (begin, b"7," * 15_000_000), b"%s[%s{}]}" % (begin, b"{}," * 90_000),
        b'%s"%s"}' % (begin, b"a" * 30_000_000), b"[" * 30_000_000, b'{"a":1}' + b" " * 30_000_000,
    ))  # fmt: skip
    with contextlib.suppress(ConnectionError):  # closed before all was sent
        status, _ = _ask(address, "POST", path, body)
        assert status in (400, 408, 413, 422, 429, 503), status  # 408: on a busy machine the body comes too slowly


def _flooded(bench: Bench, process: subprocess.Popen, address: tuple[str, int], health: str, path: str) -> None:
    """Floods a server while `bench` goes on; another client is answered within a second."""
    before = _memory_mb(process)
    while bench.goes_on():
        seed = bench.rng.randrange(2**32)
        for flood, count in (("headers", 1), ("bodies", 4)):
            with bench.case(f"{flood}, {seed}"):
                with _Health(address, health) as asked:
                    for rude in [_rude(flood, address, seed + number, path) for number in range(count)]:
                        _, error = rude.communicate()
                        assert rude.returncode == 0, error[-1500:]
                assert asked.num_asked and asked.slowest < ANSWER_S, f"{asked.slowest:.1f} s for an answer"
    with bench.case("what is left of a flood"):
        deadline = time.monotonic() + 30
        descriptors = pathlib.Path(f"/proc/{process.pid}/fd")
        while len(list(descriptors.iterdir())) > 100 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(list(descriptors.iterdir())) <= 100
        assert _memory_mb(process) <= before + MEMORY_MB, f"{_memory_mb(process)} MB, {before} MB before"
        assert (bench.scratch / "server.txt").stat().st_size < 20_000


def _rude(flood: str, address: tuple[str, int], seed: int, path: str) -> subprocess.Popen:
    """Starts a client in a process of its own, whose work takes no time from the client that is to be answered."""
    command = [sys.executable, "-m", "dev.torture.floods", flood, str(address[1]), str(seed), path]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


def openai(bench: Bench) -> None:
    """Floods of `serve --api=openai`, and the end of a server whose streams are open."""
    with _server(bench, "openai", "--waiting=6000", "--grace_s=1") as (process, address):
        _flooded(bench, process, address, "/health", "/v1/completions")
        with bench.case("Ctrl-C with a stream"):
            body = {"model": "cipher", "prompt": ["рСУш..="] * 5, "n": 1000, "stream": True}
            connection = http.client.HTTPConnection(*address, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            assert b"the server stops" in answer.read().splitlines()[-2]
            connection.close()
            assert process.wait(30) == 0
            errors = (bench.scratch / "server.txt").read_text()
            assert "Traceback" not in errors and "Fatal" not in errors, errors[-1500:]


def tinker(bench: Bench) -> None:
    """Floods of `serve --api=tinker`, and requests that wait for one that never comes."""
    with _server(bench, "tinker", f"--workdir={bench.scratch / 'tinker'}") as (process, address):

        def post(path: str, **body: object) -> tuple[int, dict]:
            status, answer = _ask(address, "POST", f"/api/v1/{path}", json.dumps(body).encode())
            return status, json.loads(answer)

        def model() -> str:
            session = post("create_session", tags=[], user_metadata=None, sdk_version="0")[1]["session_id"]
            made = {"session_id": session, "model_seq_id": 0, "base_model": "cipher", "lora_config": {"rank": 2}}
            future = post("create_model", **made)[1]["request_id"]
            while (answer := post("retrieve_future", request_id=future)[1]).get("type") == "try_again":
                pass
            return answer["model_id"]

        _flooded(bench, process, address, "/api/v1/healthz", "/api/v1/asample")
        with bench.case("a gap in the queue"):
            rude, other = model(), model()
            for seq in [*range(1000, 1064), *range(300, 1, -1), 2**63, 2**80]:
                status, _ = post("optim_step", model_id=rude, seq_id=seq, adam_params={})
                assert status in (200, 400, 429), status
            status, answer = post("optim_step", model_id=other, seq_id=1, adam_params={})
            assert status == 200, answer
            assert "forward_backward first" in post("retrieve_future", request_id=answer["request_id"])[1]["error"]
            assert post("optim_step", model_id=f"{uuid.uuid4()}:train:0", seq_id=1, adam_params={})[0] == 404


if __name__ == "__main__":
    FLOOD, PORT, SEED, PATH = sys.argv[1:]
    ADDRESS, RNG = ("127.0.0.1", int(PORT)), random.Random(int(SEED))
    if FLOOD == "headers":
        _endless_headers(ADDRESS, RNG)
    else:
        _large_bodies(ADDRESS, RNG, PATH)
        _large_bodies(ADDRESS, RNG, PATH)
