"""Limits of connections and bodies of the HTTP servers, with real sockets and an application without a model."""

import asyncio
import contextlib
import gc
import json
import logging
import socket
import threading
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from reinforce_ada_jax.serving import connections
from reinforce_ada_jax.serving import http as http_lib
from reinforce_ada_jax.serving.connections import LimitedConfig, LimitedServer, RepeatedMessages
from reinforce_ada_jax.serving.http import Bodies, Refusal

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
AMPLE_S = 3600.0  # for a request, where a test is not about its time: a machine may stand still for a minute


class Application:
    """Answers /health at once, /held when `release` is called, and /size with the size of a body."""

    def __init__(self):
        self.held, self.go_on = threading.Semaphore(0), asyncio.Event()
        self.headed = threading.Semaphore(0)  # requests to /size whose headers have arrived
        self.bodies = Bodies()

    def asgi(self):
        paths = {"/health": self.health, "/held": self.wait, "/size": self.size}
        return Starlette(routes=[Route(path, each, methods=["GET", "POST"]) for path, each in paths.items()])

    async def health(self, _):
        return JSONResponse({"status": "ok"})

    async def wait(self, _):
        self.held.release()
        await self.go_on.wait()
        return Response("held")

    async def size(self, request):
        self.headed.release()
        try:
            return Response(str(len(await self.bodies.read(request, 2**20, AMPLE_S))))
        except Refusal as refusal:
            return Response(str(refusal), refusal.status)


