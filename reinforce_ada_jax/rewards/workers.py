"""Verifier processes: many gradings at a time, each under a wall limit that nothing can outlast.

Why processes: a checker may loop for hours in C, abort, or take all memory, and a thread can be neither limited nor
killed (Math-Verify even raises off the main thread). Why not `multiprocessing`: its children re-import the parent's
`__main__`, which here imports jax and would claim the accelerator. So each worker is a plain
`python -m reinforce_ada_jax.rewards.worker` with one socket to the parent. What is graded, and how, is not known here.
"""

import collections
import contextlib
import dataclasses
import math
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Self

from reinforce_ada_jax.rewards import loading
from reinforce_ada_jax.rewards.loading import GradeFn
from reinforce_ada_jax.rewards.worker import guarded
from reinforce_ada_jax.types import Verdict

# Importing sympy takes one second on an idle machine. No limit of an item pays for it.
START_LIMIT_S = 120.0
# Starts in a row that may end without a word before the pool says that its workers can't start. A traceback from the
# worker says so at once.
MAX_FAILED_STARTS = 3
# Somebody who kills a worker from outside says nothing of the pair that it had: another one grades that anew. So often
# at most: it may have been the pair that brought the system's out-of-memory killer.
MAX_GRADINGS = 4
# The same of workers killed while they start, in a row.
MAX_KILLED_STARTS = 20
KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


class CannotStart(RuntimeError):
    """Workers don't come up; `line` says why, `str()` with the worker's traceback where there is one."""

    def __init__(self, addresses: list[str], line: str, trace: str = ""):
        self.line = f"A verifier worker cannot start with {', '.join(addresses)}: {line}" if trace else line
        super().__init__(f"{self.line}\n{trace}" if trace else line)


@dataclasses.dataclass(eq=False)
class _Worker:
    """A process and what it is doing: starting (not `ready`), idle (`item` is None), or grading pair `item`."""

    process: subprocess.Popen
    connection: Connection
    deadline: float  # time.monotonic() at which it is killed; infinite when idle
    ready: bool = False
    item: int | None = None


