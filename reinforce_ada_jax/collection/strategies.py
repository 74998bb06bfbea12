"""Collection strategies: how many responses to draw for a prompt, when to stop, which to keep, what they are worth.

A strategy is data made of plain functions over a prompt's record; the loop in collect.py knows none of them by name.
docs/strategies.md shows how to add one from outside of the package.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from reinforce_ada_jax import user_code
from reinforce_ada_jax.collection import objectives
from reinforce_ada_jax.collection.allocation import allocate
from reinforce_ada_jax.collection.groups import balanced_group
from reinforce_ada_jax.config import CollectionConfig, collection_rules
from reinforce_ada_jax.types import Prompt


@runtime_checkable
class StrategyConfig(Protocol):
    """Settings of a strategy. These four are required; any other of the `collection` section has its default."""

    @property
    def strategy(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def samples_per_round(self) -> int: ...
    @property
    def max_rounds(self) -> int: ...


@dataclasses.dataclass(frozen=True, eq=False)
class PromptProgress:
    """What a stopping rule may look at: a prompt's counts after the rounds finished so far.

    Attributes:
      prompt: whose record this is.
      rounds: finished rounds; 0 before the first.
      drawn: responses in them.
      correct: of these, the correct ones.
      estimate: the pass rate expected before drawing, where the strategy plans; else None.
      planned: draws planned for this prompt, where the strategy plans; else None.
    """

    prompt: Prompt
    rounds: int
    drawn: int
    correct: int
    estimate: float | None = None
    planned: int | None = None


def always(record: PromptProgress) -> float:
    """The common `continue_probability`: what a rule asks for is drawn."""
    del record
    return 1.0


def one(pass_rate: float) -> float:
    """The common `weight`."""
    del pass_rate
    return 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """A collection strategy.

    Attributes:
      next_draws: how many more responses to draw for a prompt now; 0 closes it. Asked before the first round, where
        it must be at least 1, and after every finished round, never in the middle of one.
      met: whether the stopping rule is met; decides nothing, counted as `collection/unmet_share`.
      keep: bool[N] verdicts of a pool -> int[n] draw indices kept for the update, ascending; none: the prompt is
        dropped.
      max_draws: the most that `next_draws` may add up to for one prompt; the loop refuses more. None: no limit.
      max_kept: the most that `keep` keeps of one prompt; None: no limit.
      baseline: what a reward is compared with: "group", "pool", "leave_one_out" or "anchored" (advantages.py).
      normalize_by_std: whether advantages are divided by the standard deviation.
      weight: pass rate of a pool, in [0, 1] -> factor of its advantages, the share of w(p) that draws did not pay.
      clips_below: pass rates below this have its weight; said in the metrics.
      continue_probability: probability in [0, 1] that a round after the first, which `next_draws` asks for, is drawn.
      plan: (estimates of P prompts, their ids) -> draws planned for each, made once before the first round.
      extra_batches: how often an iteration's prompts may be drawn anew to take the place of dropped ones.
      max_age: updates since a response was drawn, beyond which it is not kept; None: no limit.
    """

    next_draws: Callable[[PromptProgress], int]
    met: Callable[[PromptProgress], bool]
    keep: Callable[[np.ndarray], np.ndarray]
    max_draws: int | None
    max_kept: int | None
    baseline: str = "pool"
    normalize_by_std: bool = False
    weight: Callable[[float], float] = one
    clips_below: float = 0.0
    continue_probability: Callable[[PromptProgress], float] = always
    plan: Callable[[np.ndarray, Sequence[str]], np.ndarray] | None = None
    extra_batches: int = 0
    max_age: int | None = None


def round_size(strategy: Strategy, progress: PromptProgress) -> int:
    """Returns `next_draws`, checked against the strategy's own bounds.

    Raises:
      ValueError: it breaks them.
    """
    size = strategy.next_draws(progress)
    too_many = strategy.max_draws is not None and progress.drawn + size > strategy.max_draws
    if size < 0 or (size == 0 and progress.rounds == 0) or too_many:
        raise ValueError(
            f"The strategy asks for {size} more responses of prompt {progress.prompt.id!r} after {progress.rounds} "
            f"rounds and {progress.drawn} responses; its first round must have at least 1, and all rounds together at "
            f"most max_draws = {strategy.max_draws}."
        )
    return size


def uniform_at_address(seed: int, iteration: int, prompt_id: str, rounds: int) -> float:
    """Returns a number in [0, 1) that follows from the address alone, for `next_round` after `rounds` rounds."""
    address = f"{seed}/{iteration}/{rounds}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest()) / 2**64


def next_round(strategy: Strategy, progress: PromptProgress, uniform: float) -> int:
    """Returns how many responses the next round has; 0 closes the prompt.

    Args:
      strategy: its rule, and the probability that a prompt continues.
      progress: counts of the finished rounds.
      uniform: number in [0, 1); a further round is drawn where it is below the probability.
    """
    size = round_size(strategy, progress)
    return 0 if size and progress.rounds and uniform >= strategy.continue_probability(progress) else size


# ---- what strategies are made of -------------------------------------------------------------------------------------


def until(
    met: Callable[[PromptProgress], bool], samples_per_round: int, max_rounds: int
) -> Callable[[PromptProgress], int]:
    """The common `next_draws`: rounds of one size until the rule is met, at least one and at most `max_rounds`."""

    def next_draws(record: PromptProgress) -> int:
        stop = record.rounds > 0 and (met(record) or record.rounds == max_rounds)
        return 0 if stop else samples_per_round

    return next_draws


def one_round(record: PromptProgress) -> bool:
    """The common `met` of strategies that have no rule: one round has been drawn."""
    return record.rounds == 1


def keep_all(correct: np.ndarray) -> np.ndarray:
    """The common `keep` of strategies that drop nothing."""
    return np.arange(len(correct))


def fixed(samples: int) -> Strategy:
    """One round of `samples`, all of them kept: evaluation, and `grpo`."""
    return Strategy(
        until(one_round, samples, 1),
        met=one_round,
        keep=keep_all,
        max_draws=samples,
        max_kept=samples,
        baseline="group",
    )


# ---- the published ones ----------------------------------------------------------------------------------------------


def grpo(config: CollectionConfig) -> Strategy:
    """Group relative policy optimisation: one round of n, compared with its own mean (arXiv 2402.03300)."""
    return fixed(config.group_size)


def _sequential(config: CollectionConfig) -> Strategy:
    """Rounds of M until k_pos responses are correct and k_neg wrong; a balanced group of n."""
    k_pos, k_neg = collection_rules.goals(config)

    def met(record: PromptProgress) -> bool:
        return record.correct >= k_pos and record.drawn - record.correct >= k_neg

    return Strategy(
        next_draws=until(met, config.samples_per_round, config.max_rounds),
        met=met,
        keep=lambda correct: balanced_group(correct, config.group_size),
        max_draws=collection_rules.max_draws(config),
        max_kept=config.group_size,
    )


def positive(config: CollectionConfig) -> Strategy:
    """Ada-Seq-pos: rounds until k_pos = 1 response is correct (arXiv 2510.04996, section 3)."""
    return _sequential(config)


def balance(config: CollectionConfig) -> Strategy:
    """Ada-Seq-balance: rounds until k_pos = n // 2 are correct and k_neg = n - n // 2 wrong (2510.04996, section 3)."""
    return _sequential(config)


