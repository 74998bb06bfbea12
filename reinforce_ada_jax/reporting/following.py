"""Runs that still train: each reading of their files begins where the last one ended. Damaged lines are left out."""

import dataclasses
import math
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import json_object
from reinforce_ada_jax.reporting import comparison, curves, page, samples
from reinforce_ada_jax.reporting.history import (
    CONFIG,
    NEEDED,
    History,
    of_lines,
    unique_names,
    with_distinct_benchmarks,
)
from reinforce_ada_jax.reporting.samples import SampledResponses
from reinforce_ada_jax.reporting.writers import Metrics

LARGEST = 2**63
LOG_LINES = 12  # on the page before the first iteration
# What an open page has of a run: generation, number of rows, and the last iteration whose responses it has.
Known = tuple[int, int, int]
NOTHING: Known = (-1, 0, 0)


def parsed(line: bytes, after: int) -> Metrics | None:
    """Returns the metrics of a line; None if it has none, or if its iteration is not later than `after`."""
    try:
        found = json_object(line)
    except ValueError:
        return None
    metrics = {key: value for key, value in found.items() if type(value) in (int, float) and abs(value) < LARGEST}
    iteration = metrics.get("iteration")
    return metrics if type(iteration) is int and iteration > after and all(map(metrics.__contains__, NEEDED)) else None


class FollowedRun:
    """Run in a work directory, which may not exist yet."""

    def __init__(self, name: str, workdir: pathlib.Path):
        self.name, self.workdir = name, workdir
        self.history: History | None = None
        self._shown: History | None = None  # the history with the benchmarks' names on the page
        self._problem = ""  # why its files can't be shown
        # Rises when metrics.jsonl was replaced (a resume removes later lines of a killed run), or a name has changed.
        self._generation = 0
        self._lines: list[Metrics] = []
        self._inode, self._end, self._written = -1, 0, 0.0

    def read(self) -> bool:
        """Reads the new lines of metrics.jsonl; returns True if the history has changed."""
        try:
            with (self.workdir / "metrics.jsonl").open("rb") as stream:
                return self._read(stream)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:  # the file server does not answer, or config.json is another program's
            self._problem = str(error).splitlines()[0]
            return False

    def _read(self, stream: BinaryIO) -> bool:
        status = os.fstat(stream.fileno())
        replaced = self._inode != -1 and (status.st_ino != self._inode or status.st_size < self._end)
        if replaced:
            self._generation, self._end, self._lines, self.history = self._generation + 1, 0, [], None
        self._inode, self._written = status.st_ino, status.st_mtime
        stream.seek(self._end)
        text = stream.read()
        finished = text.rfind(b"\n") + 1  # a line that is being written is left for the next time
        for line in text[:finished].splitlines():
            found = parsed(line, self._lines[-1]["iteration"] if self._lines else 0)  # pyright: ignore[reportArgumentType]
            if found is not None:
                self._lines.append(found)
        self._end += finished
        if self._end and not self._lines:
            raise ValueError(f"{buckets.origin(self.workdir)} is no run of train: its metrics.jsonl has no iteration.")
        shown = 0 if self.history is None else len(self.history.updates)
        if len(self._lines) > shown:  # also lines of a reading before, whose other files could not be read
            self.history = dataclasses.replace(of_lines(self.workdir, self._lines), name=self.name)
            self._problem = ""
        return replaced or len(self._lines) > shown

    def show(self, history: History) -> None:
        """Takes the history as the page shows it: a benchmark may have another name there."""
        if self._shown is not None and not self._shown.evaluations.keys() <= history.evaluations.keys():
            self._generation += 1
        self._shown = history

    def unread(self) -> dict[str, Any]:
        """Returns the run in the form that the page's program reads, without content of its files."""
        return {"name": self.name, "workdir": buckets.origin(self.workdir), "begin": 0, "keys": [], "rows": []}

    def _run(self, begin: int) -> dict[str, Any]:
        if self.history is not None:
            return page.run_data(self._shown or self.history, begin)
        if not (self.workdir / CONFIG).exists():
            return self.unread()
        # Before the end of the first iteration: configuration, devices, the first evaluation, and the end of the log.
        known = page.run_data(dataclasses.replace(of_lines(self.workdir, []), name=self.name))
        log = self.workdir / "logs" / "host-0.log"
        lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
        return known | {"log": "\n".join(lines[-LOG_LINES:])}

    def news(self, known: Known) -> tuple[dict[str, Any], SampledResponses]:
        """Returns the parts of the run, and its responses, that a page with `known` lacks."""
        generation, count, seen = known
        if generation != self._generation or not 0 <= count <= len(self._lines) + 1:
            count = seen = 0
        last = int(self.history.metrics["iteration"][-1]) if self.history else 0
        problem, run, sampled = self._problem, self.unread(), SampledResponses([], 0, 0, 0)
        try:
            run = self._run(count)
            if seen < last:
                sampled = samples.read(self.workdir, samples.MOST_ROWS, samples.MOST_BYTES, after=seen, last=last)
        except (OSError, ValueError) as error:
            problem = str(error).splitlines()[0]
        age = round(max(time.time() - self._written, 0.0), 1)
        generation = self._generation if self.history else NOTHING[0]  # without an iteration all is sent again
        return run | {"generation": generation, "age": age, "problem": problem, "seen": last}, sampled


class FollowedRuns:
    """Runs on one live page. They are read when a page asks, but at most once in `interval_s` seconds."""

    def __init__(self, workdirs: Sequence[pathlib.Path], interval_s: float = 1.0):
        self.runs = [FollowedRun(name, path) for name, path in zip(unique_names(workdirs), workdirs, strict=True)]
        self._lock, self._interval_s = threading.Lock(), interval_s
        self._read_at = -math.inf
        self._tables: dict[str, Any] = {"comparisons": [], "figures": []}
        self._version = 0  # of the tables

    def _read(self) -> None:
        if time.monotonic() - self._read_at < self._interval_s:
            return
        changed = [run.read() for run in self.runs]
        if any(changed):
            begun = [index for index, run in enumerate(self.runs) if run.history is not None]
            histories = with_distinct_benchmarks([run.history for run in self.runs if run.history is not None])
            for index, history in zip(begun, histories, strict=True):
                self.runs[index].show(history)
            self._tables = {
                "comparisons": page.comparison_data(comparison.compare_all(histories)),
                "figures": page.figure_data(curves.figures(histories), begun) if histories else [],
            }
            self._version += 1
        self._read_at = time.monotonic()

    def page(self) -> str:
        """Returns the page without data: its program requests everything that it shows."""
        return page.render({"live": True, "runs": [run.unread() for run in self.runs]})

    def news(self, known: Sequence[Known], version: int) -> dict[str, Any]:
        """Returns the parts of each run, and the tables, that a page does not have yet.

        `known` is what the page has of each run, `version` the version of its tables. A page with another number of
        runs gets everything.
        """
        if len(known) != len(self.runs):
            known, version = [NOTHING] * len(self.runs), -1
        with self._lock:
            self._read()
            found = [run.news(each) for run, each in zip(self.runs, known, strict=True)]
            tables = {} if version == self._version else self._tables
            answer = {"live": True, "version": self._version, "runs": [run for run, _ in found], **tables}
        sampled = [responses for _, responses in found]
        if any(each.rows for each in sampled):
            answer["responses"] = page.response_data(sampled)
        of_runs = zip(self.runs, sampled, strict=True)
        cut = [samples.description(run.name, each) for run, each in of_runs if len(each.rows) < each.responses]
        return answer | ({"shown": cut} if cut else {})
