"""One environment process: `python -m reinforce_ada_jax.environments.worker FD TIMEOUT_S REFERENCE`.

`environments.workers` starts and watches it. It writes on the socket (file descriptor FD), one JSON object a line:
{"ready": true, "tools"}, or an error if it cannot start; then an answer to each request, until the other end closes. A
request names a problem alone ("reset"), or an episode, whose environment the process has or makes again from the turns
so far.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

from reinforce_ada_jax.environments import loading
from reinforce_ada_jax.environments.episode import Episode, Invalid, schemas_of
from reinforce_ada_jax.isolation import child, messages, process_tree

ADDRESS_SPACE_BYTES = 4 * 2**30
# The parent kills at the time limit. If the parent is gone, the kernel kills this much later, as in rewards/worker.py.
ORPHAN_GRACE_S = 5.0
MAX_TEXT, MAX_LINE = 8_000, 500  # characters of a failure, and of one line that says why there is no environment
MAX_REPLY = messages.MAX_MESSAGE_BYTES - 1_000  # bytes of the messages of a reply


def _one_line(error: BaseException) -> str:
    if isinstance(error, Invalid):
        return str(error)
    return " ".join(traceback.format_exception_only(error)[-1].split())


def _failure(error: BaseException) -> str:
    """Returns the exception in one line, and below it the frames of the user's file."""
    ours = os.path.dirname(__file__)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    return "\n".join([_one_line(error), *traceback.format_list(frames)]).rstrip()[:MAX_TEXT]


class Worker:
    """Episodes of one process."""

    def __init__(self, environment_class: type):
        self._class = environment_class
        self._episodes: dict[str, Episode] = {}
        self._file, self._output = "", os.dup(2)

    def open_outputs(self, file: str) -> None:
        """Directs stdout and stderr to a file ("": as before), also where an episode has closed them."""
        if file != self._file:
            with contextlib.suppress(OSError):  # the disk is full, say
                with open(file, "ab") as output:
                    os.dup2(output.fileno(), self._output)
                self._file = file
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(self._output, descriptor)
            if getattr(sys, name).closed:
                setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request; "failure" where the environment failed."""
        for key in request["over"]:
            self._episodes.pop(key, None)
        try:
            if request["key"] is None:
                return {"messages": Episode(self._class, request["problem"], request["address"]).messages}
            reply = self._step(request)
        except BaseException as error:  # an environment that calls sys.exit has failed
            self._episodes.pop(request["key"] or "", None)
            return {"failure": _failure(error)}
        if isinstance(reply, float):
            del self._episodes[request["key"]]
            return {"reward": reply}
        if len(json.dumps(reply)) > MAX_REPLY:
            return {"failure": f"messages of more than {MAX_REPLY:,} bytes"}
        return {"messages": reply}

    def _step(self, request: dict[str, Any]) -> Any:
        """Answers the newest turn; a process that has not the episode repeats the earlier ones."""
        key = request["key"]
        if request["repeat"]:
            self._episodes[key] = Episode(self._class, request["problem"], request["address"])
            if self._episodes[key].messages != request["first"]:
                raise Invalid(
                    "reset() returned other messages than at the start: they may depend on the problem only, not on "
                    "rng or time"
                )
        episode, (*earlier, newest) = self._episodes[key], request["turns"]
        for text, expected in earlier:
            if episode.answer(text) != expected:
                raise Invalid(
                    "step() answered otherwise when it was repeated in a new process: it must be a function of the "
                    "conversation and rng"
                )
        return episode.answer(newest[0])


def _serve(connection: socket.socket, reference: str, timeout_s: float) -> None:
    try:
        environment_class = loading.load(reference)
        tools = schemas_of(environment_class)
    except BaseException as error:
        trace = traceback.format_exc()[-MAX_TEXT:]
        connection.sendall(messages.to_line({"error": _one_line(error)[:MAX_LINE], "trace": trace}))
        return
    connection.sendall(messages.to_line({"ready": True, "tools": tools}))
    worker = Worker(environment_class)
    with connection.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout_s * (1 + len(request["turns"])) + ORPHAN_GRACE_S)
            worker.open_outputs(request["output"])
            answer = worker.answer(request)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.sendall(messages.to_line({"request": request["request"], **answer}))
    if hasattr(environment_class, "shut_down"):  # one that shares something between its episodes
        environment_class.shut_down()


def main() -> None:
    descriptor, timeout_s, reference = sys.argv[1:]
    process_tree.supervise(int(descriptor))
    child.confine(ADDRESS_SPACE_BYTES)
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            _serve(connection, reference, float(timeout_s))
        except ConnectionError:
            pass  # the parent died


if __name__ == "__main__":
    main()
