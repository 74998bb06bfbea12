"""Trains a policy on responses that are given: a supervised start, before reinforcement learning.

    python -m reinforce_ada_jax.sft --config=configs/tiny.py --workdir=runs/sft
    python -m reinforce_ada_jax.export --workdir=runs/sft --output=models/started

Rows of data.prompts have `messages` that end with the assistant's, or a prompt with `completion`, `response`,
`solution` or `answer`. --dry_run checks the input and prints what would run. The same command resumes the run in a work
directory. Ctrl-C ends it after saving the last update.

The number of updates follows from sft.epochs: `iterations` is not read, nor are the settings of drawing and of rewards
(docs/how_to/sft.md).
"""

import contextlib
import pathlib

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.distributed import command
from reinforce_ada_jax.files import local_copy


def main(config: Config, workdir: pathlib.Path, *, quiet: bool = False) -> None:
    """Trains, and says where the results are; ends the process with an exit code if the run didn't finish."""
    from reinforce_ada_jax.training import host_log, loop, startup, supervised

    with contextlib.ExitStack() as stack:
        with cli.user_input():
            folder, copy = stack.enter_context(local_copy.opened(workdir))
            run, state = startup.start(supervised.read_inputs(config, folder), folder, stack, copy=copy, quiet=quiet)
            stack.enter_context(host_log.copying(folder, f"begins after update {state.iteration}"))
        outcome = loop.run_to_end(run, state)
        host_log.add(outcome.message or "finished")
    loop.end(outcome, workdir, "update", compiles=False)


def dry_run(config: Config, workdir: pathlib.Path) -> None:
    """Checks all input of a run, and prints the changed settings and the summary; writes and compiles nothing."""
    from reinforce_ada_jax.distributed import processes
    from reinforce_ada_jax.training import summary, supervised

    with contextlib.ExitStack() as stack, cli.user_input():
        check_output("--workdir", workdir, folder=True)
        folder, _ = stack.enter_context(local_copy.opened(workdir))
        inputs = supervised.read_inputs(config, folder)
        if processes.is_writer():
            print(summary.dry_run(inputs.config, inputs.summary))


if __name__ == "__main__":
    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string(
        "workdir", None, "Where the run's files go; a run found there is resumed.", required=True
    )
    DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check the input, print the changed settings and a summary, and end.")
    QUIET = flags.DEFINE_bool("quiet", False, "Only warnings, errors and the final line.")

    def start() -> None:
        config, workdir = cli.resolved(CONFIG), pathlib.Path(WORKDIR.value)
        if DRY_RUN.value:
            dry_run(config, workdir)
        else:
            main(config, workdir, quiet=QUIET.value)

    command.run(start)
