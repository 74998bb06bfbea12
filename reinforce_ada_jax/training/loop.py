"""The training loop: the iterations, what follows each of them, and the ways in which a run ends.

A run is a sequence of `RunState`s: `iterate` (training/iteration.py) makes the next one, an evaluation and a line of
metrics complete it, and a checkpoint holds it. `Run` is what the loop works with; it never changes.
"""

import contextlib
import dataclasses
import enum
import functools
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import numpy as np

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import Ready, always_ready
from reinforce_ada_jax.distributed.signals import Interrupt, Interrupted
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.local_copy import LocalCopy
from reinforce_ada_jax.isolation.workers import CannotStart
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.reporting.writers import MetricsWriter
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.training.draw_ahead import DrawAhead
from reinforce_ada_jax.training.iteration import (
    Drawn,
    Trainer,
    report_unless_asked_to_end,
)
from reinforce_ada_jax.training.kept_responses import KeptResponses
from reinforce_ada_jax.training.state import RunState, to_record
from reinforce_ada_jax.training.updates import TrainingStopped

if TYPE_CHECKING:
    from reinforce_ada_jax.training.checkpoint import Checkpoints


@runtime_checkable
class Evaluator(Protocol):
    """Evaluation of weights on benchmarks; the command provides it, because `evaluation` is a layer above."""

    def is_done(self, iteration: int) -> bool:
        """Returns True, in every process, if the work directory has this iteration's results on all benchmarks."""
        ...

    def __call__(self, params: Params, iteration: int, report: Callable[[str], None], /) -> dict[str, float]:
        """Returns `evaluation/<set>/...` of the weights, and keeps them in the work directory."""
        ...


