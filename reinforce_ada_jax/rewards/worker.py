"""One verifier process: `python -m reinforce_ada_jax.rewards.worker FD TIME_LIMIT_S ADDRESS...`.

`rewards.workers` starts and watches it, `rewards.addresses` says what an address is. What it says on the connection
(file descriptor FD): first None when it is ready, or a line and a traceback when it cannot start; then one (correct,
reward, reason) for each (grader, response, answer) that it is sent, until the other end closes. `grader` counts the
addresses.
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

# Ordinary gradings stay below 0.2 GiB of memory; a factorial that nobody stops takes everything there is.
ADDRESS_SPACE_BYTES = 4 * 2**30
# The parent kills at the time limit. This much later the kernel does, should there be no parent any more: the default
# action of SIGALRM needs no interpreter, so it also ends C code that never returns. (PR_SET_PDEATHSIG would be sooner,
# but it fires when the *thread* that started the process ends, and would kill the workers of a pool made in a thread.)
ORPHAN_GRACE_S = 5.0


def _verdict(graded: Verdict | float | bool) -> Verdict:
    """A verdict as it is; of a number, the verdict with that reward, correct from 1 on."""
    if isinstance(graded, Verdict):
        return graded
    # numpy's scalars are no floats, and their bools no numbers; both can be converted, and so could text.
    if graded is None or isinstance(graded, str | bytes):
        raise TypeError(f"a grade function must return a Verdict, a number or a bool, not {graded!r}")
    reward = float(graded)
    return Verdict(reward >= 1.0, reward)


def guarded(grade_fn: GradeFn, caught: type[BaseException]) -> Callable[[str, str], Verdict]:
    """`grade_fn`, with reason "error" where it raises `caught` or returns anything without a finite reward.

    What a checker raises on a model's text is a wrong answer with a reason, never the end of a run. The first failure
    is logged with its traceback; the pool's caller counts them all by reason.
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
                    "grading failed (further failures of this process are not logged, only counted)"
                )
                logged = True
            return Verdict(False, 0.0, "error")

    return grade


def _in_one_line(error: BaseException) -> str:
    """What was raised, and the last place on the way there that is neither ours nor the import system's."""
    said = " ".join(traceback.format_exception_only(error)[-1].split())
    ours = os.path.dirname(os.path.dirname(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", ours, os.path.dirname(importlib.__file__)))
    ]
    return f"{said} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else said


def _confine() -> None:
    """Limits the address space, leaves Ctrl-C to the parent, and sends what a checker prints to stderr."""
    if sys.platform == "linux":  # macOS knows this limit and refuses to set it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = ADDRESS_SPACE_BYTES if hard == resource.RLIM_INFINITY else min(ADDRESS_SPACE_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)


def _serve(connection: Connection, names: list[str], time_limit_s: float) -> None:
    # BaseException: Math-Verify's TimeoutException is one, and a checker that calls sys.exit has failed, not finished.
    try:
        graders = [guarded(loading.load(name), caught=BaseException) for name in names]
    except BaseException as error:
        connection.send((_in_one_line(error), traceback.format_exc()))
        return
    connection.send(None)
    while True:
        grader, response, answer = connection.recv()
        signal.setitimer(signal.ITIMER_REAL, time_limit_s + ORPHAN_GRACE_S)
        verdict = graders[grader](response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # Plain values: the parent unpickles nothing that a checker made.
        connection.send((bool(verdict.correct), float(verdict.reward), str(verdict.reason)))


def main() -> None:
    descriptor, time_limit_s, *names = sys.argv[1:]
    _confine()
    with Connection(int(descriptor)) as connection:
        try:
            _serve(connection, names, float(time_limit_s))
        except (EOFError, ConnectionError):
            pass  # the parent closed its end, or died


if __name__ == "__main__":
    main()
