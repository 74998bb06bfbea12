"""Messages between the pool and a worker: one line of JSON each, bounded, and checked field by field in the parent.

A reward may run code that a model wrote, in the worker's process, and such code can write to the worker's socket. So
the parent unpickles nothing, never waits for the rest of a message, and takes a verdict only with the number of the
request that it answers.
"""

import json
import math
import socket
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.types import Verdict

# The longest line that a worker may send. Its own messages are below it: they cut what may be long.
MAX_MESSAGE_BYTES = 2**17
MAX_TEXT = 8_000  # characters of a traceback
MAX_REASON = 200
_READ_BYTES = 2**16


class Malformed(Exception):
    """A worker sent what no worker sends."""


def to_line(message: Mapping[str, Any]) -> bytes:
    """Returns the message as one line; lone surrogates are escaped, so any text survives."""
    return json.dumps(message).encode("ascii") + b"\n"


def send(connection: socket.socket, line: bytes, time_limit_s: float) -> None:
    """Sends a line; OSError if the other end is closed, or reads too little of a long line within the time limit."""
    try:
        sent = connection.send(line, socket.MSG_DONTWAIT)  # all of it, almost always, in one system call
    except BlockingIOError:
        sent = 0
    if sent < len(line):
        connection.settimeout(time_limit_s)
        try:
            connection.sendall(line[sent:])
        finally:
            connection.settimeout(None)


class Inbox:
    """Parent's view of what one worker has sent so far."""

    def __init__(self, connection: socket.socket):
        self._connection, self._buffer = connection, bytearray()

    def read(self) -> dict[str, Any] | None:
        """Returns the message that has arrived whole, None if its end is missing; never waits.

        Raises:
          EOFError: the worker closed its end.
          Malformed: the line is too long, is no JSON object, or more follows it: a worker sends one and waits.
        """
        try:
            data = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        self._buffer += data
        line, end, rest = self._buffer.partition(b"\n")
        if rest or len(line) > MAX_MESSAGE_BYTES:
            raise Malformed
        if not end:
            return None
        self._buffer.clear()
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
            raise Malformed from error
        if not isinstance(message, dict):
            raise Malformed
        return message


def _number(value: Any) -> float:
    """Returns a JSON number as a finite float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed
    try:
        number = float(value)
    except OverflowError as error:
        raise Malformed from error
    if not math.isfinite(number):
        raise Malformed
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed
    return value


def verdict_to_json(verdict: Verdict, request: str, failure: str) -> dict[str, Any]:
    """Returns the answer to a request; `failure` is the traceback where the grading failed, else ""."""
    return {
        "request": request,
        "correct": bool(verdict.correct),
        "reward": float(verdict.reward),
        "reason": str(verdict.reason)[:MAX_REASON],
        "rewards": {name: float(reward) for name, reward in verdict.rewards.items()},
        "failure": failure[-MAX_TEXT:],
    }


def verdict_from_json(message: Mapping[str, Any], request: str) -> tuple[Verdict, str]:
    """Returns the verdict and the failure's traceback of `verdict_to_json`.

    Raises:
      Malformed: a field is missing or has another type, a reward is not finite, or it answers another request.
    """
    if message.get("request") != request or not isinstance(message.get("correct"), bool):
        raise Malformed
    rewards = message.get("rewards")
    if not isinstance(rewards, dict):
        raise Malformed
    verdict = Verdict(
        message["correct"],
        _number(message.get("reward")),
        _text(message.get("reason")),
        rewards={name: _number(reward) for name, reward in rewards.items()},
    )
    return verdict, _text(message.get("failure"))


def start_error(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns None for the message of a worker that is ready, else its error as (one line, traceback)."""
    if message.get("ready") is True:
        return None
    return _text(message.get("error")), _text(message.get("trace"))
