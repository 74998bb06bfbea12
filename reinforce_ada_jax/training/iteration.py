"""One iteration: a collection of prompts, and the updates made from it.

    prompts -> engine -> verifier -> pools -> groups + advantages -> batch -> update -> the same weights

A `Run` holds what stays the same, and `train_iteration` maps a `RunState` to the next one.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

from reinforce_ada_jax.collection import averages, selection
from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.serialization import CollectedShard
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Stop
from reinforce_ada_jax.reporting import samples
from reinforce_ada_jax.training import response_journal, reward_check
from reinforce_ada_jax.training.drawing import Drawn, Source, choose, draw, draw_metrics, make_groups
from reinforce_ada_jax.training.run import Run, TrainingStopped
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.updates import make_updates, score_groups


def train_iteration(run: Run, state: RunState) -> tuple[RunState, TrainingStopped | None]:
    """Chooses prompts, draws and grades responses, groups them, scores them, and updates the weights.

    Where the sampler has devices of its own, the next iteration is drawn there during the updates, from the weights
    before them, and `run.ahead` holds it until the next call.

    Returns:
      The next state, with the metrics in `pending`; and why the run must end, or None. If it must end before any update
      was made, the state is that of the iteration before.

    Raises:
      Interrupted: the run was asked to end. Before the end of the first update, `state` is unchanged. Later, there was
        no time for the other updates, and `state` is donated.
      TrainingStopped: too many responses could not be graded, or the log-probabilities forbid an update; `state` is
        unchanged.
    """
    begin = time.monotonic()
    drawn = run.ahead.take(run.stop)  # None, unless it was drawn during the updates before
    if drawn is None:
        source = choose(run, state, _read_journal(run, state))  # prompts, and the weights to draw from
        drawn = draw(run, source, run.stop)  # and grade
        _write_journal(run, state, drawn.collected)
    waited = {"time/wait_s": time.monotonic() - begin} if run.config.draws_ahead else {}

    groups = make_groups(run, drawn)
    _report(run, state, groups)
    metrics = draw_metrics(run, drawn, groups) | _observe(run, groups) | waited
    after = _begin_next(run, _without_updates(run, state, drawn))

    run.ready_to_update(run.stop.check)
    run.progress.phase("updating")
    minibatches, scored = score_groups(run, state, groups)
    run.stop.agree()
    done = make_updates(run, state, minibatches)
    num_updates = done.metrics["update/count"]
    if done.stopped is not None and not num_updates:
        # The iteration is not in the weights: the next start draws it again, and counts its skips again.
        return dataclasses.replace(state, learner=done.learner), done.stopped
    metrics |= scored | done.metrics | {"update/skipped": len(minibatches) - num_updates}
    after = dataclasses.replace(after, learner=done.learner, skipped_in_a_row=done.skipped_in_a_row, pending=metrics)
    return after, done.stopped


def _read_journal(run: Run, state: RunState) -> CollectedShard | None:
    """Returns the responses of the next iteration that an earlier start has stored, if it has."""
    found = None if run.journal is None else run.journal.read(state, run.prompts)
    if found is not None:
        run.progress.note(f"iteration {state.iteration + 1} begins with {found.num_responses:,} stored responses")
    return found


def _write_journal(run: Run, state: RunState, collected: CollectedShard) -> None:
    """Stores the responses of an iteration before its updates, for a run that ends during them."""
    if run.journal is not None and not run.journal.write(state, collected):
        run.progress.say(
            f"iteration {state.iteration + 1}: its responses are not stored for a resume. They would need more than "
            f"{response_journal.MOST_BYTES / 1e9:g} GB with those stored before."
        )


def _report(run: Run, state: RunState, groups: Sequence[Group]) -> None:
    """Writes some responses, and warnings of verdicts and groups; TrainingStopped if too many were not graded."""
    if processes.is_writer():
        file = run.workdir / "samples" / f"{state.iteration + 1:06d}.jsonl"
        samples.write(file, groups[: run.config.logging.sampled_prompts], run.components.tokenizer.decode)
    _check_verdicts(run, state, groups)
    wanted, num_groups = run.config.collection.prompts_per_iteration, sum(bool(group.kept.size) for group in groups)
    if run.strategy.extra_batches and num_groups < wanted:
        run.progress.say(
            f"iteration {state.iteration + 1}: {num_groups} of {wanted} groups have a signal after {len(groups)} "
            "prompts, which are all that collection.max_extra_batches and the data allow; the update uses these."
        )
    if not num_groups:
        run.progress.say(f"iteration {state.iteration + 1}: every group was dropped, so nothing is updated.")


def _check_verdicts(run: Run, state: RunState, groups: Sequence[Group]) -> None:
    """Shows the first verdict of a user's reward; stops the run if too many responses could not be graded."""
    config, what = run.config, f"iteration {state.iteration + 1}"
    verdicts = [verdict for group in groups for verdict in group.pool.verdicts]
    graders, remedy = run.components.graders(run.verifiers), reward_check.training_remedy(config)
    message = reward_check.too_many_failed(config, graders, what, verdicts, remedy)
    if message:
        raise TrainingStopped(message)
    if state.iteration == 0:
        kind = "" if config.reward.path or config.environment.path else config.reward.kind
        share, flag = reward_check.share_without_answer(verdicts), "--config.reward.kind=gsm8k in a new run"
        for warning in (
            reward_check.none_above_threshold(config, verdicts),
            reward_check.without_answer(kind, share, "", flag),
        ):
            if warning:
                run.progress.say(f"{what}: {warning}")
    if state.iteration == 0 and reward_check.checked_name(config):
        pool = groups[0].pool
        text = reward_check.shown(run.components.tokenizer.decode(pool.responses[0].tokens))
        given = reward_check.described(pool.verdicts[0])
        run.progress.note(f"first response, to problem {pool.prompt.id!r}: {text} gets the reward {given}")


