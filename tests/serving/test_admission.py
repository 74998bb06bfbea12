"""Open calls without a request, requests that are none, and many calls of one peer."""

import asyncio
import contextlib

import grpc
import pytest

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.serving.jetstream import servicer as servicer_lib
from reinforce_ada_jax.serving.jetstream.servicer import PREFILLED, REFUSED_CALLS, pb2
from tests import standins
from tests.serving.test_servicer import SLOTS, Call, Ended, finish, in_time, make, settle, text_request

METHOD = "/jetstream_proto.Orchestrator/"
MAX_CALLS = SLOTS + PREFILLED + 3 + REFUSED_CALLS  # three may wait


class AtOnce(type(make()[1])):
    """A driver that answers each request with one token, as soon as it comes."""

    def place_request_on_prefill_queue(self, request):
        self.answer(request, [1], [])


@contextlib.asynccontextmanager
async def serving(**limits):
    """(servicer, channel) of a real server on loopback."""
    servicer, _ = make(**limits)
    servicer._driver = AtOnce()
    server, port = servicer_lib.make_server("127.0.0.1:0", 8)
    servicer.add_to(server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield servicer, channel
    finally:
        await server.stop(0)


async def ask(channel, content: bytes) -> grpc.StatusCode:
    """The status of a Decode call with these bytes as its request."""
    call = channel.unary_stream(f"{METHOD}Decode")(content, timeout=30)
    async for _ in call:
        pass
    return await call.code()


async def refused(channel, content: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await ask(channel, content)
    return ended.value.code(), ended.value.details()


async def is_live(channel) -> bool:
    health = channel.unary_unary(f"{METHOD}HealthCheck", response_deserializer=pb2.HealthCheckResponse.FromString)
    return (await health(b"", timeout=30)).is_live


@in_time
async def test_calls_whose_requests_never_arrive_end_and_keep_no_health_check_out():
    async with serving(request_s=5.0) as (servicer, channel):  # all are open before the first one ends
        request = text_request().SerializeToString()
        assert await ask(channel, request) == grpc.StatusCode.OK
        silent = [channel.stream_stream(f"{METHOD}Decode")() for _ in range(134)]
        for call in silent:
            await call.wait_for_connection()
        code, details = await refused(channel, request)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and f"{MAX_CALLS} calls are open" in details
        assert await is_live(channel)
        codes = [await call.code() for call in silent]
        assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == MAX_CALLS
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 134 - MAX_CALLS
        assert await ask(channel, request) == grpc.StatusCode.OK
        assert (servicer.counts.answered, servicer.counts.refused) == (2, 135)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xff\xff",
        text_request("ab").SerializeToString().replace(b"ab", b"\xed\xa0"),  # half of a surrogate pair
        text_request("ab").SerializeToString()[:-3],
    ],
)
@in_time
async def test_requests_that_cannot_be_read_are_refused_and_counted(content):
    async with serving() as (servicer, channel):
        code, details = await refused(channel, content)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "or its text is not UTF-8" in details
        assert (servicer.counts.answered, servicer.counts.refused) == (0, 1)
        assert await is_live(channel)


@in_time
async def test_a_call_without_a_request_is_one_with_an_empty_one():
    async with serving() as (_, channel):
        call = channel.stream_stream(f"{METHOD}Decode")()
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "max_tokens is 0" in await call.details()


class From(Call):
    """A call of an address whose request does not come."""

    def __init__(self, peer):
        super().__init__()
        self._peer = peer

    def peer(self):
        return self._peer

    async def read(self):
        await asyncio.sleep(3600)


@in_time
async def test_one_peer_leaves_calls_to_others():
    servicer, _ = make(peer_calls=2, request_s=30.0)
    peers = ["ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.1:3", "ipv6:%5B::1%5D:1"]
    tasks = [asyncio.create_task(servicer.decode(None, From(peer))) for peer in peers]
    await settle()
    assert [task.done() for task in tasks] == [False, False, True, False]
    with pytest.raises(Ended, match="2 calls of this address are open.*--peer_calls") as ended:
        await tasks[2]
    assert ended.value.args[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    tasks[0].cancel()
    await settle()
    further = asyncio.create_task(servicer.decode(None, From("ipv4:10.0.0.1:4")))
    await settle()
    assert not further.done() and (servicer.counts.refused, servicer.counts.hung_up) == (1, 1)
    for task in (*tasks, further):
        task.cancel()
    await settle()
    assert not servicer._open


def test_tokens_that_have_no_text_end_their_call_only(monkeypatch):
    async def run():
        servicer, driver = make()
        task = asyncio.create_task(servicer.Decode(text_request(), Call()))
        await settle()
        driver.answer(driver.requests[0], [1])
        await settle()
        with pytest.raises(Ended, match="can't decode") as ended:
            await task
        assert ended.value.args[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert (servicer.running, servicer.counts.refused, servicer.counts.answered) == (0, 1, 0)

    standins.failing(monkeypatch, Tokenizer, "decode", ValueError("can't decode 1 tokens"))
    finish(run())
