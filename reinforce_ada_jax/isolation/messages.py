"""Messages between a process and its child: one line of JSON each, bounded, and read without ever waiting.

What runs in the child may be hostile, and it can write to the child's socket. So the parent unpickles nothing, never
waits for the rest of a message, and takes anything malformed for a crash of that child.
"""

import json
import socket
from collections.abc import Mapping
from typing import Any

# The longest line that a child may send. The messages of a correct child are shorter: it cuts texts that may be long.
MAX_MESSAGE_BYTES = 2**17
_READ_BYTES = 2**16


class Malformed(Exception):
    """A child sent a message that no correct child sends."""


def to_line(message: Mapping[str, Any]) -> bytes:
    """Returns the message as one line; lone surrogates are escaped, so any text survives."""
    return json.dumps(message).encode("ascii") + b"\n"


def send(connection: socket.socket, line: bytes, time_limit_s: float) -> None:
    """Sends a line; OSError if the other end is closed, or reads too little of a long line within the time limit."""
    connection.settimeout(time_limit_s)
    try:
        connection.sendall(line)
    finally:
        connection.settimeout(None)


class Inbox:
    """Parent's view of what one child has sent so far."""

    def __init__(self, connection: socket.socket):
        self._connection, self._buffer = connection, bytearray()

    def read(self) -> dict[str, Any] | None:
        """Returns the message that has arrived whole, None if its end is missing; never waits.

        Raises EOFError where the child closed its end, and Malformed where the line is too long, is no JSON object, or
        more follows it: a child sends one and waits.
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
