"""Child process with one socket to its parent, from its start to its end, and the limits that it sets itself."""

import contextlib
import dataclasses
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reinforce_ada_jax.isolation import messages, process_tree

# Time for a child whose socket is closed to end by itself, so that its exit code tells why.
END_LIMIT_S = 1.0
_ENVIRONMENT = {
    # A child that imports jax must not claim the accelerator that the parent trains on.
    "JAX_PLATFORMS": "cpu",
    # Threads reserve address space, for every core of the host, and there may be hundreds.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",  # what a child printed before a crash is in the file
}


@dataclasses.dataclass(eq=False)
class Child:
    """Running child process."""

    process: subprocess.Popen
    connection: socket.socket
    inbox: messages.Inbox = dataclasses.field(init=False)

    def __post_init__(self):
        self.inbox = messages.Inbox(self.connection)

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

    def read(self, limit_s: float) -> dict[str, Any] | None:
        """Returns the next message, None after `limit_s` seconds without one; raises as `messages.Inbox.read` does."""
        deadline, poll = time.monotonic() + limit_s, select.poll()
        poll.register(self.connection, select.POLLIN)
        while True:
            # Also once after the deadline: a process that was stopped may be late to read what came in time.
            left_s = max(0.0, deadline - time.monotonic())
            if poll.poll(1000 * left_s) and (message := self.inbox.read()) is not None:
                return message
            if not left_s:
                return None


def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], output: str | None
) -> tuple[subprocess.Popen, socket.socket]:
    """Starts `python -m MODULE FD ARGUMENTS`, where FD is its socket, and returns the process and our socket.

    Args:
      module: of this package.
      arguments: of the program.
      environment: variables beside those of this process and those that limit threads.
      output: file that the child's stderr is appended to; None: this process's stderr.
    """
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with theirs, contextlib.ExitStack() as stack:
        # Opened at every start: the file may be on a disk that was full before.
        file = None if output is None else stack.enter_context(open(output, "ab"))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            env={**os.environ, "PYTHONPATH": path, **_ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
            stderr=file,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a process group, so that processes that a child starts are killed with it
        )
    return process, ours


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def confine(address_space_bytes: int, processor_s: int | None = None) -> None:
    """Limits this process: its memory (on Linux), its processor time; Ctrl-C is the parent's, stdout goes to stderr."""
    if sys.platform == "linux":  # macOS refuses to set this limit
        _lower(resource.RLIMIT_AS, address_space_bytes)
    if processor_s is not None:
        _lower(resource.RLIMIT_CPU, processor_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
