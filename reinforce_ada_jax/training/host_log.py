"""Log of each process of a run, logs/host-K.log in the work directory: the lines that it prints, with the time.

A new start appends. The progress line of a terminal is left out, and so is output that is not written by Python.
"""

import contextlib
import datetime
import os
import pathlib
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

import jax

from reinforce_ada_jax.distributed import processes


class _Copied:
    """An output whose lines are copied to a log."""

    def __init__(self, output: Any, log: TextIO):
        self._output, self._log, self._line = output, log, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def write(self, text: str) -> int:
        """Writes to the output, and finished lines to the log."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            # The text before was a progress line, or the spaces that removed it.
            self.add(line.rpartition("\r")[2])
        return self._output.write(text)

    def add(self, line: str) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").removesuffix("+00:00")
        with contextlib.suppress(OSError, ValueError):  # a full disk ends the run where results are lost, not here
            if line.strip():
                self._log.write(f"{now} {line}\n")


@contextlib.contextmanager
def copying(workdir: pathlib.Path, begin: str) -> Iterator[None]:
    """Copies what this process prints to its log, after the line `begin`; adds the error that ends the block."""
    file = workdir / "logs" / f"host-{processes.index()}.log"
    file.parent.mkdir(exist_ok=True)
    outputs = sys.stdout, sys.stderr
    with file.open("a", encoding="utf-8", buffering=1) as log:
        sys.stdout, sys.stderr = (_Copied(output, log) for output in outputs)
        devices = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
        process = f"process {processes.index()} of {processes.total()}"
        add(f"{process}, {os.getpid()} on {socket.gethostname()} with {devices}: {begin}")
        try:
            yield
        except Exception:
            for line in traceback.format_exc().splitlines():
                add(line)
            raise
        finally:
            sys.stdout, sys.stderr = outputs


def add(text: str) -> None:
    """Writes a line to the log alone, if there is one."""
    if isinstance(sys.stderr, _Copied):
        sys.stderr.add(text)
