"""Cost of a preemption by phase: seconds of work that are lost, and seconds from the signal to the end of the process.

A run gets SIGTERM in one phase after the other, and is started again each time. Each start is a new process
(`preemption_worker.py`), which prints its phases. The lost work is the work that the next start repeats: the time from
its first phase until it reaches the point where the signal came. The start itself is measured separately.
"""

import dataclasses
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from bench import command_line, inputs
from bench.options import log
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.training import save_times

# In the order of an iteration. The signal comes in the middle of those that count problems.
PHASES = ("collecting", "updating", "evaluating")
COUNTED = ("collecting", "evaluating")
WORKER = "bench.preemption_worker"


@dataclasses.dataclass(frozen=True, order=True)
class Moment:
    """Place in a run: finished iterations, the phase after them (its index in PHASES), and the share done of it."""

    iterations: int
    phase: int
    share: float


@dataclasses.dataclass(frozen=True)
class Started:
    """One start of the run that was told to end.

    Attributes:
      start_s: seconds from the start of the process to its first phase.
      lost_s: seconds from its first phase until it reached the point where the start before got its signal.
      at: point where it got its own signal.
      exit_s: seconds from the signal to the end of the process.
    """

    start_s: float
    lost_s: float
    at: Moment
    exit_s: float


def parsed(line: str) -> Moment | None:
    """Returns the moment of a line of a worker; None for other phases, and for the evaluation before the training."""
    iterations, _, text = line.partition(" ")
    name = re.split("[: ]", text.strip())[0]
    if name not in PHASES or (name == "evaluating" and int(iterations) == 0):
        return None
    done = re.search(r"(\d+)/(\d+)", text)
    return Moment(int(iterations), PHASES.index(name), int(done[1]) / int(done[2]) if done else 0.0)


def moments(lines: Iterator[str]) -> Iterator[Moment]:
    """Yields the moments of a worker's lines."""
    return (moment for moment in map(parsed, lines) if moment is not None)


def run_until(command: Sequence[str], phase: str, ended_at: Moment | None) -> Started:
    """Starts a run, waits until it reaches `ended_at`, and sends SIGTERM the next time that it is in `phase`.

    Raises:
      RuntimeError: it ended without this signal, or with another exit code than RESTART.
    """
    begin, first, reached = time.monotonic(), 0.0, 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # a pipe
        for moment in moments(process.stdout):
            now = time.monotonic()
            first = first or now
            if ended_at is None or moment >= ended_at:
                reached = reached or now
            if reached and PHASES[moment.phase] == phase and (moment.share >= 0.5 or phase not in COUNTED):
                signalled = time.monotonic()
                process.send_signal(signal.SIGTERM)
                process.stdout.read()
                if process.wait() == RESTART:
                    return Started(first - begin, reached - first, moment, time.monotonic() - signalled)
                break
    raise RuntimeError(f"A run ended with exit code {process.returncode}, and not of a signal in {phase!r}.")


def measure(config: Config, repeat: int) -> dict[str, Any]:
    """Returns the cost by phase: medians, and all seconds; and the times of starts and checkpoints."""
    # Every second iteration is evaluated, and the run does not end by itself.
    config = config_lib.replaced(config, inputs.QUIET | {"evaluation.every": 2, "iterations": 10**6})
    phases = [phase for phase in PHASES if phase != "evaluating" or config.evaluation.benchmarks]
    ended: list[Started] = []
    with tempfile.TemporaryDirectory() as folder:
        workdir, file = pathlib.Path(folder) / "run", pathlib.Path(folder) / "config.json"
        file.write_text(config_lib.to_json(config), encoding="utf-8")
        command = [sys.executable, "-m", WORKER, str(file), str(workdir)]
        for phase in [*phases * repeat, phases[0]]:  # the last one shows what the one before it lost
            started = run_until(command, phase, ended[-1].at if ended else None)
            log(
                f"{phase}: {started.lost_s:.1f} s of work done again, {started.exit_s:.1f} s from the signal to the end"
            )
            ended.append(started)
        saves = save_times.read(workdir)
    result: dict[str, Any] = {}
    for first, phase in enumerate(phases):
        starts = range(first, repeat * len(phases), len(phases))
        lost, exits = [ended[number + 1].lost_s for number in starts], [ended[number].exit_s for number in starts]
        result[phase] = {
            "lost_s": statistics.median(lost), "exit_s": statistics.median(exits), "all_lost_s": lost,
            "all_exit_s": exits,
        }  # fmt: skip
    return result | {
        "start_s": statistics.median(started.start_s for started in ended[1:]),
        "save_s": statistics.median(save.seconds for save in saves),
        "save_bytes": saves[-1].bytes,
    }


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures the configuration of the flags.

    Raises:
      ValueError: there is none.
    """
    return measure(inputs.config_of(options), options.repeat or 3)


if __name__ == "__main__":
    command_line.start("preemption", run, before=command_line.leave_the_device)
