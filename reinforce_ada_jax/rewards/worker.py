"""One verifier process: `python -m reinforce_ada_jax.rewards.worker FD MODULE:QUALNAME TIME_LIMIT_S`.

`rewards.workers` starts and watches it. What it says on the connection (file descriptor FD): first None when it is
ready, or a traceback when it cannot start; then one (correct, reward, reason) for each (response, answer) that it is
sent, until the other end closes.
"""

import functools
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

from reinforce_ada_jax.types import Verdict

GradeFn = Callable[[str, str], Verdict]

# Ordinary gradings stay below 0.2 GiB of memory; a factorial that nobody stops takes everything there is.
ADDRESS_SPACE_BYTES = 4 * 2**30
# The parent kills at the time limit. This much later the kernel does, should there be no parent any more: the default
# action of SIGALRM needs no interpreter, so it also ends C code that never returns. (PR_SET_PDEATHSIG would be sooner,
# but it fires when the *thread* that started the process ends, and would kill the workers of a pool made in a thread.)
ORPHAN_GRACE_S = 5.0


def guarded(grade_fn: GradeFn, caught: type[BaseException]) -> GradeFn:
    """`grade_fn`, with reason "error" where it raises `caught` or returns anything but a Verdict with a finite reward.

    What a checker raises on a model's text is a wrong answer with a reason, never the end of a run. The first failure
    is logged with its traceback; the pool's caller counts them all by reason.
    """
    logged = False

    def grade(response: str, answer: str) -> Verdict:
        nonlocal logged
        try:
            verdict = grade_fn(response, answer)
            if not isinstance(verdict, Verdict):
                raise TypeError(f"a grade function must return a Verdict, not {type(verdict).__name__}")
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


def _load(address: str) -> GradeFn:
    """The function named by "module:qualname", after its module's `warm_up()` where there is one."""
    module_name, qualname = address.split(":")
    module = importlib.import_module(module_name)
    grade_fn = functools.reduce(getattr, qualname.split("."), module)
    if hasattr(module, "warm_up"):
        module.warm_up()
    return grade_fn


def _confine() -> None:
    """Limits the address space, leaves Ctrl-C to the parent, and sends what a checker prints to stderr."""
    if sys.platform == "linux":  # macOS knows this limit and refuses to set it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = ADDRESS_SPACE_BYTES if hard == resource.RLIM_INFINITY else min(ADDRESS_SPACE_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)


def _serve(connection: Connection, address: str, time_limit_s: float) -> None:
    # BaseException: Math-Verify's TimeoutException is one, and a checker that calls sys.exit has failed, not finished.
    try:
        grade = guarded(_load(address), caught=BaseException)
    except BaseException:
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    while True:
        response, answer = connection.recv()
        signal.setitimer(signal.ITIMER_REAL, time_limit_s + ORPHAN_GRACE_S)
        verdict = grade(response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # Plain values: the parent unpickles nothing that a checker made.
        connection.send((bool(verdict.correct), float(verdict.reward), str(verdict.reason)))


def main() -> None:
    descriptor, address, time_limit_s = sys.argv[1:]
    _confine()
    with Connection(int(descriptor)) as connection:
        try:
            _serve(connection, address, float(time_limit_s))
        except (EOFError, ConnectionError):
            pass  # the parent closed its end, or died


if __name__ == "__main__":
    main()
