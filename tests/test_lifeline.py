"""Connections between processes that do nothing else: who dies, who leaves, who asks to stop."""

import signal
import subprocess
import sys
import time

import pytest

from reinforce_ada_jax.lifeline import RESTART
from tests.running import ROOT, environment

# Reads its commands from standard input: what a process of a run does, without the run.
PROCESS = """
import sys
from reinforce_ada_jax.lifeline import Lifeline
line = Lifeline(int(sys.argv[1]), int(sys.argv[2]))
if line.index == 0:
    print(line.listen("127.0.0.1"), flush=True)
else:
    line.connect("127.0.0.1", sys.argv[3])
line.start()
print("joined", flush=True)
for command in sys.stdin:
    if command == "leave\\n":
        line.leave()
    if command == "stop\\n":
        line.ask_to_stop()
    print(command.strip(), line.asked_to_stop, flush=True)
"""


@pytest.fixture
def processes():
    started = []

    def start(count):
        said = []
        for index in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(index), str(count), *said], cwd=ROOT, env=environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            started.append(process)
            if index == 0:
                said = [process.stdout.readline().strip()]
        assert [process.stdout.readline() for process in started] == ["joined\n"] * count
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def tell(process, command):
    process.stdin.write(command + "\n")
    process.stdin.flush()
    return process.stdout.readline().split()


@pytest.mark.parametrize("victim", [0, 2])
def test_all_end_when_one_dies_and_name_it(processes, victim):
    everyone = processes(3)
    everyone[victim].send_signal(signal.SIGKILL)
    for process in everyone:
        if process is not everyone[victim]:
            assert process.wait(timeout=20) == RESTART
            said = process.stderr.read()
            assert f"error: process {victim} of 3 is gone" in said
            assert "goes on from the newest checkpoint" in said


def test_a_request_to_stop_reaches_all(processes):
    everyone = processes(3)
    tell(everyone[2], "stop")
    for process in everyone[:2]:
        deadline = time.monotonic() + 20
        while tell(process, "asked?") != ["asked?", "True"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_leaves_is_not_lost(processes):
    everyone = processes(3)
    for process in everyone:
        tell(process, "leave")
    for process in everyone:
        process.communicate(timeout=20)
    assert [process.returncode for process in everyone] == [0, 0, 0]


def test_a_stranger_at_the_port_does_not_join(processes):
    import socket  # noqa: PLC0415

    first = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "0", "2"], cwd=ROOT, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    said = first.stdout.readline().strip()
    with socket.create_connection(("127.0.0.1", int(said.split()[0]))) as stranger:
        stranger.sendall(bytes(16) + b"J\x01\x00")
        second = subprocess.Popen(
            [sys.executable, "-c", PROCESS, "1", "2", said], cwd=ROOT, env=environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert first.stdout.readline() == second.stdout.readline() == "joined\n"
    assert tell(first, "still here") == ["still", "here", "False"]
    for process in (first, second):
        process.kill()
        process.communicate()
