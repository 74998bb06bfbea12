"""Messages of a worker: whole, forged and malformed."""

import json
import socket

import pytest

from reinforce_ada_jax.isolation import messages
from reinforce_ada_jax.isolation.messages import Malformed
from reinforce_ada_jax.rewards import protocol
from reinforce_ada_jax.types import Verdict

WRITTEN = {"correct": True, "reward": 0.5, "reason": "", "rewards": {"style": 0.25}, "failure": ""}


@pytest.fixture
def connected():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, messages.Inbox(ours)


def test_a_verdict_arrives_in_pieces(connected):
    theirs, inbox = connected
    line = messages.to_line(protocol.verdict_to_json(Verdict(True, 0.5, rewards={"style": 0.25}), ""))
    assert json.loads(line) == WRITTEN
    assert inbox.read() is None
    for byte in line[:-1]:
        theirs.send(bytes([byte]))
        assert inbox.read() is None
    theirs.send(b"\n")
    verdict, failure = protocol.verdict_from_json(inbox.read())
    assert (verdict, dict(verdict.rewards), failure) == (Verdict(True, 0.5), {"style": 0.25}, "")
    theirs.close()
    with pytest.raises(EOFError):
        inbox.read()


@pytest.mark.parametrize(
    "changed",
    [
        {"correct": 1},
        {"correct": "true"},
        {"reward": True},
        {"reward": "1.0"},
        {"reward": None},
        {"reward": float("nan")},
        {"reward": float("inf")},
        {"reward": 10**400},  # an integer without a float
        {"reason": None},
        {"reason": ["a"]},
        {"rewards": None},
        {"rewards": [1.0]},
        {"rewards": {"style": float("nan")}},
        {"rewards": {"style": "1"}},
        {"failure": 3},
    ],
)
def test_a_verdict_of_wrong_values_is_malformed(changed):
    message = json.loads(json.dumps(WRITTEN | changed))
    with pytest.raises(Malformed):
        protocol.verdict_from_json(message)
    for name in changed:
        del message[name]
    with pytest.raises(Malformed):
        protocol.verdict_from_json(message)


def test_long_texts_are_cut():
    message = protocol.verdict_to_json(Verdict(False, 0.0, "r" * 10**6), "f" * 10**6 + "end")
    assert len(messages.to_line(message)) < messages.MAX_MESSAGE_BYTES and message["failure"].endswith("end")