def estimate(config: CollectionConfig) -> Strategy:
    """Ada-Est: the draws of every prompt are fixed before the first one, out of one budget (2510.04996, section 3.2).

    N_x is proportional to w_sample at the estimated pass rate; advantages pay w / w_sample at the observed one.
    """
    terms = (config.allocation, config.objective)
    settings = {"alpha": config.objective_alpha, "epsilon": config.objective_epsilon}
    most = collection_rules.max_draws(config)

    def plan(estimates: np.ndarray, names: Sequence[str]) -> np.ndarray:
        total = round(collection_rules.draw_budget(config) * len(names))
        return allocate(objectives.sample_weight(*terms, estimates, **settings), total, config.min_draws, most, names)

    return Strategy(
        next_draws=lambda record: 0 if record.rounds else record.planned,
        met=one_round,
        keep=keep_all,
        max_draws=most,
        max_kept=most,
        weight=lambda pass_rate: float(objectives.gradient_weight(*terms, pass_rate, **settings)),
        plan=plan,
    )


def dapo(config: CollectionConfig) -> Strategy:
    """Dynamic sampling: one round of n; a group all correct or all wrong gives its place to a new prompt (2503.14476).

    The prompts of an iteration are then the first ones in the order of the data of which enough are kept: which
    finishes first decides nothing, and nothing that was drawn is thrown away for being too many.
    """

    def mixed(correct: np.ndarray) -> np.ndarray:
        return np.arange(len(correct)) if 0 < correct.sum() < len(correct) else np.arange(0)

    return dataclasses.replace(
        fixed(config.group_size),
        met=lambda record: 0 < record.correct < record.drawn,
        keep=mixed,
        extra_batches=config.max_extra_batches,
    )


