"""Keeps the processes that a child starts in one tree, which ends with the child; Linux only.

A process group is not enough: a process that calls `setsid` leaves it, and init adopts a process whose parent has
ended. So a supervisor is between the pool and each worker. It adopts the processes that the worker's processes leave
behind (PR_SET_CHILD_SUBREAPER), so that `kill_descendants` of the supervisor reaches everything.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Rounds of `kill_descendants`. A process that forks while it is found needs another round. If this number is not
# enough, forks are faster than kills, and then only the kill of the process group remains.
_MAX_ROUNDS = 100
_MAX_REREADINGS = 10  # of `descendants`: processes that come and go all the time never read alike twice
SUPPORTED = sys.platform == "linux"
# Signals by which something outside of the pool ends a worker: the system's out-of-memory killer, or a person.
ENDED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return []


def descendants(pid: int) -> list[int]:
    """Returns the ids of all processes below `pid`, zombies included.

    The children of a thread or process that ends pass to another one, which may have been read before them. So all are
    read again until nothing changes.
    """
    found = _read_descendants(pid)
    for _ in range(_MAX_REREADINGS):
        before, found = found, _read_descendants(pid)
        if set(found) == set(before):
            break
    return found


def _read_descendants(pid: int) -> list[int]:
    found, unseen = [], [pid]
    while unseen:
        parent = unseen.pop()
        for thread in _threads(parent):
            with contextlib.suppress(OSError):  # it has ended
                text = pathlib.Path(f"/proc/{parent}/task/{thread}/children").read_text()
                found += map(int, text.split())
                unseen += map(int, text.split())
    return found


def is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill_descendants(pid: int) -> None:
    """Kills all processes below `pid`, and those that they start meanwhile; not `pid` itself."""
    for _ in range(_MAX_ROUNDS if SUPPORTED else 0):
        running = [child for child in descendants(pid) if is_running(child)]
        if not running:
            return
        for child in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)


def adopt() -> None:
    """Makes this process the parent of all processes below it whose own parent ends; Linux only."""
    if SUPPORTED:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for(child: int) -> int:
    """Collects children that end, adopted ones included, until `child` has ended; returns its status."""
    ended = status = 0
    while ended != child:
        ended, status = os.waitpid(-1, 0)
    return status


def supervise(descriptor: int) -> None:
    """Returns in a new child process, which is the worker; this process ends as the child ends, and kills all others.

    `descriptor` is the worker's socket, which this process closes: the end of the worker must be the end of the socket.
    """
    if not SUPPORTED:
        return
    adopt()
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        # The supervisor has one thread, so this signal means that it has ended.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    os.close(descriptor)
    status = wait_for(worker)
    kill_descendants(supervisor)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in ENDED_FROM_OUTSIDE:
        os.kill(supervisor, os.WTERMSIG(status))
    os._exit(1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
