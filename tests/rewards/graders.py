"""Grade functions that do what a checker must never do, for tests/rewards/test_workers.py.

Imported by worker processes: nothing else belongs here.
"""

import os
import signal
import subprocess
import sys
import time

from reinforce_ada_jax.types import Verdict


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
        case "pid":
            return Verdict(True, 1.0, str(os.getpid()))
        case "modules":  # correct: no jax; the reason: what the main module is
            return Verdict("jax" not in sys.modules, 1.0, sys.modules["__main__"].__spec__.name)
        case "ground_types":
            return Verdict(True, 1.0, os.environ["SYMPY_GROUND_TYPES"])
    return Verdict(response == answer, float(response == answer))


def opposite(response: str, answer: str) -> Verdict:
    """A second grader for the same pool."""
    return Verdict(response != answer, float(response != answer))
