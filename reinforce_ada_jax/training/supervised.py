"""Supervised training: the start of a run, and its updates. The loop and its endings are those of training/loop.py.

An iteration is one update on `learning.prompts_per_update` demonstrations, packed into rows. No engine and no verifier
is started.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection.selection import PromptCursor, next_prompts
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
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import resume, summary
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.draw_ahead import DrawAhead
from reinforce_ada_jax.training.loop import Run
from reinforce_ada_jax.training.records import holds_checkpoint
from reinforce_ada_jax.training.startup import open_writer, take_workdir
from reinforce_ada_jax.training.state import RunState, abstract_state, from_record
from reinforce_ada_jax.training.updates import TrainingStopped
from reinforce_ada_jax.training.workdir import check_not_evaluation, run_id
from reinforce_ada_jax.types import Response


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Checked input of a run, without weights and programs.

    Attributes:
      config: with one response to a prompt, and as many iterations as there are updates.
      components: model, tokenizer and mesh.
      training: demonstrations of data.prompts.
      validation: those of sft.validation.
      read: a line on the columns of each.
    """

    config: Config
    components: Components
    training: list[Demonstration]
    validation: list[Demonstration]
    read: list[str]

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
    """Reads and checks all input of a run; of the weights, names and shapes. Writes and compiles nothing.

    Raises:
      ValueError: the user must change the configuration, a file or the work directory.
    """
    config_lib.check(config)
    config = components_lib.for_devices(config, workdir)
    config_lib.check_workdir(config, workdir)
    check_not_evaluation(workdir)
    for name, value in (("environment.path", config.environment.path), ("mesh.sampler", config.mesh.sampler)):
        if value:
            raise ValueError(f"{name} is {value!r}, and supervised training draws nothing: leave it out.")
    components = components_lib.build(config, components_lib.model_folder(config.model.path, config.model.revision))
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


class Supervised:
    """Data and programs of a run; `iterate` makes an update."""

    def __init__(self, inputs: Inputs, base: Params | None, interrupt: Interrupt):
        """Makes the programs; `base` has the frozen weights under adapters, where adapters are trained."""
        self.config, self.base, self.interrupt = inputs.config, base, interrupt
        self._training = {each.prompt.id: each for each in inputs.training}
        self._prompts = [each.prompt for each in inputs.training]
        decay = self.config.iterations if self.config.sft.schedule == "cosine" else 0
        self.schedule = make_schedule(self.config.learning, decay)
        components = inputs.components
        self.learner = SupervisedLearner(components.architecture, self.config, components.mesh, decay_updates=decay)

    def batch(self, rows: Sequence[Demonstration]) -> Batch:
        examples = [
            Example(
                row.prompt.tokens,
                Response(row.prompt.id, 0, row.tokens, np.zeros(len(row.tokens), np.float32), truncated=False),
                advantage=1.0,
            )
            for row in rows
        ]
        config = self.config
        batch = make_batch(
            examples, max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.sampling.max_response_tokens,
            num_rows=config.learning.prompts_per_update, per_row=config.learning.responses_per_row,
        )  # fmt: skip
        return self.learner.put(batch)

    def iterate(self, state: RunState) -> tuple[RunState, TrainingStopped | None]:
        """Returns the state after one more update with its metrics, or why the run must end."""
        begin, number = time.monotonic(), state.iteration + 1
        prompts, cursor = next_prompts(
            self._prompts, PromptCursor(**state.selection), self.config.learning.prompts_per_update
        )
        rows = [self._training[prompt.id] for prompt in prompts]
        learner, result = self.learner.update(state.learner, self.batch(rows), self.base, between=self.interrupt.agree)
        result = jax.device_get(result)
        if not result.finite:
            stop = TrainingStopped(
                f"update {number}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}: not finite. The "
                "update was not applied. Lower learning.learning_rate, or look for damaged rows."
            )
            return dataclasses.replace(state, learner=learner), stop
        tokens = sum(len(row.tokens) for row in rows)
        metrics = {
            "update/loss": float(result.loss),
            "update/entropy": float(result.entropy),
            "update/grad_norm": float(result.grad_norm),
            "update/learning_rate": float(np.asarray(self.schedule(number - 1))),
            "update/epoch": cursor.epoch,
            "update/response_tokens": tokens,
            "update/tokens": tokens + sum(len(row.prompt.tokens) for row in rows),
            "time/update_s": time.monotonic() - begin,
        }
        selection = dataclasses.asdict(cursor)
        return dataclasses.replace(state, learner=learner, selection=selection, iteration=number, pending=metrics), None