def ngu(config: CollectionConfig) -> Strategy:
    """Never giving up: rounds of n while all is wrong, each with chance p_retry; all-correct prompts are dropped.

    Source: arXiv 2609.13443. Retries are drawn within the iteration, under the same weights; so responses have an age
    only where `collection.overlap_iterations` began them under older ones.
    """
    most = collection_rules.max_draws(config)

    def next_draws(record: PromptProgress) -> int:
        full = most is not None and record.drawn + config.group_size > most
        return 0 if record.rounds and (record.correct or full) else config.group_size

    return Strategy(
        next_draws=next_draws,
        met=lambda record: record.correct > 0,
        keep=lambda correct: np.arange(0 if correct.all() else len(correct)),
        max_draws=most,
        max_kept=most,
        baseline="anchored",
        continue_probability=lambda record: config.retry_probability,
        max_age=config.max_age,
    )


# ---- from a configuration --------------------------------------------------------------------------------------------

BUILT_IN = {function.__name__: function for function in (grpo, positive, balance, estimate, dapo, ngu)}


def _load_function(reference: str) -> Callable[[Any], Strategy]:
    """The function that "file.py:name" names: the user's own code, run as such.

    Raises:
      ValueError: there is no such file, it isn't Python, or it defines no such function.
    """
    path_name, _, name = reference.rpartition(":")
    path, named = pathlib.Path(path_name), f"collection.strategy is {reference!r}"
    user_code.parse(path, named)
    module = user_code.run(path)
    if not hasattr(module, name):
        raise ValueError(f"{named}, but {path} defines no {name!r}.")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{named}, which is {function!r}; it must be a function of the collection section.")
    return function


def with_defaults(config: StrategyConfig) -> CollectionConfig:
    """Returns the settings of `config`; each one that it lacks has its default."""
    fields = dataclasses.fields(CollectionConfig)
    return CollectionConfig(**{field.name: getattr(config, field.name, field.default) for field in fields})


def build(strategy_config: StrategyConfig) -> Strategy:
    """The strategy that the `collection` section of a configuration describes.

    `keep`, `baseline`, `normalize_by_std` and `objective` apply to every strategy; each has its own for the first two.

    Raises:
      ValueError: the settings break a rule (config/collection_rules.py), or name a function that is not there.
    """
    config = with_defaults(strategy_config)
    collection_rules.check_collection(config)
    make = BUILT_IN[config.strategy] if config.strategy in BUILT_IN else _load_function(config.strategy)
    strategy = make(config)
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"collection.strategy is {config.strategy!r}, which gave {strategy!r}; it must give a Strategy."
        )
    strategy = dataclasses.replace(strategy, normalize_by_std=config.normalize_by_std)
    if config.keep == "group":
        strategy = dataclasses.replace(
            strategy,
            keep=lambda correct: balanced_group(correct, config.group_size),
            max_kept=config.group_size,
        )
    if config.keep == "pool":
        strategy = dataclasses.replace(strategy, keep=keep_all, max_kept=strategy.max_draws)
    if config.baseline:
        strategy = dataclasses.replace(strategy, baseline=config.baseline)
    if config.overlap_iterations and (strategy.plan or strategy.extra_batches):
        raise ValueError(
            f"collection.overlap_iterations begins prompts before {config.strategy} can say what it asks of them (it "
            "plans draws, or replaces prompts): set it to 0."
        )
    if config.objective != "identity" and strategy.plan is None:
        # Draws pay nothing here: a fixed number is kept, so advantages pay the whole weight.
        least = config.objective_epsilon

        def weight(pass_rate: float) -> float:
            return float(objectives.weight(config.objective, max(pass_rate, least), alpha=config.objective_alpha))

        strategy = dataclasses.replace(strategy, weight=weight, clips_below=least)
    return strategy
