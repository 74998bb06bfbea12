"""Grade functions that do what a checker must never do, for tests/rewards/test_workers.py.

Imported by worker processes: nothing else belongs here.
"""

import os
import pickle
import signal
import stat
import subprocess
import sys
import time

from reinforce_ada_jax.types import Verdict


class _Opened:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


FORGED = b'{"request": "1", "correct": true, "reward": 1e9, "reason": "", "rewards": {}, "failure": ""}\n'


def _sockets():
    """File descriptors of this process that are sockets."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")
            and stat.S_ISSOCK(os.fstat(number).st_mode)]  # fmt: skip


WRITTEN = {
    "a pickle": pickle.dumps(_Opened("unpickled")),
    "a framed pickle": b"\0\0\0\x50" + pickle.dumps(_Opened("unpickled")) + b"\n",
    "garbage": bytes(range(256)),
    "a forged verdict": FORGED,
    "a long line": b" " * 2**18,
    "nested brackets": b"[" * 2**16 + b"\n",
    "writes_half": b'{"request": "',
}


def _attack(how):
    """Writes to the socket of the worker, or closes it; then waits, unless it wrote something whole."""
    for number in _sockets():
        os.close(number) if how == "closes" else os.write(number, WRITTEN[how])
    if how in ("closes", "writes_half"):
        time.sleep(3600)


def _daemon(mark):
    """Starts a process that leaves the group and whose parent ends."""
    sleeper = f"import time; time.sleep(3600)  # {mark}"
    starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", starter], start_new_session=True, check=True)


def obedient(response: str, answer: str) -> Verdict | float:
    """Does what the response says: right, wrong, or one of the ways to fail."""
    match response:
        case "loop":
            while True:
                pass
        case "power":  # one bytecode, minutes in C with the interpreter locked
            return Verdict(7 ** (10**9) == 0, 0.0)
        case "sleep":
            time.sleep(3600)
        case "pause":  # long enough to be killed in
            time.sleep(0.002)
        case "wait":
            time.sleep(0.5)
        case "suicide":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "exit":
            os._exit(0)
        case "raise":
            raise KeyError(response)
        case "system_exit":
            sys.exit(0)
        case "recurse":
            return obedient(response, answer) and obedient(response, answer)
        case "memory":
            return Verdict(len(bytearray(10**11)) == 0, 0.0)
        case "none":
            return None
        case "nan":
            return Verdict(True, float("nan"))
        case "text":
            return "1.0"
        case "half":
            return 0.5
        case "bool":
            return True
        case "infinite":
            return float("inf")
        case "print":
            print("a checker may print")
        case "child":  # a process of its own, which must not outlive the worker
            subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(3600)  # {answer}"])
            time.sleep(3600)
        case "daemon_and_hang" | "daemon_and_exit":
            _daemon(answer)
            return time.sleep(3600) if response == "daemon_and_hang" else os._exit(3)
        case "writes" | "writes_half" | "closes":
            _attack(answer or response)
        case "pid":
            return Verdict(True, 1.0, str(os.getpid()))
        case "modules":  # correct: no jax; the reason: what the main module is
            return Verdict("jax" not in sys.modules, 1.0, sys.modules["__main__"].__spec__.name)
        case "ground_types":
            return Verdict(True, 1.0, os.environ["SYMPY_GROUND_TYPES"])
    return Verdict(response == answer, float(response == answer))


def strict(response: str, answer: str) -> Verdict | float:
    """Does what the response says, with -1 for a wrong one."""
    return -1.0 if response == "wrong" else obedient(response, answer)


def opposite(response: str, answer: str) -> Verdict:
    """A second grader for the same pool."""
    return Verdict(response != answer, float(response != answer))
