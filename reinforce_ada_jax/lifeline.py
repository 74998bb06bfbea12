"""How the processes of a run notice that one of them is gone.

Process 0 holds a TCP connection to each other one. A connection that ends without a farewell is a process that died;
whoever notices says so and ends its own process, because it may be waiting in a collective that will never come back.
Process 0 passes the news on, so that all say which one it was. JAX's own watch takes longer and ends in a stack trace.
"""

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading

# Exit code: the run is whole, and whoever watches over it starts it again (EX_TEMPFAIL of sysexits.h).
RESTART = 75
# A host that vanishes without closing its connections is given up after IDLE_S + PROBES * PROBE_S seconds.
IDLE_S, PROBE_S, PROBES = 10, 5, 4
TIMEOUT_S = 60  # to connect

# Messages are three bytes: what, and which process.
_JOIN, _LEAVE, _STOP, _GONE = b"J", b"L", b"S", b"G"


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _numbered(process: int) -> bytes:
    return bytes([process % 256, process // 256])


class Lifeline:
    """This process's connections, and the thread that watches them."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self.asked_to_stop = False
        self._links: dict[int, socket.socket] = {}
        self.leaving = False
        self._server: socket.socket | None = None
        self._secret = b""

    def listen(self, host: str) -> str:
        """In process 0: opens a port on its own address for the others, and gives what they connect with."""
        self._server, self._secret = socket.create_server((host, 0), backlog=self.count), secrets.token_bytes(16)
        return f"{self._server.getsockname()[1]} {self._secret.hex()}"

    def connect(self, host: str, said: str) -> None:
        """In all others: connects with process 0, with what its `listen` gave."""
        port, secret = said.split()
        link = _kept_alive(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
        link.sendall(bytes.fromhex(secret) + _JOIN + _numbered(self.index))
        link.settimeout(None)
        self._links[0] = link

    def start(self) -> None:
        """Waits until all are connected (process 0), and begins to watch."""
        while self._server is not None and len(self._links) < self.count - 1:
            link, _ = self._server.accept()
            _kept_alive(link).settimeout(TIMEOUT_S)
            joined = link.recv(19, socket.MSG_WAITALL)
            if joined[:17] == self._secret + _JOIN and len(joined) == 19:  # else somebody else who tried the port
                link.settimeout(None)
                self._links[joined[17] + 256 * joined[18]] = link
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def ask_to_stop(self) -> None:
        """Tells all others."""
        self._send(_STOP, self.index)

    def leave(self) -> None:
        """Says farewell: from now on nobody's end matters."""
        self.leaving = True
        self._send(_LEAVE, self.index)

    def _send(self, what: bytes, process: int) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.sendall(what + _numbered(process))

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._hear(key.fileobj, key.data):
                        selector.unregister(key.fileobj)

    def _hear(self, link: socket.socket, process: int) -> bool:
        """Takes one message; False where the connection has nothing more to say."""
        try:
            message = link.recv(3, socket.MSG_WAITALL)
        except OSError:
            message = b""
        if len(message) < 3:
            self._lose(process)
            return False
        what, about = message[:1], message[1] + 256 * message[2]
        if what == _GONE:
            self._lose(about)
        if what == _STOP:
            self.asked_to_stop = True
            if self._server is not None:
                self._send(_STOP, about)
        return what != _LEAVE

    def _lose(self, process: int) -> None:
        if self.leaving:
            return
        if self._server is not None:
            self._send(_GONE, process)
        print(
            f"\nerror: process {process} of {self.count} is gone, so process {self.index} ends too. What went wrong "
            "stands in that one's log. The same command, started for all of them, goes on from the newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(RESTART)
