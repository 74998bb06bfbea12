"""Supervised training: the input of a run, and its updates. Start and loop are those of startup.py and loop.py.

An iteration is one update on `learning.prompts_per_update` demonstrations, packed into rows.
"""

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
from reinforce_ada_jax.config.rules import updates_are_whole_micro_batches
from reinforce_ada_jax.data import demonstrations as demonstrations_lib
from reinforce_ada_jax.data.demonstrations import Demonstration
from reinforce_ada_jax.data.rows import Columns
from reinforce_ada_jax.data.templates import chat_from_config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.learning.optimizer import make_schedule
from reinforce_ada_jax.learning.supervised import SupervisedLearner
from reinforce_ada_jax.learning.update import EXPERT_METRICS
from reinforce_ada_jax.reporting.writers import check_installed
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import resume, startup, summary
from reinforce_ada_jax.training.run import Inputs, Run, TrainingStopped, check_weights
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.workdir import check_contents
from reinforce_ada_jax.types import Response


def read_inputs(config: config_lib.Config, workdir: pathlib.Path) -> Inputs:
    """Reads and checks all input of a run; of the weights only names and shapes. Writes and compiles nothing.

    Raises ValueError where the user must change the configuration, a file or the work directory.
    """
    config_lib.check(config)
    check_installed(config.logging.trackers)
    config = components_lib.for_devices(config, workdir)
    config_lib.check_workdir(config, workdir)
    check_contents(workdir)
    resume.check_command(workdir, supervised=True)
    for name, value in (("environment.path", config.environment.path), ("mesh.sampler", config.mesh.sampler)):
        if value:
            raise ValueError(f"{name} is {value!r}, and supervised training draws nothing: leave it out.")
    components = startup.read_components(config, workdir)
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
    schedule = "cosine" if config.learning.schedule == "auto" else config.learning.schedule
    given, config = config, dataclasses.replace(
        config, iterations=config.sft.epochs * (len(training) // of_update),
        collection=dataclasses.replace(config.collection, group_size=1, prompts_per_iteration=of_update),
        sampling=dataclasses.replace(config.sampling, temperature=1.0),
        learning=dataclasses.replace(config.learning, schedule=schedule),
    )  # fmt: skip
    updates_are_whole_micro_batches(config)
    prompts, held_out = ([each.prompt for each in rows] for rows in (training, validation))
    learner = SupervisedLearner(components.architecture, config, components.mesh)
    return Inputs(
        config=config, given=given, components=components, prompts=prompts,
        demonstrations={each.prompt.id: each for each in training},
        selection=Shuffled(prompts, config.seed),  # it observes no pools: `supervised_iteration` moves on
        strategy=strategies.fixed(1), verifiers=components_lib.no_verifiers(config), learner=learner,
        iterate=supervised_iteration, evaluator=Validation(validation) if validation else None,
        same={"the demonstrations": resume.prompts_hash([*prompts, *held_out])},
        summary="\n".join([
            *summary.model_and_mesh(config, components, str(components.folder)),
            *(f"read        {line}" for line in lines),
            f"budget      {config.iterations:,} updates of {config.learning.prompts_per_update:,} rows, "
            f"epochs: {config.sft.epochs}; learning rate {config.learning.learning_rate:g}, {schedule}",
            f"files       {buckets.origin(workdir)}: config.json, metrics.jsonl, checkpoints/",
        ]),
        command="sft",
    )  # fmt: skip


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
    layout = run.learner.layout
    batch = make_batch(
        examples, max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.sampling.max_response_tokens,
        layout=layout,
        num_rows=layout.num_rows(config.learning.prompts_per_update, config.row_tokens, run.learner.micro_rows),
    )  # fmt: skip
    return run.learner.put(batch)


def supervised_iteration(run: Run, state: RunState) -> tuple[RunState, TrainingStopped | None]:
    """Makes one update; returns the state with its metrics, and why the run must end, or None."""
    begin, number = time.monotonic(), state.iteration + 1
    cursor = PromptCursor(**state.selection)
    prompts, cursor = next_prompts(run.prompts, cursor, run.config.learning.prompts_per_update)
    rows = [run.demonstrations[prompt.id] for prompt in prompts]
    batch = supervised_batch(run, rows)
    run.begin_update()
    learner, result = run.learner.update(state.learner, batch, run.base, between=run.stop.agree)
    result = jax.device_get(result)
    if not result.finite:
        return dataclasses.replace(state, learner=learner), TrainingStopped(
            f"update {number}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}: not finite. The "
            "update was not applied. Lower learning.learning_rate, or look for damaged rows."
        )
    check_weights(result, f"update {number}")
    schedule = make_schedule(run.config.learning, run.config.num_updates)
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
            run.stop.agree()  # a score is a program of all processes
            run.stop.show(f"validation, row {begin:,} of {len(self.rows):,}")
            logprobs = run.learner.score(policy, supervised_batch(run, self.rows[begin : begin + size]))
            total -= float(processes.fetch(logprobs).sum(dtype=np.float64))
        return {"validation/loss": total / sum(len(row.tokens) for row in self.rows)}
