"""Sandboxes where the system refuses namespaces, as many containers do."""

import json
import os
import pathlib
import sys

import pytest

from tests.running import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are namespaces and filters on Linux only")

# The filter of programs refuses unshare() to this process. Its own programs then run without namespaces.
WITHOUT_NAMESPACES = """
import json, os, sys
from reinforce_ada_jax.isolation import sandbox, seccomp
from reinforce_ada_jax.isolation.sandbox import Limits, Program

seccomp.install(signals=True)
limits = Limits(processor_s=2, wall_s=10.0, memory_bytes=2**28, files_bytes=2**20, processes=8)
text = b"import os, socket\\nfor f in (socket.socket, lambda: os.kill(os.getppid(), 9)):\\n"
text += b"    try:\\n        f()\\n    except PermissionError as e:\\n        print(e.errno)"
try:
    outcome = sandbox.run([Program(["program.py"], {"program.py": text})], limits)
    found = {"output": outcome.output.decode(), "code": outcome.code}
except sandbox.SandboxFailed as error:
    found = {"error": str(error)}
print(json.dumps({"weakness": sandbox.weakness(), **found}))
"""


def others_may_run(path):
    """Returns True if an ordinary user may run a file."""
    reached = {each for way in (path, os.path.realpath(path)) for each in (way, *map(str, pathlib.Path(way).parents))}
    return all(os.stat(each).st_mode & 0o001 for each in reached)


def test_without_namespaces_the_filter_and_the_limits_remain():
    found = json.loads(run_python("-c", WITHOUT_NAMESPACES).stdout)
    assert found.pop("weakness") == "[Errno 1] unshare: Operation not permitted"
    if os.getuid() == 0 and not others_may_run(sys.executable):
        assert found == {"error": f"[Errno 13] Permission denied: {sys.executable!r}"}  # it never runs as root
    else:
        assert found == {"output": "1\n1\n", "code": 0}


# macOS lets a shell have an infinite limit of files, which `os.closerange` can't take.
ENDLESS_FILES = """
import resource
from reinforce_ada_jax.isolation import sandbox
from reinforce_ada_jax.isolation.sandbox import Limits, Program

limit = resource.getrlimit
resource.getrlimit = lambda number: (2**63 - 1,) * 2 if number == resource.RLIMIT_NOFILE else limit(number)
limits = Limits(processor_s=2, wall_s=10.0, memory_bytes=2**28, files_bytes=2**20, processes=8)
print(sandbox.run([Program(["-S", "-c", "print(1)"])], limits).output.decode())
"""


def test_a_program_runs_where_the_number_of_open_files_has_no_limit():
    assert run_python("-c", ENDLESS_FILES).stdout.strip() == "1"
