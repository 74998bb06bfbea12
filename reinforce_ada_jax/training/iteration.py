"""One iteration: a collection of prompts, and the updates made from it.

    prompts -> engine -> verifier -> pools -> groups + advantages -> batch -> update -> the same weights

A `Run` holds what stays the same, and `train_iteration` maps a `RunState` to the next one.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

from reinforce_ada_jax.collection import averages
from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.serialization import CollectedShard
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.reporting import samples
from reinforce_ada_jax.training import response_journal, reward_check
from reinforce_ada_jax.training.drawing import Drawn, choose, draw, draw_metrics, make_groups
from reinforce_ada_jax.training.run import Run, TrainingStopped
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.updates import check_logprobs, make_minibatches, make_updates


def train_iteration(run: Run, state: RunState) -> tuple[RunState, TrainingStopped | None]:
    """Collects responses, updates the weights, and advances the data.

    Where the sampler has devices of its own, the next iteration is drawn there during the updates, from the weights
    before them, and `run.ahead` holds it until the next call.

    Returns:
      The next state, whose `pending` are the metrics; and why the run must end, if an update was not finite and it
      must. If no update was made before that one, the state is still that of the iteration before.

    Raises:
      Interrupted: the run was asked to end before the end of the first update, and `state` is unchanged; or the others
        would not end before the machine does, and `state` is donated.
      TrainingStopped: no response could be graded, or the log-probabilities forbid an update; `state` is unchanged.
    """
    begin = time.monotonic()
    drawn = run.ahead.take(run.stop)
    if drawn is None:  # always, unless it was drawn during the updates before
        source = choose(run, state, _read_journal(run, state))
        drawn = draw(run, source, run.stop)
    waited_s = time.monotonic() - begin
    _keep(run, state, drawn.collected)
    groups = make_groups(run, drawn)
    _write_samples(run, state, groups)
    _check_verdicts(run, state, groups)
    metrics = draw_metrics(run, drawn, groups) | _observe(run, groups)
    after = RunState(
        learner=state.learner,
        selection=run.selection.to_json(),
        iteration=state.iteration + 1,
        partial_rollouts=drawn.source.choice.upcoming.partial,
        estimator=None if run.estimator is None else run.estimator.to_json(),
        averages=_averages_after(state, drawn),
    )
    if run.config.draws_ahead:
        metrics["time/wait_s"] = waited_s
        after = _begin_next(run, after)
    run.ready_to_update(run.stop.check)
    run.progress.phase("updating")
    _warn_of_missing_groups(run, state, groups)

    begin = time.monotonic()
    minibatches = make_minibatches(run, state, groups)
    minibatches, gaps = check_logprobs(run, state, minibatches)
    metrics["time/score_s"] = time.monotonic() - begin
    run.stop.agree()
    done = make_updates(run, state, minibatches)
    num_updates = done.metrics["update/count"]
    if done.stopped is not None and not num_updates:
        # The iteration is not in the weights: the next start draws it again, and counts its skips again.
        return dataclasses.replace(state, learner=done.learner), done.stopped
    metrics |= gaps | done.metrics | {"update/skipped": len(minibatches) - num_updates}
    after = dataclasses.replace(after, learner=done.learner, skipped_in_a_row=done.skipped_in_a_row, pending=metrics)
    return after, done.stopped


def _read_journal(run: Run, state: RunState) -> CollectedShard | None:
    """Returns the responses that an earlier start kept of the next iteration, if it kept any."""
    found = None if run.journal is None else run.journal.read(state, run.prompts)
    if found is not None:
        run.progress.note(f"iteration {state.iteration + 1} begins with {found.num_responses:,} kept responses")
    return found


def _averages_after(state: RunState, drawn: Drawn) -> averages.Averages:
    """Returns the averages of a run after an iteration."""
    pools, noise = drawn.collected.pools, drawn.source.noise
    return state.averages.after(averages.rounds(pools) | ({} if noise is None else averages.score_squares(pools)))


def _keep(run: Run, state: RunState, collected: CollectedShard) -> None:
    """Writes the responses of an iteration before its updates, for a run that ends in them."""
    if run.journal is not None and not run.journal.write(state, collected):
        run.progress.say(
            f"iteration {state.iteration + 1}: its responses are not kept for a resume. They would need more than "
            f"{response_journal.MOST_BYTES / 1e9:g} GB with those kept before."
        )


def _begin_next(run: Run, after: RunState) -> RunState:
    """Hands the weights over to the sampler, and begins to draw what follows the iteration that is to be learned.

    `after` is the state after that iteration, with the weights before its updates; it is returned with the sampler's.
    """
    assert run.rollouts is not None
    after = dataclasses.replace(after, sampler=run.rollouts.decode_weights(run.policy(after)))
    if after.iteration < run.config.iterations:
        source = dataclasses.replace(choose(run, after), reshard=run.rollouts.reshard)
        run.ahead.begin(functools.partial(draw, run, source))
    return after


def _observe(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """Lets the choice of prompts and the estimator of pass rates learn from the groups; returns their metrics."""
    metrics = dict(run.selection.observe(groups))
    return metrics if run.estimator is None else metrics | run.estimator.observe([group.pool for group in groups])


def _write_samples(run: Run, state: RunState, groups: Sequence[Group]) -> None:
    """Writes some of the responses as text."""
    if processes.is_writer():
        file = run.workdir / "samples" / f"{state.iteration + 1:06d}.jsonl"
        samples.write(file, groups[: run.config.logging.sampled_prompts], run.components.tokenizer.decode)


def _check_verdicts(run: Run, state: RunState, groups: Sequence[Group]) -> None:
    """Shows the first verdict of a run with a reward of the user's; stops the run if too many could not be graded."""
    config, what = run.config, f"iteration {state.iteration + 1}"
    verdicts = [verdict for group in groups for verdict in group.pool.verdicts]
    graders, remedy = run.components.graders(run.verifiers), reward_check.training_remedy(config)
    message = reward_check.too_many_failed(config, graders, what, verdicts, remedy)
    if message:
        raise TrainingStopped(message)
    if state.iteration == 0 and reward_check.checked_name(config):
        pool = groups[0].pool
        text = reward_check.shown(run.components.tokenizer.decode(pool.responses[0].tokens))
        given = reward_check.described(pool.verdicts[0])
        run.progress.note(f"first response, to problem {pool.prompt.id!r}: {text} gets the reward {given}")


def _warn_of_missing_groups(run: Run, state: RunState, groups: Sequence[Group]) -> None:
    """Says so if an iteration trains on fewer groups than configured."""
    wanted, kept = run.config.collection.prompts_per_iteration, sum(bool(group.kept.size) for group in groups)
    if run.strategy.extra_batches and kept < wanted:
        run.progress.say(
            f"iteration {state.iteration + 1}: {kept} of {wanted} groups have a signal after {len(groups)} prompts, "
            "which are all that collection.max_extra_batches and the data allow; the update uses these."
        )
    if not kept:
        run.progress.say(f"iteration {state.iteration + 1}: every group was dropped, so nothing is updated.")
