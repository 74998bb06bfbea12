"""Worker processes that can be killed, each with a thread that waits for its answers under a wall-clock limit.

What runs in a worker may loop for hours in C, abort, or take all memory, and a thread can be neither limited nor
killed. `multiprocessing` would import the parent's `__main__` in its children, which here imports jax and would claim
the accelerator. So a worker is a plain `python -m MODULE FD ARGUMENTS` with one socket to the parent (`child`). It
writes {"ready": true}, or {"error", "trace"} if it cannot start. Then it answers each request with its number.
"""

import contextlib
import dataclasses
import pathlib
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from reinforce_ada_jax.isolation import child, messages, process_tree

# Importing sympy takes one second on an idle machine. The time limit of a request does not include the start.
START_LIMIT_S = 120.0
# Limit of the first start that a command makes, of one process, in addition to the time limit of a request. With
# START_LIMIT_S and its three starts, a file that never ends would hold the command up for six minutes.
TRIAL_LIMIT_S = 60.0
# Starts in a row that may end without a message. A worker that reports a traceback is not started again. Starts that
# are killed from outside have a limit of their own.
MAX_FAILED_STARTS = 3
MAX_KILLED_STARTS = 20
# A request is asked at most this number of times if it does not seem to be the reason for the loss of its worker
# (`Lost.is_innocent`). It may still be the reason: a kill for lack of memory.
MAX_TRIES = 4
_CLOSED = "the workers were closed."


_T = TypeVar("_T")


class CannotStart(RuntimeError):
    """Failure of a worker to start: `line` says why, and `str()` adds the worker's traceback where there is one."""

    def __init__(self, line: str, trace: str = ""):
        self.line = line
        super().__init__(f"{line}\n{trace}" if trace else line)


class Lost(Exception):
    """A worker was lost while it had a request: "timeout" or "crash"; the text says how.

    An innocent request may be asked again: the worker was killed from outside, or it wrote something that is no answer,
    perhaps by code that an earlier request left running.
    """

    def __init__(self, reason: str, how: str, *, is_innocent: bool = False):
        self.reason, self.is_innocent = reason, is_innocent
        super().__init__(how)


@dataclasses.dataclass(eq=False)
class Program:
    """Program of workers, and the names that messages give it."""

    module: str  # of this package
    arguments: Sequence[str]  # of the program, after its socket
    names: str  # of the workers, in the plural
    loads: str  # name of what the program loads, such as a file and a function
    refusal: str  # begins the message of a program that says why it cannot start
    # File that gets what workers print; its folder is created. None: stderr. May change between requests.
    output: pathlib.Path | None = None
    # Time limit of a start, after which there is no further start; None: `START_LIMIT_S`, with further starts.
    trial_limit_s: float | None = None
    # Starts without a message, and starts that were killed from outside, since a worker was last ready or answered.
    num_failed: int = 0
    num_killed: int = 0

    def start(self) -> child.Child:
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
        return child.start(self.module, self.arguments, None if self.output is None else str(self.output))

    def count_start(self, is_from_outside: bool, is_late: bool) -> None:
        """Counts a start that has ended without a message; raises `CannotStart` after too many in a row."""
        if is_late and self.trial_limit_s is not None:
            raise CannotStart(
                f"{self.refusal}: its import took more than {self.trial_limit_s:g} s ({TRIAL_LIMIT_S:g} s and "
                "reward.time_limit_s). Import the file in a new interpreter to see why, or raise reward.time_limit_s."
            )
        self.num_killed += is_from_outside
        self.num_failed += not is_from_outside
        if self.num_killed >= MAX_KILLED_STARTS:
            raise CannotStart(
                f"{MAX_KILLED_STARTS} {self.names} in a row were killed while they started. Check for lack of memory, "
                "or lower reward.workers."
            )
        if self.num_failed >= MAX_FAILED_STARTS:
            raise CannotStart(
                f"{MAX_FAILED_STARTS} {self.names} in a row did not start with {self.loads}: each died, or was not "
                f"ready within {START_LIMIT_S:g} s. Import it in a new interpreter to see why."
            )


