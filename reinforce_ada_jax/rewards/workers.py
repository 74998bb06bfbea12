"""Verifier processes: many gradings at a time, each under a wall-clock limit that nothing can outlast.

The processes of `isolation.workers` run `rewards.worker`, as Math-Verify needs a main thread.
"""

import collections
import copy
import dataclasses
import json
import math
import os
import pathlib
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from reinforce_ada_jax.isolation import workers as workers_lib
from reinforce_ada_jax.isolation.workers import CannotStart, Lost, Program, Worker
from reinforce_ada_jax.rewards import dialects, grading, loading, protocol
from reinforce_ada_jax.rewards.loading import GradeFn, Made
from reinforce_ada_jax.types import Verdict

# (response text, answer), or with the problem's columns, which functions of other signatures ask for.
Pair = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
# What a worker made of a pair: the verdict and the traceback of a failure, or an error.
_Outcome = tuple[Verdict, str] | BaseException


class GradingFailed(ValueError):
    """Failure to grade the pair of `VerifierPool.check`; the text is one line."""


def _entry(grade_fn: GradeFn | Made | str) -> dict[str, Any]:
    """Returns what a worker needs to know of one grader; only functions of files have names in the metrics."""
    if isinstance(grade_fn, Made):
        return {"references": [grade_fn.reference], "names": [], "weights": [], "settings": dict(grade_fn.settings)}
    if not isinstance(grade_fn, str):
        return {"references": [loading.function_reference(grade_fn)], "names": [], "weights": []}
    functions = loading.split(grade_fn) or [(grade_fn, 1.0)]
    references = [loading.file_reference(reference) for reference, _ in functions]
    names = [each.rpartition(":")[2] for each in references]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{grade_fn!r} names two functions {max(names, key=names.count)!r}: give each a name of its own."
        )
    return {"references": references, "names": names, "weights": [weight for _, weight in functions]}


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
        importable module (not `__main__`); `Made`; or "file.py:function", which only workers run. "a.py:f,b.py:g=0.5"
        names several, whose weighted sum is the reward.
      workers: number of processes. 0 grades in this process, in order and without any limit: only for checkers that can
        neither hang nor crash.
      time_limit_s: wall-clock limit of one pair.
      others: further grade functions by name, for calls that ask for one (`grader`).
      output: file that gets what workers print, created if missing. None: this process's stderr.

    Attributes:
      failure: the first grading that failed since this was last set to "": one line and the traceback, or "".
    """

    def __init__(
        self,
        grade_fn: GradeFn | Made | str,
        workers: int,
        time_limit_s: float,
        others: Mapping[str, GradeFn | Made] | None = None,
        *,
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
        entries = [_entry(each) for each in (self._graders.values() if workers else ())]
        references = ", ".join(reference for entry in entries for reference in entry["references"])
        self._program = Program(
            module="reinforce_ada_jax.rewards.worker",
            arguments=[str(time_limit_s), json.dumps(entries)],
            names="verifier workers",
            loads=references,
            refusal=f"A verifier worker cannot start with {references}",
            output=output,
        )
        self._takes_columns = {
            name: isinstance(each, str | Made) or dialects.takes_columns(each) for name, each in self._graders.items()
        }
        self.workers, self.failure = workers, ""
        self.busy_s = 0.0  # seconds spent in `grade_all`, all calls together
        self._workers: list[Worker] = []
        self._entered = False

    def check(self, pair: Pair | None = None) -> Verdict | None:
        """Starts one worker and ends it, so that a function that can't be used is found before any expensive work.

        `pair` is one to grade, such as a reference answer; its verdict is returned. Raises ValueError where the
        functions can't be loaded (one line says why), and GradingFailed where the grading of the pair failed.
        """
        single = copy.copy(self)
        single.workers, single._workers, single.failure = min(self.workers, 1), [], ""
        # Output of the worker is dropped: the message of the exception has the error already.
        single._program = dataclasses.replace(
            self._program, output=pathlib.Path(os.devnull), trial_limit_s=workers_lib.TRIAL_LIMIT_S + self._time_limit_s
        )
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        self._workers = [Worker(self._program) for _ in range(self.workers)]
        try:
            for started in [worker.thread.submit(worker.start) for worker in self._workers]:
                started.result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        workers_lib.stop(self._workers)  # a grading in the thread fails
        self._thread.shutdown(cancel_futures=True)
        self._workers = []

    def submit(
        self,
        pairs: Iterable[Pair],
        grader: str = "",
        then: Callable[[list[Verdict]], list[Verdict]] = lambda verdicts: verdicts,
    ) -> Future[list[Verdict]]:
        """Iterates over `pairs` and calls `grade_all` in a thread, one call after another; `then` maps its verdicts."""
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
            if self.workers == 0:
                return self._grade_here(list(pairs), grader)
            return self._grade_all([self._request(grader, pair) for pair in pairs])
        finally:
            self.busy_s += time.monotonic() - begin

    def _check_entered(self) -> None:
        if not self._entered:
            raise ValueError("grading outside of the pool's `with` block: its workers live only inside. Enter it.")

    def _request(self, grader: str, pair: Pair) -> dict[str, Any]:
        columns = dict(pair[2]) if len(pair) > 2 and self._takes_columns[grader] else {}
        index = list(self._graders).index(grader)
        return {"grader": index, "response": pair[0], "answer": pair[1], "columns": columns}

    def _grade_all(self, requests: list[dict[str, Any]]) -> list[Verdict]:
        waiting = collections.deque(enumerate(requests))
        outcomes: queue.SimpleQueue[tuple[int, _Outcome]] = queue.SimpleQueue()
        verdicts: dict[int, Verdict] = {}
        try:
            for worker in self._workers:
                worker.thread.submit(self._grade_waiting, worker, waiting, outcomes)
            while len(verdicts) < len(requests):
                item, outcome = outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                verdicts[item], failure = outcome
                self.failure = self.failure or failure
        except BaseException:
            waiting.clear()
            for worker in self._workers:
                worker.interrupt()  # its pair is in flight, and the next call must not wait for it
            raise
        return [verdicts[item] for item in range(len(requests))]

    def _grade_waiting(
        self,
        worker: Worker,
        waiting: collections.deque[tuple[int, dict[str, Any]]],
        outcomes: "queue.SimpleQueue[tuple[int, _Outcome]]",
    ) -> None:
        """Grades requests while some wait; in the thread of a worker."""
        try:
            while worker.start():  # the process is ready before an item is taken: meanwhile another worker may take it
                try:
                    item, request = waiting.popleft()
                except IndexError:
                    return
                outcomes.put((item, self._graded(worker, request)))
        except BaseException as error:
            outcomes.put((0, error))

    def _graded(self, worker: Worker, request: Mapping[str, Any]) -> tuple[Verdict, str]:
        try:
            return worker.ask_again(lambda _: (request, self._time_limit_s), protocol.verdict_from_json)
        except Lost as lost:
            return Verdict(False, 0.0, lost.reason), f"{self._program.loads}: {lost}"

    def _grade_here(self, pairs: list[Pair], grader: str) -> list[Verdict]:
        graded_by = dialects.adapt(self._graders[grader])
        grade, verdicts = grading.guarded(graded_by, caught=Exception, log=self._program.output is None), []
        for response, answer, *columns in pairs:
            verdict, failure = grade(response, answer, columns[0] if columns else {})
            self.failure = self.failure or failure
            verdicts.append(verdict)
        return verdicts
