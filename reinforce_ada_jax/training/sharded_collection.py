"""A collection over several processes: each draws for its share of the prompts, and all end up with all pools.

The pools are those of one process, whatever the number: a sample's randomness follows from its address, a plan is made
for all prompts before they are shared out, and replaced prompts (`dapo`) are the next ones in the order of the data.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reinforce_ada_jax.analysis import enumeration
from reinforce_ada_jax.collection.collect import EstimateFn
from reinforce_ada_jax.collection.prefetch import Prefetch
from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, to_bytes
from reinforce_ada_jax.collection.strategies import Strategy, StrategyConfig
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt

Counts = collections.Counter[str]


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What is to be drawn: arguments of `collect`, of the same names.

    Attributes:
      prompts: P prompts.
      strategy: when they are done.
      replacements: prompts that take the place of those of which nothing is kept.
      estimate_fn: the pass rates expected of prompts.
      partial: what was drawn of them before, by prompt id.
      prefetch: prompts of the next collection.
    """

    prompts: Sequence[Prompt]
    strategy: Strategy
    replacements: Sequence[Prompt] = ()
    estimate_fn: EstimateFn | None = None
    partial: Mapping[str, PartialRollouts] = dataclasses.field(default_factory=dict)
    prefetch: Prefetch = dataclasses.field(default_factory=lambda: Prefetch(()))


# Draws what there is to draw on this process's devices; counts of its sampler come with the pools.
DrawFn = Callable[[Job], tuple[list[Pool], Counts]]

# Responses that prompts are expected to take; draws planned are given by prompt id.
ExpectFn = Callable[[Sequence[Prompt], Mapping[str, int]], list[float]]


def split(weights: Sequence[float], count: int) -> list[list[int]]:
    """Places split into `count` shares of about the same weight: the heaviest first, to whoever has least."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for place in sorted(range(len(weights)), key=lambda place: (-weights[place], place)):
        least = min(range(count), key=lambda share: (loads[share], len(shares[share])))
        shares[least].append(place)
        loads[least] += weights[place]
    return [sorted(share) for share in shares]


class ExpectedDraws:
    """Responses that prompts are expected to take: as planned; else by the pass rates that came with the data.

    Responses of one run are about as long for one prompt as for another before they are drawn, so this stands for
    tokens. What enumeration can't follow (a rule that looks at more of a prompt than its counts, or goes on for very
    long) is expected to be the same for all: shares then weigh what they may, and the pools are the same.
    """

    def __init__(self, collection: StrategyConfig):
        self._collection = collection
        self._known: dict[float, float] = {}  # by pass rate
        self._followed = True  # until enumeration fails

    def __call__(self, prompts: Sequence[Prompt], planned: Mapping[str, int]) -> list[float]:
        """One number a prompt; 1 for all where nothing is known of any."""
        rates = {prompt.pass_rate for prompt in prompts if prompt.pass_rate is not None}
        new = sorted(rates - self._known.keys())
        if new and not planned and self._followed:
            try:
                draws = enumeration.expected_draws(self._collection, new)
                self._known |= dict(zip(new, draws.tolist(), strict=True))
            except Exception:  # a user's rule may raise anything; it does so in every process, so all expect the same
                self._followed = False
        if not self._followed and not planned:
            return [1.0] * len(prompts)
        mean = float(np.mean([self._known[rate] for rate in sorted(rates)])) if rates and not planned else 1.0
        return [float(planned.get(prompt.id, self._known.get(prompt.pass_rate, mean))) for prompt in prompts]


def collect_everywhere(job: Job, draw: DrawFn, expected_draws: ExpectFn) -> tuple[list[Pool], Counts]:
    """The pools of all prompts, as `collect` gives them, in every process; `job.prefetch.partial` is everybody's too.

    Args:
      job: the same in every process.
      draw: called with this process's share.
      expected_draws: what shares are balanced by.

    Raises:
      Interrupted: in every process, where it was raised in any.
    """
    if processes.count() == 1:
        return draw(job)
    job, planned = _planned(job)
    pools, counts = _round(job, draw, expected_draws(job.prompts, planned), expected_draws)
    replacements = collections.deque(job.replacements)
    dropped = _dropped(pools, job.strategy)
    # As many at a time as are surely needed: together the shortest beginning of the list that keeps enough.
    while dropped and replacements:
        prompts = [replacements.popleft() for _ in range(min(dropped, len(replacements)))]
        more = dataclasses.replace(job, prompts=prompts, prefetch=Prefetch(()))
        found, counted = _round(more, draw, expected_draws(prompts, {}), expected_draws)
        dropped = _dropped(found, job.strategy)
        pools, counts = pools + found, counts + counted
    return pools, counts


def draw_everywhere(prompts: Sequence[Prompt], strategy: Strategy, collect_fn: Callable[..., list[Pool]]) -> list[Pool]:
    """As many responses of each prompt as of any other (an evaluation): the pools of all, in every process.

    `collect_fn` is `collect` with everything given but the prompts and the strategy (its `config`).
    """

    def draw(job: Job) -> tuple[list[Pool], Counts]:
        return collect_fn(job.prompts, config=job.strategy), Counts()

    return collect_everywhere(Job(prompts, strategy), draw, lambda prompts, _: [1.0] * len(prompts))[0]


def _planned(job: Job) -> tuple[Job, dict[str, int]]:
    """The job with every prompt's draws fixed, where the strategy plans: a share alone would be planned otherwise."""
    plan = job.strategy.plan
    if plan is None:
        return job, {}
    estimates = np.full(len(job.prompts), 0.5) if job.estimate_fn is None else job.estimate_fn(job.prompts)
    ids = [prompt.id for prompt in job.prompts]
    planned = dict(zip(ids, plan(np.asarray(estimates, float), ids).tolist(), strict=True))
    rates = dict(zip(ids, np.asarray(estimates).tolist(), strict=True))
    return dataclasses.replace(
        job,
        strategy=dataclasses.replace(
            job.strategy, plan=lambda _, ids: np.array([planned[prompt_id] for prompt_id in ids], int)
        ),
        estimate_fn=lambda prompts: np.array([rates[prompt.id] for prompt in prompts], float),
    ), planned


