"""The training loop: the iterations, what follows each of them, and the ways in which a run ends.

A run is a sequence of `RunState`s: `run.iterate` (training/iteration.py) makes the next one, an evaluation and a line
of metrics complete it, and a checkpoint holds it.
"""

import contextlib
import dataclasses
import enum
import pathlib
import re
import shlex
import time
from collections.abc import Mapping

import jax
import numpy as np

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.isolation.workers import CannotStart
from reinforce_ada_jax.reporting import idle_slots
from reinforce_ada_jax.reporting.history import WAITING
from reinforce_ada_jax.sampling.programs import num_replicas
from reinforce_ada_jax.training.drawing_hosts import DrawingHosts
from reinforce_ada_jax.training.run import Run, TrainingStopped
from reinforce_ada_jax.training.state import RunState, to_record
from reinforce_ada_jax.user_code import UserCodeError


class Ending(enum.Enum):
    """End of a run, with the exit code of its command. The same command continues all but a finished one."""

    FINISHED = 0
    INTERRUPTED = cli.INTERRUPTED  # by Ctrl-C
    PREEMPTED = RESTART  # the machine is taken away
    STOPPED = cli.STOPPED  # by itself: what went wrong must be fixed first


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    ending: Ending  # how it ended
    message: str = ""  # for the user; "" if the run finished now
    state: RunState | None = None  # the last state; None if the disk failed


def end(outcome: Outcome, workdir: pathlib.Path, unit: str, more: str = "", *, compiles: bool) -> None:
    """Says where the results of a command are; ends the process with an exit code if the run didn't finish.

    `compiles`: threads may be compiling. A preempted process, or one whose disk failed, does not wait for them. That
    took 28 s.
    """
    if outcome.ending is not Ending.FINISHED:
        is_lost = outcome.ending is Ending.PREEMPTED or outcome.state is None
        # JAX ends several processes together, and only one process compiles in threads.
        at_once = compiles and is_lost and processes.total() == 1
        cli.fail(outcome.message, outcome.ending.value, at_once=at_once)
    if processes.is_writer() and outcome.state is not None:
        named = buckets.url(workdir) if buckets.is_bucket(workdir) else workdir
        text = f"{outcome.message}\n".lstrip() + f"finished {unit} {outcome.state.iteration}{more}."
        if outcome.state.iteration:  # a run of no iterations has no checkpoint
            text += f" Weights: {named}/checkpoints; export them with\n"
            text += f"  python -m reinforce_ada_jax.export --workdir={shlex.quote(str(named))} --output=HF_DIR"
        print(text)


# ---- the loop --------------------------------------------------------------------------------------------------------


def run_to_end(run: Run, state: RunState) -> Outcome:
    """Runs the remaining iterations, and saves the last state even after an error; it is on disk at the return.

    Raises an error in this package or in a user's function; the last finished iteration is saved if possible.
    """
    last, note = run.config.iterations, ""
    if state.pending is None and state.iteration >= last:
        note = f"nothing to do: {state.iteration} are finished, and {last} were asked for."
    try:
        try:
            with run.verifiers, run.ahead:
                if state.pending is not None or state.iteration < last:
                    run.ready_to_sample(run.stop.check)
                _evaluate_before(run, state)
                while state.pending is not None or state.iteration < last:
                    run.stop.agree()
                    run.checkpoints.check()
                    _forget_saved(run)
                    stopped = None
                    if state.pending is None:  # otherwise the iteration was saved before its evaluation
                        traced = state.iteration + 1 == run.config.logging.profile
                        with jax.profiler.trace(run.workdir / "profile") if traced else contextlib.nullcontext():
                            state, stopped = run.iterate(run, state)
                    if state.pending is not None:  # otherwise nothing of the iteration is in the weights
                        state = write_metrics(run, state, evaluate_if_due(run, state))
                    if stopped is not None:
                        raise stopped
                    _save_if_due(run, state)
            outcome = Outcome(Ending.FINISHED, note, state)
        except OSError:
            raise
        except Exception as error:
            outcome = _outcome_of(run, state, error)
            if outcome is None:
                raise
        run.checkpoints.wait()
        _forget_saved(run)
        _end_hosts(run, outcome)
        processes.leave()
    except OSError as error:
        processes.wait_for_news()  # a save that fails because a process is gone looks like a full disk
        with contextlib.suppress(OSError):  # the first error is reported
            run.checkpoints.wait()  # a save that still runs may fail, too
        remedy = f"Fix this (on a full disk, free space), then: {_resuming(run)}"
        outcome = Outcome(Ending.STOPPED, f"{error}. Training stopped. {_newest_saved(run)}. {remedy}")
        _end_hosts(run, outcome)
    return outcome


