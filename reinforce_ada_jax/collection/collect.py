"""The collection loop: rounds of responses for every prompt until its strategy stops.

The sampler and the verifier are functions of the caller; advantages.py decides what a pool is worth. Two rules keep
short responses, which finish first, from being over-represented: a prompt's stopping rule looks at whole rounds only,
and pools are in draw order. There is no barrier between prompts unless the caller asks for one.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.prompt_rollouts import PromptRollouts
from reinforce_ada_jax.collection.request_queue import CollectionQueue
from reinforce_ada_jax.collection.strategies import Strategy, StrategyConfig
from reinforce_ada_jax.collection.trajectories import Trajectories
from reinforce_ada_jax.collection.verification import VerificationQueue, VerifyFn
from reinforce_ada_jax.types import PartialRollouts, Pool, Prefetch, Prompt, RequestQueue, Response

EstimateFn = Callable[[Sequence[Prompt]], np.ndarray]
RolloutsSoFar = Callable[[], dict[str, PartialRollouts]]


@dataclasses.dataclass(frozen=True, eq=False)
class CollectOptions:
    """Settings of a collection. `barrier`, `deterministic` and `speculative` change no response of a pool, only time.

    Attributes:
      replacements: further prompts; the next one is opened whenever a prompt closes without kept responses.
      estimate_fn: prompts -> expected pass rates, for strategies that need them; None: 1/2 for all.
      seed: seed of the run. If the strategy has a `continue_probability`, seed, iteration, prompt id and round decide
        together whether a prompt continues.
      iteration: see `seed`.
      barrier: start no round before every prompt's round is finished, as the reference program does.
      deterministic: read verdicts at the sampler's next yield, so that the order of events depends on the yields alone.
        Otherwise they are read when they arrive.
      speculative: where slots would still be idle, start a prompt's next rounds before its verdicts are there
        (speculation.py). `Pool.discarded` has the draws that were not needed.
    """

    replacements: Sequence[Prompt] = ()
    estimate_fn: EstimateFn | None = None
    seed: int = 0
    iteration: int = 0
    barrier: bool = False
    deterministic: bool = True
    speculative: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedRollouts:
    """Rollouts that one collection leaves for another, by prompt id."""

    # Rollouts to continue from: prefetched by an earlier collection, or of one broken off.
    partial: Mapping[str, PartialRollouts] = dataclasses.field(default_factory=dict)
    # Prompts of the next collections, drawn where slots would be idle; `collect` adds their rollouts.
    prefetch: Prefetch = dataclasses.field(default_factory=lambda: Prefetch(()))
    # `collect` adds the rollouts of every prompt if the sampler or `on_progress` raises.
    broken_off: dict[str, PartialRollouts] = dataclasses.field(default_factory=dict)
    # Called after every yield with a function that returns the rollouts so far. Those that it stores survive a kill.
    store: Callable[[RolloutsSoFar], None] = lambda _: None


def collect(
    prompts: Sequence[Prompt],
    sample_fn: Callable[[RequestQueue], Iterator[list[Response]]],
    verify_fn: VerifyFn,
    config: StrategyConfig | Strategy,
    options: CollectOptions | None = None,
    *,
    carried: CarriedRollouts | None = None,
    turns: Trajectories | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Pool]:
    """Draws responses for every prompt until the strategy closes it.

    Args:
      prompts: P prompts with distinct ids.
      sample_fn: a generator function over a types.RequestQueue, which yields lists of finished responses in any order.
      verify_fn: pairs (prompt, response) -> verdicts, aligned with them; or a future of them, so that the sampler need
        not wait. Futures are read in the order of the calls.
      config: the settings of a strategy (`strategies.StrategyConfig`), or a strategy.
      options: how to draw; None: the defaults of `CollectOptions`.
      carried: rollouts of an earlier collection, and for a later one.
      turns: where responses are trajectories, the queue from which the sampler takes their turns; `verify_fn` must
        return its verdicts.
      on_progress: called with (closed prompts, responses) so far, after every yield and while verdicts are waited for.

    Returns:
      P pools, aligned with `prompts`, and after them those of the replacements that were opened, in their order.

    Raises:
      ValueError: two prompts share an id, the strategy breaks its own bounds, or the settings break a rule.
      RuntimeError: the sampler returned a response unasked or twice, or ended with requests outstanding; or the
        verifier returned the wrong number of verdicts.
    """
    options, carried = options or CollectOptions(), carried or CarriedRollouts()
    strategy, prefetch = config if isinstance(config, Strategy) else strategies.build(config), carried.prefetch
    _check_ids([*prompts, *prefetch.prompts, *options.replacements])
    states = _resumed(_rollouts(prompts, prefetch, strategy, options.estimate_fn), carried.partial)
    later = _resumed(map(PromptRollouts, options.replacements, itertools.count(len(states))), carried.partial)

    def report() -> None:
        if on_progress is not None:
            on_progress(queue.num_closed, queue.num_responses)

    def so_far(*, running: bool = True) -> dict[str, PartialRollouts]:
        # A trajectory can't be graded again, so only rounds that have their verdicts are resumed.
        return _partial(queue.prompts, queue.begun() if running else {}, finished_rounds=turns is not None)

    verdicts = VerificationQueue(verify_fn, deterministic=options.deterministic, waiting=report)
    queue = CollectionQueue(
        states, later, strategy, verdicts,
        barrier=options.barrier, speculative=options.speculative, seed=options.seed, iteration=options.iteration,
    )  # fmt: skip
    if turns is not None:
        turns.attach(queue, report)
    offered = turns or queue
    sampled = sample_fn(offered)
    try:
        for responses in sampled:
            offered.receive(responses)
            report()
            carried.store(so_far)
        queue.finish()
    except Exception:
        if isinstance(sampled, Generator):
            sampled.close()  # it hands over the tokens of what runs
        carried.broken_off.update(so_far(running=False))
        raise
    prefetch.partial.update(_partial([rollouts for rollouts in queue.prompts if rollouts.prefetch], {}))
    return [rollouts.pool(strategy) for rollouts in queue.prompts if not rollouts.prefetch]


def _resumed(states: Iterable[PromptRollouts], partial: Mapping[str, PartialRollouts]) -> list[PromptRollouts]:
    """Returns the prompts; each continues from its draws in `partial`, if there are any."""
    found = list(states)
    for rollouts in found:
        if rollouts.prompt.id in partial:
            rollouts.resume(partial[rollouts.prompt.id])
    return found


def _partial(
    prompts: Sequence[PromptRollouts], running: Mapping[str, Sequence[Response]], *, finished_rounds: bool = False
) -> dict[str, PartialRollouts]:
    """Returns the rollouts so far of the prompts that have any; with `finished_rounds` those of finished rounds."""
    partial = {
        rollouts.prompt.id: rollouts.partial(running.get(rollouts.prompt.id, ()), finished_rounds=finished_rounds)
        for rollouts in prompts
    }
    return {name: rollouts for name, rollouts in partial.items() if any(rollouts.responses) or rollouts.begun}


def _check_ids(prompts: Sequence[Prompt]) -> None:
    repeated = [name for name, count in collections.Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} prompt ids are used more than once, {repeated[0]!r} first. Give every prompt its own id."
        )


def _rollouts(
    prompts: Sequence[Prompt], prefetch: Prefetch, strategy: Strategy, estimate_fn: EstimateFn | None
) -> list[PromptRollouts]:
    """Returns the state of every prompt before the first request."""
    everyone = [*prompts, *prefetch.prompts]
    estimates: list[float | None] = [None] * len(everyone)
    planned: list[int | None] = [None] * len(everyone)
    if strategy.estimates:
        found = np.full(len(everyone), 0.5) if estimate_fn is None else np.asarray(estimate_fn(everyone), float)
        if found.shape != (len(everyone),) or not ((found >= 0) & (found <= 1)).all():
            raise ValueError(
                f"estimate_fn must return {len(everyone)} pass rates in [0, 1]; it returned {found.shape}, from "
                f"{found.min(initial=np.inf):g} to {found.max(initial=-np.inf):g}."
            )
        estimates = found.tolist()
        if strategy.plan is not None:
            planned = strategies.plan_draws(strategy, found, [prompt.id for prompt in everyone]).tolist()
    ahead = [0] * len(prompts) + [prefetch.ahead.get(prompt.id, 1) for prompt in prefetch.prompts]
    return list(map(PromptRollouts, everyone, itertools.count(), ahead, estimates, planned))
