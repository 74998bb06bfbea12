"""Models by name, from a hub on this machine: what is fetched, once, and what is never asked for."""

import hashlib
import http.server
import json
import os
import pathlib
import threading
import time

import pytest

from reinforce_ada_jax.policy import hub_models
from tests import forked
from tests.running import environment

MODEL = pathlib.Path(__file__).parents[2] / "reinforce_ada_jax" / "assets" / "cipher"
COMMIT = "1234567890" * 4
WANTED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
FETCH = """
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.training.components import model_folder
for name in {wanted}:
    try:
        folder = model_folder(name)
        print(folder)
    except ValueError as error:
        print(error)
if {load}:
    print(huggingface.load(folder)[0].num_parameters)
"""

# As several processes do it.
PARTS = """
import sys
from reinforce_ada_jax.policy import hub_models, huggingface
for name in sys.argv[1:]:
    try:
        folder = hub_models.fetch_parts(name, hub_models.commit(name))
        print(folder)
        print(hub_models.repository(folder), huggingface.load(folder)[0].num_parameters)
    except ValueError as error:
        print(error)
"""


class Hub(http.server.ThreadingHTTPServer):
    """The part of the hub's HTTP interface that a download uses, for repositories given as {name: {path: content}}."""

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.asked, self.ranges = repositories, [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def files(self):
        """Files whose content was sent."""
        return sorted(path for method, path in self.asked if method == "GET" and not path.startswith("/api"))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append((self.command, self.path))
        path = self.path.partition("?")[0].removeprefix("/api/models").strip("/")
        name = "/".join(path.split("/")[:2])
        files, rest = self.server.repositories.get(name), path.removeprefix(name).strip("/")
        if files is None:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest in ("", "revision/main", "revision/v1", f"revision/{COMMIT}"):
            self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        elif rest == f"tree/{COMMIT}":
            listed = [{"type": "file", "path": path, "size": len(content), "oid": digest(content)}
                      for path, content in files.items()]  # fmt: skip
            self.answer(200, json.dumps(listed).encode())
        elif rest.startswith(f"resolve/{COMMIT}/"):
            content = files[rest.removeprefix(f"resolve/{COMMIT}/")]
            about = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT}
            first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            if last:
                self.server.ranges.append((os.path.basename(path), int(first), int(last) + 1))
                part = content[int(first) : int(last) + 1]
                self.answer(206, part, about | {"Content-Range": f"bytes {first}-{last}/{len(content)}"})
                return
            self.answer(200, content, about)
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status, content, headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


def digest(content):
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def hub():
    model = {file.name: file.read_bytes() for file in MODEL.iterdir()}
    never = dict.fromkeys(("pytorch_model.bin", "handler.py", "README.md", "onnx/model.safetensors"), b"x")
    pickled = {"config.json": model["config.json"], "pytorch_model.bin": b"x"}
    with Hub({"tiny/cipher": model | never, "tiny/pickled": pickled}) as server:
        yield server
        server.shutdown()


def start(hub, cache, wanted, load=False, parts=False, **variables):
    """Starts a process that prints the folder of each name, or the error."""
    program = [PARTS, *wanted] if parts else [FETCH.format(wanted=wanted, load=load)]
    env = environment() | {"HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(cache), "HF_TOKEN": "", **variables}
    env["HF_ENDPOINT"] = variables.get("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    return forked.Forked(["-c", *program], env)


def lines(process):
    return forked.finished(process)[0].splitlines()


def test_a_model_is_fetched_once(tmp_path, hub):
    # Two processes of one run, at once.
    both = [start(hub, tmp_path, ["tiny/cipher"], load=True) for _ in range(2)]
    folder, weights = lines(both[0])
    assert int(weights) == 107_392 and lines(both[1]) == [folder, weights]
    assert {os.path.basename(path) for path in hub.files} == WANTED
    assert set(os.listdir(folder)) == WANTED and pathlib.Path(folder).name == COMMIT
    assert hub_models.repository(pathlib.Path(folder)) == "tiny/cipher"
    fetched, began = len(hub.files), time.monotonic()
    wanted = ["tiny/cipher@v1", "tiny/none", "tiny/cipher@v2", "tiny/pickled"]
    again = start(hub, tmp_path, wanted)
    unreachable = start(hub, tmp_path, ["tiny/cipher", "a/b"], HF_ENDPOINT="http://127.0.0.1:9")
    offline = start(hub, tmp_path, ["tiny/cipher", "a/b"], HF_HUB_OFFLINE="1")
    there, none, revision, pickled = lines(again)
    assert there == folder
    assert "tiny/none is not a folder, and the model can't be fetched from huggingface.co (RepositoryNotFound" in none
    assert "the model at revision 'v2' can't be fetched from huggingface.co (RevisionNotFound" in revision
    assert "tiny/pickled has no safetensors on huggingface.co, and weights in pickles are never read" in pickled
    for process, reason in (
        (unreachable, "ConnectError: [Errno 111]"),
        (offline, "outgoing traffic has been disabled"),
    ):
        there, missing = lines(process)
        assert there == folder
        assert missing.startswith("a/b is not a folder, and the model can't be fetched") and reason in missing
        assert missing.endswith("or name a folder on this machine.")
    # One config.json more, of the repository with a pickle.
    assert len(hub.files) == fetched + 1 and time.monotonic() - began < 60


def test_parts_are_fetched_by_ranges_once(tmp_path, hub):
    def parts(*wanted, cache="parts", **variables):
        variables["XDG_CACHE_HOME"] = str(tmp_path / "own")
        return lines(start(hub, tmp_path / cache, wanted, parts=True, **variables))

    hub.asked.clear()
    folder, loaded = parts("tiny/cipher")
    assert loaded == "tiny/cipher 107392"
    assert set(os.listdir(folder)) == WANTED and pathlib.Path(folder).is_relative_to(tmp_path / "own")
    assert pathlib.Path(folder, "model.safetensors").stat().st_size < 10_000
    assert sorted(hub.ranges) == [("model.safetensors", 0, 2**18), ("model.safetensors", 2**18, 432_216)]
    assert sum(path.endswith("model.safetensors") for path in hub.files) == 2
    assert parts("tiny/cipher", HF_HUB_OFFLINE="1") == [folder, loaded]
    pickled, none = parts("tiny/pickled", "tiny/none")
    assert "tiny/pickled has no safetensors on huggingface.co, and weights in pickles are never read" in pickled
    assert "tiny/none is not a folder, and the model can't be fetched from huggingface.co" in none
    # A cache that has the weights is used.
    (whole,) = lines(start(hub, tmp_path / "whole", ["tiny/cipher"]))
    assert parts("tiny/cipher", cache="whole") == [whole, loaded] and len(hub.ranges) == 2


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-Math-1.5B", True),
        ("Qwen", False),
        ("a/b/c", False),
        ("../b", False),
        ("/a", False),
        ("a/b:c", False),
    ],
)
def test_names(path, name):
    """A name of the hub is told from a folder."""
    assert hub_models.is_name(path) is name


def test_a_folder_that_is_no_cache():
    assert hub_models.repository(MODEL) is None
    assert hub_models.repository(pathlib.Path("models--a--b/snapshots/c")) == "a/b"
