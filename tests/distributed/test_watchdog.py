"""Connections between processes that do nothing else: who dies, who leaves, who asks to stop."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from reinforce_ada_jax.cli import BAD_INPUT
from reinforce_ada_jax.distributed import watchdog
from reinforce_ada_jax.distributed.watchdog import RESTART, Watchdog
from tests import standins
from tests.running import ROOT, environment, free_port

# Reads its commands from standard input: what a process of a run does, without the run.
PROCESS = """
import sys
from reinforce_ada_jax.distributed import watchdog
watchdog.NEWS_S = 2
line = watchdog.Watchdog(int(sys.argv[1]), int(sys.argv[2]))
if line.index == 0:
    print(line.listen(), flush=True)
else:
    line.connect("127.0.0.1", sys.argv[3])
line.start()
print("joined", flush=True)
for command in sys.stdin:
    if command == "leave\\n":
        line.leave()
    if command == "refuse\\n":
        line.refuse()
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
            assert "goes on from what is saved" in said


@pytest.mark.parametrize("who", [0, 2])
def test_a_refusal_ends_all_with_its_code(processes, who):
    everyone = processes(3)
    tell(everyone[who], "refuse")
    everyone[who].kill()  # as `member` does after its message
    for number, process in enumerate(everyone):
        if number != who:
            assert process.wait(timeout=30) == BAD_INPUT
            assert f"error: process {who} of 3 refused its configuration or a file" in process.stderr.read()


def test_who_refuses_too_says_it_itself(processes):
    everyone = processes(2)
    for process in everyone:
        tell(process, "refuse")
    time.sleep(3)
    assert [tell(process, "here")[0] for process in everyone] == ["here"] * 2


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


# ---- joining, by threads in place of processes -----------------------------------------------------------------------


@contextlib.contextmanager
def listening(count=2, host=""):
    """Process 0 that listens, and what it said; its connections are closed in the end."""
    line = Watchdog(0, count)
    said = line.listen(host)
    try:
        with line._server:
            yield line, said
    finally:
        for link in line._links.values():
            link.close()


@contextlib.contextmanager
def starting(line, monkeypatch):
    """`start` in a thread, without the watch that would end this process; the list gets what it raised."""
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
    raised = []

    def start():
        try:
            line.start()
        except Exception as error:  # handed to the test
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    yield raised
    thread.join(20)
    assert not thread.is_alive()


def join(index, count, host, said):
    line = Watchdog(index, count)
    line.connect(host, said)
    return line._links[0]


def addresses():
    """Loopback, and what others reach this machine by; both families where it has them."""
    yield "127.0.0.1"
    for family, remote in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Connecting a datagram socket sends nothing: it chooses the address that would be sent from.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((remote, 9))
            yield probe.getsockname()[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        yield "::1"


@pytest.mark.parametrize("host", dict.fromkeys(addresses()))
def test_process_0_is_reached_by_every_address_of_its_machine(monkeypatch, host):
    with listening() as (line, said), starting(line, monkeypatch) as raised:
        link = join(1, 2, host, said)
    with link:
        assert raised == [] and list(line._links) == [1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_listens_on_one_address_where_that_is_asked_for(monkeypatch, host):
    if host not in addresses():
        pytest.skip(f"no {host} here")
    other = {"127.0.0.1": "::1", "::1": "127.0.0.1"}[host]
    with listening(host=host) as (line, said), starting(line, monkeypatch):
        with pytest.raises(ValueError, match="can't connect"):
            join(1, 2, other, said)
        link = join(1, 2, host, said)
    link.close()


def strangers(port, secret):
    """Connections that don't belong: silent, gone at once, half a greeting, another's secret, no process of the run."""
    said = (None, b"", b"GET", secret[:9], b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(16) + b"J\x01\x00")
    for words in (*said, secret + b"J\x00\x00", secret + b"J\x03\x00", secret + b"S\x01\x00"):
        link = socket.create_connection(("127.0.0.1", port))
        if words == b"":
            link.close()
        elif words is not None:
            link.sendall(words)
        yield link


def test_strangers_at_the_port_neither_join_nor_hold_anybody_up(monkeypatch):
    with listening(3) as (line, said):
        port, secret = int(said.split()[0]), bytes.fromhex(said.split()[1])
        with starting(line, monkeypatch) as raised:
            early = list(strangers(port, secret))
            began = time.monotonic()
            links = [join(2, 3, "127.0.0.1", said), *strangers(port, secret), join(1, 3, "127.0.0.1", said)]
        assert raised == [] and sorted(line._links) == [1, 2]
        assert time.monotonic() - began < watchdog.GREETING_S
        # Messages after the greeting are left for the watching thread.
        links[0].sendall(b"S\x02\x00")
        assert line._receive(line._links[2], 2) and line.asked_to_stop
        for link in early:
            if link.fileno() >= 0:
                link.settimeout(5.0)
                with contextlib.suppress(ConnectionResetError):
                    assert link.recv(1) == b"", "it was put off"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    for link in (*early, *links):
        link.close()


def test_a_silent_stranger_is_put_off_in_the_end(monkeypatch):
    standins.constants(monkeypatch, watchdog, GREETING_S=0.1)
    with listening() as (line, said), starting(line, monkeypatch) as raised:
        with socket.create_connection(("127.0.0.1", int(said.split()[0]))) as stranger:
            stranger.settimeout(10.0)
            assert stranger.recv(1) == b""
        link = join(1, 2, "127.0.0.1", said)
    assert raised == []
    link.close()


def test_a_process_joins_once(monkeypatch):
    with listening(3) as (line, said):
        with starting(line, monkeypatch):
            first, second = join(1, 3, "127.0.0.1", said), join(1, 3, "127.0.0.1", said)
            second.settimeout(10.0)
            assert second.recv(1) == b""
            other = join(2, 3, "127.0.0.1", said)
        assert sorted(line._links) == [1, 2]
        first.sendall(b"S\x01\x00")
        assert line._receive(line._links[1], 1), "the first is the one that counts"
    for link in (first, second, other):
        link.close()


# ---- what is said where they can't -----------------------------------------------------------------------------------


def test_who_never_comes_is_named(monkeypatch):
    standins.constants(monkeypatch, watchdog, JOIN_S=0.2)
    with listening(4) as (line, said), starting(line, monkeypatch) as raised:
        link = join(2, 4, "127.0.0.1", said)
    link.close()
    port = said.split()[0]
    (error,) = raised
    assert isinstance(error, ValueError)
    assert re.search(rf"waited 0.2 s for process 1, 3 of 4 to connect at port {port}: .*reach each other", str(error))


def test_where_it_can_not_connect_is_named():
    port = free_port()
    with pytest.raises(ValueError, match=rf"process 1 of 2 can't .* 127.0.0.1, port {port} \(.*refused\).*all ports"):
        Watchdog(1, 2).connect("127.0.0.1", f"{port} {'00' * 16}")
    with pytest.raises(ValueError, match=r"at no-host.invalid, port 9 \(.+\)\. .*all ports from 1024 up"):
        Watchdog(1, 2).connect("no-host.invalid", f"9 {'00' * 16}")


def test_where_it_can_not_listen_is_named():
    with pytest.raises(ValueError, match=r"can't listen .* 192.0.2.1 \(.+\): .*JAX_COORDINATOR_BIND_ADDRESS"):
        Watchdog(0, 2).listen("192.0.2.1")


def test_without_ipv6_it_listens_by_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listening() as (line, said), starting(line, monkeypatch) as raised:
        link = join(1, 2, "127.0.0.1", said)
    link.close()
    assert raised == []
