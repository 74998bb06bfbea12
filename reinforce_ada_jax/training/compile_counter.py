"""Counter of XLA compilations: after warm-up a run should have none."""

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the XLA compilations of this process from its creation on."""

    def __init__(self):
        self.total = 0
        self._read = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_) -> None:
        del duration
        self.total += event == COMPILE_EVENT

    def since_last(self) -> int:
        """Returns the number of compilations since the last call."""
        new, self._read = self.total - self._read, self.total
        return new
