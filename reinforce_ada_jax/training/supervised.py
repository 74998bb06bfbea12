"""Supervised training: the start of a run, and its updates. The loop and its endings are those of training/loop.py.

An iteration is one update on `learning.prompts_per_update` demonstrations, packed into rows.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.selection import PromptCursor, Shuffled, next_prompts
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.config.rules import updates_are_whole_micro_batches
from reinforce_ada_jax.data import demonstrations as demonstrations_lib
from reinforce_ada_jax.data.demonstrations import Demonstration
from reinforce_ada_jax.data.rows import Columns
from reinforce_ada_jax.data.templates import chat_from_config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.program_cache import keep_programs
from reinforce_ada_jax.distributed.signals import Interrupt
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.local_copy import LocalCopy
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.learning.optimizer import make_schedule
from reinforce_ada_jax.learning.supervised import SupervisedLearner
from reinforce_ada_jax.learning.update import EXPERT_METRICS
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.reporting.writers import check_installed
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import resume, startup, summary
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.records import holds_checkpoint
from reinforce_ada_jax.training.run import Run, TrainingStopped, check_weights
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.workdir import check_not_evaluation
from reinforce_ada_jax.types import Response


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Checked input of a run, without weights and programs."""

    config: Config  # with one response to a prompt, and as many iterations as there are updates
    components: Components  # model, tokenizer and mesh
    training: list[Demonstration]  # demonstrations of data.prompts
    validation: list[Demonstration]  # those of sft.validation
    read: list[str]  # a line on the columns of each

    def summary(self, workdir: pathlib.Path) -> str:
        """Returns the text that a run prints before it begins."""
        config, sft = self.config, self.config.sft
        return "\n".join([
            *summary.model_and_mesh(config, self.components, str(self.components.folder)),
            *(f"read        {line}" for line in self.read),
            f"budget      {config.iterations:,} updates of {config.learning.prompts_per_update:,} rows, "
            f"epochs: {sft.epochs}; learning rate {config.learning.learning_rate:g}, {sft.schedule}",
            f"files       {buckets.origin(workdir)}: config.json, metrics.jsonl, checkpoints/",
        ])  # fmt: skip


