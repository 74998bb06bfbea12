"""Torture of the commands by kills, damage, hostile files, full disks and rude clients; losses are counted.

    make torture                                                        # at most 30 minutes
    .venv/bin/python -m dev.torture --only=kills,disk --minutes=5 --seed=7

Prints a table, test -> tried / survived / lost, and the cases that were lost, and ends with code 1 if there are any. A
case is lost where the result differs from that of an undisturbed run by a bit, an exit code is not the documented one,
a message has more than a line, or a process, a file descriptor or a temporary file is left. The cases are a function of
the seed; how many are tried depends on the time.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # of this process, which reads the checkpoints

PROGRAMS = tempfile.mkdtemp(prefix="torture-programs-")  # of the compiler: killed processes may leave halves of some
os.environ["REINFORCE_ADA_TEST_PROGRAMS"] = PROGRAMS

from dev.torture import drawers, floods, intruders, runs  # noqa: E402  (what jax and the tests read is set above)
from dev.torture.bench import Bench  # noqa: E402

# Each with its share of the time.
PARTS = {
    "kills": (runs.kills, 12), "drawers": (drawers.drawers, 4),
    "checkpoints": (runs.checkpoints, 4), "disk": (runs.disk, 3),
    "folders": (intruders.folders, 4), "files": (intruders.files, 1), "parsers": (intruders.parsers, 2),
    "commands": (intruders.commands, 2), "graders": (intruders.graders, 1), "clients": (intruders.clients, 2),
    "openai": (floods.openai, 2), "tinker": (floods.tinker, 2), "page": (floods.page, 1),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="time in which new cases are begun")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose among {', '.join(PARTS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A quarter is kept for the last case of each part, which may begin just before the end.
    deadline, results = time.monotonic() + 45 * arguments.minutes, {}
    for place, name in enumerate(chosen):
        part, share = PARTS[name]
        shares = share / sum(PARTS[later][1] for later in chosen[place:])
        with Bench(name, arguments.seed, shares * max(0.0, deadline - time.monotonic())) as bench:
            part(bench)
        results[name] = bench
        print(f"{name}: {bench.tried} tried, {len(bench.lost)} lost", file=sys.stderr, flush=True)
    print(f"\n{'test':12} {'tried':>6} {'survived':>9} {'lost':>5} {'seconds':>8}   (seed {arguments.seed})")
    for name, bench in results.items():
        print(f"{name:12} {bench.tried:6} {bench.tried - len(bench.lost):9} {len(bench.lost):5} {bench.seconds:8.0f}")
    for name, bench in results.items():
        for lost in bench.lost:
            print(f"\nlost in {name}: {lost}")
    return 1 if any(bench.lost for bench in results.values()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        shutil.rmtree(PROGRAMS)
