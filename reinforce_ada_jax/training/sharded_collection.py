"""A collection over several processes: each draws for its shard of the prompts, and all end up with all pools.

Each process gets the same job and takes its shard of the prompts by the same rule (`split`). Then the processes
exchange their pools (`processes.exchange`). Where some processes only draw, the others send them the job and get the
pools back (training/drawing_hosts.py). The pools do not depend on the number of processes, unless iterations
overlap: the randomness of a sample follows from its address, a plan is made for all prompts before they are split, and
replacement prompts are the next ones in the order of the data.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reinforce_ada_jax.collection.advantages import kept_draws
from reinforce_ada_jax.collection.collect import EstimateFn
from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, to_bytes
from reinforce_ada_jax.collection.strategies import Strategy, plan_draws
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.types import PartialRollouts, Pool, Prefetch, Prompt

Counts = collections.Counter[str]
StoreFn = Callable[[Callable[[], CollectedShard]], None]

# First byte of a process's message: its shard is complete, or was broken off.
_COMPLETE, _BROKEN_OFF = b"c", b"b"


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Arguments of `collect` with the same names."""

    prompts: Sequence[Prompt]
    strategy: Strategy
    replacements: Sequence[Prompt] = ()  # prompts that replace those without kept responses
    estimate_fn: EstimateFn | None = None  # of pass rates
    partial: Mapping[str, PartialRollouts] = dataclasses.field(default_factory=dict)  # by prompt id
    prefetch: Prefetch = dataclasses.field(default_factory=lambda: Prefetch(()))  # prompts of the next collections
    # Filled if the collection ends early, also with the counts of its sampler.
    broken_off: CollectedShard = dataclasses.field(default_factory=lambda: CollectedShard([]))
    # Called with a function that returns what `broken_off` would get, whenever it may be stored.
    store: StoreFn = lambda _: None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decisions on all prompts of a job, made before they are split."""

    estimates: Mapping[str, float] | None = None  # of pass rates, by prompt id; None: the strategy needs none
    draws: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by prompt id; empty: no fixed numbers


# Draws a job on this process's devices; returns the pools and the counts of its sampler.
DrawFn = Callable[[Job], tuple[list[Pool], Counts]]
# Returns the message of each process that draws a shard of the job (`shard_message`).
ShardsFn = Callable[[Job, Plan], list[bytes]]


def split(weights: Sequence[float], num_shards: int) -> list[list[int]]:
    """Splits indices into shards of about the same weight: the heaviest first, each to the lightest shard."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    loads = [0.0] * num_shards
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        lightest = min(range(num_shards), key=lambda shard: (loads[shard], len(shards[shard])))
        shards[lightest].append(index)
        loads[lightest] += weights[index]
    return [sorted(shard) for shard in shards]


def collect_everywhere(job: Job, draw: DrawFn) -> tuple[list[Pool], Counts]:
    """Returns the pools of all prompts, as `collect` does, in every process; fills `job.prefetch.partial`, too.

    The job is the same in every process. `draw` gets this process's shard, which may have no prompts: every process
    takes part in the decode programs. Shards are balanced by planned draws, or without a plan by their sizes. Raises
    Interrupted in every process, if it was raised in any.
    """

    def exchanged(job: Job, plan: Plan) -> list[bytes]:
        return processes.exchange(shard_message(job, plan, draw, processes.count(), processes.index()))

    return collect_shards(job, exchanged)


def collect_shards(job: Job, shards: ShardsFn) -> tuple[list[Pool], Counts]:
    """Returns what `collect_everywhere` does; `shards` returns the shards of all processes that draw."""
    job, plan = _planned(job)
    pools, counts = _collect_shards(job, shards, plan)
    replacements = collections.deque(job.replacements)
    dropped = _num_dropped(pools, job.strategy)
    # Each pass draws only prompts that are certainly needed, so together they are the shortest prefix that is enough.
    while dropped and replacements:
        prompts = [replacements.popleft() for _ in range(min(dropped, len(replacements)))]
        before = CollectedShard(pools, job.prefetch.partial, dict(counts))
        store = functools.partial(_store_with, before, job.store) if processes.index() == 0 else job.store
        more = dataclasses.replace(job, prompts=prompts, prefetch=Prefetch(()), store=store)
        try:
            found, counted = _collect_shards(more, shards, dataclasses.replace(plan, draws={}))
        except Interrupted:
            job.broken_off.add_rollouts(before)
            raise
        dropped = _num_dropped(found, job.strategy)
        pools, counts = pools + found, counts + counted
    return pools, counts


