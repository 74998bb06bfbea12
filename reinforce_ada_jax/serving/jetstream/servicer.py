"""JetStream's gRPC service over its Driver: it checks requests, queues them, and sends tokens as they are decoded.

JetStream's own servicer passes every request to the Driver's threads, which kill the process when one is invalid. It
lets any number of requests wait, continues to decode for clients that have hung up, and splits characters that span
tokens. So only the Driver is used here, and an invalid request never reaches it.

gRPC's own limit of calls also counts calls whose request never arrives, and it refuses health checks, too. So the calls
are counted here: the methods are registered as streams of requests, although each call has one request. The bytes on
the wire are the same, and the handlers run before the request has arrived.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc
import numpy as np
from google.protobuf import unknown_fields
from google.protobuf.message import DecodeError

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving import jetstream
from reinforce_ada_jax.serving.response_text import TextStream
from reinforce_ada_jax.serving.settings import ServerSettings, check_max_tokens, check_prompt

pb2, _ = jetstream.protocol()

# Requests that the Driver has beyond its slots: they are prefilled when a slot becomes free.
PREFILLED = 2
# Calls beyond those that decode or wait: their requests are on the way, or are refused with a reason.
REFUSED_CALLS = 64
# The text of a token seldom has more bytes; a token id has at most 5.
BYTES_PER_TOKEN = 64
# Metadata that a client, a proxy or tracing adds to any call. All other metadata is refused.
HARMLESS_METADATA = ("user-agent", "grpc-", "x-", "traceparent", "tracestate")
# History of a request: JetStream then puts no BOS before its tokens, and uses the history for nothing else.
TOKENS_AS_THEY_ARE = "no BOS"


@dataclasses.dataclass
class Counts:
    """Numbers of calls, by how they ended, and of tokens sent."""

    answered: int = 0
    refused: int = 0
    hung_up: int = 0
    tokens: int = 0


class _Channel:
    """Return channel of a request, from the Driver's threads to the event loop."""

    def __init__(self, on_close: Callable[[], None]):
        self._loop, self._on_close = asyncio.get_running_loop(), on_close
        self.results: asyncio.Queue[list[int] | None] = asyncio.Queue()  # tokens of a decode step; None at the end

    def add_result(self, samples: Sequence[Any]) -> None:
        self._loop.call_soon_threadsafe(self.results.put_nowait, samples[0].token_ids)

    def close(self) -> None:  # the slot is free again
        self._loop.call_soon_threadsafe(self._on_close)
        self._loop.call_soon_threadsafe(self.results.put_nowait, None)


def check_supported(request: Any, metadata: Sequence[tuple[str, Any]]) -> None:
    """Raises ValueError for fields and metadata that would be ignored."""
    for name in ("session_cache", "priority"):
        if getattr(request, name):
            raise ValueError(f"{name} is {getattr(request, name)!r}: it is not supported. Leave it unset.")
    unknown = sorted({field.field_number for field in unknown_fields.UnknownFieldSet(request)})
    if unknown:
        raise ValueError(
            f"the request has fields {unknown} that google-jetstream 0.2.2 does not know: use its protocol, which has "
            "text_content or token_content, and max_tokens."
        )
    for key, _ in metadata:
        if not key.startswith(HARMLESS_METADATA):
            raise ValueError(
                f"the call has metadata {key!r}: it is not supported. How tokens are drawn is an option of the server."
            )


