"""Seconds from the start of a command to its first sampled token, or until the server is ready, cold and warm.

The commands are `train`, `evaluate` and `serve`, with the packaged model. A cold start has an empty folder of compiled
programs; a warm start has the programs of the cold start before it. `reinforce_ada_jax.benchmark` measures the starts
of a user's own run.
"""

import os
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
from absl import flags

from bench import command_line
from bench.options import log
from reinforce_ada_jax.benchmark import FIRST_TOKEN, LISTENING, seconds_until

# Arguments of Python, with FOLDER for the folder of results, and the beginning of the line that ends the measurement.
COMMANDS = {
    "train": (
        ["-c", LISTENING, "train", "--config=tiny", "--workdir=FOLDER", "--config.iterations=1", "--quiet"],
        FIRST_TOKEN,
    ),
    "evaluate": (
        ["-c", LISTENING, "evaluate", "--config=tiny", "--model=package:cipher", "--benchmarks=cipher:heldout",
         "--samples=1", "--output=FOLDER"],
        FIRST_TOKEN,
    ),
    "serve": (["-m", "reinforce_ada_jax.serve", "--model=package:cipher", "--dtype=float32", "--port=0"], "ready"),
}  # fmt: skip


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


if __name__ == "__main__":
    command_line.start("start", run)
