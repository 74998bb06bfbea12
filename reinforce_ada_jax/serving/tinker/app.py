"""The HTTP interface that the `tinker` client speaks: routes, authentication, limits of bodies, long polls."""

import asyncio
import contextlib
import datetime
import functools
import hmac
import secrets
import sqlite3
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pydantic
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from reinforce_ada_jax.serving.http import Bodies, Refusal, check_json_values, has_key
from reinforce_ada_jax.serving.tinker import protocol
from reinforce_ada_jax.serving.tinker.protocol import types
from reinforce_ada_jax.serving.tinker.service import KINDS, SCHEME, Service
from reinforce_ada_jax.serving.tinker.store import FULL_DISK, CheckpointRow, disk_is_full

# The client waits 45 s for an answer to a poll.
POLL_S = 30.0
URL_S = 3600.0
# A JSON request has at most one prompt, of 32,768 tokens. `forward_backward` has the data of a batch: the client splits
# it by an estimate of its size, without names and headers.
JSON_BYTES, LOSS_BYTES, CHUNK_BYTES = 2**20, 2**23, 4_000_000
OTHER_VALUES = 4096  # in JSON, beside the tokens of a prompt
# Requests of a model that only the worker reads.
OF_MODEL = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
UNAVAILABLE = "this server does not have it (docs/how_to/tinker.md)."
Content = dict[str, Any]  # of an answer in JSON
Handler = Callable[[Request], Awaitable[Response | Content]]


class _WeightsInfoRequest(pydantic.BaseModel):
    tinker_path: str


class _ModelRequest(pydantic.BaseModel, protected_namespaces=()):
    """Model and number of a request. The worker reads the rest; its queue would stop at a missing number."""

    model_id: str
    seq_id: int | None = None