def _store_with(before: CollectedShard, store: StoreFn, so_far: Callable[[], CollectedShard]) -> None:
    """Calls `store` with what is collected so far and what was `before`."""

    def both() -> CollectedShard:
        collected = so_far()
        collected.add_rollouts(before)
        return collected

    store(both)


def draw_everywhere(prompts: Sequence[Prompt], strategy: Strategy, collect_fn: Callable[..., list[Pool]]) -> list[Pool]:
    """Returns the pools of all prompts in every process, for an evaluation: all prompts have equal numbers of draws.

    `collect_fn` is `collect` with everything given but the prompts and the strategy (its `config`).
    """

    def draw(job: Job) -> tuple[list[Pool], Counts]:
        return collect_fn(job.prompts, config=job.strategy), Counts()

    job = Job(prompts, strategy)
    return (draw(job) if processes.count() == 1 else collect_everywhere(job, draw))[0]


def _planned(job: Job) -> tuple[Job, Plan]:
    """Returns the job with a fixed plan, which depends on all prompts."""
    if not job.strategy.estimates:
        return job, Plan()
    found = np.full(len(job.prompts), 0.5) if job.estimate_fn is None else job.estimate_fn(job.prompts)
    estimates, ids, draws = np.asarray(found, float), [prompt.id for prompt in job.prompts], {}
    if job.strategy.plan is not None:
        draws = dict(zip(ids, plan_draws(job.strategy, estimates, ids).tolist(), strict=True))
    plan = Plan(dict(zip(ids, estimates.tolist(), strict=True)), draws)
    return with_plan(job, plan), plan


def with_plan(job: Job, plan: Plan) -> Job:
    """Returns the job with the estimates and the numbers of draws of a plan; it serves any part of the prompts."""
    estimates, draws = plan.estimates, plan.draws
    if estimates is None:
        return job
    strategy = job.strategy
    if draws:
        strategy = dataclasses.replace(strategy, plan=lambda _, ids: np.array([draws[each] for each in ids], int))
    return dataclasses.replace(
        job, strategy=strategy, estimate_fn=lambda prompts: np.array([estimates[each.id] for each in prompts], float)
    )


def _num_dropped(pools: Sequence[Pool], strategy: Strategy) -> int:
    """Returns the number of prompts to replace."""
    return sum(not kept_draws(pool, strategy).size for pool in pools) if strategy.extra_batches else 0


def shard_message(job: Job, plan: Plan, draw: DrawFn, num_shards: int, index: int) -> bytes:
    """Draws one shard of a job; returns the message that tells the other processes its results."""

    def shard_of(prompts: Sequence[Prompt], draws: Mapping[str, int]) -> list[Prompt]:
        weights = [
            max(draws[prompt.id] - len(job.partial[prompt.id].responses if prompt.id in job.partial else ()), 0.5)
            if prompt.id in draws
            else 1.0
            for prompt in prompts
        ]
        return [prompts[place] for place in split(weights, num_shards)[index]]

    shard = dataclasses.replace(
        job,
        prompts=shard_of(job.prompts, plan.draws),
        replacements=(),
        prefetch=Prefetch(shard_of(job.prefetch.prompts, {}), job.prefetch.ahead),
        broken_off=CollectedShard([]),
    )
    try:
        pools, counts = draw(shard)
        return _COMPLETE + to_bytes(CollectedShard(pools, shard.prefetch.partial, dict(counts)))
    except Interrupted:
        return _BROKEN_OFF + to_bytes(shard.broken_off)


def _collect_shards(job: Job, shards: ShardsFn, plan: Plan) -> tuple[list[Pool], Counts]:
    """Returns the results of all shards together."""
    messages = shards(job, plan)
    found = [from_bytes(message[1:], job.prompts) for message in messages]
    if any(message.startswith(_BROKEN_OFF) for message in messages):
        for collected in found:
            job.broken_off.add_rollouts(collected)
        raise Interrupted
    pool_of = {pool.prompt.id: pool for shard in found for pool in shard.pools}
    for collected in found:
        job.prefetch.partial.update(collected.partial)
    total = sum((Counts(collected.counts) for collected in found), Counts())
    return [pool_of[prompt.id] for prompt in job.prompts], total
