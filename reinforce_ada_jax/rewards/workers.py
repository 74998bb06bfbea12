"""Verifier processes: many gradings at a time, each under a wall-clock limit that nothing can outlast.

A checker may loop for hours in C, abort, or take all memory, and a thread can be neither limited nor killed
(Math-Verify even raises off the main thread). `multiprocessing` would import the parent's `__main__` in its children,
which here imports jax and would claim the accelerator. So each worker is a plain
`python -m reinforce_ada_jax.rewards.worker` with one socket to the parent.
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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from reinforce_ada_jax.rewards import loading
from reinforce_ada_jax.rewards.loading import GradeFn
from reinforce_ada_jax.rewards.worker import guarded
from reinforce_ada_jax.types import Verdict

# Importing sympy takes one second on an idle machine. The time limit of a pair does not include it.
START_LIMIT_S = 120.0
# Starts in a row that may end without a message before the pool fails. A worker that can report a traceback fails it at
# once; workers that were killed from outside while they start have a limit of their own.
MAX_FAILED_STARTS = 3
MAX_KILLED_STARTS = 20
# A pair whose worker was killed from outside is graded again, at most this often in all: the pair itself may have
# brought the system's out-of-memory killer.
MAX_GRADINGS = 4
KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


class CannotStart(RuntimeError):
    """Failure of the workers to start: `line` says why, and `str()` adds the worker's traceback where there is one."""

    def __init__(self, references: Sequence[str], line: str, trace: str = ""):
        self.line = f"A verifier worker cannot start with {', '.join(references)}: {line}" if trace else line
        super().__init__(f"{self.line}\n{trace}" if trace else line)


