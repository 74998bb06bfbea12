"""A collection over several processes: each draws for its shard of the prompts, and all end up with all pools.

Each process gets the same job and takes its shard of the prompts by the same rule (`split`). Then the processes
exchange their pools (`processes.exchange`). The pools do not depend on the number of processes, unless iterations
overlap: the randomness of a sample follows from its address, a plan is made for all prompts before they are split, and
replacement prompts are the next ones in the order of the data.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reinforce_ada_jax.collection.advantages import kept_draws
from reinforce_ada_jax.collection.collect import EstimateFn
from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, partial_of, to_bytes
from reinforce_ada_jax.collection.strategies import Strategy, plan_draws
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.types import PartialRollouts, Pool, Prefetch, Prompt

Counts = collections.Counter[str]

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


# Draws a job on this process's devices; returns the pools and the counts of its sampler.
DrawFn = Callable[[Job], tuple[list[Pool], Counts]]


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
    takes part in the decode programs. Shards are balanced by planned draws, or without a plan by their sizes.

    Raises:
      Interrupted: in every process, if it was raised in any.
    """
    job, planned = _planned(job)
    pools, counts = _collect_shards(job, draw, planned)
    replacements = collections.deque(job.replacements)
    dropped = _num_dropped(pools, job.strategy)
    # Each pass draws only prompts that are certainly needed, so together they are the shortest prefix that is enough.
    while dropped and replacements:
        prompts = [replacements.popleft() for _ in range(min(dropped, len(replacements)))]
        more = dataclasses.replace(job, prompts=prompts, prefetch=Prefetch(()))
        try:
            found, counted = _collect_shards(more, draw, {})
        except Interrupted:
            _add(job.broken_off, CollectedShard(pools, job.prefetch.partial, dict(counts)))
            raise
        dropped = _num_dropped(found, job.strategy)
        pools, counts = pools + found, counts + counted
    return pools, counts


def draw_everywhere(prompts: Sequence[Prompt], strategy: Strategy, collect_fn: Callable[..., list[Pool]]) -> list[Pool]:
    """Returns the pools of all prompts in every process, for an evaluation: all prompts have equal numbers of draws.

    `collect_fn` is `collect` with everything given but the prompts and the strategy (its `config`).
    """

    def draw(job: Job) -> tuple[list[Pool], Counts]:
        return collect_fn(job.prompts, config=job.strategy), Counts()

    job = Job(prompts, strategy)
    return (draw(job) if processes.count() == 1 else collect_everywhere(job, draw))[0]


def _planned(job: Job) -> tuple[Job, dict[str, int]]:
    """Returns the job with a fixed plan, which depends on all prompts, and the planned draws by prompt id."""
    if not job.strategy.estimates:
        return job, {}
    estimates = np.full(len(job.prompts), 0.5) if job.estimate_fn is None else job.estimate_fn(job.prompts)
    ids = [prompt.id for prompt in job.prompts]
    rates = dict(zip(ids, np.asarray(estimates).tolist(), strict=True))
    job = dataclasses.replace(
        job, estimate_fn=lambda prompts: np.array([rates[prompt.id] for prompt in prompts], float)
    )
    if job.strategy.plan is None:
        return job, {}
    planned = dict(zip(ids, plan_draws(job.strategy, np.asarray(estimates, float), ids).tolist(), strict=True))
    strategy = dataclasses.replace(
        job.strategy, plan=lambda _, ids: np.array([planned[prompt_id] for prompt_id in ids], int)
    )
    return dataclasses.replace(job, strategy=strategy), planned


def _num_dropped(pools: Sequence[Pool], strategy: Strategy) -> int:
    """Returns the number of prompts to replace."""
    return sum(not kept_draws(pool, strategy).size for pool in pools) if strategy.extra_batches else 0


def _add(broken_off: CollectedShard, shard: CollectedShard) -> None:
    """Adds the rollouts of a shard to the record of a collection that is broken off."""
    broken_off.partial.update(shard.partial)
    broken_off.partial.update({pool.prompt.id: partial_of(pool) for pool in shard.pools})
    broken_off.counts.update(Counts(broken_off.counts) + Counts(shard.counts))


def _collect_shards(job: Job, draw: DrawFn, planned: Mapping[str, int]) -> tuple[list[Pool], Counts]:
    """Draws this process's shard, and exchanges the results with the other processes."""

    def shard_of(prompts: Sequence[Prompt], draws: Mapping[str, int]) -> list[Prompt]:
        weights = [
            max(draws[prompt.id] - len(job.partial[prompt.id].responses if prompt.id in job.partial else ()), 0.5)
            if prompt.id in draws
            else 1.0
            for prompt in prompts
        ]
        return [prompts[index] for index in split(weights, processes.count())[processes.index()]]

    shard = dataclasses.replace(
        job,
        prompts=shard_of(job.prompts, planned),
        replacements=(),
        prefetch=Prefetch(shard_of(job.prefetch.prompts, {}), job.prefetch.ahead),
        broken_off=CollectedShard([]),
    )
    try:
        pools, counts = draw(shard)
        message = _COMPLETE + to_bytes(CollectedShard(pools, shard.prefetch.partial, dict(counts)))
    except Interrupted:
        message = _BROKEN_OFF + to_bytes(shard.broken_off)
    messages = processes.exchange(message, drawing=True)
    shards = [from_bytes(message[1:], job.prompts) for message in messages]
    if any(message.startswith(_BROKEN_OFF) for message in messages):
        for collected in shards:
            _add(job.broken_off, collected)
        raise Interrupted
    pool_of = {pool.prompt.id: pool for shard in shards for pool in shard.pools}
    for collected in shards:
        job.prefetch.partial.update(collected.partial)
    total = sum((Counts(collected.counts) for collected in shards), Counts())
    return [pool_of[prompt.id] for prompt in job.prompts], total
