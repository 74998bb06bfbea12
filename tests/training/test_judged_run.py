"""A run whose rewards come from a judge that never says the same twice, killed while a question is open."""

import collections
import contextlib
import http.server
import json
import threading
import time
import zlib

import jax
import numpy as np
import pytest

from tests.forked import Forked, finished
from tests.running import environment, reproducible, restored

# The run is killed in this iteration, after these answers of it.
ITERATION, ANSWERED = 3, 9


def num_lines(file):
    return file.read_bytes().count(b"\n") if file is not None and file.exists() else 0


class Judge(http.server.BaseHTTPRequestHandler):
    """Endpoint that scores a text by its hash at the first answer, and otherwise at every further one."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server, text = self.server, json.loads(body)["messages"][0]["content"]
        with server.lock:
            server.asked += 1
            server.asked_since += num_lines(server.metrics) == ITERATION - 1 and not server.is_holding.is_set()
            if server.asked_since == ANSWERED + 1 and not server.is_holding.is_set():
                server.is_holding.set()
                server.go_on.wait()
                self.close_connection = True
                return  # nobody gets an answer
            score = (zlib.crc32(text.encode()) + server.answered[text]) % 3 * 5
            server.answered[text] += 1
        data = json.dumps({"choices": [{"message": {"content": f"Score: {score}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)


@contextlib.contextmanager
def judging(port=0, metrics=None):
    """A judge, which keeps a question open in the middle of an iteration of the run that writes `metrics`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Judge) as server:
        server.lock, server.asked, server.answered = threading.Lock(), 0, collections.Counter()
        server.metrics, server.asked_since = metrics, 0
        server.is_holding, server.go_on = threading.Event(), threading.Event()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


def train(workdir, server):
    changes = {
        "iterations": 4, "checkpoint.every": 1, "evaluation.every": 0, "collection.prompts_per_iteration": 8,
        "learning.prompts_per_update": 8, "sampling.slots": 32, "reward.kind": "judge", "reward.workers": 1,
        "judge.url": f"http://127.0.0.1:{server.server_address[1]}/v1", "judge.model": "a-judge",
        "judge.template": "{{ problem }} {{ response }}", "reward.time_limit_s": 60,
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    return Forked(
        ["-m", "reinforce_ada_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}", *flags], environment()
    )


@pytest.mark.slow
def test_killed_in_the_middle_of_an_iteration_it_asks_no_question_twice(tmp_path):
    with judging() as server:
        process = train(tmp_path / "unbroken", server)
        finished(process)
        asked, address = server.asked, server.server_address[1]
    with judging(address, tmp_path / "run" / "metrics.jsonl") as server:
        process = train(tmp_path / "run", server)
        while not server.is_holding.wait(0.1):
            assert process.poll() is None, process.communicate()
        time.sleep(0.5)  # the device draws more responses meanwhile
        process.kill()
        process.communicate()
        server.go_on.set()
        process = train(tmp_path / "run", server)
        out, _ = finished(process)
        assert f"resuming after iteration {ITERATION - 1}\n" in out
        # The reference answer of a problem is scored at each start, before a cache is open.
        assert sum(count > 1 for count in server.answered.values()) <= 1
        # The open question, and the reference answer at the second start.
        assert server.asked <= asked + 2
    assert reproducible(tmp_path / "run") == reproducible(tmp_path / "unbroken")
    states = [restored(tmp_path / name)[0] for name in ("run", "unbroken")]
    jax.tree.map(np.testing.assert_array_equal, *states)
