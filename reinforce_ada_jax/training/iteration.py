"""One iteration: a collection of prompts, and the updates made from it.

    prompts -> engine -> verifier -> pools -> groups + advantages -> batch -> update -> the same weights

A `Trainer` holds what stays the same through a run, and `train_iteration` maps a `RunState` to the next one.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupt
from reinforce_ada_jax.reporting import samples
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.training import reward_check
from reinforce_ada_jax.training.draw_ahead import DrawAhead
from reinforce_ada_jax.training.drawing import Drawn, draw, next_source
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.trainer import Trainer
from reinforce_ada_jax.training.updates import TrainingStopped, expected_rounds


def train_iteration(
    trainer: Trainer,
    verifiers: VerifierPool,
    interrupt: Interrupt,
    progress: Progress,
    ahead: DrawAhead[Drawn],
    state: RunState,
) -> tuple[RunState, TrainingStopped | None]:
    """Collects responses, updates the weights, and advances the data.

    Where the sampler has devices of its own, the next iteration is drawn there during the updates, from the weights
    before them, and `ahead` holds it until the next call.

    Returns:
      The next state, whose `pending` are the metrics; and why the run must end, if an update was not finite and it
      must. If no update was made before that one, the state is still that of the iteration before.

    Raises:
      Interrupted: the run was asked to end before the end of the first update, and `state` is unchanged; or the others
        would not end before the machine does, and `state` is donated.
      TrainingStopped: no response could be graded, or the log-probabilities forbid an update; `state` is unchanged.
    """
    report = functools.partial(report_unless_asked_to_end, interrupt, progress)
    begin = time.monotonic()
    drawn = ahead.take(report)
    if drawn is None:
        source = next_source(trainer, state)
        if trainer.kept is not None:
            source = dataclasses.replace(source, kept=trainer.kept.read(state, trainer.prompts))
            if source.kept is not None:
                progress.note(f"iteration {source.iteration} begins with {source.kept.num_responses:,} kept responses")
        drawn = draw(trainer, source, verifiers, report)
    wait_s = time.monotonic() - begin
    _keep(trainer, state, drawn, progress)
    groups, metrics = drawn.groups, drawn.metrics
    if processes.is_writer():
        file = trainer.workdir / "samples" / f"{state.iteration + 1:06d}.jsonl"
        decode = trainer.components.tokenizer.decode
        samples.write(file, groups[: trainer.config.logging.sampled_prompts], decode)
    _check_verdicts(trainer, state, groups, verifiers, progress)
    metrics |= trainer.selection.observe([group.pool for group in groups])
    estimator = None
    if trainer.estimator is not None:
        metrics |= trainer.estimator.observe([group.pool for group in groups])
        estimator = trainer.estimator.to_json()
    after = RunState(
        state.learner,
        trainer.selection.to_json(),
        state.iteration + 1,
        partial_rollouts=drawn.choice.upcoming.partial,
        estimator=estimator,
        averages=state.averages.after({"rounds": (sum(group.pool.rounds for group in groups), len(groups))}),
    )
    if trainer.config.draws_ahead:
        metrics["time/wait_s"] = wait_s
        after = _hand_over(trainer, verifiers, ahead, after)
    trainer.ready_to_update(report)
    progress.phase("updating")
    _warn_of_missing_groups(trainer, state, groups, progress)

    updates = trainer.updates
    rounds = expected_rounds(trainer.config, trainer.strategy, state.averages)
    minibatches = updates.minibatches(groups, trainer.policy(state), trainer.reference, interrupt.agree, rounds)
    minibatches, gaps = updates.check_logprobs(minibatches, after.iteration, progress.say)
    interrupt.agree()
    out_of_time = functools.partial(interrupt.out_of_time, notice_s=trainer.config.checkpoint.notice_s)
    done = updates.update(
        state.learner, trainer.base, minibatches, after.iteration, state.skipped_in_a_row, progress.say,
        interrupt.agree, out_of_time,
    )  # fmt: skip
    num_updates = done.metrics["update/count"]
    if done.stop is not None and not num_updates:
        # The iteration is not in the weights: the next start draws it again, and counts its skips again.
        return dataclasses.replace(state, learner=done.learner), done.stop
    metrics |= gaps | done.metrics | {"update/skipped": len(minibatches) - num_updates}
    after = dataclasses.replace(after, learner=done.learner, skipped_in_a_row=done.skipped_in_a_row, pending=metrics)
    return after, done.stop


def _keep(trainer: Trainer, state: RunState, drawn: Drawn, progress: Progress) -> None:
    """Writes the responses of an iteration before its updates, for a run that ends in them."""
    if trainer.kept is not None and not trainer.kept.write(state, drawn.collected):
        progress.say(
            f"iteration {state.iteration + 1}: its responses are not kept for a resume. They would need more than "
            f"checkpoint.responses_mb ({trainer.config.checkpoint.responses_mb:,}) with those kept before."
        )


def _hand_over(trainer: Trainer, verifiers: VerifierPool, ahead: DrawAhead[Drawn], after: RunState) -> RunState:
    """Hands the weights over to the sampler, and begins to draw what follows the iteration that is to be learned.

    `after` is the state after that iteration, with the weights before its updates; it is returned with the sampler's.
    """
    rollouts = trainer.rollouts
    after = dataclasses.replace(after, sampler=rollouts.decode_weights(trainer.policy(after)))
    if after.iteration < trainer.config.iterations:
        source = dataclasses.replace(next_source(trainer, after), reshard=rollouts.reshard)
        ahead.begin(functools.partial(draw, trainer, source, verifiers))
    return after


def report_unless_asked_to_end(interrupt: Interrupt, progress: Progress, text: str) -> None:
    """Shows the phase of the run; raises Interrupted if the run was asked to end."""
    interrupt.check()
    progress.phase(text)


def _check_verdicts(
    trainer: Trainer, state: RunState, groups: Sequence[Group], verifiers: VerifierPool, progress: Progress
) -> None:
    """Shows the first verdict of a run with a reward of the user's; stops the run if too many could not be graded."""
    config, what = trainer.config, f"iteration {state.iteration + 1}"
    verdicts = [verdict for group in groups for verdict in group.pool.verdicts]
    graders, remedy = trainer.components.graders(verifiers), reward_check.training_remedy(config)
    message = reward_check.too_many_failed(config, graders, what, verdicts, remedy)
    if message:
        raise TrainingStopped(message)
    if state.iteration == 0 and reward_check.checked_name(config):
        pool = groups[0].pool
        text = reward_check.shown(trainer.components.tokenizer.decode(pool.responses[0].tokens))
        given = reward_check.described(pool.verdicts[0])
        progress.note(f"first response, to problem {pool.prompt.id!r}: {text} gets the reward {given}")


def _warn_of_missing_groups(trainer: Trainer, state: RunState, groups: Sequence[Group], progress: Progress) -> None:
    """Says so if an iteration trains on fewer groups than configured."""
    wanted, kept = trainer.config.collection.prompts_per_iteration, sum(bool(group.kept.size) for group in groups)
    if trainer.strategy.extra_batches and kept < wanted:
        progress.say(
            f"iteration {state.iteration + 1}: {kept} of {wanted} groups have a signal after {len(groups)} prompts, "
            "which are all that collection.max_extra_batches and the data allow; the update uses these."
        )
    if not kept:
        progress.say(f"iteration {state.iteration + 1}: every group was dropped, so nothing is updated.")