class Worker:
    """One process, started when it is needed, and its thread. Only this thread calls `start`, `ask` and `ask_again`."""

    def __init__(self, program: Program):
        self._program = program
        self._is_stopped = self._is_interrupted = False
        self.child: child.Child | None = None  # it may still be starting
        self.ready: dict[str, Any] | None = None  # its first message
        self.is_busy = False  # a request is unanswered
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="worker")

    def start(self) -> child.Child:
        """Returns a process that is ready; it is another one if the last one has ended, or wrote without a request.

        Raises CannotStart where the program says why it does not start, or several processes in a row did not start.
        """
        if self.child is not None:
            poll = select.poll()  # select.select refuses file descriptors above 1,023
            poll.register(self.child.connection, select.POLLIN)
            if poll.poll(0):  # an idle process has ended, or has written without a request
                self._end(kill=True)
        while self.child is None:
            self._is_interrupted = False
            self.child = self._program.start()
            if self._is_stopped:
                self._end(kill=True)
                raise RuntimeError(_CLOSED)
            message, error, code, is_late = None, None, None, False
            try:
                message = self.child.read(self._program.trial_limit_s or START_LIMIT_S)
                is_late = message is None
                error = None if message is None else start_error(message)
            except (EOFError, ConnectionError):
                code = self._end()
            except messages.Malformed:
                message = None
            if message is not None and error is None:
                self.ready = message
                self._program.num_failed = self._program.num_killed = 0
                break
            self._end(kill=True)
            if error is not None:
                raise CannotStart(f"{self._program.refusal}: {error[0]}", error[1])
            self._program.count_start(_is_from_outside(code), is_late)
        return self.child

    def ask(
        self, process: child.Child, message: Mapping[str, Any], limit_s: float, read: Callable[[Mapping[str, Any]], _T]
    ) -> _T:
        """Returns `read` of the answer to a message; `read` raises `messages.Malformed` for anything else.

        Raises Lost where the process took too long, or ended.
        """
        deadline, number = time.monotonic() + limit_s, secrets.token_hex(8)
        self.is_busy = True
        try:
            with contextlib.suppress(OSError):  # it has ended, or reads nothing: found below
                messages.send(process.connection, messages.to_line({"request": number, **message}), limit_s)
            answer = process.read(deadline - time.monotonic())
            if answer is None:
                self._end(kill=True)
                raise Lost("timeout", f"took more than {limit_s:g} s (reward.time_limit_s)")
            if answer.get("request") != number:
                raise messages.Malformed
            result = read(answer)
        except (EOFError, ConnectionError):
            code = self._end(kill=self._is_interrupted)
            if self._is_stopped:
                raise RuntimeError(_CLOSED) from None
            if _is_from_outside(code):
                raise Lost("crash", "its process was killed at every try", is_innocent=True) from None
            how = "closed the socket of its process" if code is None else f"ended its process with exit code {code}"
            raise Lost("crash", how) from None
        except messages.Malformed:
            self._end(kill=True)
            raise Lost("crash", "its process wrote to its socket at every try", is_innocent=True) from None
        finally:
            self.is_busy = False
        self._program.num_failed = self._program.num_killed = 0
        return result

    def ask_again(
        self, request: Callable[[child.Child], tuple[Mapping[str, Any], float]], read: Callable[[Mapping[str, Any]], _T]
    ) -> _T:
        """Returns what `ask` returns; an innocent request (`Lost`) is asked again, a few times at most.

        `request` returns the message for a process, and the time limit of its answer.
        """
        num_losses = 0
        while True:
            process = self.start()
            try:
                return self.ask(process, *request(process), read)
            except Lost as lost:
                num_losses += 1
                if not lost.is_innocent or num_losses == MAX_TRIES:
                    raise

    def _end(self, *, kill: bool = False) -> int | None:
        """Ends the process; returns its exit code, None if it had to be killed."""
        ended, self.child, self.ready = self.child, None, None
        if ended is None or kill:
            return None if ended is None else ended.kill()
        return ended.end()

    def interrupt(self) -> None:
        """Kills a process with an unanswered request, which fails."""
        if self.is_busy:
            self._is_interrupted = True
            self._shut()

    def _shut(self) -> None:
        if (running := self.child) is not None:
            with contextlib.suppress(OSError):  # closed meanwhile
                running.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it

    def close(self) -> None:
        """Closes the socket for good: a request in flight fails, and the process ends, by itself if it can."""
        self._is_stopped = True
        self._shut()

    def join(self) -> None:
        """Waits for the thread and the process of a worker that was closed."""
        self.thread.shutdown(cancel_futures=True)
        self._end()


def _is_from_outside(code: int | None) -> bool:
    return code is not None and -code in process_tree.ENDED_FROM_OUTSIDE


def start_error(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns None for the message of a worker that is ready, else its error as (one line, traceback)."""
    if message.get("ready") is True:
        return None
    error, trace = message.get("error"), message.get("trace")
    if not isinstance(error, str) or not isinstance(trace, str):
        raise messages.Malformed
    return error, trace


def stop(workers: Sequence[Worker]) -> None:
    """Ends workers, all at the same time."""
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.join()