def _dropped(pools: Sequence[Pool], strategy: Strategy) -> int:
    """How many prompts must be replaced."""
    return sum(not strategy.keep(pool.correct).size for pool in pools) if strategy.extra_batches else 0


def _round(job: Job, draw: DrawFn, draws: Sequence[float], expected_draws: ExpectFn) -> tuple[list[Pool], Counts]:
    """Shares the prompts out, draws, and meets the others."""
    left = [
        max(expected - len(job.partial[prompt.id].responses), 0.5) if prompt.id in job.partial else expected
        for prompt, expected in zip(job.prompts, draws, strict=True)
    ]
    own = split(left, processes.count())[processes.index()]
    own_prefetch = split(expected_draws(job.prefetch.prompts, {}), processes.count())[processes.index()]
    share = dataclasses.replace(
        job,
        prompts=[job.prompts[place] for place in own],
        replacements=(),
        prefetch=Prefetch([job.prefetch.prompts[place] for place in own_prefetch]),
    )
    try:
        told = to_bytes(CollectedShard(*_drawn(share, draw)))
    except Interrupted:
        told = b""
    messages = processes.exchange(told)
    if not all(messages):
        raise Interrupted
    shares = [from_bytes(message, job.prompts) for message in messages]
    pool_of = {pool.prompt.id: pool for share in shares for pool in share.pools}
    for share in shares:
        job.prefetch.partial.update(share.partial)
    counts = sum((Counts(share.counts) for share in shares), Counts())
    return [pool_of[prompt.id] for prompt in job.prompts], counts


def _drawn(share: Job, draw: DrawFn) -> tuple[list[Pool], dict[str, PartialRollouts], dict[str, float]]:
    if not share.prompts:
        return [], {}, {}
    pools, counts = draw(share)
    return pools, share.prefetch.partial, dict(counts)
