"""`make torture` in small: every part tries something and loses nothing; and what is lost is seen."""

import os
import re

import pytest

from tests.running import run_python

LEAKS = """
import pathlib, subprocess, sys, tempfile
from dev.torture import bench as bench_lib
bench_lib._LEFT_S = 1.0
for leak in ("", "process", "orphan", "file", "descriptor"):
    with bench_lib.Bench("leaks", 0, 1.0) as bench:
        with bench.case("fine"):
            pass
        with bench.case("wrong"):
            assert 1 + 1 == 3
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        started = [subprocess.Popen(sleep)] if leak == "process" else []
        if leak == "orphan":
            subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({sleep!r})"], check=True)
        if leak == "file":
            pathlib.Path(tempfile.gettempdir(), "left").touch()
        if leak == "descriptor":
            opened = open(__import__("os").devnull)
    print(leak, bench.tried, [lost.partition(" are left")[0] for lost in bench.lost])
    for pid in bench_lib._running():
        __import__("os").kill(pid, 9)
"""


@pytest.mark.slow
def test_nothing_is_lost():
    done = run_python("-m", "dev.torture", "--minutes=4", "--seed=1", timeout=1800, env=dict(os.environ))
    rows = re.findall(r"^(\w+) +(\d+) +(\d+) +(\d+) +\d+$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout
    names = {"kills", "drawers", "checkpoints", "disk", "folders", "files", "parsers", "commands", "graders", "clients"}
    names |= {"openai", "tinker", "page"}
    assert {name for name, *_ in rows} == names
    for _, tried, survived, lost in rows:
        assert int(tried) >= 2 and tried == survived and lost == "0"


@pytest.mark.slow
def test_losses_and_leaks_are_seen():
    done = run_python("-c", LEAKS, timeout=120, env=dict(os.environ))
    assert done.stdout.splitlines() == [
        " 3 ['wrong: AssertionError: ']",
        "process 3 ['wrong: AssertionError: ', 'what is left: AssertionError: processes']",
        "orphan 3 ['wrong: AssertionError: ', 'what is left: AssertionError: processes']",
        "file 3 ['wrong: AssertionError: ', 'what is left: AssertionError: temporary files']",
        "descriptor 3 ['wrong: AssertionError: ', 'what is left: AssertionError: file descriptors']",
    ], done.stderr