class Validation:
    """The loss on held-out rows, as the evaluation of a run."""

    def __init__(self, supervised: Supervised, rows: Sequence[Demonstration]):
        """Takes the rows and the programs to score them with."""
        self._supervised, self._rows = supervised, rows

    def is_done(self, iteration: int) -> bool:
        """Returns False: no file has the result."""
        del iteration
        return False

    def __call__(self, params: Params, iteration: int, report: Callable[[str], None], /) -> dict[str, float]:
        """Returns the mean of -log p over the response tokens."""
        del iteration
        supervised, total = self._supervised, 0.0
        size, policy = supervised.config.learning.prompts_per_update, supervised.learner.policy(params, supervised.base)
        for begin in range(0, len(self._rows), size):
            report(f"validation, row {begin:,} of {len(self._rows):,}")
            logprobs = supervised.learner.score(policy, supervised.batch(self._rows[begin : begin + size]))
            total -= float(processes.fetch(logprobs).sum(dtype=np.float64))
        return {"validation/loss": total / sum(len(row.tokens) for row in self._rows)}


def start(
    config: Config,
    workdir: pathlib.Path,
    stack: contextlib.ExitStack,
    *,
    copy: LocalCopy | None = None,
    quiet: bool = False,
) -> tuple[Run, RunState]:
    """Checks the input and builds a run, or resumes the one in `workdir`; `stack` closes its files.

    Raises:
      ValueError: the user must change the configuration, a file or the work directory.
    """
    from reinforce_ada_jax.training.checkpoint import Checkpoints  # noqa: PLC0415  (Orbax takes 0.2 s)

    inputs = read_inputs(config, workdir)
    config = dataclasses.replace(config, model=inputs.config.model)  # config.json keeps the dtype that was chosen
    components, silent = inputs.components, quiet or not processes.is_writer()
    keep_programs(config.logging.compilation_cache)
    prompts = [each.prompt for each in inputs.training]
    processes.check_same("the configurations", config_lib.to_json(config))
    held_out = [each.prompt for each in inputs.validation]
    processes.check_same("the demonstrations", resume.prompts_hash([*prompts, *held_out]))
    weights = None  # of the model folder; an error in them shows before the first file is written
    if config.lora.rank or not holds_checkpoint(workdir):
        weights = components_lib.load_params(config, components)
    take_workdir(config, workdir, stack, copy)
    compiles, interrupt = CompileCounter(), stack.enter_context(Interrupt())
    supervised = Supervised(inputs, weights if config.lora.rank else None, interrupt)
    identity = resume.identity(config, components, prompts, supervised=True)
    kept = config.checkpoint
    checkpoints = Checkpoints(workdir, keep=kept.keep, keep_every=kept.keep_every, run_id=run_id(workdir), writes=True)
    stack.callback(checkpoints.close)
    restored = checkpoints.restore_newest(
        abstract_state(inputs.config, supervised.learner),
        accept=functools.partial(resume.check, workdir, components.folder, identity),
        say=lambda text: print(f"warning: {text}"),
    )
    if restored is not None:
        state = from_record(*restored)
    else:
        adapters = supervised.learner.lora
        if adapters is not None:
            params = components_lib.new_adapters(config, components, adapters)
        else:  # read again where a save that was cut off looked like a checkpoint
            params = components_lib.load_params(config, components) if weights is None else weights
        state = RunState(supervised.learner.init(params), dataclasses.asdict(PromptCursor(config.seed)))
    del weights
    writer = open_writer(config, workdir, state, stack, quiet=quiet)
    if not silent:
        resumed = f"\nresuming after update {state.iteration}" if state.iteration else ""
        print(inputs.summary(workdir) + resumed, flush=True)
    progress = Progress(inputs.config.iterations, state.iteration, "update", quiet=silent)
    stack.callback(progress.close)
    validation = Validation(supervised, inputs.validation) if inputs.validation else None
    run = Run(
        inputs.config, workdir, None, supervised.iterate, validation, contextlib.nullcontext(), DrawAhead(), identity,
        checkpoints, writer, progress, interrupt, compiles, copy, command="sft",
    )  # fmt: skip
    return run, state
