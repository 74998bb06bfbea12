"""Start-up of a run, in order: checked input, work directory, programs that compile early, and the first state."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import selection, strategies
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import EarlyCompilation, abstract
from reinforce_ada_jax.distributed.program_cache import keep_programs
from reinforce_ada_jax.distributed.signals import Interrupt
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.local_copy import LocalCopy
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.reporting.writers import MetricsWriter
from reinforce_ada_jax.rewards.loading import GradeFn
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import fingerprints, resume, summary
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.draw_ahead import DrawAhead
from reinforce_ada_jax.training.drawing import Drawn
from reinforce_ada_jax.training.iteration import train_iteration
from reinforce_ada_jax.training.kept_responses import KeptResponses
from reinforce_ada_jax.training.loop import EvaluatorFn, Run
from reinforce_ada_jax.training.records import holds_checkpoint
from reinforce_ada_jax.training.reward_check import check_reward, output_file
from reinforce_ada_jax.training.state import RunState, abstract_state, from_record
from reinforce_ada_jax.training.trainer import Trainer, make_trainer
from reinforce_ada_jax.training.workdir import WorkdirLock, check_not_evaluation, run_id, write_config, write_started
from reinforce_ada_jax.types import Prompt

if TYPE_CHECKING:
    from reinforce_ada_jax.training.checkpoint import Checkpoints

# Reads the benchmarks at start-up; None without benchmarks. Raises ValueError if the user must change something.
LoadBenchmarksFn = Callable[[Config, pathlib.Path, Components], EvaluatorFn | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Checked input of a run, without weights and programs.

    Attributes:
      config: with the precision that is computed in.
      components: model, tokenizer, mesh and engine.
      prompts: tokenised prompts of data.prompts.
      read: one line on the columns that they were read from.
      make_evaluator: of the benchmarks; None without benchmarks.
      verifiers: the verifier processes, not started.
      reward: what `reward.path` gives to a reference answer; "" for a built-in reward.
    """

    config: Config
    components: Components
    prompts: list[Prompt]
    read: str
    make_evaluator: EvaluatorFn | None
    verifiers: VerifierPool
    reward: str

    def summary(self, workdir: pathlib.Path) -> str:
        """Returns the text that a run prints before it begins."""
        return summary.summary(self.config, workdir, self.components, len(self.prompts), self.read, self.reward)


def read_inputs(
    config: Config, workdir: pathlib.Path, load_benchmarks: LoadBenchmarksFn, reward: GradeFn | None = None
) -> Inputs:
    """Reads and checks all input of a run; of the weights, names and shapes. Writes and compiles nothing.

    `reward` grades instead of the configured reward, in this process.

    Raises:
      ValueError: the user must change the configuration, a file or the work directory.
    """
    config_lib.check(config)
    strategy = strategies.build(config.collection, regularized=config.regularized)  # reads a user's own file
    config_lib.check_strategy(config, max_age=strategy.max_age, estimates=strategy.estimates)
    config = components_lib.for_devices(config, workdir)
    config_lib.check_workdir(config, workdir)
    check_not_evaluation(workdir)
    folder = components_lib.model_folder(config.model.path, config.model.revision)
    components = components_lib.build(config, folder, strategy)
    if not holds_checkpoint(workdir):
        huggingface.check_weights(components.folder, components.architecture)
    read: list[str] = []
    prompts = components.prompts(config.data.prompts, config, read.append)
    selection.build(config.collection, prompts, config.seed)  # reads a user's own file
    make_evaluator = load_benchmarks(config, workdir, components)
    verifiers = components_lib.verifier_pool(config, workdir, reward)
    checked = check_reward(config, verifiers, prompts[:1], "reward" if reward else None)
    return Inputs(config, components, prompts, read[0], make_evaluator, verifiers, checked)


