"""Counter of XLA compilations: after warm-up a run should have none."""

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the XLA compilations of this process, and their seconds, from its creation on."""

    def __init__(self):
        self.total, self.seconds = 0, 0.0
        self._read = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.total += 1
            self.seconds += duration_secs

    def since_last(self) -> int:
        """Returns the number of compilations since the last call."""
        new, self._read = self.total - self._read, self.total
        return new
