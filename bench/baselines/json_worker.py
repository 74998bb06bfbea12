"""Worker side of a JSON subprocess, and the memory of its process. Standard library only: any interpreter can run it.

Requests are JSON objects, one a line, on stdin; each has one answer on stdout. {"command": "load", ...} makes the
worker and is answered by its `describe()`; every other command calls the worker's method of that name. The process ends
with its input.
"""

import json
import os
import pathlib
import re
import sys


def resident_bytes(name: str) -> int:
    """Returns Linux's count for this process: VmRSS now, VmHWM the most since `reset_peak`."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[0])


def reset_peak() -> None:
    """Lets VmHWM count from now on."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def serve(load):
    """Answers requests until there are no more, and returns the worker that `load(**request)` made, or None."""
    # Libraries print on stdout as they please, so the answers get a copy of it and everything else goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        if command == "load":
            worker = load(**request)
            answer = worker.describe()
        else:
            answer = getattr(worker, command)(**request)
        print(json.dumps(answer), file=answers, flush=True)
    return worker
