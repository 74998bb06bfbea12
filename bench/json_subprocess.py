"""A subprocess that answers JSON requests, one a line: baselines, and our parts whose memory is measured alone.

The code on its side is `baselines/json_worker.py`.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

# Time that a process has to end by itself.
END_S = 60.0


class JsonSubprocess:
    """The process, from its start to `close`."""

    def __init__(self, name: str, command: Sequence[str], **environment: str):
        """Starts it with all cores: NPROC is not inherited.

        Raises:
          ValueError: the interpreter doesn't start.
        """
        self.name = name
        inherited = {key: value for key, value in os.environ.items() if key != "NPROC"}
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=inherited | environment
            )
        except OSError as error:
            raise ValueError(f"--against_python={command[0]} does not start: {error.strerror}.") from error
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    def ask(self, command: str, **request: Any) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
          RuntimeError: the process ended.
        """
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"command": command, **request}), file=self._stdin, flush=True)
            answer = self._stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}; its messages are above.")
        return json.loads(answer)

    def run(self, turn: int) -> dict[str, Any]:
        """Returns the answer to "run"; the request is the same in every turn."""
        del turn
        return self.ask("run")

    def load_baseline(self, **request: Any) -> dict[str, Any]:
        """Returns the answer to "load".

        Raises:
          ValueError: the process ended, probably because its environment lacks a package.
        """
        try:
            return self.ask("load", **request)
        except RuntimeError as error:
            self.close()
            raise ValueError(
                f"{error} --against_python must name an interpreter that has {self.name}. make parity makes one with "
                "transformers: .venv-parity/bin/python."
            ) from error

    def close(self) -> None:
        """Closes the input of the process, so that it ends; kills it if it still runs after `END_S` seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