class App:
    def __init__(self, service: Service):
        self.service = service
        self._key = service.settings.api_key
        self._secret = secrets.token_bytes(32)  # signs the addresses of files
        self._bodies = Bodies()
        # By future, an event that is set when its result is there. It disappears with the last poll.
        self._polls: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        service.on_result = self._announce

    def asgi(self) -> Starlette:
        service, asked = self.service, self._asked
        post = {
            "client/config": self._client_config,
            "client/dynamic_config": _always({"sample_cancel_enabled": True}),
            "create_session": asked(types.CreateSessionRequest, service.create_session),
            "session_heartbeat": asked(types.SessionHeartbeatRequest, lambda it: service.heartbeat(it.session_id)),
            "sessions/{session}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": asked(types.GetInfoRequest, lambda it: service.get_info(it.model_id)),
            "forward_backward": self._forward_backward,
            **{kind: functools.partial(self._of_model, kind) for kind in OF_MODEL},
            "load_weights": self._load_weights,
            "create_sampling_session": asked(types.CreateSamplingSessionRequest, service.create_sampler),
            "asample": asked(types.SampleRequest, service.sample),
            "retrieve_future": self._retrieve_future,
            "cancel_future": asked(types.FutureRetrieveRequest, lambda it: service.cancel(it.request_id)),
            "telemetry": self._telemetry,
            "weights_info": asked(_WeightsInfoRequest, lambda it: service.weights_info(it.tinker_path)),
        }
        get = {
            "healthz": _always({"status": "ok"}),
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "checkpoints": self._all_checkpoints,
            "training_runs": self._training_runs,
            "training_runs/{run}": self._training_run,
            "training_runs/{run}/checkpoints": self._checkpoints,
            "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": self._external_urls,
        }
        delete = {"training_runs/{run}/checkpoints/{kind}/{name}": self._delete_checkpoint}
        routes = [
            Route(f"/api/v1/{path}", self._guarded(handler), methods=[method])
            for method, handlers in (("POST", post), ("GET", get), ("DELETE", delete))
            for path, handler in handlers.items()
        ]
        # The address of a file contains a key.
        files = Route("/files/{run}/{name}/{file}", self._guarded(self._file, needs_key=False), methods=["GET"])
        absent = Route("/{path:path}", self._guarded(self._absent), methods=["GET", "POST", "PUT", "DELETE"])
        return Starlette(routes=[*routes, files, absent])

    def _guarded(self, handler: Handler, needs_key: bool = True) -> Handler:
        """Returns a handler that also answers refusals and errors of `handler`, and requests without the key."""

        async def guarded(request: Request) -> Response:
            self._loop = asyncio.get_running_loop()
            try:
                if needs_key and not has_key(request.headers.get("x-api-key", ""), self._key):
                    raise Refusal(401, "the API key is not that of this server (--api_key).")
                found = await handler(request)
                return found if isinstance(found, Response) else JSONResponse(found)
            except Refusal as refusal:
                return _error(refusal.status, str(refusal))
            except ValueError as error:
                return _error(422, str(error))
            except (OSError, sqlite3.Error) as error:
                if not disk_is_full(error):
                    raise
                return _error(507, f"{FULL_DISK} Nothing was accepted.")

        return guarded

    async def _body(self, request: Request, most: int = JSON_BYTES) -> bytes:
        settings = self.service.settings
        return await self._bodies.read(request, min(most, settings.request_mib * 2**20), settings.request_s)

    async def _json(self, request: Request) -> bytes:
        """Returns a body that is small enough to be parsed in the event loop."""
        body = await self._body(request)
        check_json_values(body, self.service.settings.max_prompt_tokens + OTHER_VALUES)
        return body

    def _asked(self, kind: type[pydantic.BaseModel], answer: Callable[[Any], pydantic.BaseModel | None]) -> Handler:
        """Returns the handler of requests that the service answers at once."""

        async def handle(request: Request) -> Content:
            found = answer(protocol.parse(kind, await self._json(request)))
            return {} if found is None else found.model_dump(mode="json", exclude_none=True)

        return handle

    # ---- configuration and sessions ------------------------------------------------------------------------------

    async def _absent(self, request: Request) -> Content:
        raise Refusal(404, f"{request.method} {request.url.path}: {UNAVAILABLE}")

    async def _client_config(self, _: Request) -> Content:
        chunk = min(CHUNK_BYTES, self.service.settings.request_mib * 2**20 // 2)
        return {"pjwt_auth_enabled": False, "fwdbwd_max_chunk_bytes_count": chunk}

    async def _capabilities(self, _: Request) -> Content:
        return {"supported_models": [
            {"model_name": name, "max_context_length": base.max_tokens, "trainable": True, "sampleable": True}
            for name, base in self.service.bases.items()
        ]}  # fmt: skip

    async def _finish_session(self, request: Request) -> Content:
        await self._body(request)
        self.service.end_session(request.path_params["session"], "its client closed it")
        return {}

    async def _telemetry(self, request: Request) -> Content:
        """Accepts the client's reports, and stores nothing."""
        await self._body(request)
        return {"status": "accepted"}

    # ---- models --------------------------------------------------------------------------------------------------

    async def _create_model(self, request: Request) -> Content:
        body = await self._json(request)
        asked = protocol.parse(types.CreateModelRequest, body)
        self.service.base(asked.base_model)
        return _future(self.service.create(asked.session_id, asked.model_seq_id, "create_model", body))

    async def _forward_backward(self, request: Request) -> Content:
        body = await self._body(request, LOSS_BYTES)
        message = protocol.parse_loss_message(body)
        return _future(self.service.submit(message.model_id, message.seq_id, "forward_backward", body))

    async def _of_model(self, kind: str, request: Request) -> Content:
        body = await self._json(request)
        asked = protocol.parse(_ModelRequest, body)
        return _future(self.service.submit(asked.model_id, asked.seq_id, kind, body))

    async def _load_weights(self, request: Request) -> Content:
        body = await self._json(request)
        asked = protocol.parse(types.LoadWeightsRequest, body)
        if asked.model_id is not None:
            return _future(self.service.submit(asked.model_id, asked.seq_id, "load_weights", body))
        if asked.session_id is None or asked.model_seq_id is None:
            raise ValueError("load_weights needs model_id and seq_id, or session_id and model_seq_id.")
        self.service.checkpoint(asked.path)
        return _future(self.service.create(asked.session_id, asked.model_seq_id, "load_weights", body))

    # ---- sampling and futures ------------------------------------------------------------------------------------

    async def _sampler(self, request: Request) -> Content:
        row = self.service.sampler(request.path_params["sampler"])
        return {"sampler_id": row.id, "base_model": row.base, "model_path": row.path}

    async def _retrieve_future(self, request: Request) -> Response | Content:
        """Answers with a result as soon as it is there, or asks the client to try again."""
        asked = protocol.parse(types.FutureRetrieveRequest, await self._json(request))
        ready = self._polls.setdefault(asked.request_id, asyncio.Event())
        result = self.service.result(asked.request_id)
        if result is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0 if self._is_stopping else POLL_S):
                    await ready.wait()
            result = self.service.result(asked.request_id)
        if result is None:
            return {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
        return Response(result.body, media_type=result.content_type)

    def _announce(self, request_id: str) -> None:
        """Wakes the polls of a future, from any thread."""
        if self._loop is not None and (ready := self._polls.get(request_id)) is not None:
            self._loop.call_soon_threadsafe(ready.set)

    def stop(self) -> None:
        """Answers all polls; their clients poll again until the next server has started."""
        self._is_stopping = True
        for ready in self._polls.values():
            ready.set()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    async def _all_checkpoints(self, request: Request) -> Content:
        shown, cursor = _page(request, self.service.store.checkpoints())
        return {"checkpoints": [_checkpoint(row) for row in shown], "cursor": cursor}

    async def _checkpoints(self, request: Request) -> Content:
        run = self.service.model(request.path_params["run"]).id
        return {"checkpoints": [_checkpoint(row) for row in self.service.store.checkpoints() if row.model == run]}

    async def _delete_checkpoint(self, request: Request) -> Content:
        self.service.remove_checkpoint(self.service.checkpoint(_path(request)).path)
        return {}

    def _run(self, run: str) -> Content:
        model = self.service.model(run)
        return {
            "training_run_id": model.id, "base_model": model.base, "model_owner": "local", "is_lora": True,
            "lora_rank": model.rank, "last_request_time": _time(model.created), "user_metadata": model.metadata or None,
        }  # fmt: skip

    async def _training_run(self, request: Request) -> Content:
        return self._run(request.path_params["run"])

    async def _training_runs(self, request: Request) -> Content:
        shown, cursor = _page(request, self.service.store.models()[::-1])
        return {"training_runs": [self._run(model.id) for model in shown], "cursor": cursor}

    async def _external_urls(self, request: Request) -> Content:
        """Returns addresses from which the files of a checkpoint can be fetched for some time, without the key."""
        path = _path(request)
        self.service.checkpoint(path)
        expires = int(time.time() + URL_S)
        run, _, name = path.removeprefix(SCHEME).split("/")
        urls = {
            file.name: str(request.base_url.replace(path=f"/files/{run}/{name}/{file.name}").include_query_params(
                expires=expires, key=self._signature(run, name, file.name, str(expires))
            ))
            for file in sorted(self.service.folder(path).iterdir())
        }  # fmt: skip
        return {"urls": urls, "expires": _time(expires)}

    def _signature(self, *parts: str) -> str:
        return hmac.digest(self._secret, "/".join(parts).encode(), "sha256").hex()

    async def _file(self, request: Request) -> Response:
        """Sends a file of a checkpoint, to those who have its signed address."""
        run, name, file = (request.path_params[part] for part in ("run", "name", "file"))
        expires, key = request.query_params.get("expires", ""), request.query_params.get("key", "")
        if not hmac.compare_digest(key.encode(), self._signature(run, name, file, expires).encode()):
            raise Refusal(403, "the address is not one that this server signed.")
        if time.time() > int(expires):
            raise Refusal(403, "the address has expired: ask for a new one.")
        path = f"{SCHEME}{run}/external_weights/{name}"
        self.service.checkpoint(path)
        return FileResponse(self.service.folder(path) / file)


def _always(content: Content) -> Handler:
    async def answer(_: Request) -> Content:
        return content

    return answer


def _error(status: int, why: str) -> Response:
    return JSONResponse({"detail": why}, status_code=status)


def _future(request_id: str) -> Content:
    return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _path(request: Request) -> str:
    return f"{SCHEME}{request.path_params['run']}/{request.path_params['kind']}/{request.path_params['name']}"


def _page(request: Request, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Returns the rows that the query asks for, and the cursor with which a client asks for the next ones."""
    asked = request.query_params
    try:
        offset, limit = int(asked.get("offset", 0)), int(asked.get("limit", 100))
    except ValueError as error:
        raise ValueError(f"offset and limit must be numbers ({error}).") from error
    offset, limit = max(offset, 0), min(max(limit, 0), 1000)
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _checkpoint(row: CheckpointRow) -> Content:
    return {
        "checkpoint_id": "/".join(row.path.split("/")[-2:]), "checkpoint_type": KINDS[row.kind],
        "time": _time(row.created), "tinker_path": row.path, "user_metadata": row.metadata,
        "expires_at": None if row.expires is None else _time(row.expires),
    }  # fmt: skip
