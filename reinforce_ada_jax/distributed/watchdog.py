"""Watchdog: how the processes of a run notice that one of them is gone.

Process 0 holds a TCP connection to each other one. If a connection ends without a leave message, its process died. The
process that notices prints it and ends, because it may be waiting in a collective that never returns; process 0 tells
the others, so that all name the same process. JAX's own heartbeat takes longer and ends in a stack trace.

Until all others have joined, process 0 listens on all of the machine's addresses, or, as JAX's coordinator does, on the
one in JAX_COORDINATOR_BIND_ADDRESS. Joining needs a secret of 16 bytes, new at each start, that the others get through
JAX's coordinator. A connection that sends something else, or nothing, is closed and delays no process.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time

from reinforce_ada_jax.cli import BAD_INPUT

# Exit code: the state is saved, and a supervisor should start the run again (EX_TEMPFAIL of sysexits.h).
RESTART = 75
# A host that vanishes without closing its connections is lost after IDLE_S + PROBES * PROBE_S seconds.
IDLE_S, PROBE_S, PROBES = 10, 5, 4
TIMEOUT_S = 60  # to connect
# Seconds that process 0 waits for the others. JAX starts all together, so they connect within seconds, or, after
# TIMEOUT_S of trying, not at all; and JAX takes a process for dead 100 s after its last heartbeat.
JOIN_S = 90
STRANGERS = 128  # further connections, from outside of the run, that may queue: a full queue costs seconds
NEWS_S = 5  # seconds from a failed collective to the news of a lost process, or from one refusal to the others
GREETING_S = 10  # seconds from a connection to the secret, which a process of the run sends at once

_MESSAGE = struct.Struct("<cH")  # a kind, and a process
_JOIN, _LEAVE, _STOP, _PREEMPT, _GONE, _REFUSE = b"J", b"L", b"S", b"P", b"G", b"R"
_SECRET = 16
_GREETING = _SECRET + _MESSAGE.size


class UnreachableError(ValueError):
    """A process of the run can't be reached: it ended while it joined, or the network between them is closed."""


_REMEDY = "let the machines of the run reach each other on all ports from 1024 up."


def _with_keepalive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _listening(host: str, backlog: int) -> socket.socket:
    """Returns a listening socket on a free port of `host`; if it is "", of all IPv4 and IPv6 addresses."""
    if host in ("", "::") and socket.has_dualstack_ipv6():
        # A machine may support IPv6 but have no IPv6 address.
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    family = socket.AF_INET
    if host:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, 0), family=family, backlog=backlog)


def _more(link: socket.socket, data: bytearray) -> bool:
    """Reads more of a greeting, and nothing after it; returns False if the connection ended."""
    try:
        received = link.recv(_GREETING - len(data))
    except OSError:
        return False
    data += received
    return bool(received)


