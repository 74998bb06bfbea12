"""How the processes of a run notice that one of them is gone.

Process 0 holds a TCP connection to each other one. A connection that ends without a farewell is a process that died;
whoever notices says so and ends its own process, because it may be waiting in a collective that will never come back.
Process 0 passes the news on, so that all say which one it was. JAX's own watch takes longer and ends in a stack trace.

Process 0 listens where JAX's coordinator does, on all of the machine's addresses, until all others have joined. To join
takes a secret of 16 bytes, new at each start, that the others get through JAX's coordinator. Whoever connects and says
something else, or nothing, is put off and keeps nobody waiting.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
import time

# Exit code: the run is whole, and whoever watches over it starts it again (EX_TEMPFAIL of sysexits.h).
RESTART = 75
# A host that vanishes without closing its connections is given up after IDLE_S + PROBES * PROBE_S seconds.
IDLE_S, PROBE_S, PROBES = 10, 5, 4
TIMEOUT_S = 60  # to connect
# Process 0 waits so long for the others. JAX lets none on before all are there, so they come within seconds, or, after
# TIMEOUT_S of trying, not at all; and JAX takes a process for dead 100 s after its last word.
JOIN_S = 90
STRANGERS = 128  # connections that may wait to be taken in beside those of the others: a full queue costs seconds
GREETING_S = 10  # from a connection to the secret; who has joined in earnest says it at once

# Messages are three bytes: what, and which process.
_JOIN, _LEAVE, _STOP, _GONE = b"J", b"L", b"S", b"G"
_SECRET = 16
_GREETING = _SECRET + 3  # the secret, and a message

_REMEDY = "let the machines of the run reach each other on all ports from 1024 up."


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _listening(host: str, backlog: int) -> socket.socket:
    """A free port of an address; of all addresses, of both families where the machine has both, where `host` is ""."""
    if host in ("", "::") and socket.has_dualstack_ipv6():
        # A machine may have the family, and no address of it.
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    family = socket.AF_INET
    if host:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, 0), family=family, backlog=backlog)


def _numbered(process: int) -> bytes:
    return bytes([process % 256, process // 256])


def _number(said: bytes) -> int:
    return said[0] + 256 * said[1]


def _more(link: socket.socket, said: bytearray) -> bool:
    """Adds what has come of a greeting, and no byte of what follows it; False where no more comes."""
    try:
        received = link.recv(_GREETING - len(said))
    except OSError:
        return False
    said += received
    return bool(received)


class Watchdog:
    """This process's connections, and the thread that watches them."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self.asked_to_stop = False
        self._links: dict[int, socket.socket] = {}
        self.leaving = False
        self._server: socket.socket | None = None
        self._secret = b""

    def listen(self, host: str = "") -> str:
        """In process 0: opens a port for the others, and gives what they connect with.

        Args:
          host: the address to listen on; "" for all of this machine's. What its own name stands for may be an address
            that others don't reach (127.0.1.1 on Debian), or, behind a service's address, none of its own.

        Raises:
          ValueError: nothing can listen there.
        """
        try:
            self._server = _listening(host, backlog=self.count + STRANGERS)
        except OSError as error:
            raise ValueError(
                f"process 0 can't listen for the others on a free port of {host or 'all addresses'} ({error}): give "
                "its machine that address, or name another in JAX_COORDINATOR_BIND_ADDRESS."
            ) from error
        self._secret = secrets.token_bytes(_SECRET)
        return f"{self._server.getsockname()[1]} {self._secret.hex()}"

    def connect(self, host: str, said: str) -> None:
        """In all others: connects with process 0, with what its `listen` gave.

        Raises:
          ValueError: it can't be reached.
        """
        port, secret = said.split()
        try:
            link = _kept_alive(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
            link.sendall(bytes.fromhex(secret) + _JOIN + _numbered(self.index))
        except OSError as error:
            raise ValueError(
                f"process {self.index} of {self.count} can't connect with process 0 at {host}, port {port} ({error}). "
                f"JAX's own port could be reached there; this one is a free one, another at each start: {_REMEDY}"
            ) from error
        link.settimeout(None)
        self._links[0] = link

    def start(self) -> None:
        """Waits until all are connected (process 0), and begins to watch.

        Raises:
          ValueError: some did not connect within JOIN_S.
        """
        if self._server is not None:
            with self._server, selectors.DefaultSelector() as selector:
                self._take_in(self._server, selector)
            self._server = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _take_in(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        """Fills `_links`. Each connection is heard as it speaks, so that one that doesn't is in nobody's way."""
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        guests: dict[socket.socket, tuple[float, bytearray]] = {}  # until when, and what was said so far
        deadline = time.monotonic() + JOIN_S
        try:
            while len(self._links) < self.count - 1:
                self._check_in_time(deadline, server)
                ready = {key.fileobj for key, _ in selector.select(timeout=1.0)}
                for link, (until, said) in list(guests.items()):
                    ended = link in ready and not _more(link, said)
                    if ended or len(said) == _GREETING or time.monotonic() > until:
                        selector.unregister(link)
                        del guests[link]
                        self._admit(link, bytes(said))
                if server in ready:
                    with contextlib.suppress(OSError):  # it is gone again
                        link = server.accept()[0]
                        link.setblocking(False)
                        selector.register(link, selectors.EVENT_READ)
                        guests[link] = time.monotonic() + GREETING_S, bytearray()
        finally:
            for link in guests:
                link.close()

    def _check_in_time(self, deadline: float, server: socket.socket) -> None:
        if time.monotonic() > deadline:
            missing = [str(process) for process in range(1, self.count) if process not in self._links]
            raise ValueError(
                f"process 0 waited {JOIN_S} s for process {', '.join(missing)} of {self.count} to connect at port "
                f"{server.getsockname()[1]}: see what their logs say, and {_REMEDY}"
            )

    def _admit(self, link: socket.socket, said: bytes) -> None:
        """Keeps the connection of a process that said the secret; ends any other, a port scanner's say."""
        if len(said) == _GREETING and hmac.compare_digest(said[:-2], self._secret + _JOIN):
            process = _number(said[-2:])
            if 0 < process < self.count and process not in self._links:
                link.setblocking(True)
                self._links[process] = _kept_alive(link)
                return
        link.close()

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
        what, about = message[:1], _number(message[1:])
        if what == _GONE:
            self._lose(about)
        if what == _STOP:
            self.asked_to_stop = True
            if self.index == 0:
                self._send(_STOP, about)
        return what != _LEAVE

    def _lose(self, process: int) -> None:
        if self.leaving:
            return
        if self.index == 0:
            self._send(_GONE, process)
        print(
            f"\nerror: process {process} of {self.count} is gone, so process {self.index} ends too. What went wrong "
            "stands in that one's log. The same command, started for all of them, goes on from the newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(RESTART)
