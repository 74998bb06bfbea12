"""Verifier processes: many gradings at a time, each under a wall-clock limit that nothing can outlast.

A checker may loop for hours in C, abort, or take all memory, and a thread can be neither limited nor killed
(Math-Verify even raises off the main thread). `multiprocessing` would import the parent's `__main__` in its children,
which here imports jax and would claim the accelerator. So each worker is a plain
`python -m reinforce_ada_jax.rewards.worker` with one socket to the parent (`protocol`).
"""

import collections
import copy
import json
import math
import os
import pathlib
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from reinforce_ada_jax.isolation import messages, process_tree
from reinforce_ada_jax.rewards import dialects, grading, loading, protocol
from reinforce_ada_jax.rewards.loading import GradeFn, Made
from reinforce_ada_jax.rewards.worker_process import START_LIMIT_S, Pair, WorkerProcess
from reinforce_ada_jax.types import Verdict

# Starts in a row that may end without a message before the pool fails. A worker that can report a traceback fails it at
# once; workers that were killed from outside while they start have a limit of their own.
MAX_FAILED_STARTS = 3
MAX_KILLED_STARTS = 20
# A pair whose worker was killed from outside is graded again, at most this often in all: the pair itself may have
# brought the system's out-of-memory killer.
MAX_GRADINGS = 4
KILLED_FROM_OUTSIDE = tuple(-number for number in process_tree.ENDED_FROM_OUTSIDE)


class CannotStart(RuntimeError):
    """Failure of the workers to start: `line` says why, and `str()` adds the worker's traceback where there is one."""

    def __init__(self, references: Sequence[str], line: str, trace: str = ""):
        self.line = f"A verifier worker cannot start with {', '.join(references)}: {line}" if trace else line
        super().__init__(f"{self.line}\n{trace}" if trace else line)


class GradingFailed(ValueError):
    """Failure to grade the pair of `VerifierPool.check`; the text is one line."""


def _entry(grade_fn: GradeFn | Made | str, weights: Sequence[float]) -> dict[str, Any]:
    """Returns what a worker needs to know of one grader; only functions of files have names in the metrics."""
    if isinstance(grade_fn, Made):
        return {"references": [grade_fn.reference], "names": [], "weights": [], "settings": dict(grade_fn.settings)}
    if not isinstance(grade_fn, str):
        return {"references": [loading.function_reference(grade_fn)], "names": [], "weights": []}
    references = [loading.file_reference(each) for each in loading.split(grade_fn) or [grade_fn]]
    names = [each.rpartition(":")[2] for each in references]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{grade_fn!r} names two functions {max(names, key=names.count)!r}: give each a name of its own."
        )
    if weights and len(weights) != len(names):
        raise ValueError(f"there are {len(weights)} weights for {len(names)} functions ({grade_fn!r}): one for each.")
    return {"references": references, "names": names, "weights": list(weights) or [1.0] * len(names)}


def _readable(connections: Sequence[socket.socket], limit_s: float) -> set[socket.socket]:
    """Returns the sockets that have something to read, or have ended, at the latest after `limit_s`."""
    poll = select.poll()  # select.select refuses file descriptors above 1,023
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    limit_ms = None if limit_s == math.inf else math.ceil(1000 * limit_s)
    return {by_number[number] for number, _ in poll.poll(limit_ms)}


