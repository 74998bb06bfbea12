"""Requests to end a run: Ctrl-C at the terminal, SIGTERM, or a notice that the machine is taken away.

The first request sets a flag, which is read where the state can be saved; a second signal ends the process at once.
Python runs a signal handler only after its main thread returns from a device program or from the compiler. So a thread
also reads the signals: without this delay it tells the other processes, and ends this process at a second signal.
"""

import dataclasses
import functools
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed import preemption, processes
from reinforce_ada_jax.distributed.watchdog import RESTART

# Seconds that the main thread has to end by itself after a second signal.
SECOND_S = 1.0


class Interrupted(Exception):
    """The run was asked to end, at a point where its state can be saved."""


class Interrupt:
    """Flag that this or another process of the run was asked to end; as a context manager it restores the handlers.

    Outside the main thread (in some notebooks) signals can't be caught, and only the other requests count.
    """

    def __init__(self):
        self._preempted, self._ended = False, threading.Event()
        self._requested_at: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup: socket.socket | None = None
        if threading.current_thread() is threading.main_thread():
            self._listen()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        if preemption.on_google_cloud():
            preemption.watch(self.on_notice, self._ended)

    def __enter__(self) -> "Interrupt":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # ends the thread that asks for notices
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            self._wakeup.close()  # ends the thread

    def _listen(self) -> None:
        """Starts the thread that reads signals, unless an event loop (of a notebook) reads them already."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            ours.close()
            theirs.close()
            return
        self._wakeup = theirs
        threading.Thread(target=self._read_signals, args=(ours,), name="signals", daemon=True).start()

    def _read_signals(self, signals: socket.socket) -> None:
        """Runs in the thread, until the other end is closed."""
        ends = {int(signal.SIGINT), int(signal.SIGTERM)}
        with signals:
            numbers = (number[0] for number in iter(lambda: signals.recv(1), b"") if number[0] in ends)
            for first in numbers:
                self._request(preempted=first == signal.SIGTERM)
                processes.ask_to_stop(preempted=first == signal.SIGTERM)
                break
            for second in numbers:
                time.sleep(SECOND_S)
                if not self._ended.is_set():
                    os._exit(128 + second)

    def _on_signal(self, number: int, _: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._request(preempted=number == signal.SIGTERM)
        if self._wakeup is None:
            processes.ask_to_stop(preempted=number == signal.SIGTERM)

    def _request(self, *, preempted: bool) -> None:
        self._preempted |= preempted
        if self._requested_at is None:
            self._requested_at = time.monotonic()

    def on_notice(self) -> None:
        """Requests the end because the machine will be taken away."""
        self._request(preempted=True)
        processes.ask_to_stop(preempted=True)

    def asked(self) -> bool:
        """Returns True after a request, here or in another process; other processes may not have seen it yet."""
        return self._requested_at is not None or processes.asked_to_stop()

    def preempted(self) -> bool:
        """Returns True if a machine of any process is taken away; every process must call it."""
        return processes.any_of(self._preempted or processes.asked_to_stop(preempted=True))

    def time_left(self, notice_s: float) -> float:
        """Returns the seconds until this machine is taken away; infinite if it stays, or if `notice_s` is 0."""
        if not (self._preempted and notice_s > 0) or self._requested_at is None:
            return math.inf
        return notice_s - (time.monotonic() - self._requested_at)

    def stop(self, show: Callable[[str], None] = lambda phase: None, notice_s: float = 0.0) -> "Stop":
        """Returns the `Stop` for these requests; `show` and `notice_s` are as for `Stop` and `time_left`."""
        return Stop(self.asked, show, functools.partial(self.time_left, notice_s))


@dataclasses.dataclass(frozen=True, eq=False)
class Stop:
    """The signal to stop: functions that a run calls wherever it may have to end."""

    asked: Callable[[], bool] = lambda: False  # returns True if this process knows of a request to end
    show: Callable[[str], None] = lambda phase: None  # shows the phase of the run
    time_left: Callable[[], float] = lambda: math.inf  # returns the seconds until the machine is taken away

    def check(self, phase: str) -> None:
        """Raises `Interrupted` if this process was asked to end; otherwise shows the phase.

        If all processes run a program next, a process that raises must tell the others (`sharded_collection`, `agree`).
        """
        if self.asked():
            raise Interrupted
        self.show(phase)

    def agree(self) -> None:
        """Raises `Interrupted` in all processes if any was asked to end; every process must call it."""
        if processes.any_of(self.asked()):
            raise Interrupted

    def has_time(self, seconds: float) -> bool:
        """Returns True if no machine is taken away within this time; every process must call it."""
        return not processes.any_of(seconds > self.time_left())


def end(interrupt: Interrupt, saved: str) -> NoReturn:
    """Ends this process after all processes have raised `Interrupted`; `saved` says where the results are."""
    told = interrupt.preempted()
    processes.leave()
    event, code = ("told to end", RESTART) if told else ("interrupted", cli.INTERRUPTED)
    cli.fail(f"{event}. {saved}; the same command again goes on from there.", code)
