"""One iteration: a collection of prompts, and the updates made from it.

    prompts -> engine -> verifier -> pools -> groups + advantages -> batch -> update -> the same weights

A `Trainer` holds what stays the same through a run, and `train_iteration` maps a `RunState` to the next one.
"""

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import Group, make_group
from reinforce_ada_jax.collection.collect import EstimateFn, SampleFn, collect
from reinforce_ada_jax.collection.estimators import Ema, calibration
from reinforce_ada_jax.collection.metrics import collection_metrics, discarded_metrics
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config, collection_rules
from reinforce_ada_jax.data.prompts import PromptCursor, next_prompts, prompts_after
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import Ready, always_ready
from reinforce_ada_jax.distributed.signals import Interrupt
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting import samples
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import reward_check, sharded_collection
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.sharded_collection import Job
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.updates import TrainingStopped, Updates
from reinforce_ada_jax.types import Pool, Prefetch, Prompt


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """Data, programs and frozen weights of a run.

    Attributes:
      config: of the run.
      workdir: its work directory.
      components: model folder, tokenizer, mesh and engine.
      prompts: the training set.
      strategy: stopping rule and choice of responses.
      learner: the compiled scoring and update.
      updates: minibatches and their checks.
      rollouts: the engine's decode state.
      estimator: of pass rates, where the strategy plans with them; its state is in `RunState.estimator`.
      base: frozen weights under the adapters; None if all weights are trained.
      reference: weights that the KL term compares with; None without one.
      ready_to_update: waits until the programs of the updates are compiled.
    """

    config: Config
    workdir: pathlib.Path
    components: Components
    prompts: list[Prompt]
    strategy: Strategy
    learner: Learner
    updates: Updates
    rollouts: Rollouts
    estimator: Ema | ValueHead | None = None
    base: Params | None = None
    reference: Params | None = None
    ready_to_update: Ready = always_ready

    def policy(self, state: RunState) -> Params:
        """Returns the current weights, to score with and to decode from. The next update donates them."""
        return self.learner.policy(state.learner.params, self.base)