@contextlib.contextmanager
def running(most=16, request_s=AMPLE_S):
    """(server, application, function that connects) of a server in this process."""
    application = Application()
    server = LimitedServer(LimitedConfig(application.asgi(), request_s, most, timeout_graceful_shutdown=0))
    listener, listens = socket.create_server(("127.0.0.1", 0)), threading.Event()
    server.on_listening = listens.set
    address, opened = listener.getsockname(), contextlib.ExitStack()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    assert listens.wait(60)

    def connect(content=b""):
        found = opened.enter_context(socket.create_connection(address, timeout=60))
        found.sendall(content)
        return found

    try:
        with opened:
            yield server, application, connect
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def answer(connection):
    """All that a connection sends until it is closed; b"" where it is broken off."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            found += part
    return found


def open_connections(server):
    return len(server.server_state.connections)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "begin",
    [b"", b"GET /health HTTP/1.1\r\nX-a: ", b"POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"],
    ids=["silent", "headers", "body"],
)
def test_requests_that_never_end_keep_nobody_out(begin):
    """200 connections, and room for 16: the oldest are closed, and a client beside them is answered."""
    with running() as (server, application, connect):

        def begun():
            connection = connect(begin)
            # A connection whose headers have not arrived yet is closed before older ones that send a body.
            assert b"POST" not in begin or application.headed.acquire(timeout=60)
            return connection

        slow = [begun() for _ in range(100)]
        assert answer(connect(HEALTH)).endswith(b'{"status":"ok"}')
        slow += [begun() for _ in range(100)]
        assert answer(connect(HEALTH)).endswith(b'{"status":"ok"}')
        wait_until(lambda: open_connections(server) <= 16)
        assert answer(slow[0]) == b""
        assert open_connections(server) >= 15  # the latest are still there


def test_requests_in_progress_are_not_closed_for_new_ones():
    with running(most=4) as (server, application, connect):
        held = [connect(b"GET /held HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") for _ in range(4)]
        for _ in held:
            assert application.held.acquire(timeout=60)
        assert answer(connect()).startswith(b"HTTP/1.1 503 ")
        loop = next(iter(server.server_state.tasks)).get_loop()
        loop.call_soon_threadsafe(application.go_on.set)
        assert [answer(each)[-4:] for each in held] == [b"held"] * 4
        wait_until(lambda: not open_connections(server))
        assert answer(connect(HEALTH)).startswith(b"HTTP/1.1 200 ")


class Transport(asyncio.Transport):
    """A transport without a socket, which can only be closed."""

    def abort(self):
        pass


def flooded(most):
    """Returns the processor time of 1,000 connections above `most`, which are as many as there may be."""
    server = LimitedServer(LimitedConfig(Application().asgi(), AMPLE_S, most))
    loop = asyncio.new_event_loop()

    def connect():
        made = connections.LimitedProtocol(server.config, server.server_state, {}, loop)
        made.connection_made(Transport())
        return made

    for _ in range(most):
        connect().connection_lost(ConnectionResetError())  # the oldest have left by themselves
    for _ in range(most):
        connect()
    gc.disable()
    begun = time.thread_time()
    for _ in range(1000):
        connect()
    used = time.thread_time() - begun
    gc.enable()
    loop.close()
    assert open_connections(server) == most
    return used


def test_a_connection_beyond_many_costs_as_much_as_one_beyond_a_few():
    """A search among all that are open took 200 times as long: a flood gave the event loop 1 s of work."""
    assert min(flooded(4000) for _ in range(2)) < 4 * min(flooded(4) for _ in range(2))


def test_headers_that_come_byte_by_byte_have_a_time():
    with running(request_s=0.2) as (_, _, connect):
        slow = connect(b"GET /health HTTP/1.1\r\nX-a: ")
        slow.settimeout(0.02)
        found, deadline = b"", time.monotonic() + 60
        while not found and time.monotonic() < deadline:
            try:
                found = slow.recv(64)
            except TimeoutError:
                slow.sendall(b"a")
        assert found.startswith(b"HTTP/1.1 408 ")
        # Also after a request that was answered, and after one whose body nobody reads.
        again = connect(HEALTH.replace(b"close", b"keep-alive"))
        assert again.recv(2**16).startswith(b"HTTP/1.1 200 ")
        again.sendall(b"GET /hea")
        assert b"HTTP/1.1 408 " in answer(again)
        assert b'"ok"' in answer(connect(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"))


def test_ordinary_requests_outlive_the_time_of_their_headers():
    with running(request_s=0.2) as (server, application, connect):
        held = connect(b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nConnection: close\r\n\r\n1")
        assert application.held.acquire(timeout=60)
        (task,) = server.server_state.tasks
        task.get_loop().call_soon_threadsafe(task.get_loop().call_later, 1.5, application.go_on.set)
        assert answer(held).endswith(b"held")


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused_in_whole(announced):
    """The client closes after the answer, and has sent all of its body before it reads."""
    with running() as (_, _, connect):
        head = b"POST /size HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        body = b"Content-Length: 5000000\r\n\r\n" + b"x" * 5_000_000
        if not announced:
            chunk = b"7a120\r\n" + b"x" * 500_000 + b"\r\n"
            body = b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 10 + b"0\r\n\r\n"
        said = answer(connect(head + body))
        assert said.startswith(b"HTTP/1.1 413 ") and b"larger than 1,048,576 bytes" in said
        # One that asks before it sends, as curl does, is answered without its body.
        asking = connect(head + b"Content-Length: 5000000\r\nExpect: 100-continue\r\n\r\n")
        assert answer(asking).startswith(b"HTTP/1.1 413 ")


def test_few_large_bodies_are_read_at_a_time():
    """The ninth waits for a place; a small one does not."""
    head = b"POST /size HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with running() as (_, application, connect):
        size = 2**19
        large = [connect(head % size + b"x" * (size - 1)) for _ in range(http_lib.LARGE_BODIES)]
        wait_until(application.bodies._large.locked)
        ninth = connect(head % size + b"x" * size)
        assert answer(connect(head % 3 + b"abc")).endswith(b"3")
        large[3].sendall(b"x")
        assert answer(large[3]).endswith(str(size).encode())
        assert answer(ninth).endswith(str(size).encode())


def test_json_with_more_values_than_a_request_may_have():
    http_lib.check_json_values(json.dumps({"prompt": [[1, 2], [3]], "n": 2}).encode(), 9)
    for body in (b"[" * 10, b"{},{},{},{},{},", b'"a":' * 10, b"1," * 10):
        with pytest.raises(Refusal, match="commas, brackets and names, and 9 are allowed"):
            http_lib.check_json_values(body, 9)


def test_a_message_is_printed_once_in_a_minute():
    now, said = [100.0], []
    logger, handler = logging.Logger("test"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.addFilter(RepeatedMessages(lambda: now[0]))
    for number in range(1000):
        logger.warning("accept failed for %d", number)
        logger.error("another")
        now[0] += 0.125
    held = " (and 479 times more in the minutes before)"  # eight in a second
    assert said == ["accept failed for 0", "another", *(
        line + held for number in (480, 960) for line in (f"accept failed for {number}", "another")
    )]  # fmt: skip
    said.clear()
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError:
        logger.exception("Exception in ASGI application")
    assert not said


def test_invalid_requests_fill_no_log():
    said, handler = [], logging.Handler()
    handler.emit = said.append
    with running() as (_, _, connect):
        logging.getLogger("uvicorn.error").addHandler(handler)
        for _ in range(30):
            assert answer(connect(b"\xff\xff\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        logging.getLogger("uvicorn.error").removeHandler(handler)
    assert len(said) <= 1


def test_the_limit_is_below_that_of_files(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (256, 4096))
    assert connections.most_connections() == 128
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (connections.resource.RLIM_INFINITY,) * 2)
    assert connections.most_connections() == 1024
