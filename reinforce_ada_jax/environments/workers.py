"""Pool of environment processes: episodes that are stepped beside decoding, each step under a wall-clock limit.

Each worker is a `python -m reinforce_ada_jax.environments.worker`, with a thread here that waits for it, and has many
episodes. One that hangs ends its process, and the other episodes of this process are made again in the next one: their
turns are repeated there, and must be answered as before. So a failure touches one trajectory only.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import pathlib
import secrets
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from reinforce_ada_jax.environments.episode import Message
from reinforce_ada_jax.isolation import child, messages, process_tree

START_LIMIT_S = 120.0
MAX_STARTS = 3  # in a row without a ready worker
# A step is taken again if its worker was killed from outside, or sent what is no answer: at most this often in all.
MAX_TRIES = 4
_CLOSED = "the environments were closed."


class CannotStart(RuntimeError):
    """Failure of the workers to start; `line` says why in one line."""

    def __init__(self, line: str, trace: str = ""):
        self.line = line
        super().__init__(f"{line}\n{trace}" if trace else line)


@dataclasses.dataclass(frozen=True)
class Reply:
    """Answer of an environment to a turn of the model: one of the three.

    Attributes:
      messages: the next messages.
      reward: the final reward.
      failure: "timeout", "crash" or "error" where the environment failed.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    failure: str = ""


@dataclasses.dataclass(eq=False)
class Episode:
    """One trajectory's environment, as the pool sees it.

    Attributes:
      key: its name in the pool.
      problem: what `reset` gets, as JSON.
      address: of its randomness.
      first: what `reset` must return.
      turns: the model's texts so far, each with the messages that answered it; None: unanswered.
      worker: that has its turns; None before the first one.
    """

    key: str
    problem: Mapping[str, Any]
    address: Sequence[int]
    first: Sequence[Message]
    turns: list[tuple[str, tuple[Message, ...] | None]] = dataclasses.field(default_factory=list)
    worker: "_Worker | None" = None


class _Worker:
    """One process, which is started when it is needed, and the thread that waits for it."""

    def __init__(self, pool: "EnvironmentPool"):
        self._pool, self._child, self._stopped = pool, None, False
        self._held: set[str] = set()  # keys of episodes in the process
        self.over: collections.deque[str] = collections.deque()  # keys of episodes that have ended here, to be told
        self.num_assigned = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    def start(self) -> child.Child:
        """Returns the process, which is started if there is none."""
        if self._child is None:
            self._child = self._pool.new_child()
        return self._child

    def stop(self) -> None:
        """Ends the process; a request in flight fails."""
        self._stopped = True
        running = self._child
        if running is not None:
            with contextlib.suppress(OSError):
                running.connection.shutdown(socket.SHUT_RDWR)  # the thread may wait for it
        self.thread.shutdown(cancel_futures=True)
        self._end()

    def _end(self, *, kill: bool = False) -> int | None:
        """Ends the process, whose episodes are lost; returns its exit code, None if it had to be killed."""
        ended, self._child = self._child, None
        self._held.clear()
        if ended is None or kill:
            return None if ended is None else ended.kill()
        return ended.end()

    def ask(self, episode: Episode) -> Reply:
        """Returns the answer to the newest turn of an episode, which keeps it, or to `reset` where it has none."""
        key, why = episode.key if episode.turns else None, ""
        for _ in range(MAX_TRIES):
            running, request = self.start(), secrets.token_hex(8)
            if self._stopped:  # while it started
                raise RuntimeError(_CLOSED)
            repeat = key is not None and key not in self._held
            turns = episode.turns if repeat else episode.turns[-1:]
            limit_s = self._pool.timeout_s * max(1, len(turns))
            over = [self.over.popleft() for _ in range(len(self.over))]
            self._held.difference_update(over)
            line = messages.to_line({
                "request": request, "key": key, "repeat": repeat, "problem": dict(episode.problem),
                "address": list(episode.address), "first": list(episode.first), "turns": turns, "over": over,
                "output": str(self._pool.output or ""),
            })  # fmt: skip
            try:
                with contextlib.suppress(OSError):  # it has ended, or reads nothing: found below
                    messages.send(running.connection, line, limit_s)
                message = running.read(limit_s)
            except (EOFError, ConnectionError):
                code = self._end()
                if self._stopped:
                    raise RuntimeError(_CLOSED) from None
                if code is not None and -code in process_tree.ENDED_FROM_OUTSIDE:
                    why = "its process was killed at every try"
                    continue
                how = "closed its socket" if code is None else f"ended its process with exit code {code}"
                return self._pool.failed("crash", how)
            except messages.Malformed:
                message = {}
            if message is None:
                self._end(kill=True)
                return self._pool.failed("timeout", f"took more than {limit_s:g} s (environment.timeout_s)")
            reply = self._read(message, request)
            if reply is None:  # perhaps of another episode, a fork of which has answered, too
                self._end(kill=True)
                why = "its process wrote to its socket at every try"
                continue
            if reply.messages and key is not None:
                self._held.add(key)
                episode.turns[-1] = episode.turns[-1][0], reply.messages
            else:
                self._held.discard(episode.key)
            return reply
        return self._pool.failed("crash", why)

    def _read(self, message: Mapping[str, Any], request: str) -> Reply | None:
        """Returns the reply in a message; None for one that no worker sends in answer to this request."""
        found, reward = message.get("messages"), message.get("reward")
        if message.get("request") == request:
            if isinstance(message.get("failure"), str):
                return self._pool.failed("error", message["failure"])
            if isinstance(reward, float) and math.isfinite(reward):
                return Reply(reward=reward)
            if isinstance(found, list) and found and all(map(_is_message, found)):
                return Reply(messages=tuple(found))
        return None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values()) and "content" in value


