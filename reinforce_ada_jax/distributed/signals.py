"""Being asked to end: Ctrl-C at the terminal, or SIGTERM or a notice that the machine is taken away.

The first one becomes a flag that is looked at where the state is whole; a second one ends the process at once.
"""

import signal

from reinforce_ada_jax.distributed import preemption, processes


class Interrupted(Exception):
    """The run was asked to end, at a point where the state is whole."""


class Interrupt:
    """The flag, of this process and of the other processes of the run."""

    def __init__(self):
        self._asked = self._preempted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if preemption.on_google_cloud():
            preemption.watch(self.on_notice)

    def _on_signal(self, number: int, frame: object) -> None:
        del frame
        self._asked, self._preempted = True, number == signal.SIGTERM
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        processes.ask_to_stop()

    def on_notice(self) -> None:
        """The machine will be taken away."""
        self._asked = self._preempted = True
        processes.ask_to_stop()

    def check(self) -> None:
        """Raises `Interrupted` once asked to, here or by another process: others may be further on or less far.

        Where a step of all processes follows, the one that raises must still tell the others (`sharing`, `agree`).
        """
        if self._asked or processes.asked_to_stop():
            raise Interrupted

    def preempted(self) -> bool:
        """Whether a machine is taken away, of any process (which all must ask): the run is to be started again."""
        return processes.any_of(self._preempted)

    def agree(self) -> None:
        """Raises `Interrupted` in all processes where any was asked to end; every process must come here."""
        if processes.any_of(self._asked or processes.asked_to_stop()):
            raise Interrupted
