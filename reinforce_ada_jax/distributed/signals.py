"""Requests to end a run: Ctrl-C at the terminal, SIGTERM, or a notice that the machine is taken away.

The first one becomes a flag, which is read where the state can be saved; a second signal ends the process at once.
"""

import signal
import threading
from typing import Any, NoReturn

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed import preemption, processes
from reinforce_ada_jax.distributed.watchdog import RESTART


class Interrupted(Exception):
    """The run was asked to end, at a point where its state can be saved."""


class Interrupt:
    """Flag of this process and of the other processes of the run; as a context manager it restores the handlers.

    Outside the main thread (in some notebooks) signals can't be caught, and only the other requests count.
    """

    def __init__(self):
        self._requested = self._preempted = False
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        if preemption.on_google_cloud():
            preemption.watch(self.on_notice)

    def __enter__(self) -> "Interrupt":
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: object) -> None:
        del frame
        self._requested, self._preempted = True, number == signal.SIGTERM
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        processes.ask_to_stop()

    def on_notice(self) -> None:
        """Requests the end because the machine will be taken away."""
        self._requested = self._preempted = True
        processes.ask_to_stop()

    def check(self) -> None:
        """Raises `Interrupted` after a request, here or in another process; others may not have seen it yet.

        If a program of all processes follows, the one that raises must tell the others (`sharded_collection`, `agree`).
        """
        if self._requested or processes.asked_to_stop():
            raise Interrupted

    def preempted(self) -> bool:
        """Returns True if a machine of any process is taken away; every process must call it."""
        return processes.any_of(self._preempted)

    def agree(self) -> None:
        """Raises `Interrupted` in all processes if any was asked to end; every process must call it."""
        if processes.any_of(self._requested or processes.asked_to_stop()):
            raise Interrupted


def end(interrupt: Interrupt, kept: str) -> NoReturn:
    """Ends all processes after `Interrupted`, which each has got; `kept` says what of the results is kept."""
    told = interrupt.preempted()
    processes.leave()
    event, code = ("told to end", RESTART) if told else ("interrupted", cli.INTERRUPTED)
    cli.fail(f"{event}. {kept}; the same command again goes on from there.", code)
