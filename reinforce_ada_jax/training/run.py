"""A training run: its checked input, and what else stays the same from its first iteration to its last."""

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
from reinforce_ada_jax.learning.update import UpdateMetrics
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.reporting.writers import MetricsWriter
from reinforce_ada_jax.rewards.loading import GradeFn
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.draw_ahead import DrawAhead
from reinforce_ada_jax.training.drawing_hosts import DrawingHosts
from reinforce_ada_jax.training.response_journal import ResponseJournal
from reinforce_ada_jax.training.sharded_collection import DrawFn
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import Prompt

if TYPE_CHECKING:
    from reinforce_ada_jax.training.checkpoint import Checkpoints
    from reinforce_ada_jax.training.drawing import Drawn


class TrainingStopped(Exception):
    """The run must not go on as it is; its state can be saved, unless an update took its arrays."""


def check_weights(result: UpdateMetrics, update: str) -> None:
    """Raises TrainingStopped if the weights after an update are not finite; those before it are gone."""
    if not result.weights_finite:
        raise TrainingStopped(
            f"{update}: the new weights are not finite, and are not saved. Lower learning.learning_rate or "
            "learning.weight_decay, and begin in another --workdir."
        )


@runtime_checkable
class Evaluator(Protocol):
    """Evaluation of a run's weights; for benchmarks the command provides it, because `evaluation` is a layer above."""

    def is_done(self, run: "Run", iteration: int, /) -> bool:
        """Returns True, in every process, if the work directory has this iteration's results on all benchmarks."""
        ...

    def __call__(self, run: "Run", state: RunState, /) -> dict[str, float]:
        """Returns `evaluation/<set>/...` of the weights, and keeps them in the work directory."""
        ...


@runtime_checkable
class BenchmarkEvaluator(Evaluator, Protocol):
    """Evaluation on benchmarks, which processes that only draw can draw, too."""

    benchmarks: dict[str, list[Prompt]]

    def draw_fn(
        self, run: "Inputs", rollouts: Rollouts, weights: Params, benchmark: str, iteration: int, stop: Stop, /
    ) -> DrawFn:
        """Returns the function that draws and grades problems of a benchmark, on the devices of this process."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """Checked input of a run, without weights and compiled programs. `startup.start` makes a `Run` of it."""

    config: Config  # with `model.compute_dtype` chosen
    given: Config  # as config.json has it; in supervised training some settings of `config` follow from the rows
    components: Components  # model folder, tokenizer, mesh and engine
    prompts: list[Prompt]  # the training set
    demonstrations: Mapping[str, Demonstration] = dataclasses.field(default_factory=dict)  # responses, by prompt id
    selection: Selection  # choice of prompts; its state is in `RunState.selection`
    strategy: Strategy  # stopping rule and choice of responses
    verifiers: VerifierPool  # the verifier processes; `run_to_end` starts and ends them
    reward: GradeFn | None = None  # function that `train` was given
    learner: Learner  # the compiled scoring and update, with the loss that `learning.loss` names
    # `train_iteration`, or that of supervised training: returns the next state, and why the run must end, or None.
    iterate: Callable[["Run", RunState], tuple[RunState, TrainingStopped | None]]
    evaluator: Evaluator | None = None  # None if the run doesn't evaluate
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what all processes must have read, as hashes
    summary: str = ""  # text that a run prints before it begins
    command: str = "train"  # name of the command, to resume the run with

    @property
    def is_supervised(self) -> bool:
        """True if the responses are given: nothing is drawn or graded."""
        return bool(self.demonstrations)

    @property
    def learns_on_cpu(self) -> bool:
        """True if the learner's arrays are in the memory of the host."""
        return self.learner.mesh.devices.flat[0].platform == "cpu"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Run(Inputs):
    """Settings, data, programs and files of a run. It is built once, at the start, and never changes."""

    workdir: pathlib.Path
    # The engine's decode state, or the processes that only draw; None in supervised training.
    rollouts: Rollouts | DrawingHosts | None
    estimator: Ema | ValueHead | None = None  # of pass rates, where the strategy needs them
    base: Params | None = None  # frozen weights under the adapters; None if all weights are trained
    reference: Params | None = None  # weights that the KL term compares with; None without one
    ready_to_sample: Ready = always_ready  # waits until the engine's programs are compiled
    ready_to_update: Ready = always_ready  # waits until the programs of the updates are compiled
    ahead: "DrawAhead[Drawn]" = dataclasses.field(default_factory=DrawAhead)  # draws the next iteration
    stop: Stop  # the signal to stop, asked wherever the run may have to end
    interrupt: Interrupt  # what gives that signal: Ctrl-C, SIGTERM, and notices that a machine is taken away
    progress: Progress  # the line at the terminal
    checkpoints: "Checkpoints"
    identity: Mapping[str, Any]  # what a resumed run must find unchanged
    journal: ResponseJournal | None = None  # responses of iterations that no checkpoint holds yet; None: there is none
    writer: MetricsWriter | None = None  # of the metrics, in process 0
    compiles: CompileCounter  # counter of XLA compilations
    copy: LocalCopy | None = None  # local copy of a work directory in a bucket

    def begin_update(self) -> None:
        """On CPUs, waits for the last save; NotSavedError if it failed.

        A save reads the arrays of a CPU in place, so an update before its end would copy them all.
        """
        if self.learns_on_cpu:
            self.checkpoints.wait()

    def policy(self, state: RunState) -> Params:
        """Returns the current weights, to score with and to decode from. The next update donates them."""
        return self.learner.policy(state.learner.params, self.base)