# Makes the evaluator of a run from its rollouts and verifiers.
EvaluatorFn = Callable[[Rollouts, VerifierPool], Evaluator]
IterateFn = Callable[[RunState], tuple[RunState, TrainingStopped | None]]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Settings, programs and files of a training run.

    Attributes:
      config: of the run.
      workdir: its work directory.
      trainer: data and programs; None without drawing, in supervised training.
      iterate: returns the next state, and why the run must end if it must (`train_iteration`).
      evaluator: None if the run doesn't evaluate. It gets the trained weights; without a trainer adapters alone.
      verifiers: the verifier processes; `run_to_end` starts and ends them.
      ahead: the collection that is drawn during the updates, where the sampler has devices of its own.
      identity: what a resumed run must find unchanged.
      checkpoints: the folder of checkpoints.
      writer: of the metrics, in process 0.
      progress: the line at the terminal.
      interrupt: Ctrl-C, SIGTERM, and notices that a machine is taken away.
      compiles: counter of XLA compilations.
      copy: local copy of a work directory in a bucket.
      ready_to_sample: waits until the engine's programs are compiled.
      command: name of the command, to resume the run with.
    """

    config: Config
    workdir: pathlib.Path
    trainer: Trainer | None
    iterate: IterateFn
    evaluator: Evaluator | None
    verifiers: contextlib.AbstractContextManager[Any]
    ahead: DrawAhead[Drawn]
    identity: Mapping[str, Any]
    checkpoints: "Checkpoints"
    writer: MetricsWriter | None
    progress: Progress
    interrupt: Interrupt
    compiles: CompileCounter
    copy: LocalCopy | None
    ready_to_sample: Ready = always_ready
    command: str = "train"

    @property
    def kept(self) -> KeptResponses | None:
        """Responses of iterations that no checkpoint holds yet; None: none are kept."""
        return None if self.trainer is None else self.trainer.kept


class Ending(enum.Enum):
    """End of a run. The same command continues all but a finished one."""

    FINISHED = enum.auto()
    INTERRUPTED = enum.auto()  # by Ctrl-C
    PREEMPTED = enum.auto()  # the machine is taken away
    STOPPED = enum.auto()  # by itself: what went wrong must be fixed first


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """End of a run.

    Attributes:
      ending: how it ended.
      message: for the user; "" if the run finished.
      state: the last state; None if the disk failed.
    """

    ending: Ending
    message: str = ""
    state: RunState | None = None


# ---- the loop --------------------------------------------------------------------------------------------------------


def iterations(run: Run, state: RunState) -> Iterator[RunState]:
    """Runs the iterations that are left, and yields each new state: the last one is the one to save.

    Raises:
      Interrupted: the run was asked to end.
      TrainingStopped: it must not go on.
    """
    config, last = run.config, run.config.iterations
    if state.pending is not None or state.iteration < last:
        run.ready_to_sample(functools.partial(report_unless_asked_to_end, run.interrupt, run.progress))
    if state.iteration == 0 and config.evaluation.every and run.evaluator and not run.evaluator.is_done(0):
        before = evaluate(run, run.evaluator, state)
        if run.writer is not None:
            run.writer.plot(0, before)
    while state.pending is not None or state.iteration < last:
        run.interrupt.agree()
        run.checkpoints.check()
        _forget_saved(run)
        stop = None
        if state.pending is None:  # otherwise the iteration was saved before its evaluation
            with _traced(run, state.iteration + 1):
                state, stop = run.iterate(state)
            yield state
        if state.pending is not None:  # otherwise nothing of the iteration is in the weights
            if run.evaluator and is_due(config.evaluation.every, state.iteration, last):
                state = dataclasses.replace(state, pending={**state.pending, **evaluate(run, run.evaluator, state)})
            state = write_metrics(run, state)
            yield state
        if stop is not None:
            raise stop
        if slow := run.checkpoints.times.slow(config.checkpoint, state.num_bytes):
            run.progress.say(slow)
        if _is_save_due(run, state):
            save(run, state)


def loop(run: Run, begin: RunState) -> Outcome:
    """Runs the iterations that are left, and saves the last state however they end.

    Raises:
      OSError: a file of the run can't be read or written.
      Exception: an error in this package or in a user's function; the last finished iteration is saved if possible.
    """
    state, resuming = begin, _resuming(run)
    try:
        with run.verifiers, run.ahead:
            for state in iterations(run, begin):  # noqa: B007  (the last one is used below)
                pass
    except Interrupted:
        ending = Ending.PREEMPTED if run.interrupt.preempted() else Ending.INTERRUPTED
        event = "told to end" if ending is Ending.PREEMPTED else "interrupted"
        responses = None if state.donated else run.kept
        kept = 0 if responses is None else responses.write_broken_off(state)
        if state.donated or _is_late(run, state):
            return Outcome(ending, f"{event}; {_not_saved(run, state)} {resuming}", state)
        save(run, state)
        more = f"{kept:,} responses of the next one are kept. " if kept else ""
        return Outcome(ending, f"{event}; iteration {state.iteration} is saved. {more}{resuming}", state)
    except TrainingStopped as error:
        save(run, state)
        message = f"{error} The state before it is saved as iteration {state.iteration}."
        return Outcome(Ending.STOPPED, message, state)
    except OSError:
        raise
    except Exception as error:
        # Nothing to save if an update has taken the arrays, or if other processes may not have met the error.
        if state.donated or processes.count() > 1:
            raise
        save(run, state)
        run.checkpoints.wait()
        if not isinstance(error, CannotStart):
            raise
        return Outcome(Ending.STOPPED, f"{error.line} Iteration {state.iteration} is saved. {resuming}", state)
    return Outcome(Ending.FINISHED, state=state)


def is_due(every: int, iteration: int, iterations: int) -> bool:
    """Returns True if something done every `every` iterations (0: never) is due; it always is after the last one."""
    return every > 0 and (iteration % every == 0 or iteration == iterations)


def _is_save_due(run: Run, state: RunState) -> bool:
    """Returns True if a finished iteration is to be saved, or its checkpoint amended; every process must call it."""
    checkpoint, last = run.config.checkpoint, run.config.iterations
    saved = state.iteration in run.checkpoints.iterations()
    if saved or state.iteration == last or is_due(checkpoint.every, state.iteration, last):
        return True
    minutes = run.checkpoints.times.minutes(checkpoint, state.num_bytes)
    late = minutes > 0 and run.checkpoints.seconds_since_save() >= 60 * minutes
    return processes.any_of(late)  # clocks differ


def _is_late(run: Run, state: RunState) -> bool:
    """Returns True if a state that is not saved can't be saved before the machine is taken away, in all processes."""
    if state.iteration in run.checkpoints.iterations():
        return False
    return run.interrupt.out_of_time(run.checkpoints.times.expected_s(state.num_bytes), run.config.checkpoint.notice_s)


