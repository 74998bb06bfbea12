"""Subprocesses that answer JSON requests: their end."""

import sys

from bench import json_subprocess
from bench.json_subprocess import JsonSubprocess
from tests import standins


def test_a_process_that_does_not_end_is_killed(monkeypatch):
    standins.constants(monkeypatch, json_subprocess, END_S=0.1)
    process = JsonSubprocess("stuck", [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"])
    process._stdout.readline()
    process.close()
    assert process._process.returncode == -9
    process.close()  # a second time it is there no more
