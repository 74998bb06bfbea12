"""Child process with one socket to its parent: its start and end, its limits, and the loop that answers requests."""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reinforce_ada_jax.isolation import messages, process_tree

# A child whose socket is closed has this time to end by itself, so that its exit code tells why it ended.
END_LIMIT_S = 1.0
# Ordinary gradings stay below 0.2 GiB of memory; an unlimited factorial takes all there is.
ADDRESS_SPACE_BYTES = 4 * 2**30
# The parent kills at the time limit. If the parent is gone, the kernel kills this much later: the default action of
# SIGALRM needs no interpreter, so it also ends C code that never returns. (PR_SET_PDEATHSIG would be sooner, but it
# fires when the *thread* that started the process ends, and would kill the workers of a pool made in a thread.)
ORPHAN_GRACE_S = 5.0
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
MAX_LINE, MAX_TEXT = 600, 8_000  # characters of the text of an exception, and of a traceback
Answer = Callable[[dict[str, Any]], Mapping[str, Any]]
_ENVIRONMENT = {
    # A child that imports jax must not claim the accelerator that the parent trains on.
    "JAX_PLATFORMS": "cpu",
    # Threads reserve address space, for every core of the host, and there may be hundreds.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",  # what a child printed before a crash is in the file
    # sympy on Python integers: with gmpy2 some inputs hang in C or abort the process; mpmath has a switch of its own.
    "SYMPY_GROUND_TYPES": "python",
    "MPMATH_NOGMPY": "1",
}


class Misuse(Exception):
    """Mistake of a user's code in what it asks for or returns; the text says where, and is for its author."""


def one_line(error: BaseException) -> str:
    """Returns the exception and its innermost frame outside of libraries; if there is none, outside of this package."""
    if isinstance(error, Misuse):
        return " ".join(str(error).split())[:MAX_LINE]
    frames = _user_frames(error)
    frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    text = " ".join(traceback.format_exception_only(error)[-1].split())[:MAX_LINE]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    inner = ("<frozen", os.path.dirname(os.path.dirname(__file__)), os.path.dirname(importlib.__file__))
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inner)]


def described(error: BaseException) -> str:
    """Returns the exception in one line, and below it the lines of the traceback that are the user's."""
    frames = [] if isinstance(error, Misuse) else _user_frames(error)
    return "\n".join([one_line(error), *traceback.format_list(frames)]).rstrip()


class Child:
    def __init__(self, process: subprocess.Popen, connection: socket.socket):
        self.process, self.connection, self.inbox = process, connection, messages.Inbox(connection)

    def kill(self) -> None:
        """Kills the process and all that it started."""
        self.connection.close()
        if self.process.returncode is not None:  # killed before: the number of its group may be in use again
            return
        process_tree.kill_descendants(self.process.pid)
        # Until `wait` below collects the leader, no other group can have its group's number. For a group that has ended
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
            # Polls once after the deadline, too: if this process was suspended, it still reads a message that came in
            # time.
            left_s = max(0.0, deadline - time.monotonic())
            if poll.poll(1000 * left_s) and (message := self.inbox.read()) is not None:
                return message
            if not left_s:
                return None


def start(module: str, arguments: Sequence[str], output: str | None) -> Child:
    """Starts `python -m MODULE FD ARGUMENTS`, where FD is its socket.

    `output` is the file that the child's stderr is appended to, None: this process's stderr.
    """
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with theirs, contextlib.ExitStack() as stack:
        # Opened at every start: the file may be on a disk that was full before.
        file = None if output is None else stack.enter_context(open(output, "ab"))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            env={**os.environ, "PYTHONPATH": path, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stderr=file,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a process group, so that processes that a child starts are killed with it
        )
    return Child(process, ours)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def confine(address_space_bytes: int, processor_s: int | None = None) -> None:
    """Limits memory (on Linux) and processor time of this process; it ignores Ctrl-C, and stdout goes to stderr."""
    if sys.platform == "linux":  # macOS refuses to set this limit
        _lower(resource.RLIMIT_AS, address_space_bytes)
    if processor_s is not None:
        _lower(resource.RLIMIT_CPU, processor_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)


def serve(
    descriptor: int,
    load: Callable[[], tuple[Mapping[str, Any], Answer]],
    limit_s: Callable[[Mapping[str, Any]], float],
) -> None:
    """Answers the requests of the parent in a confined process below a supervisor, until the parent closes the socket.

    `load` returns what the parent is told in addition to {"ready": true}, and the function that answers. Where it
    fails, the parent gets the error in one line, with its traceback. `limit_s` returns the time after which the parent
    kills this process if a request has no answer.
    """
    process_tree.supervise(descriptor)
    confine(ADDRESS_SPACE_BYTES)
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(ConnectionError):  # the parent died
        try:
            about, answer = load()
        except BaseException as error:
            trace = traceback.format_exc()[-MAX_TEXT:]
            connection.sendall(messages.to_line({"error": one_line(error), "trace": trace}))
            return
        connection.sendall(messages.to_line({"ready": True, **about}))
        with connection.makefile("rb") as requests:
            for line in requests:
                request = json.loads(line)
                signal.setitimer(signal.ITIMER_REAL, limit_s(request) + ORPHAN_GRACE_S)
                found = answer(request)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                connection.sendall(messages.to_line({"request": request["request"], **found}))
