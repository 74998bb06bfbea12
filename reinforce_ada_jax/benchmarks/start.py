"""Seconds from the start of a command to its first sampled token, or until the server is ready, cold and warm.

A cold start has an empty folder of compiled programs; a warm one has those of the cold start before it. Each start is a
process of its own, on the packaged model. The time of the first token is that of an event which the engine records for
JAX's monitoring (`rollouts.FIRST_WINDOW_EVENT`); a run without a listener pays nothing for it.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from reinforce_ada_jax.benchmarks.options import log
from reinforce_ada_jax.sampling.rollouts import FIRST_WINDOW_EVENT

SIGN = "first token"
# Runs the command that the first argument names, and prints SIGN when it has sampled a token.
LISTENING = f"""
import runpy, sys
import jax
jax.monitoring.register_event_listener(
    lambda event, **_: print({SIGN!r}, flush=True) if event == {FIRST_WINDOW_EVENT!r} else None
)
del sys.argv[0]
runpy.run_module("reinforce_ada_jax." + sys.argv[0], run_name="__main__", alter_sys=True)
"""


# Arguments of Python, FOLDER for that of the results, and the beginning of the line that is waited for.
COMMANDS = {
    "train": (
        ["-c", LISTENING, "train", "--config=tiny", "--workdir=FOLDER", "--config.iterations=1", "--quiet"],
        SIGN,
    ),
    "evaluate": (
        ["-c", LISTENING, "evaluate", "--config=tiny", "--model=package:cipher", "--benchmarks=cipher:heldout",
         "--samples=1", "--output=FOLDER"],
        SIGN,
    ),
    "serve": (["-m", "reinforce_ada_jax.serve", "--model=package:cipher", "--dtype=float32", "--port=0"], "ready"),
}  # fmt: skip


def seconds_until(sign: str, command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Returns the seconds from the start of a process to a line of its output that begins with `sign`.

    The process then runs to its end; one that is "ready" is told to end.

    Raises:
      RuntimeError: it ends without that line.
    """
    begin, seconds = time.monotonic(), None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None  # a pipe
        for line in process.stdout:
            if seconds is None and line.startswith(sign):
                seconds = time.monotonic() - begin
                if sign == "ready":
                    process.terminate()
    if seconds is None:
        raise RuntimeError(f"{' '.join(command[1:])!r} ended with exit code {process.returncode} before {sign!r}.")
    return seconds


def measure(repeat: int) -> dict[str, Any]:
    """Returns medians and all seconds of cold and warm starts, by command; starts of the commands alternate."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in COMMANDS}
    for turn in range(repeat):
        for name, (arguments, sign) in COMMANDS.items():
            with tempfile.TemporaryDirectory() as folder:
                own = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
                own["XDG_CACHE_HOME"] = folder
                for kind, found in seconds[name].items():
                    results = str(pathlib.Path(folder) / kind)
                    command = [sys.executable, *(argument.replace("FOLDER", results) for argument in arguments)]
                    found.append(seconds_until(sign, command, own))
                    log(f"turn {turn + 1} of {repeat}: {name}, {kind} {found[-1]:.1f} s")
    return {
        name: {f"{kind}_s": float(np.median(found)) for kind, found in kinds.items()}
        | {f"all_{kind}_s": found for kind, found in kinds.items()}
        for name, kinds in seconds.items()
    }


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures as the flags say."""
    return measure(options.repeat or 3)
