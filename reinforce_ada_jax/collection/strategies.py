"""Collection strategies: how many responses to draw for a prompt, when to stop, which to keep, how to weigh them.

A strategy is a record of plain functions of a prompt's progress; the loop in collect.py knows none of them by name.
docs/strategies.md shows how to write one outside of the package.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from reinforce_ada_jax import user_code
from reinforce_ada_jax.collection import corrections
from reinforce_ada_jax.collection.allocation import allocate
from reinforce_ada_jax.collection.groups import balanced_group
from reinforce_ada_jax.collection.objectives import Objective
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
    """Results of one prompt after its finished rounds: everything that a stopping rule may look at.

    `improved` is True if a response of the last round has a reward above the mean reward of the rounds before it; after
    the first round, above the mean of that round. With rewards 0 and 1 and no correct response before, there is one
    now.
    """

    prompt: Prompt
    rounds: int  # finished rounds; 0 before the first
    drawn: int  # responses in them
    correct: int  # correct responses in them
    estimate: float | None = None  # pass rate expected before drawing, where the strategy needs it
    planned: int | None = None  # planned draws, where it plans
    improved: bool = False


def always(_: PromptProgress) -> float:
    """The default `continue_probability`: every round that the rule asks for is drawn."""
    return 1.0


def one(_: float) -> float:
    """The default `weight`."""
    return 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """A collection strategy.

    Attributes:
      next_draws: returns the size of a prompt's next round; 0 closes the prompt. Called before the first round, where
        it must return at least 1, and after every finished round, never within one.
      met: returns whether the stopping rule is met. Only counted, as `collection/unmet_share`.
      keep: bool[N] verdicts of a pool -> int[n] draw indices for the update, ascending; none drops the prompt.
      max_draws: limit of the draws for one prompt, which the loop enforces; None: no limit.
      max_kept: limit of the draws that `keep` returns; None: no limit.
      baseline: "group", "pool", "leave_one_out" or "anchored" (advantages.py).
      normalize_by_std: whether advantages are divided by the standard deviation.
      weight: pass rate of a pool -> factor of its advantages: the part of w(p) that the number of draws does not
        provide.
      clips_below: pass rates below this one get the weight at this one; counted as `collection/weight_clipped_share`.
      continue_probability: probability in [0, 1] that a round is drawn when `next_draws` asks for it; of the first: 1.
      plan: (estimates of P prompts, their ids) -> planned draws of each; called once, before the first round.
      extra_batches: limit of the prompts that replace dropped ones, in units of an iteration's prompts.
      max_age: limit of the updates since a response was drawn; older ones are not kept. None: no limit.
      coefficients: (pool, mask of usable draws) -> draw indices kept and a coefficient of each (corrections.py). It
        replaces `keep`, `baseline`, `normalize_by_std` and `weight` in the update; with `extra_batches`, `keep` and
        `drop_unmet` still decide which prompts are replaced; these have no rows. None: the four make the advantages.
      needs_estimates: the pass rates of all prompts are estimated before the first draw, also without a `plan`.
      drop_unmet: drop a prompt unless its rule is met and the kept rewards lie on both sides of the pool's mean.
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
    coefficients: corrections.CoefficientsFn | None = None
    needs_estimates: bool = False
    drop_unmet: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a field of another type; its message has the line of a user's file that set it."""
        for name in ("next_draws", "met", "keep", "weight", "continue_probability"):
            if not callable(value := getattr(self, name)):
                raise ValueError(f"{name} of a Strategy is {value!r:.80}; it must be a function.")
        for name in ("plan", "coefficients"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise ValueError(f"{name} of a Strategy is {value!r:.80}; it must be a function, or None.")
        for name, least in (("max_draws", 1), ("max_kept", 1), ("extra_batches", 0), ("max_age", 0)):
            value, optional = getattr(self, name), name != "extra_batches"
            if not (value is None and optional) and (not isinstance(value, int | np.integer) or value < least):
                or_none = ", or None" * optional
                raise ValueError(
                    f"{name} of a Strategy is {value!r:.80}; it must be a whole number of at least {least}{or_none}."
                )

    @property
    def estimates(self) -> bool:
        """True if pass rates are estimated before the first draw."""
        return self.plan is not None or self.needs_estimates


def round_size(strategy: Strategy, progress: PromptProgress) -> int:
    """Returns `next_draws`; raises ValueError where it breaks the strategy's own bounds."""
    size = strategy.next_draws(progress)
    if not isinstance(size, int | np.integer):
        raise user_code.wrong(
            strategy.next_draws,
            f"The strategy asks for {size!r} more responses of prompt {progress.prompt.id!r}, which is of the type "
            f"{type(size).__name__}; `next_draws` must return a whole number (int).",
        )
    most = np.inf if strategy.max_draws is None else strategy.max_draws
    if size < 0 or (size == 0 and progress.rounds == 0) or progress.drawn + size > most:
        raise user_code.wrong(
            strategy.next_draws,
            f"The strategy asks for {size} more responses of prompt {progress.prompt.id!r} after {progress.rounds} "
            f"rounds and {progress.drawn} responses; its first round must have at least 1, and all rounds together at "
            f"most max_draws = {strategy.max_draws}.",
        )
    return int(size)  # JSON, in which pools are stored and sent, has no numpy integers


def probability_of_more(strategy: Strategy, progress: PromptProgress) -> float:
    """Returns `continue_probability`; raises ValueError where it is no probability."""
    probability = strategy.continue_probability(progress)
    if not 0 <= probability <= 1:
        raise user_code.wrong(
            strategy.continue_probability,
            f"continue_probability of the strategy is {probability!r:.80} after {progress.rounds} rounds of prompt "
            f"{progress.prompt.id!r}; it must be in [0, 1].",
        )
    return probability


def plan_draws(strategy: Strategy, estimates: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns the draws that a strategy plans for each prompt; raises ValueError where they are no whole numbers."""
    assert strategy.plan is not None
    planned = np.asarray(strategy.plan(estimates, names))
    if planned.shape != (len(names),) or planned.dtype.kind != "i":
        raise user_code.wrong(
            strategy.plan,
            f"The strategy's plan must return {len(names)} whole numbers, one for each prompt; it returned an array of "
            f"{planned.dtype} with the shape {planned.shape}.",
        )
    return planned


def uniform_at_address(seed: int, iteration: int, prompt_id: str, rounds: int) -> float:
    """Returns a number in [0, 1) that follows from the address alone."""
    address = f"{seed}/{iteration}/{rounds}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest()) / 2**64


def next_round(strategy: Strategy, progress: PromptProgress, seed: int, iteration: int) -> int:
    """Returns the size of the next round; 0 closes the prompt.

    A round after the first is drawn where `uniform_at_address` is below the strategy's `continue_probability`.
    """
    size = round_size(strategy, progress)
    if size and progress.rounds:
        uniform = uniform_at_address(seed, iteration, progress.prompt.id, progress.rounds)
        return size if uniform < probability_of_more(strategy, progress) else 0
    return size


# ---- what strategies are made of -------------------------------------------------------------------------------------


def until(
    met: Callable[[PromptProgress], bool], samples_per_round: int, max_rounds: int
) -> Callable[[PromptProgress], int]:
    """Returns a `next_draws`: rounds of one size until the rule is met, at least one and at most `max_rounds`."""

    def next_draws(progress: PromptProgress) -> int:
        stop = progress.rounds > 0 and (met(progress) or progress.rounds == max_rounds)
        return 0 if stop else samples_per_round

    return next_draws


def one_round(progress: PromptProgress) -> bool:
    """The `met` of strategies without a rule: one round is finished."""
    return progress.rounds == 1


def keep_all(correct: np.ndarray) -> np.ndarray:
    """The `keep` of strategies that drop nothing."""
    return np.arange(len(correct))


def fixed(samples: int) -> Strategy:
    """Returns the strategy of one round of `samples`, all kept: for evaluation and `grpo`."""
    draws = until(one_round, samples, 1)
    return Strategy(draws, one_round, keep_all, max_draws=samples, max_kept=samples, baseline="group")


# ---- the published ones ----------------------------------------------------------------------------------------------


def grpo(config: CollectionConfig) -> Strategy:
    """Group relative policy optimisation: one round of n, compared with its own mean (arXiv 2402.03300)."""
    return fixed(config.group_size)


def sequential(config: CollectionConfig) -> Strategy:
    """`positive` and `balance`: rounds of M until k_pos responses are correct and k_neg wrong; a balanced group of n.

    positive is Ada-Seq-pos, with k_pos = 1 and k_neg = 0; balance is Ada-Seq-balance, with k_pos = n // 2 and k_neg = n
    - n // 2 (arXiv 2510.04996 v3, section 3.2). `collection.unmet` decides what happens to prompts that do not reach
    these numbers, and to one-sided prompts: "drop" is the passive filtering of arXiv 2510.04996 v1 (section 2.2).
    "replace" is the dynamic sampling of DAPO; v3 combines its rules with it.
    """
    k_pos, k_neg = collection_rules.goals(config)

    def met(progress: PromptProgress) -> bool:
        return progress.correct >= k_pos and progress.drawn - progress.correct >= k_neg

    return Strategy(
        next_draws=until(met, config.samples_per_round, config.max_rounds),
        met=met,
        keep=lambda correct: balanced_group(correct, config.group_size),
        max_draws=collection_rules.max_draws(config),
        max_kept=config.group_size,
        extra_batches=config.max_extra_batches if config.unmet == "replace" else 0,
        drop_unmet=config.unmet != "keep",
    )


def estimate(config: CollectionConfig) -> Strategy:
    """Ada-Est: one budget is planned over all prompts before the first draw (2510.04996 v3, section 3.1).

    N_x is proportional to w_sample at the estimated pass rate; advantages provide w / w_sample at the observed one.
    """
    objective, allocation = _objective(config), collection_rules.allocation(config)
    most = collection_rules.max_draws(config)
    assert most is not None  # only ngu may have no limit
    objective.check_weights(allocation)

    def plan(estimates: np.ndarray, names: Sequence[str]) -> np.ndarray:
        total = config.samples_per_round * len(names)
        weights = np.asarray(objective.sample_weight(allocation, estimates))
        return allocate(weights, total, collection_rules.MIN_DRAWS, most, names)

    return Strategy(
        next_draws=lambda progress: 0 if progress.rounds else (progress.planned or 0),
        met=one_round,
        keep=keep_all,
        max_draws=most,
        max_kept=most,
        weight=lambda pass_rate: float(objective.gradient_weight(allocation, pass_rate)),
        plan=plan,
    )


def dapo(config: CollectionConfig) -> Strategy:
    """Dynamic sampling: one round of n; a prompt all correct or all wrong is replaced (2503.14476, section 3.2).

    An iteration takes prompts in data order until enough of them are neither. So the order of completion has no effect,
    and no prompt with a signal is thrown away.
    """
    return dataclasses.replace(
        fixed(config.group_size),
        met=lambda progress: 0 < progress.correct < progress.drawn,
        keep=lambda correct: np.arange(len(correct) if 0 < correct.sum() < len(correct) else 0),
        extra_batches=config.max_extra_batches,
    )


def ngu(config: CollectionConfig) -> Strategy:
    """Never giving up: rounds of n, each after the first with probability p_retry, until one improves on those before.

    A round improves where some reward is above the mean of the rewards before it: for rewards 0 and 1, where a response
    is correct. Prompts solved by all of their responses, and prompts given up on, are dropped and replaced by new ones:
    small groups spend no update on what is solved, and retries spend draws on what is not.

    Source: arXiv 2609.13443. Retries are drawn within the iteration, under the same weights, so responses have an age
    only where `collection.overlap` drew them under older weights. A group that loses its old responses is
    kept only if it has both sides. With a correction rounds end by verdicts alone and nothing is dropped.
    """
    most, published = collection_rules.max_draws(config), collection_rules.correction(config) == "none"

    def met(progress: PromptProgress) -> bool:
        return progress.correct > 0 or (progress.improved and published)

    def next_draws(progress: PromptProgress) -> int:
        full = most is not None and progress.drawn + config.group_size > most
        return 0 if progress.rounds and (met(progress) or full) else config.group_size

    return Strategy(
        next_draws=next_draws,
        met=met,
        keep=keep_all,
        max_draws=most,
        max_kept=most,
        baseline="anchored",
        continue_probability=lambda progress: config.retry_probability,
        extra_batches=config.max_extra_batches if published else 0,
        max_age=config.max_age,
        drop_unmet=published,
    )


# ---- from a configuration --------------------------------------------------------------------------------------------

BUILT_IN = {
    "grpo": grpo, "positive": sequential, "balance": sequential, "estimate": estimate, "dapo": dapo, "ngu": ngu
}  # fmt: skip


def _objective(config: CollectionConfig) -> Objective:
    return Objective(config.objective, config.objective_alpha, config.objective_k, config.objective_epsilon)


def with_defaults(config: StrategyConfig) -> CollectionConfig:
    """Returns the settings of `config`; each one that it lacks has its default."""
    names = [field.name for field in dataclasses.fields(CollectionConfig) if hasattr(config, field.name)]
    return CollectionConfig(**{name: getattr(config, name) for name in names})


def build(strategy_config: StrategyConfig, *, regularized: bool = False) -> Strategy:
    """Returns the strategy that the `collection` section of a configuration describes.

    `normalize_by_std` and `objective` apply to every strategy; `keep` and `baseline`, where set, replace its own.

    Args:
      strategy_config: the section.
      regularized: the loss has an entropy or KL term (`Config.regularized`): a strategy with `coefficients` then keeps
        the whole first round of each prompt.

    Raises:
      ValueError: the settings break a rule (config/collection_rules.py), or name a function that is missing.
    """
    config = with_defaults(strategy_config)
    collection_rules.check_collection(config)
    setting = f"collection.strategy is {config.strategy!r}"
    strategy = (BUILT_IN.get(config.strategy) or user_code.load(config.strategy, setting))(config)
    if not isinstance(strategy, Strategy):
        raise ValueError(f"{setting}, which returned {strategy!r}; it must return a Strategy.")
    if config.strategy not in BUILT_IN:
        strategy = _with_named_functions(strategy, pathlib.Path(config.strategy.rpartition(":")[0]), setting)
    changes: dict[str, Any] = {"normalize_by_std": config.normalize_by_std}
    if config.keep == "group":
        changes |= {"keep": lambda correct: balanced_group(correct, config.group_size), "max_kept": config.group_size}
    if config.keep == "pool":
        changes |= {"keep": keep_all, "max_kept": strategy.max_draws}
    if config.baseline:
        changes["baseline"] = config.baseline
    objective = _objective(config)
    correction = corrections.from_settings(config, objective, strategy.max_draws)
    if correction:
        changes |= correction
    elif config.objective != "identity" and strategy.plan is None:
        # Only a plan lets the number of draws provide a part of the weight; here advantages provide all of it.
        changes |= {"weight": objective.clipped_weight, "clips_below": objective.epsilon}
    strategy = dataclasses.replace(strategy, **changes)
    if regularized and strategy.coefficients is not None:
        kept, size = strategy.max_kept, collection_rules.first_round(config)
        most = None if kept is None or size is None else min(kept + size, strategy.max_draws or kept + size)
        coefficients = corrections.with_first_round(strategy.coefficients)
        strategy = dataclasses.replace(strategy, coefficients=coefficients, max_kept=most)
    _check_estimates(config, strategy)
    return strategy


def _with_named_functions(strategy: Strategy, path: pathlib.Path, setting: str) -> Strategy:
    """Returns a user's strategy whose own functions name the file and the line of an error."""
    fields = {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)}
    package = f"{__name__.partition('.')[0]}."
    own = {
        name: user_code.named(value, path, setting)
        for name, value in fields.items()
        if callable(value) and not str(getattr(value, "__module__", "")).startswith(package)
    }
    return dataclasses.replace(strategy, **own)


def _check_estimates(config: CollectionConfig, strategy: Strategy) -> None:
    """Raises ValueError where prompts would have no estimate in time."""
    if config.overlap != "none" and strategy.estimates:
        does = "estimates pass rates" if strategy.plan is None else "plans draws"
        choice = ", or use a number as control variate" if config.control_variate == "noise" else ""
        raise ValueError(
            f"collection.overlap is {config.overlap!r}, but {config.strategy} {does} after the last iteration's "
            f"verdicts, so the next iteration's prompts can't start early: set it to 'none'{choice}."
        )
    if strategy.extra_batches and strategy.estimates:
        raise ValueError(
            f"{config.strategy} estimates pass rates before the first draw, and its extra_batches are "
            f"{strategy.extra_batches}: prompts that replace others have no estimate in time. Set extra_batches to 0, "
            "or leave out plan and needs_estimates."
        )
