"""Drawing of the next iteration in a thread, on the sampler's devices, while the learner's devices update.

The thread and the updates share nothing that one of them changes: weights, prompts and estimates are fixed before the
thread starts. Only this thread uses the rest (engine state, verifiers) until the collection ends. So a schedule, and
not time, decides which weights draw which iteration.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from reinforce_ada_jax.distributed.signals import Stop

LOOK_EVERY_S = 0.2

T = TypeVar("T")


class DrawAhead(contextlib.AbstractContextManager["DrawAhead[T]"], Generic[T]):
    """Runs at most one collection at a time, in a thread; on exit it ends where it next asks whether to stop.

    A request to end breaks the collection off in the thread, which tells the other processes. So `take` has the same
    outcome in all of them, whenever they learn of the request.
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drawing")
        self._ended = threading.Event()
        self._drawing: Future[T] | None = None
        self._phase = "collecting"

    def begin(self, draw: Callable[[Stop], T], stop: Stop) -> None:
        """Starts a collection, which ends early if `stop` asks for it; the one before must have been taken."""
        assert self._drawing is None
        self._drawing = self._pool.submit(draw, Stop(lambda: self._ended.is_set() or stop.asked(), self._show))

    def wait(self, stop: Stop) -> None:
        """Waits until the collection has ended, and shows its phase; `take` then returns it, or raises its error."""
        while self._drawing is not None and not self._drawing.done():
            stop.show(self._phase)
            wait([self._drawing], LOOK_EVERY_S)

    def take(self, stop: Stop) -> T | None:
        """Waits for the collection and returns it, once, or None; raises its error, or Interrupted."""
        self.wait(stop)
        drawing, self._drawing = self._drawing, None
        return None if drawing is None else drawing.result()

    def _show(self, phase: str) -> None:
        self._phase = phase

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)