def start(
    config: Config,
    workdir: pathlib.Path,
    load_benchmarks: LoadBenchmarksFn,
    stack: contextlib.ExitStack,
    *,
    reward: GradeFn | None = None,
    copy: LocalCopy | None = None,
    quiet: bool = False,
) -> tuple[Run, RunState]:
    """Checks the input and builds a run, or resumes the one in `workdir`; `stack` closes its files.

    `reward` grades instead of the configured reward, in this process. `workdir` is the folder of `copy`, if it is in
    a bucket.

    Raises:
      ValueError: the user must change the configuration, a file or the work directory.
    """
    inputs = read_inputs(config, workdir, load_benchmarks, reward)
    config, components, prompts, verifiers = inputs.config, inputs.components, inputs.prompts, inputs.verifiers
    silent = quiet or not processes.is_writer()
    keep_programs(config.logging.compilation_cache)
    # An error in the weights shows before the first file is written.
    params = None if holds_checkpoint(workdir) else components_lib.load_params(config, components)
    processes.check_same("the configurations", config_lib.to_json(config))
    processes.check_same("the prompts", resume.prompts_hash(prompts))
    processes.check_same("the reward functions", resume.reward_hash(config, prompts))
    take_workdir(config, workdir, stack, copy)
    # From here on no mistake is to be told, whose message would wait for the compiler.
    if components.environments is not None:
        components.environments.pool.program.output = output_file(workdir, "environment")
        stack.callback(components.environments.pool.close)
    compiles, compilation = CompileCounter(), stack.enter_context(EarlyCompilation())
    ready_to_sample = compilation.add(components.engine.programs())
    trainer = make_trainer(config, workdir, components, prompts, params)
    checkpoints, identity, state = begin_or_resume(trainer, params, stack, reward)
    shapes = abstract(state.learner)
    fingerprint = compilation.add({"checksum of a checkpoint": lambda: fingerprints.of_arrays.lower(shapes)})
    programs = trainer.updates.programs(state.learner, trainer.policy(state), trainer.base, trainer.reference)
    ready_to_update = compilation.add(programs)
    evaluator = None if inputs.make_evaluator is None else inputs.make_evaluator(trainer.rollouts, verifiers)
    interrupt = stack.enter_context(Interrupt())
    writer = open_writer(config, workdir, state, stack, quiet=quiet)
    if not silent:
        resumed = f"\nresuming after iteration {state.iteration}" if state.iteration else ""
        print(inputs.summary(workdir) + resumed, flush=True)  # a log file has it from the beginning
    progress = Progress(config.iterations, state.iteration, quiet=silent)
    stack.callback(progress.close)
    kept = KeptResponses(
        workdir, identity, limit_bytes=config.checkpoint.responses_mb * 10**6,
        broken_off=components_lib.rounds_alike(config), ready=functools.partial(fingerprint, progress.phase),
    )  # fmt: skip
    trainer = dataclasses.replace(trainer, kept=kept, ready_to_update=ready_to_update)
    ahead = DrawAhead[Drawn]()
    iterate = functools.partial(train_iteration, trainer, verifiers, interrupt, progress, ahead)
    files = (identity, checkpoints, writer, progress, interrupt, compiles, copy, ready_to_sample)
    return Run(config, workdir, trainer, iterate, evaluator, verifiers, ahead, *files), state


def take_workdir(config: Config, workdir: pathlib.Path, stack: contextlib.ExitStack, copy: LocalCopy | None) -> None:
    """Locks a work directory until `stack` is closed, and writes what the run is.

    Raises:
      ValueError: another training has it, or not all processes see it.
    """
    lock = WorkdirLock(workdir)
    stack.callback(lock.close)
    if copy is not None:
        copy.may_upload = lock.check
        stack.callback(copy.close)  # while the lock is held
    write_config(config, workdir)
    write_started(workdir)


def open_writer(
    config: Config, workdir: pathlib.Path, state: RunState, stack: contextlib.ExitStack, *, quiet: bool
) -> MetricsWriter | None:
    """Returns the writer of metrics after `state`, which `stack` closes; None but in process 0."""
    if not processes.is_writer():
        return None
    written, logging = state.iteration - (state.pending is not None), config.logging
    writer = MetricsWriter(
        workdir, last_iteration=written, tensorboard=logging.tensorboard, wandb=logging.wandb,
        trackio=logging.trackio, quiet=quiet,
    )  # fmt: skip
    stack.callback(writer.close)
    if writer.lacking:
        print(
            f"warning: {buckets.origin(workdir / 'metrics.jsonl')} has no lines for {writer.lacking} of {written} "
            "iterations, and the run goes on without them. If you have a copy of the file, end the run and "
            "restore it."
        )
    return writer


def begin_or_resume(
    trainer: Trainer, params: Params | None, stack: contextlib.ExitStack, reward: GradeFn | None = None
) -> tuple["Checkpoints", dict[str, Any], RunState]:
    """Returns checkpoints, identity and state: that of the newest checkpoint, else one that begins with `params`."""
    from reinforce_ada_jax.training.checkpoint import Checkpoints  # noqa: PLC0415  (Orbax: while programs compile)

    config, components, learner = trainer.config, trainer.components, trainer.learner
    identity = resume.identity(config, components, trainer.prompts, reward)
    kept = config.checkpoint
    checkpoints = Checkpoints(
        trainer.workdir, keep=kept.keep, keep_best=kept.keep_best, keep_every=kept.keep_every,
        run_id=run_id(trainer.workdir), writes=True,
    )  # fmt: skip
    stack.callback(checkpoints.close)
    restored = checkpoints.restore_newest(
        abstract_state(config, learner),
        accept=functools.partial(
            resume.check, trainer.workdir, components.folder, identity, accept_reward=kept.accept_changed_reward
        ),
        say=lambda text: print(f"warning: {text}"),
        sampler=components.engine.abstract_weights() if config.draws_ahead else None,
    )
    if restored is None:
        if learner.lora is not None:
            params = components_lib.new_adapters(config, components, learner.lora)
        elif params is None:
            params = components_lib.load_params(config, components)
        estimator = None if trainer.estimator is None else trainer.estimator.to_json()
        state = RunState(learner.init(params), trainer.selection.to_json(), estimator=estimator)
    else:
        state = from_record(*restored)
        if restored[1]["reward"] != identity["reward"]:
            partial = {name: rollouts.ungraded() for name, rollouts in state.partial_rollouts.items()}
            state = dataclasses.replace(state, partial_rollouts=partial)
    trainer.selection.load_json(state.selection)
    if trainer.estimator is not None and state.estimator is not None:
        trainer.estimator.load_json(state.estimator)
    return checkpoints, identity, state
