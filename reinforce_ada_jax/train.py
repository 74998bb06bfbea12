"""Trains a policy, from a Hugging Face folder to checkpoints.

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/tiny
    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/grpo --config.collection.strategy=grpo
    python -m reinforce_ada_jax.train --config=configs/qwen_1p5b.py --workdir=runs/qwen --dry_run \\
        --config.model.path=models/Qwen2.5-Math-1.5B --config.data.prompts=prompts.jsonl

--dry_run checks the input and prints what would run. The same command resumes the run in a work directory. Ctrl-C ends
it after saving the last finished iteration. The loop is in training/loop.py, one iteration in training/iteration.py,
and what a checkpoint holds in training/state.py.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import ConfigDict

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.distributed import command
from reinforce_ada_jax.files import local_copy

if TYPE_CHECKING:
    import reinforce_ada_jax.training.trained


def train(
    config: Config | ConfigDict,
    workdir: str | pathlib.Path,
    *,
    reward: Callable[..., Any] | None = None,
    quiet: bool = True,
) -> "reinforce_ada_jax.training.trained.TrainedRun":
    """Trains as configured, or resumes the run in `workdir`; the function of the command, for notebooks.

    Args:
      config: settings, such as `get_config()` of a file in configs/, or `defaults()` with some of them changed.
      workdir: folder of the run's files; made if there is none.
      reward: (response, answer) -> number, bool or Verdict, such as a function of a notebook, or with another signature
        that `reward.path` takes. It replaces `reward.kind`, too. This process calls it, so `reward.workers`
        and `reward.time_limit_s` do not apply: a call that never returns stops the run. A resumed run must be given a
        function with the same source.
      quiet: show no progress.

    Returns:
      The finished run, with metrics and weights.

    Raises:
      ValueError: the configuration, a file or the work directory is wrong; the message says what to change.
      TrainingStopped: the run can't go on; its state is saved.
      Interrupted: Ctrl-C or SIGTERM; the state is saved, and the same call resumes it.
    """
    from reinforce_ada_jax.distributed import processes
    from reinforce_ada_jax.distributed.signals import Interrupted
    from reinforce_ada_jax.evaluation.evaluator import load_evaluator
    from reinforce_ada_jax.training import loop, startup
    from reinforce_ada_jax.training.run import TrainingStopped
    from reinforce_ada_jax.training.trained import trained_run

    config = config if isinstance(config, Config) else config_lib.resolve(config)
    if processes.count() > 1:
        raise ValueError(f"train() is for one process, and there are {processes.count()}: use the command for several.")
    with contextlib.ExitStack() as stack:
        folder, copy = stack.enter_context(local_copy.opened(workdir))
        inputs = startup.read_inputs(config, folder, load_evaluator, reward)
        run, state = startup.start(inputs, folder, stack, copy=copy, quiet=quiet)
        outcome = loop.run_to_end(run, state)
        if outcome.ending is loop.Ending.STOPPED:
            raise TrainingStopped(outcome.message)
        if outcome.ending is not loop.Ending.FINISHED or outcome.state is None:
            raise Interrupted(outcome.message)
        return dataclasses.replace(trained_run(run, outcome.state), workdir=pathlib.Path(workdir))


def main(config: Config, workdir: pathlib.Path, *, quiet: bool = False, page: int | None = None) -> None:
    """Trains, and says where the results are; ends the process with an exit code if the run didn't finish.

    `page` is the port of a live page of the run (0: any); None: no page.
    """
    from reinforce_ada_jax.distributed import processes
    from reinforce_ada_jax.evaluation.evaluator import load_evaluator
    from reinforce_ada_jax.training import drawing_host, host_log, loop, startup
    from reinforce_ada_jax.training.reward_check import not_graded

    with contextlib.ExitStack() as stack:
        with cli.user_input():
            folder, copy = stack.enter_context(local_copy.opened(workdir))
            if page is not None and processes.is_writer():
                from reinforce_ada_jax.reporting import live

                listener = live.listen(live.LOOPBACK, page)
                print(f"page        {live.address_of(listener)}", flush=True)
                stack.enter_context(live.in_a_process(folder, listener))  # it ends with this process
            inputs = startup.read_inputs(config, folder, load_evaluator)
            if inputs.components.only_draws:
                rollouts = startup.start_drawing(inputs, folder, stack, copy)
                to_end, begins = functools.partial(drawing_host.follow, inputs, rollouts), "begins to draw"
            else:
                run, state = startup.start(inputs, folder, stack, copy=copy, quiet=quiet)
                to_end = functools.partial(loop.run_to_end, run, state)
                begins = f"begins after iteration {state.iteration}"
            stack.enter_context(host_log.copying(folder, begins))
        outcome = to_end()
        host_log.add(outcome.message or "finished")
        ungraded = not_graded(folder)
    loop.end(outcome, workdir, "iteration", ungraded, compiles=True)


def dry_run(config: Config, workdir: pathlib.Path) -> None:
    """Checks all input of a run, and prints the changed settings and the summary; writes and compiles nothing."""
    from reinforce_ada_jax.distributed import processes
    from reinforce_ada_jax.evaluation.evaluator import load_evaluator
    from reinforce_ada_jax.planning import here
    from reinforce_ada_jax.training import startup, summary

    with contextlib.ExitStack() as stack, cli.user_input():
        check_output("--workdir", workdir, folder=True)
        folder, _ = stack.enter_context(local_copy.opened(workdir))
        inputs = startup.read_inputs(config, folder, load_evaluator)
        if processes.is_writer():
            cost = here.iteration_line(inputs.config, inputs.components, inputs.strategy)
            print(summary.dry_run(inputs.config, f"{inputs.summary}\n{cost}"))


if __name__ == "__main__":
    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string(
        "workdir", None, "Where the run's files go; a run found there is resumed.", required=True
    )
    DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check the input, and print what would run and how long it takes.")
    PAGE = flags.DEFINE_integer(
        "page", None, "Port of a live page of the run on this machine; 0 chooses a free one. Without it: no page.", 0,
        65_535,
    )  # fmt: skip
    QUIET = flags.DEFINE_bool("quiet", False, "Only warnings, errors and the final line.")

    def start() -> None:
        config, workdir = cli.resolved(CONFIG), pathlib.Path(WORKDIR.value)
        if DRY_RUN.value:
            dry_run(config, workdir)
        else:
            main(config, workdir, quiet=QUIET.value, page=PAGE.value)

    command.run(start)
