"""Measures what a run would take on this machine: its start, its rollouts, its updates and its memory.

    python -m reinforce_ada_jax.benchmark --config=configs/tiny.py
    python -m reinforce_ada_jax.benchmark --config=configs/qwen_1p5b.py --config.model.path=HF_DIR --json=FILE

The command runs `train` twice in a temporary folder, for --iterations iterations each. The first run begins without
compiled programs (cold). The second one has the programs of the first (warm). Nothing is evaluated, and nothing is
reported elsewhere. The figures of collections and updates are medians over both runs, without their first iterations.
docs/performance.md compares measurements with other programs.
"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections.config_flags import config_flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import write_atomically

FIRST_TOKEN = "first token"
# Runs the command that the first argument names, and prints FIRST_TOKEN when it has sampled a token.
LISTENING = f"""
import runpy, sys
import jax
from reinforce_ada_jax.sampling.rollouts import FIRST_WINDOW_EVENT
jax.monitoring.register_event_listener(
    lambda event, **_: print({FIRST_TOKEN!r}, flush=True) if event == FIRST_WINDOW_EVENT else None
)
del sys.argv[0]
runpy.run_module("reinforce_ada_jax." + sys.argv[0], run_name="__main__", alter_sys=True)
"""
SETTINGS = {"evaluation.benchmarks": "()", "logging.trackers": ""}


def seconds_until(sign: str, command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Returns the seconds from the start of a process to a line of its output that begins with `sign`.

    The process then runs to its end. With the sign "ready" it is a server, and gets SIGTERM.

    Raises:
      RuntimeError: it ends without that line, or with an exit code other than 0; the message has its last output.
    """
    begin, seconds, said = time.monotonic(), None, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None  # a pipe
        try:
            for line in process.stdout:
                said.append(line)
                if seconds is None and line.startswith(sign):
                    seconds = time.monotonic() - begin
                    if sign == "ready":
                        process.terminate()
        except KeyboardInterrupt:  # the folder of the process is removed next
            process.kill()
            raise
    if seconds is None or (process.returncode and sign != "ready"):
        text = f"{' '.join(command[1:])!r} ended with exit code {process.returncode}"
        raise RuntimeError(f"{text}{'' if seconds else f' before {sign!r}'}: {''.join(said[-5:])}")
    return seconds


def settings_of(values: flags.FlagValues) -> list[str]:
    """Returns --config and the settings that were changed, as flags of `train`, however the user has written them."""
    config = values["config"]
    changed = config_flags.get_override_values(config)
    return [f"--config={config_flags.get_config_filename(config)}", *(f"--config.{k}={v}" for k, v in changed.items())]


def measure(settings: Sequence[str], iterations: int) -> dict[str, Any]:
    """Trains twice with `settings`, flags of `train`; returns the figures. Raises RuntimeError if a run fails."""
    flags_of_train = [*settings, f"--config.iterations={iterations}", "--quiet"]
    flags_of_train += [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags_of_train.append(f"--config.logging.compilation_cache={folder}/programs")
        environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
        taken = []
        for kind in ("cold", "warm"):
            workdir = pathlib.Path(folder) / kind
            command = [sys.executable, "-c", LISTENING, "train", *flags_of_train, f"--workdir={workdir}"]
            result[f"first_token_{kind}_s"] = seconds_until(FIRST_TOKEN, command, environment)
            # The first iteration compiles.
            taken += map(json.loads, (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:])
    unit = 1 if sys.platform == "darwin" else 1024
    result |= {
        "tokens_per_s": statistics.median(each["collection/tokens"] / each["time/collect_s"] for each in taken),
        "collect_s": statistics.median(each["time/collect_s"] for each in taken),
        "update_s": statistics.median(each["time/update_s"] for each in taken),
        "slot_utilisation": statistics.median(each["collection/slot_utilisation"] for each in taken),
        "process_peak_bytes": unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }
    device_bytes = max(each["memory/peak_bytes"] for each in taken)
    return result | ({"device_peak_bytes": device_bytes} if device_bytes else {})


def main(settings: Sequence[str], iterations: int, file: str | None) -> None:
    """Measures, prints a line for each figure, and writes them into `file`."""
    with cli.user_input():
        if file:
            check_output("--json", file, folder=False)
    try:
        result = measure(settings, iterations)
    except RuntimeError as error:
        cli.fail(f"{error}\nIts own messages are above.", cli.STOPPED)
    for name, value in result.items():
        print(f"{name:<24}{value:,.2f}" if isinstance(value, float) else f"{name:<24}{value:,}")
    if file:
        with buckets.output(file) as local:
            local.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(local, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    CONFIG = cli.define_config()
    ITERATIONS = flags.DEFINE_integer("iterations", 3, "Iterations of each of the two runs, at least 2.", lower_bound=2)
    JSON = flags.DEFINE_string("json", None, "File for the figures.")

    def run() -> None:
        cli.resolved(CONFIG)  # reports a mistake before anything starts
        main(settings_of(flags.FLAGS), ITERATIONS.value, JSON.value)

    cli.run(run)
