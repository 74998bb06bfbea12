"""The server of the live page: what it answers, what it refuses, and that it waits for nobody."""

import contextlib
import gzip
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from reinforce_ada_jax.reporting import live
from tests import standins
from tests.browser import browser, needs_browser
from tests.plotted import make_run, sample, write_samples
from tests.reporting.test_following import line
from tests.reporting.test_page import HOSTILE
from tests.reporting.test_page_in_browser import GRAD_NORM, LEGEND, POINT, SEE, resize

ALL = "/data?runs=-1:0:0&version=-1"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(work directory, port) of a page that is served."""
    workdir = make_run(
        tmp_path_factory.mktemp("live") / "run", [100, 100], {0: 0.2, 2: 0.6},
        config={"iterations": 5, "note": HOSTILE},
        metrics={"update/grad_norm": [1.0, 2.0], "time/collect_s": [1.0, 1.0]},
    )  # fmt: skip
    write_samples(workdir, 2, [sample(HOSTILE, HOSTILE, reason=HOSTILE)])
    listener = live.listen(live.LOOPBACK, 0)
    threading.Thread(target=live.serve, args=([workdir], listener), daemon=True).start()
    return workdir, listener.getsockname()[1]


def ask(port, path, **headers):
    connection = http.client.HTTPConnection(live.LOOPBACK, port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_and_its_data(served):
    port = served[1]
    answer, body = ask(port, "/")
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"connect-src 'self'" in body and b"hacked" not in body  # the runs come later
    answer, body = ask(port, ALL)
    news = json.loads(body)
    assert answer.status == 200 and [row[0] for row in news["runs"][0]["rows"]] == [0, 1, 2]
    assert HOSTILE in news["responses"]["problems"][0] and b"<" not in body
    answer, packed = ask(port, ALL, **{"Accept-Encoding": "gzip"})
    assert answer.headers["Content-Encoding"] is None or json.loads(gzip.decompress(packed))["runs"]


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/data", "localhost", 404), ("/data?runs=x&version=0", "localhost", 404),
        ("/../config.json", "localhost", 404),
        (ALL, "localhost:1234", 200), (ALL, "[::1]", 200), ("/data?runs=9:9:9,9:9:9&version=99", "127.0.0.1", 200),
        (ALL, "evil.example", 403), ("/", "127.0.0.1.evil.example", 403), (ALL, "", 403),
    ],
)  # fmt: skip
def test_other_requests_and_other_names_are_refused(served, path, host, status):
    answer, body = ask(served[1], path, Host=host)
    assert answer.status == status
    assert status == 200 or b"runs" not in body


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nX-a: "], ids=["silent", "headers"])
def test_slow_and_silent_connections_do_not_stop_it(served, begin):
    """More than there may be: the oldest are closed for later ones, and a browser beside them is answered at once."""
    port = served[1]
    slow = [socket.create_connection((live.LOOPBACK, port)) for _ in range(3 * live.MOST_CONNECTIONS)]
    for connection in slow[-live.MOST_CONNECTIONS :]:  # some of the others are closed
        connection.sendall(begin)
    assert ask(port, ALL)[0].status == 200
    slow[0].settimeout(60)
    assert slow[0].recv(1) == b""
    for connection in slow:
        connection.close()


def test_a_request_is_answered_where_many_others_come_right_after_it(tmp_path):
    """All are there when it begins to accept, and none of the others sends a request."""
    listener = live.listen(live.LOOPBACK, 0)
    address = listener.getsockname()
    with contextlib.ExitStack() as stack:

        def connect(content):
            connection = stack.enter_context(socket.create_connection(address, timeout=60))
            connection.sendall(content)
            return connection

        browser = connect(f"GET {ALL} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        for _ in range(3 * live.MOST_CONNECTIONS):
            connect(b"GET / HTTP/1.1\r\nX-a: ")
        threading.Thread(target=live.serve, args=([tmp_path / "run"], listener), daemon=True).start()
        assert browser.recv(2**16).startswith(b"HTTP/1.1 200 ")


def test_headers_that_come_byte_by_byte_have_a_time(served, monkeypatch):
    standins.constants(monkeypatch, live, TIMEOUT_S=0.3)
    with socket.create_connection((live.LOOPBACK, served[1]), timeout=0.02) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX-a: ")
        deadline = time.monotonic() + 60
        while True:  # each byte comes within the time of a read
            try:
                assert slow.recv(1) == b""
                break
            except TimeoutError:
                assert time.monotonic() < deadline
                slow.sendall(b"a")


def test_a_port_that_is_taken_is_an_error(served):
    with pytest.raises(ValueError, match=f"can't listen on 127.0.0.1, port {served[1]} .*name another port"):
        live.listen(live.LOOPBACK, served[1])


def test_a_host_that_has_no_address_is_an_error(monkeypatch):
    standins.failing(monkeypatch, socket, "getaddrinfo", socket.gaierror(-2, "Name or service not known"))
    with pytest.raises(ValueError, match="can't listen on nowhere, port 0 .*name another host"):
        live.listen("nowhere", 0)


def test_its_process_ends_with_its_run(tmp_path):
    # A run that is killed can end nothing itself.
    program = (
        "import pathlib, time; from reinforce_ada_jax.reporting import live\n"
        f"listener = live.listen('127.0.0.1', 0); print(listener.getsockname()[1], flush=True)\n"
        f"with live.in_a_process(pathlib.Path({str(tmp_path / 'run')!r}), listener): time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as run:
        port = int(run.stdout.readline())
        answer, body = ask(port, ALL)
        assert answer.status == 200 and json.loads(body)["runs"][0]["rows"] == []
        (child,) = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + live.NICE)
        assert os.getpriority(os.PRIO_PROCESS, int(child)) == nice
        loaded = pathlib.Path(f"/proc/{child}/maps").read_text()
        assert not re.search("jaxlib|matplotlib", loaded)
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while pathlib.Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((live.LOOPBACK, port))


# ---- in a browser ----------------------------------------------------------------------------------------------------

AT_LAST = """
    const test = new Function("return " + arguments[0]), end = Date.now() + 8000;
    return new Promise(done => {
      const look = () => test() ? done(true) : Date.now() > end ? done(document.body.innerText) : setTimeout(look, 50);
      look();
    });
