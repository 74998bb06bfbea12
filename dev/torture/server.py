"""A server of the built-in model, as a part of the torture attacks it."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

from dev.torture.bench import Bench
from tests.running import ROOT, environment


@contextlib.contextmanager
def ready(bench: Bench, *options: str, most_files: int | None = None) -> Iterator[tuple[subprocess.Popen, int]]:
    """Starts `serve` with options, at most `most_files` of them open; yields its process and port when it is ready."""
    command = [sys.executable, "-m", "reinforce_ada_jax.serve", "--port=0", "--dtype=float32", *options]
    if most_files is not None:
        command = ["sh", "-c", f'ulimit -n {most_files}; exec "$@"', "sh", *command]
    with (bench.scratch / "server.txt").open("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            said = ""
            for line in process.stdout:
                said += line
                if line.startswith("ready"):
                    break
            yield process, int(re.search(r"127\.0\.0\.1:(\d+)", said)[1])
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
