"""The prompts of an iteration, their responses and groups, and the metrics of the collection."""

import collections
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from reinforce_ada_jax.collection import selection
from reinforce_ada_jax.collection.advantages import Group, make_group
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, EstimateFn, RolloutsSoFar, collect
from reinforce_ada_jax.collection.estimators import calibration
from reinforce_ada_jax.collection.metrics import collection_metrics, discarded_metrics, turn_metrics
from reinforce_ada_jax.collection.serialization import CollectedShard
from reinforce_ada_jax.config import Config, collection_rules
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupted, Stop
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.rollouts import Reshard, Rollouts
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.drawing_hosts import DRAW, DrawingHosts, Order
from reinforce_ada_jax.training.environments import shaped_verdicts, turn_sampling
from reinforce_ada_jax.training.run import Inputs, Run, TrainingStopped
from reinforce_ada_jax.training.sharded_collection import Counts, DrawFn, Job, collect_everywhere, collect_shards
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Response, ScoreNoise, Verdict


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Everything that decides what is drawn for one iteration; nothing changes it while it is drawn."""

    iteration: int
    choice: selection.Choice  # of prompts
    weights: Params  # to draw from: the learner's, or those that the engine made of them
    policy_version: int  # iterations whose updates are in the weights
    partial_rollouts: Mapping[str, PartialRollouts] = dataclasses.field(default_factory=dict)  # of `RunState`
    reshard: Reshard | None = None  # cost of making the weights, if it was done before; None: it is done now
    stored: CollectedShard | None = None  # responses of this iteration that an earlier start has drawn
    noise: ScoreNoise | None = None  # expected from scores so far, if the control variate uses it


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """Responses of one iteration with their verdicts."""

    source: Source  # what they were drawn from
    collected: CollectedShard  # pools and counts
    seconds: dict[str, float]  # metrics of the time that drawing and grading took


def choose(run: Run, state: RunState, stored: CollectedShard | None = None) -> Source:
    """Returns the prompts of the iteration after `state`, and the weights that it is drawn from.

    A selection may offer more replacements than the strategy's `extra_batches` allow: the others are left out.
    """
    iteration, count = state.iteration + 1, run.config.collection.prompts_per_iteration
    with selection.running(run.config.collection.selection):
        choice = selection.choose(run.selection, count, run.config.seed, iteration)
    allowed = choice.replacements[: run.strategy.extra_batches * count]
    if state.sampler_weights is None:
        weights, version = run.policy(state), state.iteration
    else:
        weights, version = state.sampler_weights, state.iteration - 1
    return Source(
        iteration=iteration, choice=dataclasses.replace(choice, replacements=allowed), weights=weights,
        policy_version=version, partial_rollouts=state.partial_rollouts, stored=stored,
        noise=state.averages.score_noise() if run.config.collection.control_variate == "noise" else None,
    )  # fmt: skip


def check_drawn(responses: Sequence[Response], config: Config, iteration: int) -> None:
    """Raises TrainingStopped where a drawn token has a log-probability that is not finite."""
    if not responses or np.isfinite(np.concatenate([response.logprobs for response in responses])).all():
        return  # at once, as there are thousands of short responses
    for response in responses:
        strange = ~np.isfinite(response.logprobs[response.sampled])
        if strange.any():
            raise TrainingStopped(
                f"iteration {iteration}: {strange.sum()} of {strange.size} tokens of a response to problem "
                f"{response.prompt_id!r} have log-probabilities that are not finite. The weights, or their products in "
                f"{config.model.compute_dtype}, are NaN or infinite, and so is whatever is learned from them. Train "
                "again with a lower learning.learning_rate, or with model.compute_dtype=float32, from an earlier "
                "checkpoint (export --iteration)."
            )


def draw(run: Run, source: Source, stop: Stop) -> Drawn:
    """Draws and grades responses until every prompt's rule is met.

    Raises:
      Interrupted: `stop` raised it, here or in another process; `run.journal` has the responses so far, if a resumed
        run may use them.
      TrainingStopped: the engine's log-probabilities are not finite.
    """
    begin, verify_s = time.monotonic(), run.verifiers.busy_s
    run.components.graders(run.verifiers).failure = ""
    stored, upcoming = source.stored or CollectedShard([]), source.choice.upcoming
    if stored.pools:
        # The prompts as the selection returned them: their labels may tell the strategy what the selection knows.
        chosen = {prompt.id: prompt for prompt in (*source.choice.prompts, *source.choice.replacements)}
        pools = [dataclasses.replace(pool, prompt=chosen[pool.prompt.id]) for pool in stored.pools]
        collected = dataclasses.replace(stored, pools=pools)
        upcoming.partial.update(stored.partial)
        if isinstance(run.estimator, ValueHead):  # `observe` needs the features of the prompts
            run.estimator.estimate(source.weights, source.choice.prompts)
    else:
        estimate_fn, partial = _estimate_fn(run, source), {**source.partial_rollouts, **stored.partial}
        choice = source.choice
        job = Job(choice.prompts, run.strategy, choice.replacements, estimate_fn, partial, upcoming)
        if run.journal is not None:
            job = dataclasses.replace(
                job, broken_off=run.journal.begin(),
                store=functools.partial(run.journal.store_so_far, source.iteration),
            )  # fmt: skip
        pools, counts = _collect_fn(run, source, stop)(job)
        collected = CollectedShard(pools, upcoming.partial, dict(counts + collections.Counter(stored.counts)))
    if isinstance(run.rollouts, Rollouts):
        run.rollouts.release()  # the updates need the memory
    for pool in collected.pools:
        check_drawn(pool.responses, run.config, source.iteration)
    seconds = {"time/collect_s": time.monotonic() - begin, "time/verify_s": run.verifiers.busy_s - verify_s}
    return Drawn(source, collected, seconds)


def _collect_fn(run: Run, source: Source, stop: Stop) -> DrawFn:
    """Returns the function that draws a job: here, in all processes, or in those that only draw."""
    iteration, version = source.iteration, source.policy_version
    if isinstance(run.rollouts, DrawingHosts):
        if version < iteration - 1:  # handed over before the updates, or by an earlier start
            run.rollouts.hand_over(source.weights)
        else:
            run.rollouts.decode_weights(source.weights)
        order = Order(action=DRAW, iteration=iteration, policy_version=version)
        return functools.partial(collect_shards, shards=run.rollouts.shards(order, stop))
    assert run.rollouts is not None
    draw = draw_fn(run, run.rollouts, source.weights, iteration=iteration, policy_version=version, stop=stop)
    return draw if processes.count() == 1 else functools.partial(collect_everywhere, draw=draw)


def draw_fn(
    run: Inputs, rollouts: Rollouts, weights: Params, *, iteration: int, policy_version: int, stop: Stop
) -> DrawFn:
    """Returns the function that draws and grades a job of an iteration, on the devices of this process."""
    config, begin = run.config, time.monotonic()
    turns = run.components.trajectories(config, stream(iteration), config.sampling.max_response_tokens)
    sample_fn = rollouts.sampler(
        weights,
        stream=stream(iteration),
        sampling=turn_sampling(config, config.sampling, turns),
        prefetch_stream=stream(iteration + 1) if config.collection.overlap != "none" else None,
        policy_version=policy_version,
    )
    shaping = components_lib.shaping(config)
    verify_fn = run.components.verify_fn(run.verifiers, shaping) if turns is None else shaped_verdicts(turns, shaping)

    def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict] | Future[list[Verdict]]:
        if processes.total() == 1:  # several stop together, at the end of the collection
            check_drawn([response for _, response in pairs], config, iteration)
        return verify_fn(pairs)

    def draw_job(job: Job) -> tuple[list[Pool], Counts]:
        def on_progress(closed: int, drawn: int) -> None:
            rate = rollouts.counts.tokens / (time.monotonic() - begin)
            stop.check(f"collecting: {closed}/{len(job.prompts)} prompts, {drawn:,} responses, {rate:,.0f} tokens/s")

        def counts() -> dict[str, float | int]:
            return dataclasses.asdict(rollouts.counts)

        def store(so_far: RolloutsSoFar) -> None:
            job.store(lambda: CollectedShard([], so_far(), counts()))

        options = CollectOptions(
            replacements=job.replacements, estimate_fn=job.estimate_fn, seed=config.seed, iteration=iteration,
            barrier=config.collection.barrier, deterministic=components_lib.deterministic(config),
            speculative=run.components.draws_speculatively(config.collection),
        )  # fmt: skip
        stop.show(f"collecting: 0/{len(job.prompts)} prompts")  # the first window of a large model takes a while
        try:
            pools = collect(
                job.prompts, sample_fn, verify, job.strategy, options,
                carried=CarriedRollouts(job.partial, job.prefetch, job.broken_off.partial, store),
                turns=turns, on_progress=on_progress,
            )  # fmt: skip
        except Interrupted:
            job.broken_off.counts.update(counts())
            raise
        return pools, collections.Counter(counts())

    return draw_job


def draw_metrics(run: Run, drawn: Drawn, groups: Sequence[Group]) -> dict[str, float]:
    """Returns the metrics of an iteration's prompts, responses, slots and times (docs/reference/metrics.md)."""
    assert run.rollouts is not None
    config, source, pools = run.config, drawn.source, [group.pool for group in groups]
    thresholds = collection_rules.goals(config.collection)
    metrics = collection_metrics(groups, config.collection.group_size, len(source.choice.prompts), thresholds)
    if run.components.draws_speculatively(config.collection):
        metrics |= discarded_metrics(pools)
    if run.components.environments is not None:
        metrics |= turn_metrics(pools)
    if source.noise is not None:
        metrics |= {f"collection/score_noise_{name}": value for name, value in source.noise._asdict().items()}
    counts = collections.Counter(drawn.collected.counts)
    if run.components.engine.options.drafts:
        metrics["collection/draft_tokens"] = counts["drafted"]
        metrics["collection/draft_acceptance"] = counts["accepted"] / max(counts["drafted"], 1)
    staleness = [source.iteration - 1 - response.policy_version for pool in pools for response in pool.responses]
    reshard = source.reshard or run.rollouts.reshard
    return {
        **metrics,
        **drawn.seconds,
        **calibration(pools),
        "collection/slot_utilisation": (counts["tokens"] - counts["accepted"]) / max(counts["slot_steps"], 1),
        "collection/redone_tokens": counts["redone"],
        "collection/prefills": counts["prefills"],
        "collection/prefilled_tokens": counts["prefilled_tokens"],
        "collection/shared_tokens": counts["shared_tokens"],
        "collection/continued_tokens": counts["continued_tokens"],
        "collection/dispatches": counts["dispatches"],
        "collection/waited_share": counts["waited_steps"] / max(counts["steps"], 1),
        "collection/ahead": sum(age > 0 for age in staleness),
        "collection/in_flight": sum(bool(response.versions) for pool in pools for response in pool.responses),
        "collection/staleness_max": max(staleness, default=0),
        "time/reshard_s": reshard.seconds,
        "memory/reshard_bytes": reshard.bytes,
        "time/host_between_windows_s": counts["host_s"] / (len(processes.drawing()) or processes.count()),
    }


def _estimate_fn(run: Run, source: Source) -> EstimateFn | None:
    """Returns the function that estimates pass rates under the weights, where the strategy needs them."""
    if isinstance(run.estimator, ValueHead):
        return functools.partial(run.estimator.estimate, source.weights)
    return None if run.estimator is None else run.estimator.estimate


def make_groups(run: Run, drawn: Drawn) -> list[Group]:
    """Returns the group of each prompt: its kept responses and their advantages. A response's age is in updates."""
    config, iteration = run.config, drawn.source.iteration
    updates = config.collection.prompts_per_iteration // config.learning.prompts_per_update
    weights, noise, groups = drawn.source.choice.weight_of(), drawn.source.noise, []
    for pool in drawn.collected.pools:
        ages = np.array([(iteration - 1 - response.policy_version) * updates for response in pool.responses])
        informed = pool if noise is None else dataclasses.replace(pool, noise=noise)
        groups.append(make_group(informed, run.strategy, ages, prompt_weight=weights.get(pool.prompt.id, 1.0)))
    return groups