def _not_saved(run: Run, state: RunState) -> str:
    """Returns what remains of a run whose last state is not saved."""
    newest, notice_s = run.checkpoints.latest(), run.config.checkpoint.notice_s
    saved = "no iteration is saved" if newest is None else f"iteration {newest} is the newest that is saved"
    lost = "its updates" if state.donated else "a checkpoint"
    return (
        f"{saved}, because {lost} would end later than checkpoint.notice_s ({notice_s:g} s) after the signal. The "
        "responses drawn since then are kept."
    )


def evaluate(run: Run, evaluator: Evaluator, state: RunState) -> dict[str, float]:
    """Returns avg@k and pass@k of the current weights, or their loss on held-out rows."""
    report = functools.partial(report_unless_asked_to_end, run.interrupt, run.progress)
    begin = time.monotonic()
    run.ahead.wait(report)  # it has the engine
    params = state.learner.params if run.trainer is None else run.trainer.policy(state)
    metrics = evaluator(params, state.iteration, report)
    averages = (f"{key.split('/')[1]} {value:.3f}" for key, value in metrics.items() if key.endswith("/avg"))
    text = f"avg@{run.config.evaluation.samples} {', '.join(averages)}"
    if run.trainer is None:
        text = f"validation loss {metrics['validation/loss']:.4f}"
    run.progress.note(f"iteration {state.iteration}: {text}")
    return metrics | {"time/evaluate_s": time.monotonic() - begin}


def _traced(run: Run, iteration: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context that traces an iteration into the work directory, if it is the one to be traced."""
    if iteration != run.config.logging.profile:
        return contextlib.nullcontext()
    return jax.profiler.trace(run.workdir / "profile")


def write_metrics(run: Run, state: RunState) -> RunState:
    """Writes the pending metrics of an iteration; returns the state without them, with its evaluation."""
    memory = jax.local_devices()[0].memory_stats() or {}
    metrics = dict(state.pending or {}) | {
        "compile/count": run.compiles.since_last(),
        "memory/peak_bytes": memory.get("peak_bytes_in_use", 0),  # 0 if the backend doesn't count
    }
    if run.writer is not None:
        run.writer.write(state.iteration, metrics)
    run.progress.iteration(_shown(metrics))
    averages = [value for key, value in metrics.items() if re.fullmatch("evaluation/.*/avg", key)]
    return dataclasses.replace(state, pending=None, evaluation=float(np.mean(averages)) if averages else None)


def _shown(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the numbers of the progress line."""
    if "collection/responses" not in metrics:  # supervised training
        return {"loss": f"{metrics['update/loss']:.4f}"}
    failed = metrics["collection/verifier_failures"] / metrics["collection/responses"]
    return {
        "reward": f"{metrics['reward/first_round']:.3f}",
        "zero-signal": f"{metrics['collection/zero_signal_share']:.2f}",
        "entropy": f"{metrics['update/entropy']:.2f}",
        **({"not graded": f"{failed:.1%}"} if failed else {}),
    }


def save(run: Run, state: RunState) -> None:
    """Begins to write a checkpoint of a state, whose metrics are in the bucket before it where the run has one."""
    if run.copy is not None:
        run.copy.upload()
    record = to_record(state) | dict(run.identity)
    run.checkpoints.save(state.iteration, state.learner, record, state.evaluation, state.sampler)


def _forget_saved(run: Run) -> None:
    """Removes the kept responses of the iterations that the newest complete checkpoint has."""
    if run.kept is not None:
        run.kept.forget(run.checkpoints.newest_on_disk())


def _resuming(run: Run) -> str:
    named = buckets.origin(run.workdir)
    return f"python -m reinforce_ada_jax.{run.command} with the same --config and --workdir={named} goes on from there."


def run_to_end(run: Run, state: RunState) -> Outcome:
    """Runs the loop; the last state is on disk when this returns."""
    try:
        outcome = loop(run, state)
        run.checkpoints.wait()
        _forget_saved(run)
        processes.leave()
    except OSError as error:
        processes.wait_for_news()  # a save that fails because a process is gone looks like a full disk
        newest = run.checkpoints.latest()
        saved = "No checkpoint was finished yet" if newest is None else f"The last complete checkpoint is {newest}"
        remedy = f"Fix this (on a full disk, free space), then: {_resuming(run)}"
        return Outcome(Ending.STOPPED, f"{error}. Training stopped. {saved}. {remedy}")
    return outcome
