"""The live page: a small HTTP server for the page and its new data, in a process that no run waits for.

It listens on loopback unless told otherwise, reads the files of the runs, and writes nothing. A connection has ten
seconds for its request and ten for the answer. There are at most `MOST_CONNECTIONS`. A further connection closes the
oldest one without a request; if all have one, the further connection is closed.
"""

import asyncio
import contextlib
import email
import gzip
import http
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from reinforce_ada_jax.reporting.following import FollowedRuns
from reinforce_ada_jax.reporting.page import embedded

LOOPBACK = "127.0.0.1"
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
# /data?runs=GENERATION:ROWS:SEEN,...&version=VERSION: what the page has.
DATA = re.compile(r"/data\?runs=([-\d:,]*)&version=(-?\d{1,9})", re.ASCII)
KNOWN = re.compile(r"(-?\d{1,9}):(\d{1,9}):(\d{1,9})", re.ASCII)
MOST_CONNECTIONS, BACKLOG = 32, 128
# Connections that the event loop accepts in one go, far below the limit: a request is read before it is closed as the
# oldest connection without one.
ACCEPTED_AT_ONCE = 4
TIMEOUT_S = 10
COMPRESSED = 20_000  # bytes; larger answers are compressed
HEADERS = {
    "Cache-Control": "no-store", "Connection": "close", "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'",
}  # fmt: skip
NICE = 10  # a page may be late, training must not be


class _Server:
    """Connections of the page: each has one request."""

    def __init__(self, runs: FollowedRuns, host: str):
        self._runs, self._is_local = runs, host in (LOOPBACK, "::1")
        self._num_open = 0
        self._waiting: dict[asyncio.StreamWriter, None] = {}  # those whose request has not arrived, the oldest first

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open >= MOST_CONNECTIONS:
            oldest = next(iter(self._waiting), writer)
            self._waiting.pop(oldest, None)
            oldest.close()
            if oldest is writer:
                return
        self._num_open += 1
        self._waiting[writer] = None
        try:
            # Errors of a browser that has left or is too slow, or of another program.
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
                async with asyncio.timeout(TIMEOUT_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                self._waiting.pop(writer, None)
                answer = await asyncio.to_thread(self._answer, request.decode("latin-1"))
                writer.write(answer)
                writer.close()
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        await writer.wait_closed()  # until all is sent
                except TimeoutError:
                    writer.transport.abort()
        finally:
            self._num_open -= 1
            self._waiting.pop(writer, None)
            writer.close()

    def _answer(self, request: str) -> bytes:
        """Returns the answer to a request. It runs in a thread, because it reads the files of the runs."""
        line, _, lines = request.partition("\r\n")
        headers = email.message_from_string(lines)
        address = line.removeprefix("GET ").partition(" ")[0]  # with another method it matches no address below
        # Another web site could make its host name resolve to this machine, and read the runs of the user.
        if self._is_local and not LOCAL_HOST.fullmatch(headers.get("Host", "")):
            status, kind, text = http.HTTPStatus.FORBIDDEN, "text/plain", "The host of this page is localhost."
        elif address.partition("?")[0] == "/":
            status, kind, text = http.HTTPStatus.OK, "text/html", self._runs.page()
        elif asked := DATA.fullmatch(address):
            known = [(int(generation), int(rows), int(seen)) for generation, rows, seen in KNOWN.findall(asked[1])]
            news = embedded(self._runs.news(known, int(asked[2])))
            status, kind, text = http.HTTPStatus.OK, "application/json", news
        else:
            status, kind, text = http.HTTPStatus.NOT_FOUND, "text/plain", "There is only this page, at /."
        body, fields = text.encode("utf-8", "replace"), dict(HEADERS)
        if len(body) > COMPRESSED and "gzip" in headers.get("Accept-Encoding", ""):
            body, fields["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        fields |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        head = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*head, "", ""]).encode() + body


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 chooses a free one. ValueError: the port is taken, or no such host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        other = "host" if isinstance(error, socket.gaierror) else "port"
        raise ValueError(f"the page can't listen on {host}, port {port} ({error}): name another {other}.") from error


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(workdirs: Sequence[pathlib.Path], listener: socket.socket) -> None:
    """Serves the page of these runs until the process is interrupted."""

    async def forever() -> None:
        made = _Server(FollowedRuns(workdirs), listener.getsockname()[0])
        await asyncio.start_server(made.connected, sock=listener, backlog=ACCEPTED_AT_ONCE)
        listener.listen(BACKLOG)  # others wait for their turn
        await asyncio.Event().wait()  # `serve_forever` would wait for open connections at the end

    asyncio.run(forever())


@contextlib.contextmanager
def in_a_process(workdir: pathlib.Path, listener: socket.socket) -> Iterator[None]:
    """Serves the page of a run in another process, which ends when this process ends, even if it is killed."""
    with listener:
        descriptor = listener.fileno()
        module = "reinforce_ada_jax.reporting.live"
        command = [sys.executable, "-P", "-m", module, str(descriptor), str(os.getpid()), str(workdir)]
        process = subprocess.Popen(
            command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    DESCRIPTOR, PARENT, WORKDIR = sys.argv[1:]
    os.nice(NICE)
    threading.Thread(target=_end_with, args=(int(PARENT),), daemon=True).start()
    serve([pathlib.Path(WORKDIR)], socket.socket(fileno=int(DESCRIPTOR)))
