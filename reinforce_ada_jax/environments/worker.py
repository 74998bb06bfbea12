"""One environment process: `python -m reinforce_ada_jax.environments.worker FD TIMEOUT_S REFERENCE`.

`environments.workers` starts and watches it. It writes on the socket (file descriptor FD), one JSON object a line:
{"ready": true, "tools"}, or an error if it cannot start; then an answer to each request, until the other end closes. A
request has only a problem ("reset"), or an episode. If the process does not have the episode's environment, it makes it
again from the turns so far.
"""

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.environments import loading
from reinforce_ada_jax.environments.episode import Episode, Invalid, schemas_of
from reinforce_ada_jax.isolation import child, messages

MAX_REPLY = messages.MAX_MESSAGE_BYTES - 1_000  # bytes of the messages of a reply


class Worker:
    def __init__(self, environment_class: type):
        self._class = environment_class
        self._episodes: dict[str, Episode] = {}
        self._file, self._output = "", os.dup(2)

    def _open_outputs(self, file: str) -> None:
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
        self._open_outputs(request["output"])
        for key in request["over"]:
            self._episodes.pop(key, None)
        try:
            is_reset = request["key"] is None
            reply = self._new(request).messages if is_reset else self._step(request)
        except BaseException as error:  # an environment that calls sys.exit has failed
            self._episodes.pop(request["key"] or "", None)
            return {"failure": child.described(error)[: child.MAX_TEXT]}
        if isinstance(reply, float):
            del self._episodes[request["key"]]
            return {"reward": reply}
        if (size := len(json.dumps(reply))) > MAX_REPLY:
            remedy = "shorten what reset(), step() and the tools return"
            return {"failure": f"messages of more than {MAX_REPLY:,} bytes ({size:,}): {remedy}"}
        return {"messages": reply}

    def _new(self, request: dict[str, Any]) -> Episode:
        return Episode(self._class, request["problem"], request["address"])

    def _step(self, request: dict[str, Any]) -> Any:
        """Answers the newest turn; if this process does not have the episode, it first repeats the earlier turns."""
        key = request["key"]
        if request["repeat"]:
            self._episodes[key] = self._new(request)
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


def main() -> None:
    descriptor, timeout_s, reference = sys.argv[1:]

    def load() -> tuple[dict[str, Any], child.Answer]:
        environment_class: Any = loading.load(reference)
        if hasattr(environment_class, "shut_down"):  # one that shares something between its episodes
            atexit.register(environment_class.shut_down)
        return {"tools": schemas_of(environment_class)}, Worker(environment_class).answer

    def limit_s(request: Mapping[str, Any]) -> float:
        return float(timeout_s) * (1 + len(request["turns"]))

    child.serve(int(descriptor), load, limit_s)


if __name__ == "__main__":
    main()
