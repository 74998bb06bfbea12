"""A server with the JSON API of Google Cloud Storage, for tests: objects in memory, late answers, errors by choice.

It has what gcsfs and TensorStore ask for: objects are listed, read in ranges, written at once, as multipart or
resumable uploads, copied and deleted, with conditions on generations.
"""

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import json
import math
import pathlib
import random
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Query = Mapping[str, str]

# Not `importorskip`: every test process reads every test file, and few of them need the package.
needs_gcsfs = pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="gcsfs isn't installed")


def files_of(folder: pathlib.Path) -> list[str]:
    """Returns the files below a folder, by their names relative to it."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@dataclasses.dataclass
class Stored:
    """One object."""

    content: bytes
    generation: int
    updated: str


@dataclasses.dataclass
class Upload:
    """A resumable upload."""

    bucket: str
    name: str
    query: Query
    received: bytearray = dataclasses.field(default_factory=bytearray)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"code": status, "message": message}}, status_code=status)


@dataclasses.dataclass
class Buckets:
    """All buckets of the server; any name is a bucket.

    Attributes:
      most_sent: requests wait while `sent` is as long as this.
      error_share: share of requests that are answered with 503, by a seeded generator; nothing is done for them.
      objects: by bucket and name.
      requests: "METHOD path", in the order of arrival.
      sent: (BUCKET/NAME, first byte, end) of what was sent of the content of objects.
    """

    most_sent: float = math.inf
    error_share: float = 0.0
    objects: dict[tuple[str, str], Stored] = dataclasses.field(default_factory=dict)
    requests: list[str] = dataclasses.field(default_factory=list)
    sent: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    chance: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))
    uploads: dict[str, Upload] = dataclasses.field(default_factory=dict)
    generation: int = 1_000

    # ---- for tests ---------------------------------------------------------------------------------------------------

    def write(self, url: str, content: bytes) -> None:
        """Writes an object, as another machine would."""
        bucket, _, name = url.removeprefix("gs://").partition("/")
        self._put(bucket, name, content, {})

    def read(self, url: str) -> bytes:
        """Returns the content of an object."""
        bucket, _, name = url.removeprefix("gs://").partition("/")
        return self.objects[bucket, name].content

    def names(self, url: str) -> list[str]:
        """Returns the names of the objects of a folder, relative to it."""
        bucket, _, prefix = (url + "/").removeprefix("gs://").partition("/")
        found = (name for owner, name in self.objects if owner == bucket and name.startswith(prefix))
        return sorted(name.removeprefix(prefix) for name in found)

    # ---- the API -----------------------------------------------------------------------------------------------------

    def _put(self, bucket: str, name: str, content: bytes, query: Query) -> Response:
        refused = self._refused(bucket, name, query)
        if refused is not None:
            return refused
        self.generation += 1
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        self.objects[bucket, name] = Stored(bytes(content), self.generation, now)
        return JSONResponse(self._described(bucket, name))

    def _refused(self, bucket: str, name: str, query: Query) -> Response | None:
        """Returns the answer to a request whose condition is not met."""
        found = self.objects.get((bucket, name))
        generation = str(found.generation if found else 0)
        if query.get("ifGenerationMatch", generation) != generation:
            return _error(412, "Precondition Failed")
        return Response(status_code=304) if query.get("ifGenerationNotMatch") == generation else None

    def _described(self, bucket: str, name: str) -> dict[str, Any]:
        stored = self.objects[bucket, name]
        return {
            "kind": "storage#object", "id": f"{bucket}/{name}/{stored.generation}", "name": name, "bucket": bucket,
            "generation": str(stored.generation), "metageneration": "1", "size": str(len(stored.content)),
            "updated": stored.updated, "timeCreated": stored.updated, "contentType": "application/octet-stream",
            "md5Hash": base64.b64encode(hashlib.md5(stored.content).digest()).decode(), "etag": str(stored.generation),
        }  # fmt: skip

    async def about(self, request: Request) -> Response:
        """Describes a bucket."""
        return JSONResponse({"kind": "storage#bucket", "name": request.path_params["bucket"], "location": "US"})

    async def list(self, request: Request) -> Response:
        """Lists one page of a bucket."""
        bucket, query = request.path_params["bucket"], request.query_params
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names, folders = [], set()
        for owner, name in sorted(self.objects):
            if owner != bucket or not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if "endOffset" in query and name >= query["endOffset"]:
                continue
            folder, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(prefix + folder + delimiter)
            else:
                names.append(name)
        first, most = int(query.get("pageToken") or 0), int(query.get("maxResults") or 1_000)
        items = [self._described(bucket, name) for name in names[first : first + most]]
        page: dict[str, Any] = {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}
        return JSONResponse(page | ({"nextPageToken": str(first + most)} if first + most < len(names) else {}))

    async def get(self, request: Request) -> Response:
        """Describes an object, or sends its content or a range of it."""
        bucket, name, query = request.path_params["bucket"], request.path_params["name"], request.query_params
        stored = self.objects.get((bucket, name))
        if stored is None or query.get("generation", str(stored.generation)) != str(stored.generation):
            return _error(404, f"No such object: {bucket}/{name}")
        refused = self._refused(bucket, name, query)
        if refused is not None or query.get("alt") != "media":
            return refused or JSONResponse(self._described(bucket, name))
        size, wanted = len(stored.content), request.headers.get("range", "").removeprefix("bytes=")
        first, _, last = wanted.partition("-")
        begin = int(first) if first else max(size - int(last), 0) if last else 0
        end = min(int(last), size - 1) if first and last else size - 1
        if wanted and begin >= size:
            return _error(416, "Requested range not satisfiable")
        headers = {"x-goog-generation": str(stored.generation), "x-goog-stored-content-length": str(size)}
        if wanted:
            headers["content-range"] = f"bytes {begin}-{end}/{size}"
        self.sent.append((f"{bucket}/{name}", begin, end + 1))
        return Response(stored.content[begin : end + 1], status_code=206 if wanted else 200, headers=headers)

    async def delete(self, request: Request) -> Response:
        """Removes an object."""
        bucket, name = request.path_params["bucket"], request.path_params["name"]
        if (bucket, name) not in self.objects:
            return _error(404, f"No such object: {bucket}/{name}")
        refused = self._refused(bucket, name, request.query_params)
        if refused is None:
            del self.objects[bucket, name]
        return refused or Response(status_code=204)

    async def copy(self, request: Request) -> Response:
        """Copies an object."""
        path = request.path_params
        stored = self.objects.get((path["bucket"], path["name"]))
        if stored is None:
            return _error(404, "No such object")
        self._put(path["to_bucket"], path["to_name"], stored.content, {})
        resource = self._described(path["to_bucket"], path["to_name"])
        return JSONResponse({"kind": "storage#rewriteResponse", "done": True, "resource": resource})

    async def upload(self, request: Request) -> Response:
        """Writes an object, or begins a resumable upload."""
        bucket, query, body = request.path_params["bucket"], request.query_params, await request.body()
        if query.get("uploadType") == "resumable":
            token = uuid.uuid4().hex
            name = query.get("name") or json.loads(body)["name"]
            self.uploads[token] = Upload(bucket, name, query)
            location = f"{request.url.scheme}://{request.url.netloc}/resumable/{token}"
            return Response(headers={"Location": location, "X-GUploader-UploadID": token})
        if query.get("uploadType") == "multipart":  # as gcsfs writes it: lines end with "\n"
            boundary = b"\n--" + request.headers["content-type"].split("boundary=")[1].strip('"').encode()
            about, _, rest = (b"\n" + body).removeprefix(boundary).partition(boundary)
            name = json.loads(about.partition(b"\n\n")[2])["name"]
            content = rest.partition(b"\n\n")[2].removesuffix(boundary + b"--")
            return self._put(bucket, name, content, query)
        return self._put(bucket, query["name"], body, query)

    async def resume(self, request: Request) -> Response:
        """Takes the next part of a resumable upload."""
        upload = self.uploads[request.path_params["token"]]
        span, _, total = request.headers.get("content-range", "*/*").removeprefix("bytes ").partition("/")
        body = await request.body()
        if span != "*":
            upload.received[int(span.split("-")[0]) :] = body
        if total == "*" or len(upload.received) < int(total):
            last = len(upload.received) - 1
            return Response(status_code=308, headers={"Range": f"bytes=0-{last}"} if last >= 0 else {})
        return self._put(upload.bucket, upload.name, bytes(upload.received), upload.query)

    def app(self) -> Starlette:
        """Returns the application."""

        def route(path: str, endpoint: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
            async def answer(request: Request) -> Response:
                self.requests.append(f"{request.method} {request.url.path}")
                while len(self.sent) >= self.most_sent:
                    await asyncio.sleep(0.01)
                if self.chance.random() < self.error_share:
                    return _error(503, "Service Unavailable")
                return await endpoint(request)

            return Route(path, answer, methods=methods)

        api = "/storage/v1/b/{bucket}"
        return Starlette(routes=[
            route(f"/upload{api}/o", self.upload, "POST"),
            route("/resumable/{token}", self.resume, "POST", "PUT"),
            route(f"{api}/o/{{name:path}}/rewriteTo/b/{{to_bucket}}/o/{{to_name:path}}", self.copy, "POST"),
            route(f"{api}/o/{{name:path}}/copyTo/b/{{to_bucket}}/o/{{to_name:path}}", self.copy, "POST"),
            route(f"/download{api}/o/{{name:path}}", self.get, "GET"),
            route(f"{api}/o", self.list, "GET"),
            route(f"{api}/o/{{name:path}}", self.get, "GET"),
            route(f"{api}/o/{{name:path}}", self.delete, "DELETE"),
            route(api, self.about, "GET"),
        ])  # fmt: skip


@contextlib.contextmanager
def serving(buckets: Buckets) -> Iterator[dict[str, str]]:
    """Serves `buckets` on a free port; gives the environment in which gcsfs and TensorStore find it."""
    config = uvicorn.Config(
        buckets.app(), host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none"}
    finally:
        server.should_exit = True
        thread.join()
