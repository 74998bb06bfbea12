"""`bench.preemption`: where a run is, by its own words, and what is measured when it is told to end."""

import json
import subprocess
import sys

import pytest
from absl import flags

from bench import options, preemption
from bench.preemption import Moment
from tests.running import ROOT, environment


@pytest.mark.parametrize(
    ("line", "moment"),
    [
        ("3 collecting: 8/32 prompts, 120 responses, 900 tokens/s\n", Moment(3, 0, 0.25)),
        ("3 updating\n", Moment(3, 1, 0.0)),
        ("3 evaluating heldout: 16/32 problems, 40 responses\n", Moment(3, 2, 0.5)),
        ("0 evaluating heldout: 16/32 problems, 40 responses\n", None),  # before the training
        ("0 compiling update (3 of 4)\n", None),
    ],
)
def test_the_moments_of_a_run_are_in_its_order(line, moment):
    assert preemption.parsed(line) == moment
    assert moment is None or Moment(2, 2, 1.0) < moment < Moment(4, 0, 0.0)


# A run that begins at the iteration of its first argument, and ends after a signal with the second as exit code.
SCRIPTED = """
import signal, sys, time

def end(*_):
    time.sleep(0.2)
    sys.exit(int(sys.argv[2]))

signal.signal(signal.SIGTERM, end)
print("0 compiling update (1 of 2)", flush=True)
time.sleep(0.1)
for iteration in range(int(sys.argv[1]), 9):
    for text in ("collecting: 1/4 prompts", "collecting: 2/4 prompts", "collecting: 4/4 prompts", "updating"):
        print(iteration, text, flush=True)
        time.sleep(0.1)
"""


def test_the_work_of_a_start_that_repeats_is_lost():
    command = [sys.executable, "-c", SCRIPTED]
    first = preemption.run_until([*command, "1", "75"], "collecting", None)
    assert first.at == Moment(1, 0, 0.5) and first.lost_s == 0
    assert first.exit_s >= 0.2 and first.start_s >= 0.1  # what the script sleeps, however slow the machine is
    # It begins the iteration again, and is told to end in the updates after it; the next start has them.
    second = preemption.run_until([*command, "1", "75"], "updating", first.at)
    assert second.at == Moment(1, 1, 0.0) and second.lost_s > 0
    third = preemption.run_until([*command, "2", "75"], "collecting", second.at)
    assert third.at == Moment(2, 0, 0.5) and third.lost_s == 0


def test_a_run_that_ends_otherwise_is_an_error():
    with pytest.raises(RuntimeError, match="A run ended with exit code 1, and not of a signal in 'collecting'"):
        preemption.run_until([sys.executable, "-c", SCRIPTED, "1", "1"], "collecting", None)
    with pytest.raises(RuntimeError, match="exit code 0, and not of a signal in 'evaluating'"):
        preemption.run_until([sys.executable, "-c", SCRIPTED, "8", "75"], "evaluating", None)


def test_a_configuration_is_needed():
    values = options.define_flags(flags.FlagValues())
    values(["bench"])
    with pytest.raises(ValueError, match="--config is missing"):
        preemption.run(values)


@pytest.mark.slow
def test_the_command_measures_each_phase_of_a_run(tmp_path):
    settings = {"evaluation.samples": 1, "model.numerics": "invariant", "sampling.slots": 32}
    flags = ["--config=configs/tiny.py", *(f"--config.{key}={value}" for key, value in settings.items())]
    command = ["-m", "bench.preemption", *flags, "--repeat=1", f"--json={tmp_path / 'out.json'}"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found) == ["benchmark", "collecting", "updating", "evaluating", "start_s", "save_s", "save_bytes"]
    for phase in preemption.PHASES:
        assert len(found[phase]["all_lost_s"]) == len(found[phase]["all_exit_s"]) == 1
        assert 0 <= found[phase]["lost_s"] < 60 and 0 < found[phase]["exit_s"] < 60
    assert found["save_bytes"] > 107_392 * 4
