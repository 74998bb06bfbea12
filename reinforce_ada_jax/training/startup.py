"""Start-up of a run, in order: checked input, work directory, programs that compile early, and the first state."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import jax

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import selection as selection_lib
from reinforce_ada_jax.collection import simulate, strategies
from reinforce_ada_jax.collection.estimators import Ema
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import EarlyCompilation, abstract
from reinforce_ada_jax.distributed.program_cache import keep_programs
from reinforce_ada_jax.distributed.signals import Interrupt
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.local_copy import LocalCopy
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy import huggingface, lora
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.reporting.writers import MetricsWriter, check_installed
from reinforce_ada_jax.rewards.loading import GradeFn
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import fingerprints, host_memory, resume, summary
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.drawing_hosts import DrawingHosts
from reinforce_ada_jax.training.iteration import train_iteration
from reinforce_ada_jax.training.records import holds_checkpoint
from reinforce_ada_jax.training.response_journal import ResponseJournal
from reinforce_ada_jax.training.reward_check import check_reward, output_file
from reinforce_ada_jax.training.run import Evaluator, Inputs, Run
from reinforce_ada_jax.training.state import RunState, abstract_base, abstract_state, from_record
from reinforce_ada_jax.training.updates import update_programs
from reinforce_ada_jax.training.workdir import WorkdirLock, check_contents, run_id, write_config, write_started

if TYPE_CHECKING:
    from reinforce_ada_jax.training.checkpoint import Checkpoints

# Reads the benchmarks at start-up; None without benchmarks. Raises ValueError if the user must change something.
LoadBenchmarksFn = Callable[[Config, Components], Evaluator | None]


def read_inputs(
    config: Config, workdir: pathlib.Path, load_benchmarks: LoadBenchmarksFn, reward: GradeFn | None = None
) -> Inputs:
    """Reads and checks all input of a run; of the weights only names and shapes. Writes and compiles nothing.

    `reward` grades instead of the configured reward, in this process. Raises ValueError where the user must change
    the configuration, a file or the work directory; `start` does, too.
    """
    config_lib.check(config)
    check_installed(config.logging.trackers)
    strategy = strategies.build(config.collection, regularized=config.regularized)
    config_lib.check_strategy(
        config, max_age=strategy.max_age, estimates=strategy.estimates, weighs=strategy.coefficients is not None
    )
    config = components_lib.for_devices(config, workdir)
    config_lib.check_workdir(config, workdir)
    check_contents(workdir)
    resume.check_command(workdir, supervised=False)
    components = read_components(config, workdir, strategy)
    learner = Learner(components.architecture, config, components.mesh)
    policy = learner.policy(abstract_state(learner).params, abstract_base(config, learner))
    copy_bytes = mesh_lib.shard_bytes(components.engine.abstract_copy(policy))
    host_memory.check(components.engine, sum(summary.weight_bytes(config, components)) + copy_bytes)
    read: list[str] = []
    prompts = components.prompts(config.data.prompts, config, read.append)
    simulate.check_own(config.collection, strategy, prompts)
    selection = selection_lib.build(config.collection, prompts, config.seed, extra_batches=strategy.extra_batches)
    evaluator = load_benchmarks(config, components)
    verifiers = components_lib.verifier_pool(config, workdir, reward)
    checked = check_reward(config, verifiers, prompts[:1], "reward" if reward else None)
    return Inputs(
        config=config, given=config, components=components, prompts=prompts, selection=selection, strategy=strategy,
        verifiers=verifiers, reward=reward, learner=learner, iterate=train_iteration, evaluator=evaluator,
        same={
            "the prompts": resume.prompts_hash(prompts),
            "the reward functions": resume.reward_hash(config, prompts),
            "the files of strategy, selection and loss": resume.code_hash(config),
        },
        summary=summary.summary(
            config, workdir, components, strategy, num_prompts=len(prompts), read=read[0], reward=checked,
            copy_bytes=copy_bytes,
        ),
    )  # fmt: skip


def read_components(config: Config, workdir: pathlib.Path, strategy: Strategy | None = None) -> Components:
    """Returns `components.build` of the model that a run starts from; a first start checks the names of its weights."""
    components = components_lib.build(config, components_lib.model_folder(config.model.path), strategy)
    if not holds_checkpoint(workdir):
        huggingface.check_weights(components.folder, components.architecture)
    return components


def start(
    inputs: Inputs,
    workdir: pathlib.Path,
    stack: contextlib.ExitStack,
    *,
    copy: LocalCopy | None = None,
    quiet: bool = False,
) -> tuple[Run, RunState]:
    """Builds the run of checked input, or resumes the one in `workdir`; `stack` closes its files.

    `workdir` is the folder of `copy`, if it is in a bucket.
    """
    # 1. The rest of the input. All errors, also those in the weights, show before the first file is written.
    config, components, draws = inputs.config, inputs.components, not inputs.is_supervised
    keep_programs(config.logging.compilation_cache)
    params = None if holds_checkpoint(workdir) else components_lib.load_params(config, components, quiet=quiet)

    # 2. The work directory: no other training has it, and all processes see it.
    join(inputs, workdir, stack, copy)

    # 3. The engine's programs begin to compile. All input is checked above: an error here would wait for the compiler.
    compiles = CompileCounter()
    compilation = stack.enter_context(EarlyCompilation())
    draws_here = draws and components.engine.hand_over is None
    ready_to_sample = compilation.add(components.engine.programs() if draws_here else {})

    # 4. The frozen weights.
    base, reference = frozen_weights(inputs, params, quiet=quiet)
    rollouts = Rollouts(components.engine) if draws_here else None
    if draws and not draws_here:
        inputs = dataclasses.replace(inputs, verifiers=components_lib.no_verifiers(config))
        rollouts = DrawingHosts(components.engine, inputs.verifiers, components.graders(inputs.verifiers))
    estimator = components_lib.make_estimator(config, components) if inputs.strategy.estimates else None

    # 5. The state: that of the newest checkpoint, or a new one.
    checkpoints = open_checkpoints(inputs, workdir, stack)
    identity = resume.identity(inputs)
    state = newest_state(inputs, checkpoints, workdir, identity) or first_state(inputs, params, estimator)
    inputs.selection.load_json(deepcopy(state.selection))  # it may keep and change what it gets
    if estimator is not None and state.estimator is not None:
        estimator.load_json(state.estimator)

    # 6. The programs of the updates, for these arrays. In supervised training nothing else would run meanwhile.
    fingerprint = compilation.add(fingerprints.programs(abstract(state.learner)) if draws else {})
    ready_to_update = compilation.add(update_programs(inputs, state.learner, base, reference) if draws else {})

    # 7. Signals, metrics and the terminal.
    interrupt = stack.enter_context(Interrupt())
    writer = open_writer(config, workdir, state, stack, quiet=quiet)
    progress = begin_progress(inputs, state, stack, quiet=quiet)
    journal = ResponseJournal(
        workdir, identity,
        broken_off=components_lib.rounds_alike(config), ready=functools.partial(fingerprint, progress.phase),
    ) if draws else None  # fmt: skip

    run = Run(
        **vars(inputs), workdir=workdir, rollouts=rollouts, estimator=estimator, base=base, reference=reference,
        ready_to_sample=ready_to_sample, ready_to_update=ready_to_update,
        stop=interrupt.stop(progress.phase, config.checkpoint.notice_s), interrupt=interrupt, progress=progress,
        checkpoints=checkpoints, identity=identity, journal=journal, writer=writer, compiles=compiles, copy=copy,
    )  # fmt: skip
    return run, state


def start_drawing(
    inputs: Inputs, workdir: pathlib.Path, stack: contextlib.ExitStack, copy: LocalCopy | None = None
) -> Rollouts:
    """Returns the engine of a process that only draws, when all processes have the same input."""
    keep_programs(inputs.config.logging.compilation_cache)
    join(inputs, workdir, stack, copy)
    stack.enter_context(Interrupt())  # tells the others
    return Rollouts(inputs.components.engine)


# ---- the steps of a start --------------------------------------------------------------------------------------------


def join(inputs: Inputs, workdir: pathlib.Path, stack: contextlib.ExitStack, copy: LocalCopy | None) -> None:
    """Takes the work directory, when all processes have the same input, and splits them into their groups.

    What environments print goes to a file there; `stack` ends their processes.
    """
    engine, mesh, environments = inputs.components.engine, inputs.components.mesh, inputs.components.environments
    for what, text in {"the configurations": config_lib.to_json(inputs.given), **inputs.same}.items():
        processes.check_same(what, text)
    lock = WorkdirLock(workdir)
    stack.callback(lock.close)
    if copy is not None:
        copy.may_upload = lock.check
        stack.callback(copy.close)  # while the lock is held
    resume.check_newest(workdir, inputs)  # a start that is refused leaves config.json as it is
    write_config(inputs.given, workdir)
    write_started(workdir)
    if engine.hand_over is not None:
        processes.split_hosts(mesh_lib.num_learning(mesh, engine.mesh))
    if environments is not None:
        environments.pool.program.output = output_file(workdir, "environment")
        stack.callback(environments.pool.close)


def open_writer(
    config: Config, workdir: pathlib.Path, state: RunState, stack: contextlib.ExitStack, *, quiet: bool
) -> MetricsWriter | None:
    """Returns the writer of metrics after `state`, which `stack` closes; None but in process 0."""
    if not processes.is_writer():
        return None
    written = state.iteration - (state.pending is not None)
    writer = MetricsWriter(workdir, last_iteration=written, trackers=config.logging.trackers, quiet=quiet)
    stack.callback(writer.close)
    if writer.lacking:
        print(
            f"warning: {buckets.origin(workdir / 'metrics.jsonl')} has no lines for {writer.lacking} of {written} "
            "iterations, and the run goes on without them. If you have a copy of the file, end the run and "
            "restore it."
        )
    return writer


def begin_progress(inputs: Inputs, state: RunState, stack: contextlib.ExitStack, *, quiet: bool) -> Progress:
    """Prints the summary of a run and begins its progress line, in process 0 and unless `quiet`; `stack` ends it."""
    silent, unit = quiet or not processes.is_writer(), "update" if inputs.is_supervised else "iteration"
    if not silent:
        resumed = f"\nresuming after {unit} {state.iteration}" if state.iteration else ""
        print(inputs.summary + resumed, flush=True)  # a log file has it from the beginning
    progress = Progress(inputs.config.iterations, state.iteration, unit, quiet=silent)
    stack.callback(progress.close)
    return progress


def open_checkpoints(inputs: Inputs, workdir: pathlib.Path, stack: contextlib.ExitStack) -> "Checkpoints":
    """Opens the checkpoints of the one training in a work directory; `stack` closes them."""
    from reinforce_ada_jax.training.checkpoint import Checkpoints  # noqa: PLC0415  (Orbax: while programs compile)

    chosen, largest = inputs.config.checkpoint, 0
    if inputs.learns_on_cpu and processes.total() == 1:
        arrays = jax.tree.leaves(abstract_state(inputs.learner))
        largest = max(array.size * array.dtype.itemsize for array in arrays)
    checkpoints = Checkpoints(
        workdir, keep=chosen.keep, keep_best=chosen.keep_best, keep_every=chosen.keep_every, run_id=run_id(workdir),
        writes=True, largest_bytes=largest,
    )  # fmt: skip
    stack.callback(checkpoints.close)
    return checkpoints


def newest_state(
    inputs: Inputs, checkpoints: "Checkpoints", workdir: pathlib.Path, identity: dict[str, Any]
) -> RunState | None:
    """Returns the state in the newest checkpoint, None without one; ValueError if it belongs to another run."""
    config, components, engine = inputs.config, inputs.components, inputs.components.engine
    restored = checkpoints.restore_newest(
        abstract_state(inputs.learner),
        accept=functools.partial(
            resume.check, workdir, components.folder, identity,
            accept_reward=config.checkpoint.accept_changed_reward,
        ),
        say=lambda text: print(f"warning: {text}"),
        sampler=engine.abstract_weights(cast=engine.hand_over is not None) if config.draws_ahead else None,
    )  # fmt: skip
    if restored is None:
        if (workdir / "metrics.jsonl").exists() and processes.is_writer():
            print(f"warning: {workdir} has metrics and no checkpoint: the run begins again, and replaces its metrics.")
        return None
    state = from_record(*restored)
    if restored[1]["reward"] != identity["reward"]:
        partial = {name: rollouts.ungraded() for name, rollouts in state.partial_rollouts.items()}
        state = dataclasses.replace(state, partial_rollouts=partial)
    return state


def first_state(inputs: Inputs, params: Params | None, estimator: Ema | ValueHead | None) -> RunState:
    """Returns the state before the first iteration; `params` are the weights of the model folder, if they are read."""
    learner, components = inputs.learner, inputs.components
    if learner.lora is not None:
        key = jax.random.key(inputs.config.seed)  # the adapters are a function of it
        params = lora.init(components.architecture, learner.lora, key, components.mesh)
    elif params is None:  # a save that was cut off looked like a checkpoint
        params = components_lib.load_params(inputs.config, components)
    state = None if estimator is None else estimator.to_json()
    chosen_by = selection_lib.state_of(inputs.selection, inputs.config.collection.selection)
    return RunState(learner.init(params), chosen_by, estimator=state)


def frozen_weights(
    inputs: Inputs, params: Params | None, *, quiet: bool = False
) -> tuple[Params | None, Params | None]:
    """Returns the base under the adapters, and the reference of the KL term; None where there is none.

    `params` are the weights of the model folder, if they are read.
    """
    config, components = inputs.config, inputs.components
    base = reference = None
    if inputs.learner.lora is not None:
        base = components_lib.load_params(config, components, quiet=quiet) if params is None else params
    # Adapters begin as a change of 0, so their base is the reference.
    if config.learning.kl_coefficient and not inputs.is_supervised:
        reference = base
        if base is None:
            reference = components_lib.load_params(config, components, config.model.compute_dtype, quiet=quiet)
    return base, reference
