"""Pool of environment processes: episodes take steps during decoding, each step under a wall-clock limit.

Each worker of `isolation.workers` runs `environments.worker`, and has many episodes. If an episode hangs, its process
is killed. The other episodes of this process are made again in the next process: their turns are repeated there, and
must be answered as before. So a failure touches one trajectory only.
"""

import collections
import dataclasses
import itertools
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from reinforce_ada_jax.environments.episode import Message, is_message
from reinforce_ada_jax.isolation import workers as workers_lib
from reinforce_ada_jax.isolation.child import Child
from reinforce_ada_jax.isolation.messages import Malformed
from reinforce_ada_jax.isolation.workers import CannotStart, Lost, Program, Worker


@dataclasses.dataclass(frozen=True)
class Reply:
    """Answer of an environment to a turn of the model: one of the three is set."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    failure: str = ""  # "timeout", "crash" or "error" where the environment failed


@dataclasses.dataclass(eq=False)
class Episode:
    """One trajectory's environment, as the pool sees it."""

    key: str  # its name in the pool
    problem: Mapping[str, Any]  # what `reset` gets, as JSON
    address: Sequence[int]  # seed of its random generator
    first: Sequence[Message]  # what `reset` must return
    # The model's texts so far, each with the messages that answered it; None: unanswered.
    turns: list[tuple[str, tuple[Message, ...] | None]] = dataclasses.field(default_factory=list)
    worker: Worker | None = None  # answers its turns; None before the first one
    process: Child | None = None  # process of `worker` whose environment has seen all answered turns; None: none has


def _read(message: Mapping[str, Any]) -> Reply | str:
    """Returns the reply in a message, or why the environment failed."""
    found, reward, failure = message.get("messages"), message.get("reward"), message.get("failure")
    if isinstance(failure, str):
        return failure
    if isinstance(reward, float) and math.isfinite(reward):
        return Reply(reward=reward)
    if isinstance(found, list) and found and all(map(is_message, found)):
        if all(isinstance(text, str) for each in found for text in each.values()):
            return Reply(messages=tuple(found))
    raise Malformed


class EnvironmentPool:
    """Environments in worker processes, which start with the first request; `close` ends them.

        with contextlib.closing(EnvironmentPool("game.py:Game", workers=2, timeout_s=10.0)) as pool:
            first = pool.reset({"answer": "7"}).result().messages

    `reference` is "file.py:Class", `workers` the number of processes, `timeout_s` the wall-clock limit of a step. What
    environments print goes to the file `program.output`; None: this process's stderr.
    """

    def __init__(self, reference: str, workers: int, timeout_s: float):
        self._timeout_s = timeout_s
        self.tools: tuple[dict[str, Any], ...] = ()  # descriptions of the tools of the class; `check` sets them
        self.failure = ""  # the first failure since this was last set to ""
        self.program = Program(  # its output may be changed between requests
            module="reinforce_ada_jax.environments.worker",
            arguments=[str(timeout_s), reference],
            names="environment processes",
            loads=repr(reference),
            refusal=f"environment.path is {reference!r}",
        )
        self._lock, self._keys = threading.Lock(), itertools.count()
        self._workers = [Worker(self.program) for _ in range(workers)]
        self._in_turn = itertools.cycle(self._workers)
        # Keys of episodes that have ended; the next request to a worker tells them to its process.
        self._over = {worker: collections.deque[str]() for worker in self._workers}
        self.close = weakref.finalize(self, workers_lib.stop, self._workers)

    def check(self) -> None:
        """Starts one worker, which loads the class; ValueError, with one line, if the class can't be used."""
        worker = self._workers[0]
        self.program.trial_limit_s = workers_lib.TRIAL_LIMIT_S + self._timeout_s
        try:
            worker.thread.submit(worker.start).result()
        except CannotStart as error:
            raise ValueError(error.line) from None
        finally:
            self.program.trial_limit_s = None
        assert worker.ready is not None
        self.tools = tuple(worker.ready["tools"])

    def failed(self, reason: str, why: str) -> Reply:
        """Returns the reply of a failed environment, and keeps the first failure for a message."""
        with self._lock:
            self.failure = self.failure or f"{self.program.arguments[-1]}: {why}"
        return Reply(failure=reason)

    def reset(self, problem: Mapping[str, Any]) -> Future[Reply]:
        """Returns the first messages of a problem, from an environment that is used for nothing else."""
        worker = next(self._in_turn)
        return worker.thread.submit(self._ask, worker, Episode("", problem, (), ()))

    def begin(self, problem: Mapping[str, Any], address: Sequence[int], first: Sequence[Mapping[str, str]]) -> Episode:
        """Returns a new episode, which no process has before its first step."""
        return Episode(str(next(self._keys)), problem, address, [dict(message) for message in first])

    def step(self, episode: Episode, text: str) -> Future[Reply]:
        """Answers a turn of the model; the episode's earlier turns have been answered."""
        if episode.worker is None:
            episode.worker = next(self._in_turn)
        episode.turns.append((text, None))
        return episode.worker.thread.submit(self._ask, episode.worker, episode)

    def end(self, episode: Episode) -> None:
        """Forgets an episode that gets no further turn."""
        if episode.worker is not None:
            self._over[episode.worker].append(episode.key)

    def _ask(self, worker: Worker, episode: Episode) -> Reply:
        """Returns the answer to an episode's newest turn and stores it there; without a turn, the answer to `reset`."""
        ended = [self._over[worker].popleft() for _ in range(len(self._over[worker]))]

        def request(process: Child) -> tuple[dict[str, Any], float]:
            repeat = bool(episode.turns) and episode.process is not process
            turns = episode.turns if repeat else episode.turns[-1:]
            message = {
                "key": episode.key if episode.turns else None, "repeat": repeat, "problem": dict(episode.problem),
                "address": list(episode.address), "first": list(episode.first), "turns": turns, "over": ended,
                "output": str(self.program.output or ""),
            }  # fmt: skip
            return message, self._timeout_s * max(1, len(turns))

        try:
            reply = worker.ask_again(request, _read)
        except Lost as lost:
            return self.failed(lost.reason, str(lost))
        if isinstance(reply, str):
            return self.failed("error", reply)
        if reply.messages and episode.turns:
            episode.process = worker.child
            episode.turns[-1] = episode.turns[-1][0], reply.messages
        return reply
