"""Notices of a metadata server, from a stand-in for it, reach the run."""

import functools
import http.server
import signal
import socket
import subprocess
import sys
import threading

import pytest

from reinforce_ada_jax.distributed import preemption, signals
from tests import standins


@pytest.fixture
def metadata():
    """(address, what it answers by name); other names are not found, and a missing header is refused."""
    answers = {"preempted": "FALSE", "maintenance-event": "NONE"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/")
            allowed = self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if allowed and name in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(name, "").encode() if allowed else b"")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", answers
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, False),
        ({"preempted": "TRUE"}, True),
        ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, True),
        ({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, False),
    ],
)
def test_what_the_server_says(metadata, changed, said):
    address, answers = metadata
    answers |= changed
    assert preemption.noticed(address) == said


def test_the_server_is_not_asked_through_a_proxy(metadata, monkeypatch):
    """A proxy can't reach the metadata server of this machine, and its answer would be about another one."""
    address, answers = metadata
    answers["preempted"] = "TRUE"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert preemption.noticed(address)


def test_no_answer_is_no_notice(metadata):
    address, answers = metadata
    answers.clear()
    assert not preemption.noticed(address)
    assert not preemption.noticed("http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as server:  # which ends each connection with a line that is no HTTP
        answering = threading.Thread(target=answer, args=(server, b"?\r\n"))
        answering.start()
        assert not preemption.noticed(f"http://127.0.0.1:{server.getsockname()[1]}")
        answering.join()


def answer(server, line):
    """Answers one connection."""
    with server.accept()[0] as connection:
        connection.recv(1000)
        connection.sendall(line)


def test_a_notice_asks_the_run_to_end(metadata, monkeypatch):
    address, answers = metadata
    monkeypatch.setattr(signals.signal, "signal", lambda *_: None)
    with signals.Interrupt() as asked:
        thread = preemption.watch(asked.on_notice, threading.Event(), server=address, poll_s=0.01)
        thread.join(0.2)
        stop, unlimited = asked.stop(notice_s=25.0), asked.stop()
        stop.check("drawing")
        assert stop.has_time(1000.0)
        answers["preempted"] = "TRUE"
        thread.join(20)
        assert not thread.is_alive() and asked.preempted()
        assert not stop.has_time(25.0) and stop.has_time(asked.time_left(25.0) - 1.0)
        assert unlimited.has_time(1000.0), "no limit"
        with pytest.raises(signals.Interrupted):
            stop.check("drawing")


def test_nobody_asks_for_notices_after_the_end(metadata, monkeypatch):
    address, answers = metadata
    watch, threads = functools.partial(preemption.watch, server=address), []
    monkeypatch.setattr(preemption, "on_google_cloud", lambda: True)
    monkeypatch.setattr(preemption, "watch", lambda *arguments: threads.append(watch(*arguments)))
    with signals.Interrupt():
        assert [thread.is_alive() for thread in threads] == [True]
    threads[0].join(4)  # seconds between two questions: 5
    assert not threads[0].is_alive()
    # A notice that comes then is not for a run that has ended.
    ended = threading.Event()
    ended.set()
    answers["preempted"] = "TRUE"
    watch(pytest.fail, ended).join()


# The main thread is in a program that never returns to Python, as in a long program of the devices.
IN_A_PROGRAM = """
import functools
import hashlib
import threading
from reinforce_ada_jax.distributed import processes, signals

processes.ask_to_stop = lambda **_: print("told", flush=True)
signals.SECOND_S = 0.1
asked = signals.Interrupt()
threading.Timer(0.5, functools.partial(print, "ready", flush=True)).start()  # when the program has begun
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_heard_during_a_program_and_the_second_ends_the_process(number):
    with subprocess.Popen([sys.executable, "-c", IN_A_PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "told\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number


def test_only_googles_machines_are_asked(tmp_path, monkeypatch):
    product = tmp_path / "product_name"
    standins.constants(monkeypatch, preemption, PRODUCT=product)
    assert not preemption.on_google_cloud()
    product.write_text("Google Compute Engine\n")
    assert preemption.on_google_cloud()