def _stop_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()


class EnvironmentPool:
    """Environments in worker processes, which start with the first request; `close` ends them.

        with contextlib.closing(EnvironmentPool("game.py:Game", workers=2, timeout_s=10.0)) as pool:
            first = pool.reset({"answer": "7"}).result().messages

    Args:
      reference: "file.py:Class".
      workers: number of processes.
      timeout_s: wall-clock limit of a step.
      output: file that gets what environments print; None: this process's stderr.

    Attributes:
      tools: descriptions of the tools that a class has, after `check`.
      failure: the first failure of an environment since it was last emptied.
      output: see above; may be changed between requests.
    """

    def __init__(self, reference: str, workers: int, timeout_s: float, output: pathlib.Path | None = None):
        self.reference, self.timeout_s, self.output = reference, timeout_s, output
        self.tools: tuple[dict[str, Any], ...] = ()
        self.failure = ""
        self._lock, self._keys = threading.Lock(), itertools.count()
        # Weak: the workers and their finalizer must not keep the pool alive.
        self._workers = [_Worker(weakref.proxy(self)) for _ in range(workers)]
        self.close = weakref.finalize(self, _stop_all, self._workers)

    def check(self) -> None:
        """Starts one worker, which reads the class.

        Raises:
          ValueError: the class can't be loaded, or is no environment; one line says why.
        """
        try:
            self._workers[0].thread.submit(self._workers[0].start).result()
        except CannotStart as error:
            raise ValueError(error.line) from None

    def new_child(self) -> child.Child:
        """Starts a process, and waits until it is ready."""
        output = None
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            output = str(self.output)
        arguments = [str(self.timeout_s), self.reference]
        for _ in range(MAX_STARTS):
            started = child.Child(*child.start("reinforce_ada_jax.environments.worker", arguments, {}, output))
            try:
                message = started.read(START_LIMIT_S)
            except (EOFError, ConnectionError, messages.Malformed):
                message = None
            if message is not None and message.get("ready") is True:
                self.tools = tuple(message["tools"])
                return started
            started.kill()
            if message is not None:
                raise CannotStart(f"environment.path is {self.reference!r}: {message['error']}", message["trace"])
        raise CannotStart(
            f"{MAX_STARTS} environment processes in a row did not start with {self.reference!r}: each died, or was not "
            f"ready within {START_LIMIT_S:g} s. Import it in a new interpreter to see why."
        )

    def failed(self, reason: str, why: str) -> Reply:
        """Returns the reply of a failed environment, and keeps the first failure for a message."""
        with self._lock:
            self.failure = self.failure or f"{self.reference}: {why}"
        return Reply(failure=reason)

    def reset(self, problem: Mapping[str, Any], address: Sequence[int] = ()) -> Future[Reply]:
        """Returns the first messages of a problem, from an environment that is used for nothing else."""
        worker = self._least_used()
        return worker.thread.submit(worker.ask, Episode("", problem, address, ()))

    def _least_used(self) -> _Worker:
        worker = min(self._workers, key=lambda worker: worker.num_assigned)
        worker.num_assigned += 1
        return worker

    def begin(self, problem: Mapping[str, Any], address: Sequence[int], first: Sequence[Mapping[str, str]]) -> Episode:
        """Returns a new episode, which no process has before its first step."""
        return Episode(str(next(self._keys)), problem, address, [dict(message) for message in first])

    def step(self, episode: Episode, text: str) -> Future[Reply]:
        """Answers a turn of the model; the episode's earlier turns have been answered."""
        if episode.worker is None:
            episode.worker = self._least_used()
        episode.turns.append((text, None))
        return episode.worker.thread.submit(episode.worker.ask, episode)

    def end(self, episode: Episode) -> None:
        """Forgets an episode that gets no further turn."""
        if episode.worker is not None:
            episode.worker.over.append(episode.key)
