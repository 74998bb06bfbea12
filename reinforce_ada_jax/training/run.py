"""A training run: what stays the same from its first iteration to its last."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from reinforce_ada_jax.collection.estimators import Ema
from reinforce_ada_jax.collection.selection import Selection
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.demonstrations import Demonstration
from reinforce_ada_jax.distributed.compilation import Ready, always_ready
from reinforce_ada_jax.distributed.signals import Interrupt, Stop
from reinforce_ada_jax.files.local_copy import LocalCopy
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.reporting.writers import MetricsWriter
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.draw_ahead import DrawAhead
from reinforce_ada_jax.training.response_journal import ResponseJournal
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import Prompt

if TYPE_CHECKING:
    from reinforce_ada_jax.training.checkpoint import Checkpoints
    from reinforce_ada_jax.training.drawing import Drawn


class TrainingStopped(Exception):
    """The run must not go on as it is; its state can be saved."""


@runtime_checkable
class Evaluator(Protocol):
    """Evaluation of a run's weights; for benchmarks the command provides it, because `evaluation` is a layer above."""

    def is_done(self, run: "Run", iteration: int, /) -> bool:
        """Returns True, in every process, if the work directory has this iteration's results on all benchmarks."""
        ...

    def __call__(self, run: "Run", state: RunState, /) -> dict[str, float]:
        """Returns `evaluation/<set>/...` of the weights, and keeps them in the work directory."""
        ...


# Returns the next state, and why the run must end if it must.
IterateFn = Callable[["Run", RunState], tuple[RunState, TrainingStopped | None]]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """Settings, data, programs and files of a run. It is built once, at the start, and never changes.

    Attributes:
      config: of the run.
      workdir: its work directory.
      components: model folder, tokenizer, mesh and engine.
      prompts: the training set.
      demonstrations: in supervised training, the responses to the prompts, by prompt id.
      selection: choice of prompts; its state is in `RunState.selection`.
      strategy: stopping rule and choice of responses.
      verifiers: the verifier processes; `run_to_end` starts and ends them.
      rollouts: the engine's decode state; None in supervised training, which draws nothing.
      estimator: of pass rates, where the strategy plans with them; its state is in `RunState.estimator`.
      learner: the compiled scoring and update.
      base: frozen weights under the adapters; None if all weights are trained.
      reference: weights that the KL term compares with; None without one.
      ready_to_sample: waits until the engine's programs are compiled.
      ready_to_update: waits until the programs of the updates are compiled.
      iterate: makes an iteration: `train_iteration`, or that of supervised training.
      evaluator: None if the run doesn't evaluate.
      ahead: the collection that is drawn during the updates, where the sampler has devices of its own.
      stop: the signal to stop, asked wherever the run may have to end.
      interrupt: what gives that signal: Ctrl-C, SIGTERM, and notices that a machine is taken away.
      progress: the line at the terminal.
      checkpoints: the folder of checkpoints.
      identity: what a resumed run must find unchanged.
      journal: responses of iterations that no checkpoint holds yet; None: there is none.
      writer: of the metrics, in process 0.
      compiles: counter of XLA compilations.
      copy: local copy of a work directory in a bucket.
      command: name of the command, to resume the run with.
    """

    config: Config
    workdir: pathlib.Path
    components: Components
    prompts: list[Prompt]
    demonstrations: Mapping[str, Demonstration] = dataclasses.field(default_factory=dict)
    selection: Selection
    strategy: Strategy
    verifiers: VerifierPool
    rollouts: Rollouts | None
    estimator: Ema | ValueHead | None = None
    learner: Learner
    base: Params | None = None
    reference: Params | None = None
    ready_to_sample: Ready = always_ready
    ready_to_update: Ready = always_ready
    iterate: IterateFn
    evaluator: Evaluator | None = None
    ahead: "DrawAhead[Drawn]" = dataclasses.field(default_factory=DrawAhead)
    stop: Stop
    interrupt: Interrupt
    progress: Progress
    checkpoints: "Checkpoints"
    identity: Mapping[str, Any]
    journal: ResponseJournal | None = None
    writer: MetricsWriter | None = None
    compiles: CompileCounter
    copy: LocalCopy | None = None
    command: str = "train"

    def policy(self, state: RunState) -> Params:
        """Returns the current weights, to score with and to decode from. The next update donates them."""
        return self.learner.policy(state.learner.params, self.base)
