"""Floods of the HTTP servers: endless headers, JSON of 30 MB, thousands of prompts, and a signal while one is busy."""

import contextlib
import http.client
import json
import os
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

from dev.torture import runs, server
from dev.torture.bench import Bench
from reinforce_ada_jax.isolation import process_tree
from reinforce_ada_jax.reporting import live
from tests.running import ROOT, environment

FILES = 1024  # that the server may have open, fewer than there are sockets
SOCKETS = 1500
ANSWER_S = 1.0  # in which a client beside a flood is answered
MEMORY_MB = 200  # that may be left of a flood
FLOODS = {"headers": 1, "bodies": 4}  # clients of each
HEADERS_S = 4, 30  # of a flood of headers: at least, and where there is time
PROMPT = "рСУш..="
Asked = tuple[str, str, bytes | None]  # method, path and body of a request that is answered with 200
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


def _memory_mb(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) // 1024


def _waited_for_a_core_s(pid: int) -> float:
    """Returns how long the main thread of a process could run and had no core, where the system counts that."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(pathlib.Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class _Client:
    """Asks a server for the same things, one after another.

    `slowest` is the longest answer in seconds, and without the time in which other work of the machine had the cores.
    """

    def __init__(self, pid: int, address: tuple[str, int], asked: tuple[Asked, ...]):
        self.slowest, self.num_asked, self.error = 0.0, 0, ""
        self._pid, self._address, self._asked, self._stopping = pid, address, asked, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopping.wait(0.02):
            for method, path, body in self._asked:
                begun, waited = time.monotonic(), _waited_for_a_core_s(self._pid)
                try:
                    status, answer = _ask(self._address, method, path, body)
                    assert status == 200, (status, answer)
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    self.error = self.error or f"{method} {path}: {error!r:.500}"
                waited = _waited_for_a_core_s(self._pid) - waited
                self.slowest = max(self.slowest, time.monotonic() - begun - waited)
                self.num_asked += 1

    def __enter__(self) -> "_Client":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


def _endless_headers(address: tuple[str, int], rng: random.Random, seconds: float) -> None:
    """1,500 sockets with headers, bytes at a time; those that are closed come again."""
    sockets: list[socket.socket | None] = [None] * SOCKETS
    deadline = time.monotonic() + seconds
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
        # 404: of the live page; 408: on a busy machine the body comes too slowly
        assert status in (400, 404, 408, 413, 422, 429, 503), status


def _many_prompts(address: tuple[str, int], rng: random.Random, path: str) -> None:
    """Requests with up to a million prompts, whose clients hang up."""
    for _ in range(8):
        count = rng.choice((5000, 5000, 100_000, 1_000_000))
        body = json.dumps({"model": "cipher", "prompt": [PROMPT[: rng.randrange(1, 8)]] * count, "max_tokens": 1})
        with contextlib.suppress(ConnectionError), socket.create_connection(address, timeout=60) as connection:
            connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\n" % path.encode())
            connection.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body.encode()))
            connection.sendall(body.encode())
            time.sleep(rng.uniform(0, 1))


def _flooded(
    bench: Bench, pid: int, address: tuple[str, int], path: str, *asked: Asked, floods: dict[str, int],
    within_s: float = ANSWER_S,
) -> None:  # fmt: skip
    """Floods a server while `bench` goes on, with a number of clients of each kind; another client is answered in time.

    Bodies and prompts go to `path`. During a flood of headers the other client asks for all of `asked`. Bodies and
    prompts give the server work, so it asks for the first alone.
    """
    before = _memory_mb(pid)
    while bench.goes_on():
        seed = bench.rng.randrange(2**32)
        for flood, count in floods.items():
            seconds = min(HEADERS_S[1], max(HEADERS_S[0], bench.deadline - time.monotonic()))
            beside = asked if flood == "headers" else asked[:1]
            with bench.case(f"{flood}, {seed}"):
                with _Client(pid, address, beside) as client, contextlib.ExitStack() as stack:
                    rude = [_rude(flood, address, seed + number, path, seconds) for number in range(count)]
                    for each in [stack.enter_context(each) for each in rude]:
                        _, error = each.communicate()
                        assert each.returncode == 0, error[-1500:]
                assert not client.error, client.error
                assert client.num_asked and client.slowest < within_s, f"{client.slowest:.1f} s for an answer"
    with bench.case("what is left of a flood"):
        deadline = time.monotonic() + 30
        descriptors = pathlib.Path(f"/proc/{pid}/fd")
        while len(list(descriptors.iterdir())) > 100 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(list(descriptors.iterdir())) <= 100
        assert _memory_mb(pid) <= before + MEMORY_MB, f"{_memory_mb(pid)} MB, {before} MB before"
        assert sum(file.stat().st_size for file in bench.scratch.glob("server.txt")) < 20_000


def _rude(flood: str, address: tuple[str, int], seed: int, path: str, seconds: float) -> subprocess.Popen:
    """Starts a client in a process of its own, whose work takes no time from the client that is to be answered."""
    command = [sys.executable, "-m", "dev.torture.floods", flood, str(address[1]), str(seed), path, str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


def openai(bench: Bench) -> None:
    """Floods of `serve --api=openai`, and the end of servers whose streams are open."""
    health, path = ("GET", "/health", None), "/v1/completions"
    short = "POST", path, json.dumps({"model": "cipher", "prompt": PROMPT, "max_tokens": 4}).encode()
    with _server(bench, "openai", "--waiting=6000", "--grace_s=1") as (process, address):
        _flooded(bench, process.pid, address, path, health, short, floods=FLOODS | {"prompts": 2})
        _interrupted(bench, process, address)
    with _server(bench, "openai", "--waiting=6000", "--grace_s=1", "--dtype=bfloat16") as (process, address):
        _interrupted(bench, process, address)


def _interrupted(bench: Bench, process: subprocess.Popen, address: tuple[str, int]) -> None:
    """Ctrl-C while a stream runs, which gets an end that says so."""
    body = {"model": "cipher", "prompt": [PROMPT] * 5, "n": 1000, "stream": True}
    connection = http.client.HTTPConnection(*address, timeout=60)
    with bench.case(f"Ctrl-C with a stream, {process.args}"), contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            line = answer.readline()
            assert line.startswith(b"data: "), (answer.status, line)
            process.send_signal(signal.SIGINT)
            assert b"the server stops" in answer.read().splitlines()[-2]
        assert process.wait(30) == 0
        errors = (bench.scratch / "server.txt").read_text()
        assert "Traceback" not in errors and "Fatal" not in errors, errors[-1500:]


def page(bench: Bench) -> None:
    """Floods of the live page, whose process has a low priority and may take ten seconds for an answer."""
    listener = live.listen(live.LOOPBACK, 0)
    address = listener.getsockname()
    with live.in_a_process(bench.scratch / "run", listener):
        (pid,) = process_tree.descendants(os.getpid())
        news = "GET", "/data?runs=-1:0:0&version=-1", None
        assert _ask(address, *news)[0] == 200  # it has started
        _flooded(bench, pid, address, "/", news, floods=FLOODS, within_s=live.TIMEOUT_S)


class _Tinker:
    """A client of `serve --api=tinker` with one model."""

    def __init__(self, address: tuple[str, int]):
        self.address = address
        session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0")[1]["session_id"]
        made = {"session_id": session, "model_seq_id": 0, "base_model": "cipher", "lora_config": {"rank": 2}}
        self.model = self.result(self.post("create_model", **made)[1]["request_id"])["model_id"]

    def post(self, method: str, **body: object) -> tuple[int, dict]:
        status, answer = _ask(self.address, "POST", f"/api/v1/{method}", json.dumps(body).encode())
        return status, json.loads(answer)

    def result(self, request: str) -> dict:
        while (answer := self.post("retrieve_future", request_id=request)[1]).get("type") == "try_again":
            pass
        return answer

    def save(self, seq: int, **others: object) -> tuple[int, dict]:
        """Asks to save the weights under a name, in place of those that are there."""
        return self.post("save_weights", model_id=self.model, seq_id=seq, path="kept", overwrite=True, **others)

    def saved(self, seq: int) -> str:
        """Asks to save the weights, or asks again, and returns their path."""
        return self.result(self.save(seq)[1]["request_id"]).get("path", "")


def tinker(bench: Bench) -> None:
    """Floods of `serve --api=tinker`, requests that wait for one that never comes, a full disk, and kills in saves."""
    with _server(bench, "tinker", f"--workdir={bench.scratch / 'tinker'}") as (process, address):
        _flooded(bench, process.pid, address, "/api/v1/asample", ("GET", "/api/v1/healthz", None), floods=FLOODS)
        with bench.case("a gap in the queue"):
            rude, other = _Tinker(address), _Tinker(address)
            for seq in [*range(1000, 1064), *range(300, 1, -1), 2**63, 2**80]:
                status, _ = rude.post("optim_step", model_id=rude.model, seq_id=seq, adam_params={})
                assert status in (200, 400, 429), status
            status, answer = other.post("optim_step", model_id=other.model, seq_id=1, adam_params={})
            assert status == 200, answer
            assert "forward_backward first" in other.result(answer["request_id"])["error"]
            assert other.post("optim_step", model_id=f"{uuid.uuid4()}:train:0", seq_id=1, adam_params={})[0] == 404
    with runs.small_disk(bench.scratch / "small", 8192) as mounted:
        if mounted:
            _full_disk(bench, bench.scratch / "small")
    _killed_in_saves(bench, bench.scratch / "saves")


def _full_disk(bench: Bench, disk: pathlib.Path) -> None:
    """A disk without a free byte refuses a request with 507; with space the same request is accepted."""
    with bench.case("a full disk"), _server(bench, "tinker", f"--workdir={disk / 'tinker'}") as (_, address):
        client, filler = _Tinker(address), disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        status, answer = client.save(1, user_metadata={"a": "x" * 10**5})
        assert status == 507 and "Nothing was accepted" in answer["detail"], (status, answer)
        filler.unlink()
        assert client.saved(1).endswith("/weights/kept")
        errors = (bench.scratch / "server.txt").read_text()
        assert "Traceback" not in errors, errors[-1500:]


def _killed_in_saves(bench: Bench, workdir: pathlib.Path) -> None:
    """Kills a server while it overwrites weights: they stay whole, and the next start ends the saves."""
    client, seq, whole = None, 1, {}

    def saved(name: str) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in workdir.glob(f"checkpoints/*/weights/{name}/*")}

    for number in range(3):
        with bench.case(f"kills in saves, start {number}"):
            assert whole in (saved("kept"), saved(".kept.aside")), "the weights are gone, or in parts"
            with _server(bench, "tinker", f"--workdir={workdir}") as (process, address):
                client = client or _Tinker(address)
                client.address = address
                assert client.saved(seq).endswith("/weights/kept")  # the last one before the kill
                whole = whole or saved("kept")
                assert len(whole) > 2 and saved("kept") == whole and not saved(".kept.*")
                for _ in range(3):
                    seq += 1
                    assert client.save(seq)[0] == 200
                time.sleep(bench.rng.uniform(0, 0.2))
                process.kill()


if __name__ == "__main__":
    FLOOD, PORT, SEED, PATH, SECONDS = sys.argv[1:]
    ADDRESS, RNG = ("127.0.0.1", int(PORT)), random.Random(int(SEED))
    if FLOOD == "headers":
        _endless_headers(ADDRESS, RNG, float(SECONDS))
    elif FLOOD == "prompts":
        _many_prompts(ADDRESS, RNG, PATH)
    else:
        _large_bodies(ADDRESS, RNG, PATH)
        _large_bodies(ADDRESS, RNG, PATH)
