"""The live page: a small HTTP server of the page and of what is new, in a process that no run waits for.

It listens on loopback unless told otherwise, reads the files of the runs, and writes nothing. A connection has ten
seconds for its request and ten for each part of its answer. There are at most `MOST_CONNECTIONS`: for a further one the
oldest without a request is closed.
"""

import contextlib
import gzip
import http.server
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from reinforce_ada_jax.reporting.following import FollowedRuns
from reinforce_ada_jax.reporting.page import embedded

LOOPBACK = "127.0.0.1"
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
# data?runs=GENERATION:ROWS:SEEN,...&version=VERSION: what the page has.
QUERY = re.compile(r"runs=([-\d:,]*)&version=(-?\d{1,9})", re.ASCII)
KNOWN = re.compile(r"(-?\d{1,9}):(\d{1,9}):(\d{1,9})", re.ASCII)
MOST_CONNECTIONS = 32
TIMEOUT_S = 10
COMPRESSED = 20_000  # bytes; larger answers are compressed
NICE = 10  # a page may be late, training must not be


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = TIMEOUT_S  # of each read and write

    def do_GET(self) -> None:
        server = cast(_Server, self.server)
        server.request_arrived(self.connection)
        path, _, query = self.path.partition("?")
        # Another site could make its own name point here, and read the runs of the user.
        if server.local and not LOCAL_HOST.fullmatch(self.headers.get("Host", "")):
            self._answer(403, "text/plain", "The host of this page is localhost.")
        elif path == "/":
            self._answer(200, "text/html", server.runs.page())
        elif path == "/data" and (asked := QUERY.fullmatch(query)):
            known = [(int(generation), int(rows), int(seen)) for generation, rows, seen in KNOWN.findall(asked[1])]
            self._answer(200, "application/json", embedded(server.runs.news(known, int(asked[2]))))
        else:
            self._answer(404, "text/plain", "There is only this page, at /.")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        if len(body) > COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Writes nothing."""


class _Server(http.server.ThreadingHTTPServer):
    """Connections of the page, each in a thread."""

    daemon_threads = True
    request_s = TIMEOUT_S

    def __init__(self, listener: socket.socket, runs: FollowedRuns):
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.runs = listener, runs
        self.local = listener.getsockname()[0] in (LOOPBACK, "::1")
        self._lock = threading.Lock()
        # Open connections, the oldest first, with the timer of those whose request has not arrived.
        self._open: dict[socket.socket, threading.Timer | None] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a thread, in place of the oldest one without a request if there are too many."""
        # A timer, because the time of a read begins again with each byte.
        timer = threading.Timer(self.request_s, self._end, [request])
        timer.daemon = True
        with self._lock:
            silent = [each for each, waits in self._open.items() if waits is not None]
            is_full = len(self._open) >= MOST_CONNECTIONS
            if not is_full or silent:
                self._open[request] = timer
        if is_full and not silent:
            self.shutdown_request(request)
            return
        if is_full:
            self._end(silent[0])
        timer.start()
        super().process_request(request, client_address)

    def _end(self, request: socket.socket) -> None:
        """Ends the thread of a connection, unless its request has arrived."""
        with self._lock:
            timer = self._open.get(request)
            if timer is None:
                return
            del self._open[request]
        timer.cancel()
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def request_arrived(self, request: socket.socket) -> None:
        with self._lock:
            timer = self._open.get(request)
            if timer is None:
                raise ConnectionAbortedError("the time of the connection is up")
            self._open[request] = None
        timer.cancel()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                timer = self._open.pop(request, None)
            if timer is not None:
                timer.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Is silent about a browser that has left, or is too slow."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 chooses a free one. ValueError: the port is taken, or no such host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=4 * MOST_CONNECTIONS)
    except (OSError, OverflowError) as error:
        other = "host" if isinstance(error, socket.gaierror) else "port"
        raise ValueError(f"the page can't listen on {host}, port {port} ({error}): name another {other}.") from error


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(workdirs: Sequence[pathlib.Path], listener: socket.socket) -> None:
    """Serves the page of these runs until the process is interrupted."""
    _Server(listener, FollowedRuns(workdirs)).serve_forever()


@contextlib.contextmanager
def in_a_process(workdir: pathlib.Path, listener: socket.socket) -> Iterator[None]:
    """Serves the page of a run in a process of its own, which ends with this one, however that ends."""
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
