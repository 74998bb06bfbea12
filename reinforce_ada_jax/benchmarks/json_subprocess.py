"""A process that is asked in JSON objects, one a line, and answers each with one: baselines, and parts of ours whose
memory is to be their own."""

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any


class JsonSubprocess:
    """The process, from its start to `close`."""

    def __init__(self, name: str, command: Sequence[str], **environment: str):
        """Starts it, with all cores: NPROC is not handed on.

        Raises:
          ValueError: the interpreter doesn't start.
        """
        self.name = name
        inherited = {key: value for key, value in os.environ.items() if key != "NPROC"}
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=inherited | environment
            )
        except OSError as error:
            raise ValueError(f"--against_python={command[0]} does not start: {error.strerror}.") from error

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
          RuntimeError: the process ended.
        """
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}; its messages are above.")
        return json.loads(answer)

    def load(self, **request: Any) -> dict[str, Any]:
        """The answer to the first request, of a baseline.

        Raises:
          ValueError: the process ended, probably because its environment lacks what it needs.
        """
        try:
            return self.ask(command="load", **request)
        except RuntimeError as error:
            self.close()
            raise ValueError(
                f"{error} --against_python must name an interpreter that has {self.name}, such as "
                ".venv-parity/bin/python (make parity)."
            ) from error

    def close(self) -> None:
        """Ends the process, which takes the end of its input as the end of its work."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)
