"""A worker as the pool sees it: its process, its socket, and the pair that it grades. `worker` is its program."""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.isolation import child, messages

# (response text, answer), or with the problem's columns, which functions of other signatures ask for.
Pair = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
# Importing sympy takes one second on an idle machine. The time limit of a pair does not include it.
START_LIMIT_S = 120.0
# sympy on Python integers: with gmpy2 some inputs hang in C or abort the process; mpmath has a switch of its own.
_ENVIRONMENT = {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}


@dataclasses.dataclass(eq=False)
class WorkerProcess(child.Child):
    """Process and its work: starting (not `ready`), idle (`item` is None), or grading pair `item`."""

    deadline: float  # time.monotonic() at which it is killed; infinite when idle
    ready: bool = False
    item: int | None = None
    request: str = ""  # number of the last request: a random one, which the verdict repeats

    @classmethod
    def start(cls, graders: str, time_limit_s: float, output: str | None) -> "WorkerProcess":
        """Starts a process with these graders, whose output goes to the end of a file; None: to this one's stderr."""
        arguments = [str(time_limit_s), graders]
        started = child.start("reinforce_ada_jax.rewards.worker", arguments, _ENVIRONMENT, output)
        return cls(*started, time.monotonic() + START_LIMIT_S)

    def send(self, item: int, grader: int, pair: Pair, time_limit_s: float) -> None:
        """Sends a pair to be graded. If the worker does not take it, `VerifierPool._wait` finds it dead or late."""
        self.item, self.request = item, secrets.token_hex(8)
        self.deadline = time.monotonic() + time_limit_s
        message: dict[str, Any] = {"request": self.request, "grader": grader, "response": pair[0], "answer": pair[1]}
        message["columns"] = dict(pair[2]) if len(pair) > 2 else {}
        with contextlib.suppress(OSError):
            messages.send(self.connection, messages.to_line(message), time_limit_s)