def _environment() -> dict[str, str]:
    """Returns the parent's environment and module search path, single-threaded, with sympy on Python integers."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        # With gmpy2 some inputs hang in C or abort the process; mpmath has a switch of its own.
        "SYMPY_GROUND_TYPES": "python",
        "MPMATH_NOGMPY": "1",
        # A grade function that imports jax must not claim the accelerator that the parent trains on.
        "JAX_PLATFORMS": "cpu",
        # numpy's BLAS reserves address space for every core of the host, and there may be hundreds.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


@dataclasses.dataclass(eq=False)
class _Worker:
    """Process and its work: starting (not `ready`), idle (`item` is None), or grading pair `item`."""

    process: subprocess.Popen
    connection: Connection
    deadline: float  # time.monotonic() at which it is killed; infinite when idle
    ready: bool = False
    item: int | None = None

    @classmethod
    def start(cls, references: Sequence[str], time_limit_s: float) -> "_Worker":
        """Starts a process with the grade functions of these references."""
        ours, theirs = multiprocessing.connection.Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", "reinforce_ada_jax.rewards.worker"]
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(time_limit_s), *references],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a process group, so that processes that a checker starts are killed with it
            )
        return cls(process, ours, time.monotonic() + START_LIMIT_S)

    def kill(self) -> None:
        """Kills the process and all that it started."""
        self.connection.close()
        if self.process.returncode is not None:  # killed before: the number of its group may be in use again
            return
        # Only `wait` below collects the leader, so its group's number is still its own here. For a group that has ended
        # Linux raises the first error, macOS the second.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


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
      grade_fn: (response text, answer) -> Verdict, number or bool, at the top level of an importable module (not
        `__main__`), or the reference "file.py:function" of one, which only workers run.
      workers: number of processes. 0 grades in this process, in order and without any limit: only for checkers that can
        neither hang nor crash.
      time_limit_s: wall-clock limit of one pair.
      others: further grade functions by name, for calls that ask for one (`grader`).
    """

    def __init__(
        self, grade_fn: GradeFn | str, workers: int, time_limit_s: float, others: Mapping[str, GradeFn] | None = None
    ):
        if workers < 0:
            raise ValueError(f"workers is {workers}; it must be at least 1, or 0 to grade in this process.")
        if not 0.0 < time_limit_s < math.inf:
            raise ValueError(f"time_limit_s is {time_limit_s}; it must be a finite number of seconds above 0.")
        if isinstance(grade_fn, str) and not workers:
            raise ValueError(f"workers is 0 and grade_fn {grade_fn!r}: a file is run in workers only. Use at least 1.")
        self._graders: dict[str, Any] = {"": grade_fn, **(others or {})}
        self._time_limit_s = time_limit_s
        self._references = [
            loading.file_reference(each) if isinstance(each, str) else loading.function_reference(each)
            for each in (self._graders.values() if workers else ())
        ]
        self.workers = workers
        self.busy_s = 0.0  # seconds spent in `grade_all`, all calls together
        self._workers: list[_Worker] = []
        self._num_failed_starts = self._num_killed_starts = 0
        self._entered = False

    def check(self) -> None:
        """Starts one worker and ends it, to find grade functions that can't be loaded before any expensive work.

        Raises:
          ValueError: they can't be loaded; one line says why.
        """
        if not self.workers:
            return
        try:
            self._start(1)
        except CannotStart as error:
            raise ValueError(error.line) from None
        finally:
            self._end_workers()
            self._num_failed_starts = self._num_killed_starts = 0

    def __enter__(self) -> "VerifierPool":
        self._entered = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        try:
            self._start(self.workers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self._thread.shutdown(cancel_futures=True)
        self._end_workers()

    def submit(self, pairs: Iterable[tuple[str, str]], grader: str = "") -> Future[list[Verdict]]:
        """Calls `grade_all` in a thread of the pool, one call after another; that thread also iterates over `pairs`."""
        self._check_entered()
        return self._thread.submit(self.grade_all, pairs, grader)

    def grade_all(self, pairs: Iterable[tuple[str, str]], grader: str = "") -> list[Verdict]:
        """Returns verdicts for (response text, answer) pairs, in order, by `grade_fn` or one of `others`."""
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
        index = list(self._graders).index(grader)
        verdicts: dict[int, Verdict] = {}
        waiting, gradings = collections.deque(range(len(pairs))), [0] * len(pairs)
        self._wait(limit_s=0.0)  # replaces workers that died while idle, which no pair may pay for
        try:
            while len(verdicts) < len(pairs):
                self._check_entered()  # another thread may leave the block meanwhile
                for worker in self._workers:
                    if waiting and worker.ready and worker.item is None:
                        worker.item = item = waiting.popleft()
                        gradings[item] += 1
                        worker.deadline = time.monotonic() + self._time_limit_s
                        with contextlib.suppress(ConnectionError):  # it died just now, which `_wait` finds
                            worker.connection.send((index, *pairs[item]))
                for item, verdict in self._wait():
                    if verdict is None and gradings[item] < MAX_GRADINGS:
                        waiting.appendleft(item)
                    else:
                        verdicts[item] = verdict or Verdict(False, 0.0, "crash")
        finally:
            # After an interrupt some pairs are still in flight; the next call must not receive their verdicts.
            for slot, worker in enumerate(self._workers):
                if worker.item is not None:
                    self._replace(slot)
        return [verdicts[item] for item in range(len(pairs))]

    def _start(self, count: int) -> None:
        """Starts `count` workers and waits until all are ready."""
        for _ in range(count):
            self._workers.append(_Worker.start(self._references, self._time_limit_s))
        while not all(worker.ready for worker in self._workers):
            self._wait()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = _Worker.start(self._references, self._time_limit_s)

    def _wait(self, limit_s: float = math.inf) -> list[tuple[int, Verdict | None]]:
        """Sleeps until a worker sends a message, ends or is out of time.

        Returns the pairs that this settles, with None for one whose worker was killed from outside.
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
                    settled += self._receive(worker, worker.connection.recv())
                except (EOFError, ConnectionError):
                    ended = True
            if ended or now >= worker.deadline:
                settled += self._lose(slot, "timeout" if now >= worker.deadline else "crash")
        return settled

    def _receive(self, worker: _Worker, message: Any) -> list[tuple[int, Verdict | None]]:
        """Processes a message of `rewards.worker`: None when ready, an error of its start, or a verdict."""
        settled: list[tuple[int, Verdict | None]] = []
        if worker.item is not None:
            settled.append((worker.item, Verdict(*message)))
        elif message is not None:
            raise CannotStart(self._references, *message)
        worker.ready, worker.item, worker.deadline = True, None, math.inf
        self._num_failed_starts = self._num_killed_starts = 0
        return settled

    def _lose(self, slot: int, reason: str) -> list[tuple[int, Verdict | None]]:
        """Replaces a worker that ended or is out of time, and settles its pair."""
        worker = self._workers[slot]
        worker.kill()
        from_outside = reason == "crash" and worker.process.returncode in KILLED_FROM_OUTSIDE
        if not worker.ready:
            self._count_failed_start(from_outside)
        self._replace(slot)
        if worker.item is None:
            return []
        return [(worker.item, None if from_outside else Verdict(False, 0.0, reason))]

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