class VerifierPool:
    """Grades (response, answer) pairs in worker processes, each pair under a hard wall-clock limit.

        with VerifierPool(math_answer.grade, workers=2, time_limit_s=6.0) as pool:
            verdicts = pool.grade_all([(response, answer), ...])

    A worker that is stuck at the limit, or dies, is killed and replaced; its pair gets reason "timeout" or "crash", and
    no other pair is affected. A pair whose worker was killed from outside is graded again, a few times at most. Where
    `grade_fn` raises, or returns no finite reward, the reason is "error". The start of a worker counts against no
    pair's limit; `warm_up()` of the function's module is called first, if there is one. One thread at a time may call
    `grade_all`, and none while a submitted call is unfinished. No process outlives the `with` block.

    Args:
      grade_fn: a function of (response text, answer) or of another signature (`dialects`), at the top level of an
        importable module (not `__main__`); `Made`; or "file.py:function", which only workers run. "a.py:f,b.py:g" names
        several, whose weighted sum is the reward.
      workers: number of processes. 0 grades in this process, in order and without any limit: only for checkers that can
        neither hang nor crash.
      time_limit_s: wall-clock limit of one pair.
      others: further grade functions by name, for calls that ask for one (`grader`).
      weights: of the functions in files; empty: 1 for each.
      output: file that gets what workers print, created if missing. None: this process's stderr.

    Attributes:
      failure: the first grading that failed since the pool was made: one line and the traceback, or "".
    """

    def __init__(
        self,
        grade_fn: GradeFn | Made | str,
        workers: int,
        time_limit_s: float,
        others: Mapping[str, GradeFn | Made] | None = None,
        *,
        weights: Sequence[float] = (),
        output: pathlib.Path | None = None,
    ):
        if workers < 0:
            raise ValueError(f"workers is {workers}; it must be at least 1, or 0 to grade in this process.")
        if not 0.0 < time_limit_s < math.inf:
            raise ValueError(f"time_limit_s is {time_limit_s}; it must be a finite number of seconds above 0.")
        if isinstance(grade_fn, str | Made) and not workers:
            raise ValueError(f"workers is 0 and grade_fn {grade_fn!r}: it is run in workers only. Use at least 1.")
        self._graders: dict[str, Any] = {"": grade_fn, **(others or {})}
        self._time_limit_s = time_limit_s
        entries = [_entry(each, weights) for each in (self._graders.values() if workers else ())]
        self._references = [reference for entry in entries for reference in entry["references"]]
        self._entries = json.dumps(entries)
        self._takes_columns = {
            name: isinstance(each, str | Made) or dialects.takes_columns(each) for name, each in self._graders.items()
        }
        self.workers, self.output, self.failure = workers, output, ""
        self.busy_s = 0.0  # seconds spent in `grade_all`, all calls together
        self._workers: list[WorkerProcess] = []
        self._num_failed_starts = self._num_killed_starts = 0
        self._entered = False

    def check(self, pair: Pair | None = None) -> Verdict | None:
        """Starts one worker and ends it, to find functions that can't be used before any expensive work.

        Args:
          pair: one to grade, such as a reference answer; its verdict is returned.

        Raises:
          ValueError: the functions can't be loaded; one line says why.
          GradingFailed: the grading of the pair failed.
        """
        single = copy.copy(self)
        single.workers, single._workers, single.failure = min(self.workers, 1), [], ""
        single.output = pathlib.Path(os.devnull)  # the message has the error already
        try:
            with single:
                verdict = None if pair is None else single.grade_all([pair])[0]
        except CannotStart as error:
            raise ValueError(error.line) from None
        if single.failure:
            raise GradingFailed(single.failure.partition("\n")[0])
        return verdict

    def __enter__(self) -> "VerifierPool":
        self._entered = True
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        try:
            for _ in range(self.workers):
                self._workers.append(self._new_worker())
            while not all(worker.ready for worker in self._workers):
                self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self._thread.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def submit(
        self,
        pairs: Iterable[Pair],
        grader: str = "",
        then: Callable[[list[Verdict]], list[Verdict]] = lambda verdicts: verdicts,
    ) -> Future[list[Verdict]]:
        """Calls `grade_all` in a thread of the pool, one call after another; `then` maps its verdicts to the result.

        That thread also iterates over `pairs`.
        """
        self._check_entered()
        return self._thread.submit(lambda: then(self.grade_all(pairs, grader)))

    def grade_all(self, pairs: Iterable[Pair], grader: str = "") -> list[Verdict]:
        """Returns verdicts for (response text, answer) pairs, in order, by `grade_fn` or one of `others`.

        A pair may have the columns of its problem as a third entry, for functions that ask for them (`dialects`).
        """
        self._check_entered()
        if grader not in self._graders:
            others = ", ".join(filter(None, self._graders)) or "none"
            raise ValueError(f"there is no grader {grader!r}; the others of this pool are: {others}.")
        begin = time.monotonic()
        try:
            return self._grade_all(list(pairs), grader)
        finally:
            self.busy_s += time.monotonic() - begin

    def _check_entered(self) -> None:
        if not self._entered:
            raise ValueError("grading outside of the pool's `with` block: its workers live only inside. Enter it.")

    def _grade_all(self, pairs: list[Pair], grader: str) -> list[Verdict]:
        if self.workers == 0:
            return self._grade_here(pairs, grader)
        index = list(self._graders).index(grader)
        if not self._takes_columns[grader]:
            pairs = [(response, answer) for response, answer, *_ in pairs]
        verdicts: dict[int, Verdict] = {}
        waiting, gradings = collections.deque(range(len(pairs))), [0] * len(pairs)
        self._wait(limit_s=0.0)  # replaces workers that died while idle, which no pair may pay for
        try:
            while len(verdicts) < len(pairs):
                self._check_entered()  # another thread may leave the block meanwhile
                for worker in self._workers:
                    if waiting and worker.ready and worker.item is None:
                        item = waiting.popleft()
                        gradings[item] += 1
                        worker.send(item, index, pairs[item], self._time_limit_s)
                for item, verdict in self._wait():
                    if verdict is None and gradings[item] < MAX_GRADINGS:
                        waiting.appendleft(item)
                    else:
                        verdicts[item] = verdict or self._failed("crash", "its process was killed at every try")
        finally:
            # After an interrupt some pairs are still in flight; the next call must not receive their verdicts.
            for slot, worker in enumerate(self._workers):
                if worker.item is not None:
                    self._replace(slot)
        return [verdicts[item] for item in range(len(pairs))]

    def _grade_here(self, pairs: list[Pair], grader: str) -> list[Verdict]:
        graded_by = dialects.adapt(self._graders[grader])
        grade, verdicts = grading.guarded(graded_by, caught=Exception, log=self.output is None), []
        for response, answer, *columns in pairs:
            verdict, failure = grade(response, answer, columns[0] if columns else {})
            self.failure = self.failure or failure
            verdicts.append(verdict)
        return verdicts

    def _failed(self, reason: str, why: str) -> Verdict:
        """Returns the verdict of a pair whose worker was lost."""
        self.failure = self.failure or f"{', '.join(self._references)}: {why}"
        return Verdict(False, 0.0, reason)

    def _new_worker(self) -> WorkerProcess:
        return WorkerProcess.start(self._entries, self._time_limit_s, None if self.output is None else str(self.output))

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = self._new_worker()

    def _wait(self, limit_s: float = math.inf) -> list[tuple[int, Verdict | None]]:
        """Sleeps until a worker sends a message, ends or is out of time.

        Returns the pairs that this settles, with None for one whose worker was killed from outside.
        """
        now = time.monotonic()
        patience_s = min(limit_s, *(worker.deadline - now for worker in self._workers))
        readable = _readable([worker.connection for worker in self._workers], max(0.0, patience_s))
        now = time.monotonic()
        settled = []
        for slot, worker in enumerate(self._workers):
            item = worker.item
            try:
                message = worker.inbox.read() if worker.connection in readable else None
                if message is None and now < worker.deadline:
                    continue
                verdict = self._lose(slot, "timeout") if message is None else self._receive(worker, message)
            except (EOFError, ConnectionError):
                verdict = self._end(slot)
            except messages.Malformed:
                verdict = self._lose(slot, "crash", "wrote to the socket of its process")
            if item is not None:
                settled.append((item, verdict))
        return settled

    def _receive(self, worker: WorkerProcess, message: dict[str, Any]) -> Verdict | None:
        """Processes a message of `rewards.worker`: a verdict, ready, or an error of its start."""
        verdict = None
        if worker.item is not None:
            verdict, failure = protocol.verdict_from_json(message, worker.request)
            self.failure = self.failure or failure
        elif worker.ready:  # it was asked nothing
            raise messages.Malformed
        elif error := protocol.start_error(message):
            raise CannotStart(self._references, *error)
        worker.ready, worker.item, worker.deadline = True, None, math.inf
        self._num_failed_starts = self._num_killed_starts = 0
        return verdict

    def _end(self, slot: int) -> Verdict | None:
        """Replaces a worker that closed its socket; returns the verdict of its pair, None to grade it again."""
        late = time.monotonic() >= self._workers[slot].deadline
        code = self._workers[slot].end()
        if late:
            return self._lose(slot, "timeout")
        how = "closed the socket of its process" if code is None else f"ended its process with exit code {code}"
        return self._lose(slot, "crash", how, code in KILLED_FROM_OUTSIDE)

    def _lose(self, slot: int, reason: str, why: str = "", from_outside: bool = False) -> Verdict | None:
        """Replaces a worker; returns the verdict of its pair, None to grade it again."""
        worker = self._workers[slot]
        worker.kill()
        if not worker.ready:
            self._count_failed_start(from_outside)
        self._replace(slot)
        if worker.item is None or from_outside:
            return None
        return self._failed(reason, why or f"took more than {self._time_limit_s:g} s (reward.time_limit_s)")

    def _count_failed_start(self, from_outside: bool) -> None:
        self._num_killed_starts += from_outside
        self._num_failed_starts += not from_outside
        if self._num_killed_starts == MAX_KILLED_STARTS:
            raise CannotStart(
                self._references,
                f"{MAX_KILLED_STARTS} verifier workers in a row were killed while they started. Check for lack of "
                "memory, or lower reward.workers.",
            )
        if self._num_failed_starts == MAX_FAILED_STARTS:
            raise CannotStart(
                self._references,
                f"{MAX_FAILED_STARTS} verifier workers in a row did not start with {', '.join(self._references)}: each "
                f"died, or was not ready within {START_LIMIT_S:g} s. Import it in a new interpreter to see why.",
            )
