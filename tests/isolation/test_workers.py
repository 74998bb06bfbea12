"""Workers that answer what was not asked, and messages of their start."""

import pathlib

import pytest

from reinforce_ada_jax.isolation import workers
from reinforce_ada_jax.isolation.messages import Malformed
from reinforce_ada_jax.isolation.workers import CannotStart, Lost, Program, Worker


def program(monkeypatch, folder: pathlib.Path, text: str) -> Program:
    """Returns a program of this text, which has `lines`, the requests, and `write`."""
    (folder / "written_program.py").write_text(
        "import json, os, signal, socket, sys\n"
        "connection = socket.socket(fileno=int(sys.argv[1]))\n"
        "lines = map(json.loads, connection.makefile('rb'))\n"
        "def write(**message):\n"
        "    connection.sendall(json.dumps(message).encode() + b'\\n')\n" + text
    )
    monkeypatch.syspath_prepend(folder)
    return Program(
        module="written_program", arguments=[], names="test workers", loads="a test", refusal="A test cannot start"
    )


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Returns what the worker of a program answers to {"a": 1}."""
    started = []

    def ask(text: str, limit_s: float = 20.0):
        worker = Worker(program(monkeypatch, tmp_path, text))
        started.append(worker)
        return worker.thread.submit(lambda: worker.ask(worker.start(), {"a": 1}, limit_s, dict)).result()

    yield ask
    workers.stop(started)
    assert all(worker.child is None for worker in started)


def test_an_answer_has_the_number_of_its_request(asked):
    answer = asked("write(ready=True)\nfor line in lines: write(request=line['request'], a=line['a'] + 1)")
    assert answer["a"] == 2
    # One that was written for another request, or before it was asked for.
    for number in ("'80'", "None"):
        with pytest.raises(Lost, match="wrote to its socket") as lost:
            asked(f"write(ready=True)\nfor line in lines: write(request={number}, a=2)")
        assert (lost.value.reason, lost.value.is_innocent) == ("crash", True)


def test_only_the_loss_of_a_killed_worker_is_no_fault_of_the_request(asked):
    for end, innocent in (("os.kill(os.getpid(), signal.SIGKILL)", True), ("os._exit(3)", False)):
        with pytest.raises(Lost) as lost:
            asked(f"write(ready=True)\nfor line in lines: {end}")
        assert (lost.value.reason, lost.value.is_innocent) == ("crash", innocent)
    with pytest.raises(Lost, match=r"took more than 0.2 s \(reward.time_limit_s\)") as lost:
        asked("write(ready=True)\nfor line in lines: signal.pause()", limit_s=0.2)
    assert (lost.value.reason, lost.value.is_innocent) == ("timeout", False)


def test_a_start_that_ends_without_a_message_is_tried_a_few_times(asked):
    with pytest.raises(CannotStart, match="A test cannot start: no luck") as error:
        asked("write(error='no luck', trace='line 1')")
    assert str(error.value).endswith("line 1")
    with pytest.raises(CannotStart, match="3 test workers in a row did not start with a test"):
        asked("os._exit(0)")
    with pytest.raises(CannotStart, match="20 test workers in a row were killed while they started.*reward.workers"):
        asked("os.kill(os.getpid(), signal.SIGKILL)")


def test_a_worker_is_ready_or_says_why_not():
    assert workers.start_error({"ready": True}) is None
    assert workers.start_error({"error": "ImportError: no b", "trace": "..."}) == ("ImportError: no b", "...")
    for message in ({}, {"ready": 1}, {"ready": False}, {"error": "a"}, {"error": 1, "trace": ""}):
        with pytest.raises(Malformed):
            workers.start_error(message)