class Watchdog:
    """This process's connections, and the thread that watches them."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self.asked_to_stop = self.preempted = False  # another process was asked; its machine is taken away
        self._links: dict[int, socket.socket] = {}
        self.leaving = self.refused = False
        self._server: socket.socket | None = None
        self._secret = b""

    def listen(self, host: str = "") -> str:
        """Opens a port in process 0; returns the greeting that the others pass to `connect`.

        With `host` "" it listens on all of this machine's addresses. The machine's own name may resolve to an address
        that others don't reach (127.0.1.1 on Debian), or, behind a service, to an address that this machine does not
        have. May raise ValueError.
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

    def connect(self, host: str, greeting: str) -> None:
        """Connects another process with process 0, whose `listen` returned the greeting; may raise UnreachableError."""
        port, secret = greeting.split()
        try:
            link = _with_keepalive(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
            link.sendall(bytes.fromhex(secret) + _MESSAGE.pack(_JOIN, self.index))
        except OSError as error:
            raise UnreachableError(
                f"process {self.index} of {self.count} can't connect with process 0 at {host}, port {port} ({error}). "
                f"JAX's own port could be reached there; this one is a free one, another at each start: {_REMEDY}"
            ) from error
        link.settimeout(None)
        self._links[0] = link

    def start(self) -> None:
        """Waits until all are connected (in process 0), then starts the thread; UnreachableError after JOIN_S."""
        if self._server is not None:
            with self._server, selectors.DefaultSelector() as selector:
                self._accept_all(self._server, selector)
            self._server = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _accept_all(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        """Fills `_links`. Greetings are read as they arrive, so that a silent connection delays no other."""
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        guests: dict[socket.socket, tuple[float, bytearray]] = {}  # deadline, and the greeting so far
        deadline = time.monotonic() + JOIN_S
        try:
            while len(self._links) < self.count - 1:
                self._check_in_time(deadline, server)
                ready = {key.fileobj for key, _ in selector.select(timeout=1.0)}
                for link, (until, data) in list(guests.items()):
                    ended = link in ready and not _more(link, data)
                    if ended or len(data) == _GREETING or time.monotonic() > until:
                        selector.unregister(link)
                        del guests[link]
                        self._admit(link, bytes(data))
                if server in ready:
                    with contextlib.suppress(OSError):  # the connection has ended already
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
            raise UnreachableError(
                f"process 0 waited {JOIN_S} s for process {', '.join(missing)} of {self.count} to connect at port "
                f"{server.getsockname()[1]}: see what their logs say, and {_REMEDY}"
            )

    def _admit(self, link: socket.socket, data: bytes) -> None:
        """Keeps the connection of a process that sent the secret; closes any other, for example a port scanner's."""
        if len(data) == _GREETING and hmac.compare_digest(data[:_SECRET], self._secret):
            kind, process = _MESSAGE.unpack(data[_SECRET:])
            if kind == _JOIN and 0 < process < self.count and process not in self._links:
                link.setblocking(True)
                self._links[process] = _with_keepalive(link)
                return
        link.close()

    def ask_to_stop(self, *, preempted: bool = False) -> None:
        """Tells all others that this process was asked to stop, or that its machine is taken away."""
        self._send(_PREEMPT if preempted else _STOP, self.index)

    def leave(self) -> None:
        """Announces that this process ends; from now on no other process is reported as lost."""
        self.leaving = True
        self._send(_LEAVE, self.index)

    def refuse(self) -> None:
        """Announces that this process ends because its input is wrong.

        The others have the same input. Each has NEWS_S seconds to refuse it with a message of its own, and then ends
        with the same exit code: to start the run again would not help.
        """
        self.leaving = True
        self._send(_REFUSE, self.index)

    def _send(self, kind: bytes, process: int) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.sendall(_MESSAGE.pack(kind, process))

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if not self._receive(key.fileobj, key.data):
                        selector.unregister(key.fileobj)

    def _receive(self, link: socket.socket, process: int) -> bool:
        """Handles one message; returns False if the connection sends no more."""
        try:
            message = link.recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError:
            message = b""
        if len(message) < _MESSAGE.size:
            self._lose(process)
            return False
        kind, about = _MESSAGE.unpack(message)
        if kind == _GONE:
            self._lose(about)
        if kind in (_STOP, _PREEMPT):
            self.preempted |= kind == _PREEMPT
            self.asked_to_stop = True
            if self.index == 0:
                self._send(kind, about)
        if kind == _REFUSE and not self.refused:
            self.refused = True
            if self.index == 0:
                self._send(_REFUSE, about)
            timer = threading.Timer(NEWS_S, self._end_refused, [about])
            timer.daemon = True
            timer.start()
        return kind not in (_LEAVE, _REFUSE)

    def _end_refused(self, process: int) -> None:
        if not self.leaving:
            print(
                f"\nerror: process {process} of {self.count} refused its configuration or a file, so process "
                f"{self.index} ends too. See the log of process {process}.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(BAD_INPUT)

    def _lose(self, process: int) -> None:
        if self.leaving or self.refused:
            return
        if self.index == 0:
            self._send(_GONE, process)
        print(
            f"\nerror: process {process} of {self.count} is gone, so process {self.index} ends too. See the log of "
            f"process {process}. The same command, started for all processes, goes on from what is saved.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(RESTART)