def read_inputs(config: Config, workdir: pathlib.Path) -> Inputs:
    """Reads and checks all input of a run; of the weights only names and shapes. Writes and compiles nothing.

    Raises ValueError where the user must change the configuration, a file or the work directory; `start` does, too.
    """
    config_lib.check(config)
    check_installed(config.logging.trackers)
    config = components_lib.for_devices(config, workdir)
    config_lib.check_workdir(config, workdir)
    check_not_evaluation(workdir)
    for name, value in (("environment.path", config.environment.path), ("mesh.sampler", config.mesh.sampler)):
        if value:
            raise ValueError(f"{name} is {value!r}, and supervised training draws nothing: leave it out.")
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    if not holds_checkpoint(workdir):
        huggingface.check_weights(components.folder, components.architecture)
    lines: list[str] = []
    read = functools.partial(
        demonstrations_lib.read, columns=Columns(config.data.problem_column, config.data.answer_column),
        tokenizer=components.tokenizer, template=config.data.template, chat=chat_from_config(config),
        max_prompt_tokens=config.data.max_prompt_tokens, max_response_tokens=config.sampling.max_response_tokens,
        report=lines.append,
    )  # fmt: skip
    training = read(config.data.prompts)
    validation = read(config.sft.validation) if config.sft.validation else []
    of_update = config.learning.prompts_per_update
    if len(training) < of_update:
        raise ValueError(
            f"{config.data.prompts} has {len(training):,} rows, and an update takes {of_update:,}: lower "
            "learning.prompts_per_update or add rows."
        )
    config = dataclasses.replace(
        config, iterations=config.sft.epochs * (len(training) // of_update),
        collection=dataclasses.replace(config.collection, group_size=1, prompts_per_iteration=of_update),
        sampling=dataclasses.replace(config.sampling, temperature=1.0),
    )  # fmt: skip
    updates_are_whole_micro_batches(config)
    return Inputs(config, components, training, validation, lines)


def supervised_batch(run: Run, rows: Sequence[Demonstration]) -> Batch:
    """Returns demonstrations as a batch on the devices; each response has the advantage 1."""
    config = run.config
    examples = [
        Example(
            row.prompt.tokens,
            Response(row.prompt.id, 0, row.tokens, np.zeros(len(row.tokens), np.float32), truncated=False),
            advantage=1.0,
        )
        for row in rows
    ]
    batch = make_batch(
        examples, max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.sampling.max_response_tokens,
        num_rows=config.learning.prompts_per_update, per_row=config.learning.responses_per_row,
    )  # fmt: skip
    return run.learner.put(batch)


def decay_updates(config: Config) -> int:
    """Returns the number of updates after which the learning rate is 0; 0: it doesn't decay."""
    return config.iterations if config.sft.schedule == "cosine" else 0


def supervised_iteration(run: Run, state: RunState) -> tuple[RunState, TrainingStopped | None]:
    """Makes one update; returns the state with its metrics, and why the run must end, or None."""
    begin, number = time.monotonic(), state.iteration + 1
    cursor = PromptCursor(**state.selection)
    prompts, cursor = next_prompts(run.prompts, cursor, run.config.learning.prompts_per_update)
    rows = [run.demonstrations[prompt.id] for prompt in prompts]
    batch = supervised_batch(run, rows)
    learner, result = run.learner.update(state.learner, batch, run.base, between=run.stop.agree)
    result = jax.device_get(result)
    if not result.finite:
        stopped = TrainingStopped(
            f"update {number}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}: not finite. The "
            "update was not applied. Lower learning.learning_rate, or look for damaged rows."
        )
        return dataclasses.replace(state, learner=learner), stopped
    check_weights(result, f"update {number}")
    schedule = make_schedule(run.config.learning, decay_updates(run.config))
    tokens = sum(len(row.tokens) for row in rows)
    metrics = {
        "update/loss": float(result.loss),
        "update/entropy": float(result.entropy),
        "update/grad_norm": float(result.grad_norm),
        "update/learning_rate": float(np.asarray(schedule(number - 1))),
        "update/epoch": cursor.epoch,
        "update/response_tokens": tokens,
        "update/tokens": tokens + sum(len(row.prompt.tokens) for row in rows),
        "time/update_s": time.monotonic() - begin,
    }
    of_experts = {name: getattr(result, name) for name in EXPERT_METRICS}
    metrics |= {f"update/{name}": float(value) for name, value in of_experts.items() if value is not None}
    return dataclasses.replace(
        state, learner=learner, selection=dataclasses.asdict(cursor), iteration=number, pending=metrics
    ), None


@dataclasses.dataclass(frozen=True, eq=False)
class Validation:
    """The loss on held-out rows, as the evaluation of a run."""

    rows: Sequence[Demonstration]

    def is_done(self, run: Run, iteration: int) -> bool:
        """Returns False: no file has the result."""
        del run, iteration
        return False

    def __call__(self, run: Run, state: RunState) -> dict[str, float]:
        """Returns the mean of -log p over the response tokens."""
        size, policy, total = run.config.learning.prompts_per_update, run.policy(state), 0.0
        for begin in range(0, len(self.rows), size):
            run.stop.check(f"validation, row {begin:,} of {len(self.rows):,}")
            logprobs = run.learner.score(policy, supervised_batch(run, self.rows[begin : begin + size]))
            total -= float(processes.fetch(logprobs).sum(dtype=np.float64))
        return {"validation/loss": total / sum(len(row.tokens) for row in self.rows)}


def start(
    config: Config,
    workdir: pathlib.Path,
    stack: contextlib.ExitStack,
    *,
    copy: LocalCopy | None = None,
    quiet: bool = False,
) -> tuple[Run, RunState]:
    """Checks the input and builds a run, or resumes the one in `workdir`; `stack` closes its files."""
    # 1. Input. An error in the weights, too, shows before the first file is written.
    inputs = read_inputs(config, workdir)
    config = dataclasses.replace(config, model=inputs.config.model)  # config.json keeps the dtype that was chosen
    components, prompts = inputs.components, [each.prompt for each in inputs.training]
    keep_programs(config.logging.compilation_cache)
    processes.check_same("the configurations", config_lib.to_json(config))
    held_out = [each.prompt for each in inputs.validation]
    processes.check_same("the demonstrations", resume.prompts_hash([*prompts, *held_out]))
    params = None
    if config.lora.rank or not holds_checkpoint(workdir):
        params = components_lib.load_params(config, components)

    # 2. The work directory.
    startup.take_workdir(config, workdir, stack, copy)

    # 3. The learner, and the state: that of the newest checkpoint, or a new one.
    compiles, interrupt = CompileCounter(), stack.enter_context(Interrupt())
    learner = SupervisedLearner(
        components.architecture, inputs.config, components.mesh, decay_updates=decay_updates(inputs.config)
    )
    base = params if config.lora.rank else None
    checkpoints = startup.open_checkpoints(config, workdir, stack)
    identity = resume.identity(config, components, prompts, supervised=True)
    state = startup.newest_state(checkpoints, inputs.config, components, learner, workdir, identity)
    if state is None:
        state = startup.first_state(config, components, learner, params, dataclasses.asdict(PromptCursor(config.seed)))

    # 4. Metrics and the terminal.
    writer = startup.open_writer(config, workdir, state, stack, quiet=quiet)
    iterations = inputs.config.iterations
    progress = startup.begin_progress(inputs.summary(workdir), state, iterations, stack, "update", quiet=quiet)

    run = Run(
        config=inputs.config,
        workdir=workdir,
        components=components,
        prompts=prompts,
        demonstrations={each.prompt.id: each for each in inputs.training},
        selection=Shuffled(prompts, config.seed),  # it observes no pools: `supervised_iteration` moves on
        strategy=strategies.fixed(1),
        verifiers=components_lib.no_verifiers(config),
        rollouts=None,
        learner=learner,
        base=base,
        iterate=supervised_iteration,
        evaluator=Validation(inputs.validation) if inputs.validation else None,
        stop=interrupt.stop(progress.phase, config.checkpoint.notice_s),
        interrupt=interrupt,
        progress=progress,
        checkpoints=checkpoints,
        identity=identity,
        writer=writer,
        compiles=compiles,
        copy=copy,
        command="sft",
    )
    return run, state
