"""Drawing of the next iteration in a thread, on the sampler's devices, while the learner's devices update.

The thread shares nothing with the updates that either of them changes: weights, prompts and estimates are fixed before
it starts, and everything else of a collection (engine state, verifiers) is used by nobody else until it is finished. So
a schedule decides which weights draw which iteration, and time decides nothing.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from reinforce_ada_jax.distributed.signals import Stop

LOOK_EVERY_S = 0.2

Drawn = TypeVar("Drawn")


class DrawAhead(contextlib.AbstractContextManager["DrawAhead[Drawn]"], Generic[Drawn]):
    """At most one collection in flight. On exit it is broken off where it next asks whether to stop."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drawing")
        self._ended = threading.Event()
        self._drawing: Future[Drawn] | None = None
        self._phase = "collecting"

    def begin(self, draw: Callable[[Stop], Drawn]) -> None:
        """Starts a collection, after the one before was taken; its phase is shown where it is waited for."""
        assert self._drawing is None
        self._drawing = self._pool.submit(draw, Stop(self._ended.is_set, self._show))

    def wait(self, stop: Stop) -> None:
        """Waits until nothing is in flight; `take` then says how it ended."""
        while self._drawing is not None and not self._drawing.done():
            stop.check(self._phase)
            wait([self._drawing], LOOK_EVERY_S)

    def take(self, stop: Stop) -> Drawn | None:
        """Waits for the collection in flight and returns it, once; None if none was started.

        What ended a collection is raised here, and Interrupted if the run was asked to end.
        """
        self.wait(stop)
        drawing, self._drawing = self._drawing, None
        return None if drawing is None else drawing.result()

    def _show(self, phase: str) -> None:
        self._phase = phase

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)
