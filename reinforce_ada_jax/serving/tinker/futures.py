"""Requests for samples and their answers, in memory: a kill loses them, and the client then asks again."""

import collections
import dataclasses
import time

from reinforce_ada_jax.serving.sampler import SampleJob
from reinforce_ada_jax.serving.tinker.protocol import Result

# Seconds for which answers are stored: before they are fetched, and after it, in case the client did not get them.
UNFETCHED_S, FETCHED_S = 3600.0, 60.0


@dataclasses.dataclass(eq=False)
class SampleFuture:
    """Request for samples of a session, and its answer."""

    session: str
    job: SampleJob | None = None
    result: Result | None = None


class SampleFutures:
    """Futures by the id of their request; the caller's lock protects them. Only `num_waiting` looks at all of them."""

    def __init__(self):
        self.waiting: dict[str, SampleFuture] = {}
        self._answered: collections.OrderedDict[str, tuple[float, SampleFuture]] = collections.OrderedDict()
        self._fetched: collections.OrderedDict[str, tuple[float, SampleFuture]] = collections.OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in each for each in (self.waiting, self._answered, self._fetched))

    def num_waiting(self) -> collections.Counter[str]:  # of each session
        return collections.Counter(future.session for future in self.waiting.values())

    def add(self, request_id: str, session: str) -> SampleFuture:
        self.waiting[request_id] = future = SampleFuture(session)
        return future

    def finish(self, request_id: str, result: Result) -> None:
        """Stores an answer, unless the request has one, and removes expired answers."""
        now = time.monotonic()
        future = self.waiting.pop(request_id, None)
        if future is not None:
            future.job, future.result = None, result
            self._answered[request_id] = now, future
        for results, seconds in ((self._answered, UNFETCHED_S), (self._fetched, FETCHED_S)):
            while results and now - next(iter(results.values()))[0] > seconds:
                results.popitem(last=False)

    def fetch(self, request_id: str) -> Result | None:
        """Returns the answer for the client, None while there is none yet; KeyError if the request is unknown."""
        if request_id in self.waiting:
            return None
        if request_id in self._answered:
            self._fetched[request_id] = time.monotonic(), self._answered.pop(request_id)[1]
        return self._fetched[request_id][1].result
