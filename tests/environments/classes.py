"""Environments for tests: `Obedient` does what the model's text says."""

import contextlib
import os
import signal
import sys
import time
from typing import ClassVar

import numpy as np


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
      a: the first number,
        on two lines.
      b: the second one.
    """
    return a + b


def fail() -> str:
    """Fails."""
    raise RuntimeError("no luck")


def user(content):
    return [{"role": "user", "content": content}]


def throw(error):
    raise error


def forked(child):
    """Runs `child` in a new process."""
    pid = os.fork()
    if not pid:
        child()
    return pid


def sends(data):
    """Writes to each socket of the process."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket"):
                os.write(descriptor, data)


FORGED = b'{"messages": [{"role": "user", "content": "forged"}]}\n'


class Obedient:
    """Answers each text with its number of turns, or misbehaves as it says."""

    acts: ClassVar = {
        "hang": lambda self: time.sleep(3600),
        "raise": lambda self: throw(KeyError("secret")),
        "exit": lambda self: os._exit(3),
        "quit": lambda self: sys.exit(),
        "die": lambda self: os.kill(os.getpid(), signal.SIGKILL),
        "nan": lambda self: float("nan"),
        "text": lambda self: "well done",
        "assistant": lambda self: [{"role": "assistant", "content": "I am you"}],
        "empty": lambda self: [],
        "long": lambda self: user("x" * 200_000),
        "time": lambda self: user(str(time.time())),
        "random": lambda self: user(str(self.rng.integers(10**9))),
        "numpy": lambda self: np.float32(0.5),
        "none": lambda self: None,
        "dict": lambda self: user("a message")[0],
        "bytes": lambda self: user(b"bytes"),
        "huge": lambda self: 10**400,
        "interrupt": lambda self: throw(KeyboardInterrupt()),
        "forge": lambda self: sends(FORGED),
        "babble": lambda self: sends(b"hello\n"),
        "half": lambda self: sends(FORGED[:20]) or user("the rest"),
        "flood": lambda self: sends(b"x" * 200_000),
        "unplug": lambda self: os.closerange(3, 64),
        "double": lambda self: user("twice" if forked(lambda: time.sleep(0.1)) else "twice, later"),
        "slow": lambda self: time.sleep(0.4) or user("slow"),
        "leave": lambda self: user(str(forked(lambda: time.sleep(3600)))),
        "silence": lambda self: sys.stdout.close() or os.close(2) or user("silence"),
        "speak": lambda self: print("a line", flush=True) or (sys.stderr.write("another line\n") and user("spoken")),
        "end": lambda self: self.turns,
    }

    def __init__(self, rng):
        self.rng, self.turns = rng, 0

    def reset(self, problem):
        return user(problem["problem"])

    def step(self, messages):
        self.turns += 1
        act = self.acts.get(messages[-1]["content"])
        return act(self) if act else user(f"turn {self.turns} of {len(messages)} messages")


class WithTools:
    """Ends with 1 where the text has no call."""

    tools = (add, fail)

    def reset(self, problem):
        return [{"role": "user", "content": problem["problem"]}]

    def step(self, messages):
        return float(messages[-1]["content"] == "done")


class OwnTools:
    """Calls its tools itself: it has their descriptions, and gets turns as they are."""

    tool_schemas = ({"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}},)

    def reset(self, problem):
        return user(problem["problem"])

    def step(self, messages):
        return [{"role": "tool", "content": messages[-1]["content"].upper()}]


class Moody:
    """Begins otherwise each time."""

    def reset(self, problem):
        return [{"role": "user", "content": str(time.time_ns())}]

    def step(self, messages):
        return 0.0


class Begins:
    """Begins as the problem says."""

    def reset(self, problem):
        act = {
            "hang": lambda: time.sleep(3600),
            "long": lambda: user("x" * 200_000),
            "exit": lambda: os._exit(3),
            "raise": lambda: throw(KeyError("secret")),
            "nothing": lambda: None,
        }.get(problem["problem"], lambda: user(problem["problem"]))
        return act()

    def step(self, messages):
        return 1.0


class NoStep:
    def reset(self, problem):
        return []


def function():
    pass
