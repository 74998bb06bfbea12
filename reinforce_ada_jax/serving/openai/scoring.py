"""Scores of finished texts for many clients: one micro-batch between two decode windows.

Decode windows are the same with and without scores. A request without scores waits between two windows for at most one
micro-batch of others, and never for the compiler: a new shape is compiled in another thread.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Int

from reinforce_ada_jax.learning.micro_batches import num_rows, row_tokens
from reinforce_ada_jax.learning.scoring import Scorer, Scores
from reinforce_ada_jax.policy.transformer import Params


@dataclasses.dataclass(eq=False)
class ScoreJob:
    tokens: Int[np.ndarray, " T"]  # at least one
    temperature: float  # divides the logits, above 0
    done: Callable[[Scores | Exception], None]  # gets the scores, or the error
    is_cancelled: bool = False


class ScoreQueue:
    """Texts that wait for one model's scorer; `turn` runs in the thread that owns the devices."""

    def __init__(self, scorer: Scorer, params: Params, wake: threading.Event):
        """`wake` is set when there is something to score."""
        self._scorer, self._params, self._wake = scorer, params, wake
        self._waiting: collections.deque[ScoreJob] = collections.deque()
        self._previous: tuple[list[ScoreJob], Any] | None = None  # texts on the devices, and the outputs
        self._compiler = ThreadPoolExecutor(1, "compiler")
        self._programs: dict[tuple[int, int], Future[Any]] = {}

    def submit(self, job: ScoreJob) -> None:
        self._waiting.append(job)
        self._wake.set()

    def close(self) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def turn(self) -> bool:
        """Submits a micro-batch and reads the one before it; returns False if there was neither."""
        submitted, previous = self._submit(), self._previous
        self._previous = submitted
        if previous is not None:
            jobs, outputs = previous
            try:
                found = self._scorer.read(outputs, [len(job.tokens) for job in jobs])
            except Exception as error:
                found = [error] * len(jobs)
            for job, scores in zip(jobs, found, strict=True):
                job.done(scores)
        return submitted is not None or previous is not None

    def _submit(self) -> tuple[list[ScoreJob], Any] | None:
        jobs, shape = self._next_jobs()
        if not jobs:
            return None
        program = self._program(shape)
        if not program.done():
            return None  # the end of its compilation wakes the thread
        for job in jobs:
            self._waiting.remove(job)
        try:
            rows = self._scorer.rows([job.tokens for job in jobs], [job.temperature for job in jobs], shape)
            return jobs, program.result()(self._params, *rows)
        except Exception as error:
            self._programs.pop(shape)  # to be compiled again
            for job in jobs:
                job.done(error)
            return None

    def _next_jobs(self) -> tuple[list[ScoreJob], tuple[int, int]]:
        """Returns the job that has waited longest, others that fit into rows of its length, and the rows' shape."""
        while self._waiting and self._waiting[0].is_cancelled:
            self._waiting.popleft()
        waiting = [job for job in list(self._waiting) if not job.is_cancelled]
        if not waiting:
            return [], (0, 0)
        tokens = row_tokens(len(waiting[0].tokens))
        fitting = [job for job in waiting if len(job.tokens) <= tokens]
        rows = num_rows(len(fitting), tokens, self._scorer.least_rows)
        return fitting[:rows], (rows, tokens)

    def _program(self, shape: tuple[int, int]) -> Future[Any]:
        if shape not in self._programs:
            arguments = self._params, *self._scorer.abstract_rows(shape)
            future = self._compiler.submit(lambda: self._scorer.program.lower(*arguments).compile())
            self._programs[shape] = future
            future.add_done_callback(lambda _: self._wake.set())
        return self._programs[shape]
