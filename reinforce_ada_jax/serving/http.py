"""Parts that the HTTP servers share: models to serve, keys, bodies of bounded size, refusals."""

import asyncio
import contextlib
import dataclasses
import hmac
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.learning.platform import describe_dtype
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving.connections import LimitedConfig, LimitedServer, most_connections
from reinforce_ada_jax.serving.settings import ServerSettings

HUNG_UP = 499  # nobody reads this status; it is counted
# Bodies with more bytes are large. Smaller ones of 1,024 connections have 256 MiB at most.
LARGE_BODY, LARGE_BODIES = 2**18, 8
ENDING_S = 3  # to send the ends of answers that are broken off after --grace_s
DRAINED = 2**26  # bytes of a refused body that are read, and not kept


class Refusal(Exception):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A model to serve; `load` reads its weights, `tokenizer_id` tells clients where its tokenizer is."""

    name: str
    folder: pathlib.Path
    tokenizer: Tokenizer
    engine: Engine
    load: Callable[[], Params]
    tokenizer_id: str | None = None


def has_key(given: str, key: str) -> bool:
    """Returns True if a client sent the server's key; its time does not depend on what was sent."""
    return not key or hmac.compare_digest(given.encode(), key.encode())


class Bodies:
    """Reads bodies of bounded size and time; a few large ones at a time, so that their sum is bounded as well."""

    def __init__(self):
        self._large = asyncio.Semaphore(LARGE_BODIES)

    async def read(self, request: Request, most: int, within_s: float) -> bytes:
        """Reads a body of at most `most` bytes."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "this server takes bodies without compression.")
        announced = request.headers.get("content-length", "")
        is_too_large = announced.isdecimal() and int(announced) > most
        body = None
        try:
            # With "expect" the client waits for the answer before it sends the body.
            if not (is_too_large and "expect" in request.headers):
                async with asyncio.timeout(within_s), contextlib.AsyncExitStack() as place:
                    body = await self._read(request, 0 if is_too_large else most, place)
        except ClientDisconnect:
            raise Refusal(HUNG_UP, "the client has hung up.") from None
        except TimeoutError:
            raise Refusal(408, f"the request did not arrive within {within_s:g} s (--request_s).") from None
        if body is None:
            raise Refusal(413, f"the request is larger than {most:,} bytes, the limit of this path and --request_mib.")
        return body

    async def _read(self, request: Request, most: int, place: contextlib.AsyncExitStack) -> bytes | None:
        """Returns the body; None if it has more than `most` bytes."""
        parts, size, is_large = [], 0, False
        # `stream` keeps the request's body open until it is exhausted.
        async with contextlib.aclosing(request.stream()) as stream:
            async for part in stream:
                size += len(part)
                if size > most + DRAINED:
                    break
                if size > most:  # many clients read no answer before they have sent all
                    parts.clear()
                    continue
                if size > LARGE_BODY and not is_large:
                    await place.enter_async_context(self._large)
                    is_large = True
                parts.append(part)
        return b"".join(parts) if size <= most else None


def check_json_values(body: bytes, most: int) -> None:
    """Refuses JSON that would take long to parse: by its commas, brackets and names, those in texts included.

    500,000 values take 0.5 s of the event loop and 100 MB; to count the marks of 30 MB takes 0.02 s.
    """
    found = sum(body.count(mark) for mark in (b",", b"[", b"{", b'":'))
    if found > most:
        raise Refusal(
            413, f"the request has {found:,} commas, brackets and names, and {most:,} are allowed: send less at a time."
        )


def on_signals(call: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: call())


def end_process() -> NoReturn:
    """Ends the process while a program runs on the devices: an ordinary exit takes them from its thread, and aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def http_server(settings: ServerSettings, application: Starlette) -> LimitedServer:
    return LimitedServer(LimitedConfig(
        application, settings.request_s, most_connections(),
        timeout_graceful_shutdown=int(min(settings.grace_s, 3600)) + ENDING_S,
    ))  # fmt: skip


def summary(settings: ServerSettings, models: Sequence[Served], port: int) -> str:
    """Returns the lines on models and address that are printed at the start."""
    lines = []
    for each in models:
        architecture, platform = each.engine.architecture, jax.default_backend()
        precision = describe_dtype(each.engine.dtype, platform, architecture.num_parameters)
        lines.append(f"model       {each.name}: {each.folder}, {architecture.family}, {precision}")
        options = each.engine.options
        beyond = architecture.beyond(options.most_tokens)
        lines.append(
            f"memory      cache {each.engine.cache_bytes / 2**20:,.1f} MiB: {options.slots} slots, prompts of up to "
            f"{options.max_prompt_tokens:,} tokens, responses of up to {options.max_response_tokens:,}{beyond}"
        )
    key = "with the key of --api_key" if settings.api_key else "without a key: for this machine"
    return "\n".join(
        [*lines, f"address     http://{settings.address}:{port}, {key}; not ready yet, reads weights and compiles"]
    )
