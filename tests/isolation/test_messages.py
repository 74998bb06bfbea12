"""Lines between a process and its child: whole, halved and malformed."""

import socket

import pytest

from reinforce_ada_jax.isolation import messages


@pytest.fixture
def connected():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, messages.Inbox(ours)


@pytest.mark.parametrize(
    "data",
    [
        b"no JSON\n",
        b"[1, 2]\n",  # no object
        b"\xff\xfe\n",  # no UTF-8
        b'{"ready": true}\n{"ready": true}\n',  # two, where one was asked for
        b'{"ready": true}\n{',
        b"[" * 60_000 + b"\n",  # nested more deeply than Python recurses
    ],
)
def test_other_bytes_are_no_message(connected, data):
    theirs, inbox = connected
    theirs.sendall(data)
    with pytest.raises(messages.Malformed):
        inbox.read()


def test_a_line_has_a_longest_length(connected):
    theirs, inbox = connected
    for part in (messages.MAX_MESSAGE_BYTES // 2, messages.MAX_MESSAGE_BYTES // 2):
        theirs.sendall(b" " * part)
        assert inbox.read() is None
    theirs.sendall(b" ")
    with pytest.raises(messages.Malformed):
        inbox.read()