def _observe(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """Lets the choice of prompts and the estimator of pass rates learn from the groups; returns their metrics."""
    try:
        metrics = selection.observe(run.selection, groups, run.config.collection.selection)
    except ValueError as error:
        raise TrainingStopped(f"{error}.") from error
    return metrics if run.estimator is None else metrics | run.estimator.observe([group.pool for group in groups])


def _without_updates(run: Run, state: RunState, drawn: Drawn) -> RunState:
    """Returns the state after an iteration, with the weights before its updates."""
    pools, noise = drawn.collected.pools, drawn.source.noise
    observed = averages.rounds(pools) | ({} if noise is None else averages.score_squares(pools))
    return RunState(
        learner=state.learner,
        selection=selection.state_of(run.selection, run.config.collection.selection),
        iteration=state.iteration + 1,
        partial_rollouts=drawn.source.choice.upcoming.partial,
        estimator=None if run.estimator is None else run.estimator.to_json(),
        averages=state.averages.after(observed),
    )


def _begin_next(run: Run, after: RunState) -> RunState:
    """Gives a sampler with devices of its own the new weights, and begins to draw; returns the new state."""
    if not run.config.draws_ahead:
        return after
    assert run.rollouts is not None
    after = dataclasses.replace(after, sampler_weights=run.rollouts.decode_weights(run.policy(after)))
    if after.iteration < run.config.iterations:
        source = dataclasses.replace(choose(run, after, _read_journal(run, after)), reshard=run.rollouts.reshard)
        run.ahead.begin(functools.partial(_draw_next, run, after, source), run.stop)
    return after


def _draw_next(run: Run, after: RunState, source: Source, stop: Stop) -> Drawn:
    """Draws the next iteration and stores its responses, in a thread: the run may end before it takes them."""
    drawn = draw(run, source, stop)
    _write_journal(run, after, drawn.collected)
    return drawn
