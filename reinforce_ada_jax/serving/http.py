"""Parts that the HTTP servers share: models to serve, keys, bodies of bounded size, refusals."""

import asyncio
import contextlib
import dataclasses
import hmac
import pathlib
from collections.abc import Callable, Sequence

import jax
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.learning.platform import describe_dtype
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving.settings import ServerSettings

HUNG_UP = 499  # nobody reads this status; it is counted


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


async def read_body(request: Request, request_mib: int, within_s: float | None = None) -> bytes:
    """Reads a body up to the limit.

    Raises:
      Refusal: it is compressed, too large, or not complete in time, or the client has hung up.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "this server takes bodies without compression.")
    parts, size, most = [], 0, request_mib * 2**20
    try:
        async with asyncio.timeout(within_s):
            # `stream` keeps the request's body open until it is exhausted.
            async with contextlib.aclosing(request.stream()) as stream:
                async for part in stream:
                    size += len(part)
                    if size > most:
                        raise Refusal(413, f"the request is larger than {most:,} bytes (--request_mib).")
                    parts.append(part)
    except ClientDisconnect:
        raise Refusal(HUNG_UP, "the client has hung up.") from None
    except TimeoutError:
        raise Refusal(408, f"the request did not arrive within {within_s:g} s (--request_s).") from None
    return b"".join(parts)


def http_server(settings: ServerSettings, application: Starlette) -> uvicorn.Server:
    """Returns an HTTP server of an application."""
    return uvicorn.Server(uvicorn.Config(
        application, log_level="warning", access_log=False, lifespan="off", server_header=False, ws="none",
        timeout_graceful_shutdown=int(min(settings.grace_s, 3600)),
    ))  # fmt: skip


def summary(settings: ServerSettings, models: Sequence[Served], port: int) -> str:
    """Returns the lines on models and address that are printed at the start."""
    lines = []
    for each in models:
        architecture, platform = each.engine.architecture, jax.default_backend()
        precision = describe_dtype(each.engine.dtype, platform, architecture.num_parameters)
        lines.append(f"model       {each.name}: {each.folder}, {architecture.family}, {precision}")
    key = "with the key of --api_key" if settings.api_key else "without a key: for this machine"
    return "\n".join([*lines, f"address     http://{settings.address}:{port}, {key}; not ready yet"])
