"""A worker as the pool sees it: its process, its socket, and the pair that it grades. `worker` is its program."""

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.rewards import process_tree, protocol

# (response text, answer), or with the problem's columns, which functions of other signatures ask for.
Pair = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
# Importing sympy takes one second on an idle machine. The time limit of a pair does not include it.
START_LIMIT_S = 120.0
# Time for a worker whose socket is closed to end by itself, so that its exit code tells why.
END_LIMIT_S = 1.0


def _environment() -> dict[str, str]:
    """Returns the parent's environment and module search path, single-threaded, with sympy on Python integers."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        # With gmpy2 some inputs hang in C or abort the process; mpmath has a switch of its own.
        "SYMPY_GROUND_TYPES": "python",
        "MPMATH_NOGMPY": "1",
        # A grade function that imports jax must not claim the accelerator that the parent trains on.
        "JAX_PLATFORMS": "cpu",
        # numpy's BLAS reserves address space for every core of the host, and there may be hundreds.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # what a checker printed before a crash is in the file
    }


@dataclasses.dataclass(eq=False)
class WorkerProcess:
    """Process and its work: starting (not `ready`), idle (`item` is None), or grading pair `item`."""

    process: subprocess.Popen
    connection: socket.socket
    inbox: protocol.Inbox
    deadline: float  # time.monotonic() at which it is killed; infinite when idle
    ready: bool = False
    item: int | None = None
    request: str = ""  # number of the last request: a random one, which the verdict repeats

    @classmethod
    def start(cls, graders: str, time_limit_s: float, output: str | None) -> "WorkerProcess":
        """Starts a process with these graders, whose output goes to the end of a file; None: to this one's stderr."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "reinforce_ada_jax.rewards.worker"]
        with theirs, contextlib.ExitStack() as stack:
            # Opened at every start: the file may be on a disk that was full before.
            file = None if output is None else stack.enter_context(open(output, "ab"))
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(time_limit_s), graders],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stderr=file,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a process group, so that processes that a checker starts are killed with it
            )
        return cls(process, ours, protocol.Inbox(ours), time.monotonic() + START_LIMIT_S)

    def send(self, item: int, grader: int, pair: Pair, time_limit_s: float) -> None:
        """Sends a pair to be graded. If the worker does not take it, `VerifierPool._wait` finds it dead or late."""
        self.item, self.request = item, secrets.token_hex(8)
        self.deadline = time.monotonic() + time_limit_s
        message: dict[str, Any] = {"request": self.request, "grader": grader, "response": pair[0], "answer": pair[1]}
        message["columns"] = dict(pair[2]) if len(pair) > 2 else {}
        with contextlib.suppress(OSError):
            protocol.send(self.connection, protocol.to_line(message), time_limit_s)

    def kill(self) -> None:
        """Kills the process and all that it started."""
        self.connection.close()
        if self.process.returncode is not None:  # killed before: the number of its group may be in use again
            return
        process_tree.kill_descendants(self.process.pid)
        # Only `wait` below collects the leader, so its group's number is still its own here. For a group that has ended
        # Linux raises the first error, macOS the second.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> int | None:
        """Waits for a process that has closed its socket, and returns its exit code; None if it had to be killed."""
        try:
            return self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()