def _end_hosts(run: Run, outcome: Outcome) -> None:
    """Ends the processes that only draw, if there are any, as this one ends."""
    if isinstance(run.rollouts, DrawingHosts):
        run.rollouts.end(outcome.ending.value, outcome.message)


def _newest_saved(run: Run) -> str:
    newest = run.checkpoints.latest()
    return "No checkpoint was finished yet" if newest is None else f"The last complete checkpoint is {newest}"


def _outcome_of(run: Run, state: RunState, error: Exception) -> Outcome | None:
    """Saves the last state before an error (OSError if it can't); returns the run's end, or None to raise the error."""
    if isinstance(error, Interrupted):
        return _interrupted(run, state)
    if isinstance(error, TrainingStopped):
        if state.donated:  # an update gave weights that can't be used
            return Outcome(Ending.STOPPED, f"{error} {_newest_saved(run)}.", state)
        save(run, state)
        return Outcome(Ending.STOPPED, f"{error} The state before it is saved as iteration {state.iteration}.", state)
    # No state can be saved if an update has taken the arrays, or if other processes may not have the error.
    if state.donated or processes.count() > 1:
        return None
    save(run, state)
    run.checkpoints.wait()
    if isinstance(error, CannotStart | UserCodeError):
        line = error.line if isinstance(error, CannotStart) else f"{error}. Fix the file."
        return Outcome(Ending.STOPPED, f"{line} Iteration {state.iteration} is saved. {_resuming(run)}", state)
    return None


def _interrupted(run: Run, state: RunState) -> Outcome:
    """Saves the state of a run that was asked to end, where there is time."""
    ending = Ending.PREEMPTED if run.interrupt.preempted() else Ending.INTERRUPTED
    event = "told to end" if ending is Ending.PREEMPTED else "interrupted"
    written = 0 if run.journal is None else run.journal.write_broken_off()
    is_saved = state.iteration in run.checkpoints.iterations()
    if state.donated or not (is_saved or run.stop.has_time(run.checkpoints.times.expected_s(state.num_bytes))):
        return Outcome(ending, f"{event}; {_not_saved(run, state)} {_resuming(run)}", state)
    save(run, state)
    more = f"{written:,} responses of the next collection are stored. " if written else ""
    return Outcome(ending, f"{event}; iteration {state.iteration} is saved. {more}{_resuming(run)}", state)


def is_due(every: int, iteration: int, iterations: int) -> bool:
    """Returns True if something done every `every` iterations (0: never) is due; it always is after the last one."""
    return every > 0 and (iteration % every == 0 or iteration == iterations)


def _save_if_due(run: Run, state: RunState) -> None:
    """Saves a finished iteration, or amends its checkpoint, where that is due; every process must call it."""
    checkpoint, times, last = run.config.checkpoint, run.checkpoints.times, run.config.iterations
    if slow := times.slow(checkpoint, state.num_bytes):
        run.progress.say(slow)
    saved = state.iteration in run.checkpoints.iterations()
    due = saved or state.iteration == last or is_due(checkpoint.every, state.iteration, last)
    if not due:
        minutes = times.minutes(checkpoint, state.num_bytes)
        late = minutes > 0 and time.monotonic() - run.checkpoints.saved_at >= 60 * minutes
        due = processes.any_of(late)  # clocks differ
    if due:
        save(run, state)


