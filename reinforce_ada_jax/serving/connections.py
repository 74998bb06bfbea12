"""Limits of what a client may hold of the HTTP servers: connections, time, and lines of their log."""

import asyncio
import collections
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MOST_CONNECTIONS = 1024
# Connections that the event loop accepts in one go. Their files are open before the limit closes them.
ACCEPTED_AT_ONCE = 64
LISTEN_BACKLOG = 1024
# The application refuses a slow body first, because it can say why.
BODY_GRACE_S = 1.0
UNREAD_S = 60.0
ANOTHER = "another request"  # uvicorn limits the time until it begins
REPEATED_S = 60.0
TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"content-length: 43\r\n\r\nthe request did not arrive in time (408).\r\n"
)
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: 43\r\n\r\nthere are too many open connections (503).\n"
)


def most_connections() -> int:
    """Returns how many connections may be open: half of the files of the process, at most 1,024."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, files // 2))


class RepeatedMessages(logging.Filter):
    """Lets each message pass once in a minute, with the number of those that it kept back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._passed: dict[str, tuple[float, int]] = {}  # time of the last one, and how many came since

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        if kind is asyncio.CancelledError:  # a request that the end of the server broke off
            return False
        now, key = self._clock(), f"{record.msg} {kind and kind.__name__}"  # few: clients choose arguments alone
        last, held = self._passed.get(key, (-REPEATED_S, 0))
        if now - last < REPEATED_S:
            self._passed[key] = last, held + 1
            return False
        self._passed[key] = now, 0
        if held:
            record.msg = f"{record.getMessage()} (and {held:,} times more in the minutes before)"
            record.args = ()
        return True


class _Connections(ServerState):
    """The connections of a server, and those that it waits for, in the order in which it began to.

    A flood needs the oldest one for each new connection. A search among 512 took longer than all other work on it.
    """

    def __init__(self):
        super().__init__()
        self.headers: collections.OrderedDict[LimitedProtocol, None] = collections.OrderedDict()
        self.bodies: collections.OrderedDict[LimitedProtocol, None] = collections.OrderedDict()

    def put(self, connection: "LimitedProtocol", awaited: Any) -> None:
        """Notes that the server begins to wait for headers or a body of a connection, or waits no longer (None)."""
        self.headers.pop(connection, None)
        self.bodies.pop(connection, None)
        if awaited is not None:
            (self.bodies if awaited is h11.SEND_BODY else self.headers)[connection] = None

    def oldest(self) -> "LimitedProtocol | None":
        """Returns the oldest connection without a request, last of those that send a body; None if there is none."""
        return next(iter(self.headers or self.bodies), None)


class LimitedProtocol(H11Protocol):
    """A connection whose requests must arrive in time, among a limited number of connections.

    The time for headers begins with the connection, or with the first byte of a later request. The time for a body
    begins at the end of the headers. Where there are too many connections, the oldest one whose request has not arrived
    is closed: an ordinary client sends its request at once, and so is never the oldest one for long.
    """

    config: "LimitedConfig"
    server_state: _Connections
    # What the server waits for: headers, a body, another request; None while the client waits for its answer.
    _awaited: Any = None
    _since = _unread_since = 0.0  # seconds of the event loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self.config.most_connections:
            oldest = self.server_state.oldest()
            if oldest is None:
                transport.write(FULL)
                transport.close()
                self.connections.discard(self)
                return
            oldest.transport.abort()
            oldest._leave()
        self._await(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        """Counts the connection no longer."""
        self.connections.discard(self)
        self.server_state.put(self, None)

    def _await(self, state: Any) -> None:
        if state is not self._awaited:
            self._awaited, self._since = state, self.loop.time()
            self.server_state.put(self, state)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        self._await(state if state in (h11.IDLE, h11.SEND_BODY) else None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.SEND_BODY:
            self._await(ANOTHER)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = self.loop.time()

    def end_if_slow(self) -> None:
        """Ends a client that has not sent its request in time, or does not read its answer."""
        now, limit_s = self.loop.time(), self.config.request_s
        if self.transport.is_closing():
            return
        if self.flow.write_paused and now > self._unread_since + UNREAD_S:
            self.transport.abort()
        elif self._awaited is h11.IDLE and now > self._since + limit_s:
            self.transport.write(TOO_SLOW)
            self.transport.close()
        elif self._awaited is h11.SEND_BODY and now > self._since + limit_s + BODY_GRACE_S:
            if self.cycle.response_complete:
                self.transport.close()
            else:
                self.transport.abort()


class LimitedConfig(uvicorn.Config):
    def __init__(self, application: Any, request_s: float, most: int, **others: Any):
        super().__init__(
            application, http=LimitedProtocol, backlog=ACCEPTED_AT_ONCE, log_level="warning", access_log=False,
            lifespan="off", server_header=False, ws="none", **others,
        )  # fmt: skip
        self.request_s, self.most_connections = request_s, most
        for name in ("uvicorn.error", "asyncio"):
            logger = logging.getLogger(name)
            if not any(isinstance(each, RepeatedMessages) for each in logger.filters):
                logger.addFilter(RepeatedMessages())


class LimitedServer(uvicorn.Server):
    """Server that says when it listens, and when it begins to stop."""

    def __init__(self, config: LimitedConfig):
        super().__init__(config)
        self.server_state = _Connections()
        self.on_listening: Callable[[], None] = lambda: None  # clients can connect
        self.on_stop: Callable[[], None] = lambda: None  # in the event loop; requests in progress still have time

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(LISTEN_BACKLOG)  # more connections than the event loop accepts in one go wait for their turn
        self.on_listening()

    async def on_tick(self, counter: int) -> bool:
        for each in self.server_state.connections:
            cast(LimitedProtocol, each).end_if_slow()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stop()
        await super().shutdown(sockets)
