"""One verifier process: `python -m reinforce_ada_jax.rewards.worker FD TIME_LIMIT_S REFERENCE...`.

`rewards.workers` starts and watches it; `rewards.loading` defines references. It sends on the connection (file
descriptor FD): None when it is ready, or an error in one line and a traceback when it cannot start; then (correct,
reward, reason) for each (grader, response, answer) that it receives, until the other end closes. `grader` is the index
of a reference.
"""

import importlib
import logging
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from reinforce_ada_jax.rewards import loading
from reinforce_ada_jax.rewards.loading import GradeFn
from reinforce_ada_jax.types import Verdict

# Ordinary gradings stay below 0.2 GiB of memory; an unlimited factorial takes all there is.
ADDRESS_SPACE_BYTES = 4 * 2**30
# The parent kills at the time limit. If the parent is gone, the kernel kills this much later: the default action of
# SIGALRM needs no interpreter, so it also ends C code that never returns. (PR_SET_PDEATHSIG would be sooner, but it
# fires when the *thread* that started the process ends, and would kill the workers of a pool made in a thread.)
ORPHAN_GRACE_S = 5.0


def _verdict(graded: Verdict | float | bool) -> Verdict:
    """Returns a verdict unchanged; for a number the verdict with that reward, correct from 1 on."""
    if isinstance(graded, Verdict):
        return graded
    # numpy's scalars are not floats and its bools not numbers, so anything but text is converted.
    if graded is None or isinstance(graded, str | bytes):
        raise TypeError(f"a grade function must return a Verdict, a number or a bool, not {graded!r}")
    reward = float(graded)
    return Verdict(reward >= 1.0, reward)


def guarded(grade_fn: GradeFn, caught: type[BaseException]) -> Callable[[str, str], Verdict]:
    """Returns `grade_fn` with reason "error" where it raises `caught` or returns no finite reward.

    An exception of a checker is a wrong answer with a reason and never ends a run. The first one is logged with its
    traceback; the metrics count all by reason.
    """
    logged = False

    def grade(response: str, answer: str) -> Verdict:
        nonlocal logged
        try:
            verdict = _verdict(grade_fn(response, answer))
            if not math.isfinite(verdict.reward):
                raise ValueError(f"a reward must be finite, not {verdict.reward}")
            return verdict
        except caught:
            if not logged:
                logging.getLogger(__name__).exception(
                    "Grading failed. Further failures of this process are counted, not logged."
                )
                logged = True
            return Verdict(False, 0.0, "error")

    return grade


def _in_one_line(error: BaseException) -> str:
    """Returns the exception and its innermost frame outside of this package and the import system."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    inner = ("<frozen", os.path.dirname(os.path.dirname(__file__)), os.path.dirname(importlib.__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inner)]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def _confine() -> None:
    """Limits the address space, leaves Ctrl-C to the parent, and sends the output of checkers to stderr."""
    if sys.platform == "linux":  # macOS refuses to set this limit
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = ADDRESS_SPACE_BYTES if hard == resource.RLIM_INFINITY else min(ADDRESS_SPACE_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)


def _serve(connection: Connection, references: list[str], time_limit_s: float) -> None:
    # BaseException: Math-Verify's TimeoutException is one, and a checker that calls sys.exit has failed.
    try:
        graders = [guarded(loading.load(reference), caught=BaseException) for reference in references]
    except BaseException as error:
        connection.send((_in_one_line(error), traceback.format_exc()))
        return
    connection.send(None)
    while True:
        grader, response, answer = connection.recv()
        signal.setitimer(signal.ITIMER_REAL, time_limit_s + ORPHAN_GRACE_S)
        verdict = graders[grader](response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # Plain values, so that the parent unpickles nothing that a checker made.
        connection.send((bool(verdict.correct), float(verdict.reward), str(verdict.reason)))


def main() -> None:
    descriptor, time_limit_s, *references = sys.argv[1:]
    _confine()
    with Connection(int(descriptor)) as connection:
        try:
            _serve(connection, references, float(time_limit_s))
        except (EOFError, ConnectionError):
            pass  # the parent closed its end, or died


if __name__ == "__main__":
    main()