def make_trainer(
    config: Config, workdir: pathlib.Path, components: Components, prompts: list[Prompt], params: Params | None
) -> Trainer:
    """Builds the trainer of a run; `params` are the weights of the model folder, read again where they are needed."""
    strategy = strategies.build(config.collection)
    learner = Learner(components.architecture, config, components.mesh)
    base = reference = None
    if learner.lora is not None:
        base = components_lib.load_params(config, components) if params is None else params
    if config.learning.kl_coefficient:  # adapters begin as no change, so their base is the reference
        dtype = config.model.compute_dtype
        reference = components_lib.load_params(config, components, dtype) if base is None else base
    updates, rollouts = Updates(config, strategy, learner, workdir), Rollouts(components.engine)
    estimated = strategy.plan is not None or strategy.needs_estimates
    estimator = components_lib.make_estimator(config, components) if estimated else None
    return Trainer(
        config, workdir, components, prompts, strategy, learner, updates, rollouts, estimator, base, reference
    )


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Prompts of one iteration.

    Attributes:
      prompts: those of the iteration.
      cursor: position in the data after them.
      replacements: prompts that may replace some of them, each with the cursor after it.
      upcoming: prompts of the next iteration, which idle slots may begin; fills as they are drawn.
    """

    prompts: list[Prompt]
    cursor: PromptCursor
    replacements: list[tuple[Prompt, PromptCursor]]
    upcoming: Prefetch

    def cursor_after(self, num_used: int) -> PromptCursor:
        """Returns the position after the prompts and the replacements used, `num_used` together."""
        used = num_used - len(self.prompts)
        return self.replacements[used - 1][1] if used else self.cursor


def choose_prompts(trainer: Trainer, cursor: PromptCursor) -> Chosen:
    """Returns the prompts that an iteration at `cursor` is made of."""
    size, strategy = trainer.config.collection.prompts_per_iteration, trainer.strategy
    prompts, after = next_prompts(trainer.prompts, cursor, size)
    ids = {prompt.id for prompt in prompts}
    upcoming = Prefetch(())
    extra = strategy.extra_batches * size
    if trainer.config.collection.overlap_iterations:
        # The next iteration's prompts are fixed already, so replacements are borrowed from the others that follow, and
        # come again in their turn. The end of an epoch and the beginning of the next one may share some prompts.
        following = next_prompts(trainer.prompts, after, size)[0]
        upcoming = Prefetch([prompt for prompt in following if prompt.id not in ids])
        ids |= {prompt.id for prompt in following}
        borrowed = prompts_after(trainer.prompts, after, extra, ids) if extra else []
        return Chosen(prompts, after, [(prompt, after) for prompt, _ in borrowed], upcoming)
    replacements = prompts_after(trainer.prompts, after, extra, ids) if extra else []
    return Chosen(prompts, after, replacements, upcoming)


def train_iteration(
    trainer: Trainer, verifiers: VerifierPool, interrupt: Interrupt, progress: Progress, state: RunState
) -> tuple[RunState, TrainingStopped | None]:
    """Collects responses, updates the weights, and advances the data.

    Returns:
      The next state, whose `pending` are the metrics; and why the run must end, if an update was not finite and it
      must. If no update was made before that one, the state is still that of the iteration before.

    Raises:
      Interrupted: the run was asked to end during the collection.
      TrainingStopped: no response could be graded, or the log-probabilities forbid an update; `state` is unchanged.
    """
    chosen = choose_prompts(trainer, state.cursor)
    groups, metrics = collect_groups(trainer, state, chosen, verifiers, interrupt, progress)
    if processes.is_writer():
        file = trainer.workdir / "samples" / f"{state.iteration + 1:06d}.jsonl"
        decode = trainer.components.tokenizer.decode
        samples.write(file, groups[: trainer.config.logging.sampled_prompts], decode)
    _check_verdicts(trainer, state, groups, verifiers, progress)
    trainer.ready_to_update(functools.partial(report_unless_asked_to_end, interrupt, progress))
    progress.phase("updating")
    _warn_of_missing_groups(trainer, state, groups, progress)

    updates, iteration = trainer.updates, state.iteration + 1
    minibatches = updates.minibatches(groups, trainer.policy(state), trainer.reference)
    finite, skipped, gaps = updates.check_logprobs(minibatches, iteration, state.skipped_in_a_row, progress.say)
    done = updates.update(state.learner, trainer.base, finite, iteration, skipped, progress.say)
    num_updates = done.metrics["update/count"]
    if done.stop is not None and not num_updates:
        # The iteration is not in the weights: the next start draws it again, and counts its skips again.
        return dataclasses.replace(state, learner=done.learner), done.stop
    metrics |= gaps | done.metrics | {"update/skipped": len(minibatches) - num_updates}
    if trainer.estimator is not None:
        metrics |= trainer.estimator.observe([group.pool for group in groups])
    after = RunState(
        done.learner,
        chosen.cursor_after(len(groups)),
        iteration,
        done.skipped_in_a_row,
        chosen.upcoming.partial,
        None if trainer.estimator is None else trainer.estimator.to_json(),
        pending=metrics,
    )
    return after, done.stop


def report_unless_asked_to_end(interrupt: Interrupt, progress: Progress, text: str) -> None:
    """Shows the phase of the run; raises Interrupted if the run was asked to end."""
    interrupt.check()
    progress.phase(text)


def collect_groups(
    trainer: Trainer,
    state: RunState,
    chosen: Chosen,
    verifiers: VerifierPool,
    interrupt: Interrupt,
    progress: Progress,
) -> tuple[list[Group], dict[str, float]]:
    """Draws and grades responses until every prompt's rule is met; returns groups with advantages, and metrics."""
    config, rollouts = trainer.config, trainer.rollouts
    begin, verify_s, verifiers.failure = time.monotonic(), verifiers.busy_s, ""
    speculative = collection_rules.draws_speculatively(config.collection)
    sample_fn = _sample_fn(trainer, state)
    verify_fn = trainer.components.verify_fn(verifiers, components_lib.shaping(config))

    def draw(job: Job) -> tuple[list[Pool], sharded_collection.Counts]:
        def report(closed: int, drawn: int) -> None:
            interrupt.check()
            rate = rollouts.counts.tokens / (time.monotonic() - begin)
            progress.phase(
                f"collecting: {closed}/{len(job.prompts)} prompts, {drawn:,} responses, {rate:,.0f} tokens/s"
            )

        pools = collect(
            job.prompts,
            sample_fn,
            verify_fn,
            job.strategy,
            replacements=job.replacements,
            estimate_fn=job.estimate_fn,
            seed=config.seed,
            iteration=state.iteration + 1,
            barrier=config.collection.barrier,
            deterministic=components_lib.deterministic(config),
            partial=job.partial,
            prefetch=job.prefetch,
            speculative=speculative,
            on_progress=report,
        )
        return pools, collections.Counter(dataclasses.asdict(rollouts.counts))

    replacements = [prompt for prompt, _ in chosen.replacements]
    estimate_fn = _estimate_fn(trainer, state)
    job = Job(chosen.prompts, trainer.strategy, replacements, estimate_fn, state.partial_rollouts, chosen.upcoming)
    pools, counts = sharded_collection.collect_everywhere(job, draw)
    groups = _groups(trainer, state, pools)
    thresholds = collection_rules.goals(config.collection)
    metrics = collection_metrics(groups, config.collection.group_size, len(chosen.prompts), thresholds)
    if speculative:
        metrics |= discarded_metrics(pools)
    return groups, metrics | calibration(pools) | {
        "collection/slot_utilisation": counts["tokens"] / max(counts["slot_steps"], 1),
        "collection/prefills": counts["prefills"],
        "collection/dispatches": counts["dispatches"],
        "collection/ahead": sum(
            response.policy_version < state.iteration for pool in pools for response in pool.responses
        ),
        "time/collect_s": time.monotonic() - begin,
        "time/verify_s": verifiers.busy_s - verify_s,
        "time/reshard_s": rollouts.reshard.seconds,
        "memory/reshard_bytes": rollouts.reshard.bytes,
        "time/host_between_windows_s": counts["host_s"] / processes.count(),
    }


