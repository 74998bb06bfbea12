"""A training that prints its phases on standard output: the process that `preemption.py` ends.

python -m bench.preemption_worker CONFIG_JSON WORKDIR
"""

import contextlib
import pathlib
import sys
from collections.abc import Mapping

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.evaluation.evaluator import load_evaluator
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.training import loop, startup


def say_phases(progress: Progress, iterations: int) -> None:
    """Lets a progress line print "ITERATIONS TEXT" for each phase, with the number of iterations finished by then."""
    phase, count = progress.phase, progress.iteration

    def said(text: str) -> None:
        print(iterations, text, flush=True)
        phase(text)

    def counted(numbers: Mapping[str, str]) -> None:
        nonlocal iterations
        iterations += 1
        count(numbers)

    progress.phase, progress.iteration = said, counted


def main(config: pathlib.Path, workdir: pathlib.Path) -> None:
    """Trains, or resumes, and ends as `train` does."""
    with contextlib.ExitStack() as stack:
        checked = config_lib.from_json(config.read_text(encoding="utf-8"))
        run, state = startup.start(startup.read_inputs(checked, workdir, load_evaluator), workdir, stack, quiet=True)
        say_phases(run.progress, state.iteration - (state.pending is not None))
        outcome = loop.run_to_end(run, state)
    if outcome.ending is loop.Ending.PREEMPTED:
        sys.exit(RESTART)
    if outcome.message:
        sys.exit(outcome.message)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
