"""Speed and latency of grading at another commit and here, measured in turns.

    .venv/bin/python dev/grading_speed.py c8eaba3^        # before the protocol of bounded lines between pool and worker

Each turn is a process that grades the same answers with two workers: all at once for the speed, one by one for the
latency. The ratios are medians over the turns, so that another load on the machine falls on both.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import json, statistics, time
from reinforce_ada_jax.rewards import math_answer
from reinforce_ada_jax.rewards.workers import VerifierPool

pairs = [(f"So the answer is \\\\boxed{{{number}}}.", str(number + number % 2)) for number in range(2000)]
with VerifierPool(math_answer.grade, workers=2, time_limit_s=6.0) as pool:
    pool.grade_all(pairs[:100])
    begin = time.perf_counter()
    pool.grade_all(pairs)
    rate, single = len(pairs) / (time.perf_counter() - begin), []
    for pair in pairs[:300]:
        begin = time.perf_counter()
        pool.grade_all([pair])
        single.append(time.perf_counter() - begin)
print(json.dumps([rate, 1000 * statistics.median(single)]))
"""


def measured(folder: pathlib.Path) -> list[float]:
    """Returns (gradings per second, milliseconds of one) of the package in a folder."""
    env = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        before = pathlib.Path(scratch) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(before), arguments.commit], check=True)
        try:
            turns = [(measured(before), measured(ROOT)) for _ in range(arguments.turns)]
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    for place, name in enumerate(("gradings/s", "ms of one")):
        old, new = (statistics.median(turn[side][place] for turn in turns) for side in (0, 1))
        ratios = sorted(new[place] / old[place] for old, new in turns)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"{name:10} {old:10.2f} before {new:10.2f} here   ratio {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