def _sample_fn(trainer: Trainer, state: RunState) -> SampleFn:
    """Returns the function that draws from the current weights, as the next iteration does."""
    config, iteration = trainer.config, state.iteration + 1
    sampling = SamplingParams(
        config.sampling.max_response_tokens,
        config.sampling.temperature,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
    )
    return trainer.rollouts.sampler(
        trainer.policy(state),
        stream=stream(iteration),
        sampling=sampling,
        prefetch_stream=stream(iteration + 1) if config.collection.overlap_iterations else None,
        policy_version=state.iteration,
    )


def _estimate_fn(trainer: Trainer, state: RunState) -> EstimateFn | None:
    """Returns the function that estimates pass rates under the current weights, where the strategy plans with them."""
    if isinstance(trainer.estimator, ValueHead):
        return functools.partial(trainer.estimator.estimate, trainer.policy(state))
    return None if trainer.estimator is None else trainer.estimator.estimate


def _groups(trainer: Trainer, state: RunState, pools: Sequence[Pool]) -> list[Group]:
    """Returns the groups of the pools; ages of responses count updates."""
    config = trainer.config
    updates = config.collection.prompts_per_iteration // config.learning.prompts_per_update
    groups = []
    for pool in pools:
        ages = np.array([(state.iteration - response.policy_version) * updates for response in pool.responses])
        groups.append(make_group(pool, trainer.strategy, ages))
    return groups


def _check_verdicts(
    trainer: Trainer, state: RunState, groups: Sequence[Group], verifiers: VerifierPool, progress: Progress
) -> None:
    """Shows the first verdict of a run with a reward of the user's; stops the run if no response could be graded."""
    config, what = trainer.config, f"iteration {state.iteration + 1}"
    verdicts = [verdict for group in groups for verdict in group.pool.verdicts]
    message = reward_check.all_failed(config, verifiers, what, verdicts, reward_check.training_remedy(config))
    if message:
        raise TrainingStopped(message)
    if state.iteration == 0 and config.reward.path:
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