"""


@pytest.mark.browser
@needs_browser
def test_new_points_and_responses_come_by_themselves(served, tmp_path):
    workdir, port = served
    with browser(tmp_path / "profile") as window:
        resize(window, 400, 800)
        window.go(f"http://127.0.0.1:{port}/")
        assert window.run(AT_LAST, "document.getElementById('status').innerText.startsWith('2 / 5 running')") is True
        assert window.run(AT_LAST, "document.querySelectorAll('#table .pool').length === 1") is True
        window.click("#table .open")  # a reader, whom nothing may disturb
        write_samples(workdir, 3, [sample("new", prompt="q", advantage=None)])
        begin = time.monotonic()
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write(line(3, **{"update/grad_norm": 3.0, "time/collect_s": 1.0}))
        assert window.run(AT_LAST, "document.getElementById('status').innerText.startsWith('3 / 5 running')") is True
        assert time.monotonic() - begin < 5
        window.run(SEE, GRAD_NORM)
        assert window.run(LEGEND, "update/grad_norm") == ["run\n2"]
        assert window.run("return document.querySelectorAll('#table .pool').length") == 1
        window.click("#fresh")
        assert window.run("return document.querySelectorAll('#table .pool').length") == 2
        assert window.run("return document.querySelectorAll('#table .whole').length") == 1
        resize(window, 1400, 900)
        window.run(SEE, GRAD_NORM)
        window.run(POINT, "update/grad_norm", 0.99)
        assert window.run(LEGEND, "update/grad_norm") == ["run\n2"]  # of 1, 2 and 3
        window.type("#filter-text", "new")
        assert window.run("return document.getElementById('count').innerText") == "1 of 2 responses to 1 prompt"
        window.go("about:blank")
        window.go(f"http://127.0.0.1:{port}/#pool/run/3/q/0")
        assert window.run(AT_LAST, "document.querySelectorAll('.named').length === 1") is True
        for iteration in (4, 5):
            with (workdir / "metrics.jsonl").open("a") as file:
                file.write(line(iteration))
        assert window.run(AT_LAST, "document.getElementById('status').innerText.startsWith('5 / 5 finished')") is True
        assert window.console() == [] and window.run("return window.hacked === undefined")