def _environment() -> dict[str, str]:
    """The parent's environment and module search path, single-threaded, with sympy on Python integers."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        # With gmpy2 some inputs hang in C or abort the process. mpmath would use it whatever sympy does.
        "SYMPY_GROUND_TYPES": "python",
        "MPMATH_NOGMPY": "1",
        # A grade function that imports jax must not claim the accelerator that the parent trains on.
        "JAX_PLATFORMS": "cpu",
        # numpy's BLAS reserves address space for every core of the host, and there may be hundreds.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


class VerifierPool:
    """Grades (response, answer) pairs in worker processes, each pair under a hard wall limit.

        with VerifierPool(math_answer.grade, workers=2, time_limit_s=6.0) as pool:
            verdicts = pool.grade_all([(response, answer), ...])

    A worker that is stuck at the limit, or dies, is killed and replaced; its pair gets reason "timeout" or "crash" and
    no other pair notices. A pair whose worker was killed from outside is graded anew, a few times at most. Where
    `grade_fn` raises, or returns anything without a finite reward, the reason is "error". Starting a worker counts
    against no pair's limit; a module with a function `warm_up()` has it called first. One thread at a time may call
    `grade_all`, and none while something submitted isn't finished. No process outlives the `with` block.

    Args:
      grade_fn: (response text, answer) -> Verdict, number or bool, at the top level of an importable module (not
        `__main__`), or the address "file.py:function" of one, which is run in the workers only.
      workers: processes. 0 grades in this process, in order and without any limit: only for checkers that can neither
        hang nor crash.
      time_limit_s: wall clock for one pair.
      others: further grade functions by name, of equal rights, for calls that ask for one (`grader`).
    """

    def __init__(
        self,
        grade_fn: GradeFn | str,
        workers: int,
        time_limit_s: float,
        others: Mapping[str, GradeFn] | None = None,
    ):
        if workers < 0:
            raise ValueError(f"workers is {workers}; it must be at least 1, or 0 to grade in this process.")
        if not 0.0 < time_limit_s < math.inf:
            raise ValueError(f"time_limit_s is {time_limit_s}; it must be a finite number of seconds above 0.")
        if isinstance(grade_fn, str) and not workers:
            raise ValueError(f"workers is 0 and grade_fn {grade_fn!r}: a file is run in workers only. Use at least 1.")
        self._graders = {"": grade_fn, **(others or {})}
        self._time_limit_s = time_limit_s
        self._addresses = [
            loading.file_address(each) if isinstance(each, str) else loading.address(each)
            for each in (self._graders.values() if workers else ())
        ]
        self.workers = workers
        self.busy_s = 0.0  # seconds spent in `grade_all`, all calls together
        self._workers: list[_Worker] = []
        self._num_failed_starts = self._num_killed_starts = 0
        self._entered = False

    def check(self) -> None:
        """Starts one worker and ends it again: whether the grade functions can be loaded, before anything expensive.

        Raises:
          ValueError: they can't; one line says why. A file's code is run for this, in the worker only.
        """
        if not self.workers:
            return
        self._workers.append(self._start())
        try:
            while not self._workers[0].ready:
                self._wait()
        except CannotStart as error:
            raise ValueError(error.line) from None
        finally:
            self._end_workers()
            self._num_failed_starts = self._num_killed_starts = 0

    def __enter__(self) -> Self:
        self._entered = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        try:
            for _ in range(self.workers):
                self._workers.append(self._start())
            while not all(worker.ready for worker in self._workers):
                self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self._thread.shutdown(cancel_futures=True)
        self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()

    def submit(self, pairs: Iterable[tuple[str, str]], grader: str = "") -> Future[list[Verdict]]:
        """`grade_all` in a thread of the pool's own, call after call; `pairs` is gone through in that thread."""
        self._check_entered()
        return self._thread.submit(self.grade_all, pairs, grader)

    def grade_all(self, pairs: Iterable[tuple[str, str]], grader: str = "") -> list[Verdict]:
        """Verdicts for (response text, answer) pairs, in the order of `pairs`, by `grade_fn` or one of `others`."""
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

    def _grade_all(self, pairs: list[tuple[str, str]], grader: str) -> list[Verdict]:
        if self.workers == 0:
            grade = guarded(self._graders[grader], caught=Exception)
            return [grade(response, answer) for response, answer in pairs]
        verdicts: list[Verdict | None] = [None] * len(pairs)
        number = list(self._graders).index(grader)
        waiting = collections.deque(range(len(pairs)))
        gradings, num_graded = [0] * len(pairs), 0
        self._wait(limit_s=0.0)  # replaces what died while idle, which no pair may pay for
        try:
            while num_graded < len(pairs):
                self._check_entered()  # the pool may be left while its thread is at work
                for worker in self._workers:
                    if waiting and worker.ready and worker.item is None:
                        item = waiting.popleft()
                        gradings[item] += 1
                        self._hand_over(worker, item, (number, *pairs[item]))
                for item, verdict in self._wait():
                    if verdict is None and gradings[item] < MAX_GRADINGS:
                        waiting.appendleft(item)
                        continue
                    verdicts[item] = verdict or Verdict(False, 0.0, "crash")
                    num_graded += 1
        finally:
            # After an interrupt some pairs are still in flight; the next call must not receive their verdicts.
            for slot, worker in enumerate(self._workers):
                if worker.item is not None:
                    self._replace(slot)
        return verdicts

    def _hand_over(self, worker: _Worker, item: int, question: tuple[int, str, str]) -> None:
        worker.item = item
        worker.deadline = time.monotonic() + self._time_limit_s
        with contextlib.suppress(ConnectionError):  # it died just now, which `_wait` sees
            worker.connection.send(question)

    def _wait(self, limit_s: float = math.inf) -> list[tuple[int, Verdict | None]]:
        """Sleeps until a worker says something, ends or is out of time.

        Returns the pairs that this settles; None for one whose worker was killed from outside.
        """
        now = time.monotonic()
        patience_s = min(limit_s, *(worker.deadline - now for worker in self._workers))
        connections = [worker.connection for worker in self._workers]
        readable = multiprocessing.connection.wait(connections, max(0.0, patience_s))
        now = time.monotonic()
        settled = []
        for slot, worker in enumerate(self._workers):
            ended = False
            if worker.connection in readable:
                try:
                    settled += self._hear(worker, worker.connection.recv())
                except (EOFError, ConnectionError):
                    ended = True
            if now >= worker.deadline:
                settled += self._lose(slot, "timeout")
            elif ended:
                settled += self._lose(slot, "crash")
        return settled

    def _hear(
        self, worker: _Worker, message: tuple[bool, float, str] | tuple[str, str] | None
    ) -> list[tuple[int, Verdict]]:
        """Takes a verdict, or the news that a worker is ready (None) or can't start (a line and a traceback)."""
        if not worker.ready and message is not None:
            raise CannotStart(self._addresses, *message)
        settled = [] if worker.item is None else [(worker.item, Verdict(*message))]
        worker.ready, worker.item, worker.deadline = True, None, math.inf
        self._num_failed_starts = self._num_killed_starts = 0
        return settled

    def _lose(self, slot: int, reason: str) -> list[tuple[int, Verdict | None]]:
        """Replaces a worker that ended or is out of time, and settles what it was grading."""
        worker = self._workers[slot]
        self._kill(worker)
        from_outside = reason == "crash" and worker.process.returncode in KILLED_FROM_OUTSIDE
        if not worker.ready:
            self._count_failed_start(from_outside)
        self._workers[slot] = self._start()
        if worker.item is None:
            return []
        return [(worker.item, None if from_outside else Verdict(False, 0.0, reason))]

    def _count_failed_start(self, from_outside: bool) -> None:
        if from_outside:
            self._num_killed_starts += 1
        else:
            self._num_failed_starts += 1
        if self._num_killed_starts == MAX_KILLED_STARTS:
            line = f"{MAX_KILLED_STARTS} verifier workers in a row were killed while they started: out of memory?"
        elif self._num_failed_starts == MAX_FAILED_STARTS:
            line = (
                f"{MAX_FAILED_STARTS} verifier workers in a row did not start with {', '.join(self._addresses)}: each "
                f"died, or was not ready within {START_LIMIT_S:g} s. Import it in a fresh interpreter to see why."
            )
        else:
            return
        raise CannotStart(self._addresses, line)

    def _start(self) -> _Worker:
        ours, theirs = multiprocessing.connection.Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", "reinforce_ada_jax.rewards.worker"]
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(self._time_limit_s), *self._addresses],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group of its own, so that what a checker starts is killed with it
            )
        return _Worker(process, ours, time.monotonic() + START_LIMIT_S)

    def _kill(self, worker: _Worker) -> None:
        worker.connection.close()
        if worker.process.returncode is not None:  # done before: its group's number may be another's by now
            return
        # `wait` collects the leader only afterwards, so its group's number can't be another's by now. Of a group that
        # is dead already Linux says nothing, and macOS that it is not permitted.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()

    def _replace(self, slot: int) -> None:
        self._kill(self._workers[slot])
        self._workers[slot] = self._start()
