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

from reinforce_ada_jax.distributed.signals import Interrupted

LOOK_EVERY_S = 0.2

Drawn = TypeVar("Drawn")
# Is called with text for the progress line; raises Interrupted if the run was asked to end.
Report = Callable[[str], None]


class DrawAhead(contextlib.AbstractContextManager["DrawAhead[Drawn]"], Generic[Drawn]):
    """At most one collection in flight. On exit it is broken off at its next report, and its thread ends."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drawing")
        self._ended = threading.Event()
        self._drawing: Future[Drawn] | None = None
        self._phase = "collecting"

    def begin(self, draw: Callable[[Report], Drawn]) -> None:
        """Starts a collection, after the one before was taken; its progress is shown where it is waited for."""
        assert self._drawing is None
        self._drawing = self._pool.submit(draw, self._report)

    def wait(self, report: Report) -> None:
        """Waits until nothing is in flight; `take` then says how it ended."""
        while self._drawing is not None and not self._drawing.done():
            report(self._phase)
            wait([self._drawing], LOOK_EVERY_S)

    def take(self, report: Report) -> Drawn | None:
        """Waits for the collection in flight and returns it, once; None if none was started.

        Raises:
          Exception: what ended the collection, or what `report` raised.
        """
        self.wait(report)
        drawing, self._drawing = self._drawing, None
        return None if drawing is None else drawing.result()

    def _report(self, text: str) -> None:
        if self._ended.is_set():
            raise Interrupted
        self._phase = text

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)
