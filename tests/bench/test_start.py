"""Starts of commands that `benchmark` and `bench.start` measure: the line that is waited for, and second starts."""

import os
import sys

import pytest

from bench import start
from reinforce_ada_jax.benchmark import seconds_until


def test_the_line_is_waited_for():
    program = "import time; time.sleep(0.05); print('first token', flush=True); time.sleep(0.2)"
    assert 0.05 < seconds_until("first token", [sys.executable, "-c", program], os.environ) < 5


def test_a_server_is_told_to_end():
    program = "import time; print('ready       after 1.0 s', flush=True); time.sleep(600)"
    assert seconds_until("ready", [sys.executable, "-c", program], os.environ) < 5


def test_an_end_without_the_line_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 3 before 'ready'"):
        seconds_until("ready", [sys.executable, "-c", "raise SystemExit(3)"], os.environ)


@pytest.mark.slow
def test_second_starts_are_quicker():
    found = start.measure(1)
    assert list(found) == ["train", "evaluate", "serve"]
    for seconds in found.values():
        assert 0 < seconds["warm_s"] < seconds["cold_s"]
