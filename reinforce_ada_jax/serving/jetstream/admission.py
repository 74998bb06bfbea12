"""Calls until their requests are here: how many may be open, how long a request may take to arrive, and its parsing.

gRPC's own limit of calls counts a call whose request never arrives, and refuses health checks along with it. So the
methods are registered as streams of requests, although each has one: on the wire it is the same, and their handlers run
before the request has arrived.
"""

import asyncio
import collections
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from reinforce_ada_jax.serving.jetstream.servicer import Servicer, pb2, refuse


class Admission:
    """The servicer's methods behind limits: of open calls, of those of one peer, and of the time a request takes."""

    def __init__(self, servicer: Servicer, max_calls: int, max_peer_calls: int, request_s: float):
        self._servicer, self._counts = servicer, servicer.counts
        self._max_calls, self._max_peer_calls, self._request_s = max_calls, max_peer_calls, request_s
        self._open: collections.Counter[str] = collections.Counter()  # calls by the address of their peer

    def _refusal(self, peer: str) -> str:
        """Returns why a further call of a peer is refused, or ""."""
        if self._open[peer] >= self._max_peer_calls:
            return (
                f"{self._open[peer]} calls of this address are open, and more may not be: wait for their ends, or "
                "start the server with a larger --peer_calls."
            )
        if self._open.total() >= self._max_calls:
            return f"{self._max_calls} calls are open, and more may not be: try again later."
        return ""

    async def decode(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Reads the request of a `Decode` call within its time, and hands the call to the servicer."""
        peer = context.peer().rpartition(":")[0]  # without the port
        if refusal := self._refusal(peer):
            await refuse(self._counts, context, grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        self._open[peer] += 1
        try:
            await self._servicer.Decode(await self._request(context), context)
        finally:
            self._open -= collections.Counter([peer])  # without an entry for 0

    async def _request(self, context: grpc.aio.ServicerContext) -> Any:
        try:
            async with asyncio.timeout(self._request_s):
                content = await context.read()
        except TimeoutError:
            why = f"no request arrived within {self._request_s:g} s of the call."
            await refuse(self._counts, context, grpc.StatusCode.DEADLINE_EXCEEDED, why)
        except asyncio.CancelledError:
            self._counts.hung_up += 1
            raise
        try:
            return pb2.DecodeRequest.FromString(content if isinstance(content, bytes) else b"")  # else EOF
        except DecodeError as error:
            why = f"the request is no DecodeRequest, or its text is not UTF-8 ({error!s:.200})."
            await refuse(self._counts, context, grpc.StatusCode.INVALID_ARGUMENT, why)

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Decode": grpc.stream_stream_rpc_method_handler(
                self.decode, response_serializer=pb2.DecodeResponse.SerializeToString
            ),
            "HealthCheck": grpc.stream_unary_rpc_method_handler(
                self._servicer.HealthCheck, response_serializer=pb2.HealthCheckResponse.SerializeToString
            ),
        }
        name = pb2.DESCRIPTOR.services_by_name["Orchestrator"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