def _not_saved(run: Run, state: RunState) -> str:
    """Returns text on what is saved of a run whose last state is not."""
    newest, notice_s = run.checkpoints.latest(), run.config.checkpoint.notice_s
    saved = "no iteration is saved" if newest is None else f"iteration {newest} is the newest that is saved"
    lost = "its updates" if state.donated else "a checkpoint"
    stored = "" if run.journal is None else " The responses drawn since then are stored."  # None: nothing is drawn
    limit = f"checkpoint.notice_s ({notice_s:g} s)"
    return f"{saved}, because {lost} would end later than {limit} after the signal.{stored}"


def _evaluate_before(run: Run, state: RunState) -> None:
    """Evaluates the weights that the run begins with, once."""
    if state.iteration == 0 and run.config.evaluation.every and run.evaluator and not run.evaluator.is_done(run, 0):
        metrics = evaluate_if_due(run, state)
        if run.writer is not None:
            run.writer.plot(0, metrics)


def evaluate_if_due(run: Run, state: RunState) -> dict[str, float]:
    """Returns avg@k and pass@k of the weights, or their loss on held-out rows; nothing where no evaluation is due."""
    if run.evaluator is None or not is_due(run.config.evaluation.every, state.iteration, run.config.iterations):
        return {}
    waits = time.monotonic()
    run.ahead.wait(run.stop)  # the collection uses the engine
    begin = time.monotonic()
    metrics = run.evaluator(run, state)
    averages = (f"{key.split('/')[1]} {value:.3f}" for key, value in metrics.items() if key.endswith("/avg"))
    text = f"avg@{run.config.evaluation.samples} {', '.join(averages)}"
    if "validation/loss" in metrics:
        text = f"validation loss {metrics['validation/loss']:.4f}"
    run.progress.note(f"iteration {state.iteration}: {text}")
    times = {"time/evaluate_s": time.monotonic() - begin}
    if state.pending is not None and WAITING in state.pending:
        times[WAITING] = state.pending[WAITING] + begin - waits
    return metrics | times


def write_metrics(run: Run, state: RunState, evaluated: Mapping[str, float]) -> RunState:
    """Writes the pending metrics of an iteration with its evaluation; returns the state without them."""
    memory = jax.local_devices()[0].memory_stats() or {}
    metrics = {
        **(state.pending or {}),
        **evaluated,
        "compile/count": run.compiles.since_last(),
        "memory/peak_bytes": memory.get("peak_bytes_in_use", 0),  # 0 if the backend doesn't count
    }
    if run.writer is not None:
        run.writer.write(state.iteration, metrics)
    run.progress.iteration(_shown(metrics))
    if state.iteration == idle_slots.ADVICE_AT and run.rollouts is not None:
        engine, speculative = run.components.engine, run.components.draws_speculatively(run.config.collection)
        advice = idle_slots.advice(
            run.config, busy=metrics["collection/slot_utilisation"], slots=engine.options.slots,
            replicas=num_replicas(engine.mesh), speculative=speculative,
        )  # fmt: skip
        run.progress.note(advice)
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
    """Begins to write a checkpoint of a state; if the run has a bucket, the metrics are uploaded first."""
    if run.copy is not None:
        run.copy.upload()
    record = to_record(state) | dict(run.identity)
    run.checkpoints.save(state.iteration, state.learner, record, state.evaluation, state.sampler_weights)


def _forget_saved(run: Run) -> None:
    """Removes the stored responses of iterations that the newest complete checkpoint includes."""
    if run.journal is not None:
        run.journal.forget(run.checkpoints.newest_on_disk())


def _resuming(run: Run) -> str:
    named = shlex.quote(str(buckets.origin(run.workdir)))
    return f"python -m reinforce_ada_jax.{run.command} with the same --config and --workdir={named} goes on from there."