class Servicer:
    """`Decode` and `HealthCheck` of JetStream's protocol, for one engine behind one Driver."""

    def __init__(self, driver: Any, engine: Engine, tokenizer: Tokenizer, settings: ServerSettings):
        """`settings` limits the requests that wait for a slot, open calls, and the time for a request to arrive."""
        self._driver, self._tokenizer, self._options = driver, tokenizer, engine.options
        self._vocab_size, self._settings = engine.architecture.vocab_size, settings
        self._max_calls = engine.options.slots + PREFILLED + settings.waiting + REFUSED_CALLS
        self._open: collections.Counter[str] = collections.Counter()  # calls by the address of their peer
        self._turns = asyncio.Semaphore(engine.options.slots + PREFILLED)
        # `running` are the requests that the Driver has.
        self.counts, self.running, self.waiting = Counts(), 0, 0

    async def _refuse(self, context: grpc.aio.ServicerContext, code: grpc.StatusCode, why: str) -> NoReturn:
        """Ends a call that is not answered, with the reason."""
        self.counts.refused += 1
        await context.abort(code, why)
        raise AssertionError("abort raises")  # its annotations do not say so

    def _prompt(self, request: Any) -> np.ndarray:
        """Returns int32[T], the tokens of a request: text is encoded as it is, without a chat template."""
        check_max_tokens(request.max_tokens, self._options)
        if not (request.text_content.text or request.token_content.token_ids):
            raise ValueError("the prompt is empty: send text_content.text or token_content.token_ids.")
        if request.WhichOneof("content") == "text_content":
            tokens = self._tokenizer.encode(request.text_content.text)
        else:
            tokens = np.array(request.token_content.token_ids, np.int32)
        check_prompt(tokens, self._options, self._vocab_size)
        return tokens

    async def _accept(self, request: Any, context: grpc.aio.ServicerContext) -> np.ndarray:
        """Returns the prompt's tokens as soon as the Driver may have them, or ends the call with a reason."""
        try:
            check_supported(request, tuple(context.invocation_metadata() or ()))
            prompt = await asyncio.to_thread(self._prompt, request)
        except ValueError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._turns.locked() and self.waiting >= self._settings.waiting:
            why = (
                f"{self.waiting} requests are waiting, and more may not: try again later, or start the server with a "
                "larger --waiting or more --slots."
            )
            await self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1
        return prompt

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> None:  # noqa: N802  (the protocol's)
        """Streams a response: token ids as they come, and for text requests the text that they complete.

        The trailing metadata has `finish`: "stop" for a stop token, "length" where max_tokens was reached before one.
        """
        try:
            prompt = await self._accept(request, context)
            await self._answer(prompt, request, context)
        except ValueError as error:  # tokens that the tokenizer can't decode
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            self.counts.hung_up += 1
            raise

    def _turn_over(self) -> None:
        self.running -= 1
        self._turns.release()

    async def _answer(self, prompt: np.ndarray, request: Any, context: grpc.aio.ServicerContext) -> None:
        # The Driver reports that the slot is free. Before, a client that hangs up and calls again gets no second slot.
        channel = _Channel(self._turn_over)
        self.running += 1
        active = jetstream.orchestrator().ActiveRequest(
            max_tokens=request.max_tokens,
            return_channel=channel,
            prefill_content=prompt,
            history_path=TOKENS_AS_THEY_ARE,
            is_client_side_tokenization=True,  # skips JetStream's own detokenisation, of one token at a time
        )
        self._driver.place_request_on_prefill_queue(active)
        count = 0
        try:
            is_text = request.WhichOneof("content") == "text_content"
            text = TextStream(self._tokenizer, prompt.tolist()) if is_text else None
            while count < request.max_tokens and (token_ids := await channel.results.get()) is not None:
                if token_ids:  # empty for a stop token
                    count += len(token_ids)
                    self.counts.tokens += len(token_ids)
                    await self._write(context, text.add(token_ids) if text else "", token_ids)
            if text and (rest := text.flush()):
                await self._write(context, rest, [])
        finally:
            # A further token is then beyond the limit, and the Driver frees the slot.
            active.max_tokens = 0
        context.set_trailing_metadata((("finish", "length" if count == request.max_tokens else "stop"),))
        self.counts.answered += 1

    @staticmethod
    async def _write(context: grpc.aio.ServicerContext, text: str, token_ids: list[int]) -> None:
        samples = [pb2.DecodeResponse.StreamContent.Sample(text=text, token_ids=token_ids)]
        await context.write(pb2.DecodeResponse(stream_content=pb2.DecodeResponse.StreamContent(samples=samples)))

    async def decode(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Answers a `Decode` call if not too many calls are open, and if its request arrives in time."""
        peer, exhausted = context.peer().rpartition(":")[0], grpc.StatusCode.RESOURCE_EXHAUSTED  # without the port
        if self._open[peer] >= self._settings.peer_calls:
            why = (
                f"{self._open[peer]} calls of this address are open, and more may not be: wait for their ends, or "
                "start the server with a larger --peer_calls."
            )
            await self._refuse(context, exhausted, why)
        if self._open.total() >= self._max_calls:
            why = f"{self._max_calls} calls are open, and more may not be: try again later."
            await self._refuse(context, exhausted, why)
        self._open[peer] += 1
        try:
            await self.Decode(await self._request(context), context)
        finally:
            self._open -= collections.Counter([peer])  # without an entry for 0

    async def _request(self, context: grpc.aio.ServicerContext) -> Any:
        try:
            async with asyncio.timeout(self._settings.request_s):
                content = await context.read()
        except TimeoutError:
            why = f"no request arrived within {self._settings.request_s:g} s of the call."
            await self._refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, why)
        except asyncio.CancelledError:
            self.counts.hung_up += 1
            raise
        try:
            return pb2.DecodeRequest.FromString(content if isinstance(content, bytes) else b"")  # else EOF
        except DecodeError as error:
            why = f"the request is no DecodeRequest, or its text is not UTF-8 ({error!s:.200})."
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, why)

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """Reports whether the Driver's threads run, for any number of open calls; its request has no content."""
        return pb2.HealthCheckResponse(is_live=self._driver.live)

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Decode": grpc.stream_stream_rpc_method_handler(
                self.decode, response_serializer=pb2.DecodeResponse.SerializeToString
            ),
            "HealthCheck": grpc.stream_unary_rpc_method_handler(
                self.HealthCheck, response_serializer=pb2.HealthCheckResponse.SerializeToString
            ),
        }
        name = pb2.DESCRIPTOR.services_by_name["Orchestrator"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def make_server(address: str, max_prompt_tokens: int) -> tuple[grpc.aio.Server, int]:
    """Returns a server bound to "host:port" (port 0: a free one), and its port; ValueError if it cannot listen."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", 2**16 + BYTES_PER_TOKEN * max_prompt_tokens),
            ("grpc.so_reuseport", 0),  # else a second server takes half of the first one's clients, silently
            ("grpc.keepalive_time_ms", 30_000),  # to notice clients that vanished
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.server_handshake_timeout_ms", 10_000),  # of connections that say nothing
        ]
    )
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {address} ({error}): choose another --port or --host.") from error
    return server, port
