"""Measured times of a run's checkpoints, and the expected time of the next one.

`saves.jsonl` in the work directory has a line for each complete checkpoint, so that a resumed run knows the rate at
once. Saves are measured during training; a save at the end of a run is not slower.
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax

from reinforce_ada_jax.config.settings import CheckpointConfig
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.files.durable import finished_lines

FILE = "saves.jsonl"
# Minutes between checkpoints if `checkpoint.minutes` is 0, and one takes longer than a preempted machine stays.
MINUTES = 10.0
NEWEST = 3  # saves that the estimate is made from: a bucket or a shared disk is not always as fast


@dataclasses.dataclass(frozen=True)
class Save:
    """One complete checkpoint: its iteration, the bytes of its arrays in all processes, and the seconds it took."""

    iteration: int
    bytes: int
    seconds: float


def read(workdir: pathlib.Path) -> list[Save]:
    """Returns the saves of a work directory; a line that is damaged is left out."""
    saves = []
    for line in finished_lines(workdir / FILE):
        with contextlib.suppress(ValueError, TypeError):
            saves.append(Save(**json.loads(line)))
    return saves


class SaveTimes:
    """Times of the saves of a run, measured by process 0; the others know none."""

    def __init__(self, workdir: pathlib.Path):
        """Reads the saves of earlier starts."""
        self._said = False
        self._file = workdir / FILE
        self._saves = read(workdir) if processes.is_writer() else []
        self._begun: tuple[int, int, float] | None = None

    def begin(self, iteration: int, size: int) -> None:
        """Notes that a save of this number of bytes begins."""
        self._begun = iteration, size, time.monotonic()

    def complete(self) -> None:
        """Notes that the save is written; the thread that writes calls this."""
        if self._begun is None or not processes.is_writer():
            return
        iteration, size, begin = self._begun
        save = Save(iteration, size, max(round(time.monotonic() - begin, 3), 0.001))
        self._saves.append(save)
        # The checkpoint is written, and the estimate needs no file before the next start.
        with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dataclasses.asdict(save)) + "\n")

    def expected_s(self, size: int) -> float:
        """Returns the seconds that a save of this number of bytes will take; 0 before the first save."""
        return max((size * save.seconds / save.bytes for save in self._saves[-NEWEST:]), default=0.0)

    def minutes(self, checkpoint: CheckpointConfig, size: int) -> float:
        """Returns the minutes after which a save is due; 0: time alone makes none due."""
        is_slow = self.expected_s(size) > checkpoint.notice_s > 0
        return checkpoint.minutes or (MINUTES if is_slow else 0.0)

    def slow(self, checkpoint: CheckpointConfig, size: int) -> str:
        """Returns a warning, once, if a save takes longer than a preempted machine stays; otherwise ""."""
        seconds = self.expected_s(size)
        if self._said or not seconds > checkpoint.notice_s > 0:
            return ""
        self._said = True
        return (
            f"A checkpoint takes about {seconds:.0f} s ({size / 1e9:.1f} GB), longer than checkpoint.notice_s "
            f"({checkpoint.notice_s:g} s). So a preemption saves no checkpoint. It costs the updates since the newest "
            f"one, which is written every {self.minutes(checkpoint, size):g} minutes, after an iteration."
        )


def num_bytes(arrays: Any) -> int:
    """Returns the bytes of arrays, in all processes together."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
