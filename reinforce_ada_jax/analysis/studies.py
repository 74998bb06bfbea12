"""Three questions that the paper leaves open, in numbers; how they are shown is in simulate.py, the command.

zero_variance   how often does a group of n have no signal, and how often a strategy's pool?
epsilon         where does the least pass rate of w(p) bias the log objective, and what noise does it save?
learning        who learns fastest for each draw, rather than for each update?
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.analysis.enumeration import PROMPT, canonical_group, expectations, group_terms
from reinforce_ada_jax.collection import objectives, strategies
from reinforce_ada_jax.collection.estimators import Ema
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, StrategyConfig
from reinforce_ada_jax.config import EstimatorConfig

# Stands for an epsilon of 0, at which w(0) is infinite: an all-wrong pool has advantages of 0 whatever their factor,
# and every other one a pass rate so far above this that it changes nothing.
NO_EPSILON = 1e-12


# ---- zero variance ---------------------------------------------------------------------------------------------------


def zero_variance(group_sizes: Sequence[int], pass_rates: Float[np.ndarray, " P"]) -> Float[np.ndarray, "N P"]:
    """p^n + (1 - p)^n, the chance that n independent responses are all correct or all wrong."""
    sizes = np.asarray(group_sizes, np.float64)[:, None]
    return pass_rates**sizes + (1.0 - pass_rates) ** sizes


# ---- epsilon ---------------------------------------------------------------------------------------------------------


def epsilon_effect(
    config: StrategyConfig, pass_rates: Float[np.ndarray, " P"], epsilon: float
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """(bias factor, noise to signal) of the log objective with one `objective_epsilon`; 0 is allowed here.

    The bias factor is E[g] over the exact gradient (1 / p) p (1 - p), the noise Var(g) / E[g]^2. Draws that pay a share
    of the weight pay it relative to the other prompts' (N_x / mean N), so `estimate` is measured in units of the mean
    of w_sample: 1 is an unbiased gradient up to one factor for all prompts. Its shares are whole draws: where one is 4
    or 5, the rounding alone moves the gradient by a tenth.

    Args:
      config: of the strategy; its objective is taken to be "log".
      pass_rates: above 0 and below 1.
    """
    config = dataclasses.replace(
        strategies.with_defaults(config), objective="log", objective_epsilon=max(epsilon, NO_EPSILON)
    )
    found, unit = expectations(config, pass_rates), 1.0
    if strategies.build(config).plan is not None:
        shares = objectives.sample_weight(config.allocation, "log", pass_rates, epsilon=config.objective_epsilon)
        unit = shares.mean()
    return found.signal * unit, found.variance


def where_epsilon_binds(
    pass_rates: Float[np.ndarray, " P"], without: Float[np.ndarray, " P"], bias: Float[np.ndarray, " P"]
) -> Float[np.ndarray, " B"]:
    """The pass rates whose bias factor differs by more than a tenth from the one without epsilon."""
    return pass_rates[np.abs(bias / without - 1.0) > 0.1]


# ---- learning --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """How a population of prompts learns.

    Attributes:
      name: of the strategy.
      draws: float[U + 1], responses drawn before each update and after the last.
      pass_rate: float[U + 1], the population's mean.
    """

    name: str
    draws: np.ndarray
    pass_rate: np.ndarray


def population(size: int, a: float = 0.6, b: float = 1.2) -> Float[np.ndarray, " P"]:
    """Pass rates of `size` prompts: quantiles of Beta(a, b) at (i + 1/2) / size; many hard, a few solved.

    With u = p^a the density p^(a - 1) (1 - p)^(b - 1) has no pole at 0, and a trapezoid sum serves. b is at least 1.
    """
    u = np.linspace(0.0, 1.0, 200_001)
    p = u ** (1.0 / a)
    density = (1.0 - p) ** (b - 1.0)
    cumulated = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return np.interp((np.arange(size) + 0.5) / size, cumulated / cumulated[-1], p)


def draw_counts(
    strategy: Strategy,
    pass_rates: Float[np.ndarray, " P"],
    rng: np.random.Generator,
    *,
    estimates: Float[np.ndarray, " P"] | None = None,
    planned: Int[np.ndarray, " P"] | None = None,
) -> tuple[Int[np.ndarray, " P"], Int[np.ndarray, " P"]]:
    """(drawn, correct) of one prompt of each pass rate: the outcomes of enumeration.py, sampled round by round.

    The counts alone, for all prompts together, hundreds of times as fast as the loop over responses.
    """
    count = len(pass_rates)
    plans = [(None, None)] * count
    if planned is not None:
        plans = list(zip(estimates.tolist(), planned.tolist(), strict=True))

    @functools.cache
    def decide(rounds: int, drawn: int, correct: int, plan: tuple[float | None, int | None]) -> tuple[int, float]:
        record = PromptProgress(PROMPT, rounds, drawn, correct, *plan)
        size = strategy.next_draws(record)
        return size, strategy.continue_probability(record) if size and rounds else 1.0

    drawn, correct = np.zeros(count, np.int64), np.zeros(count, np.int64)
    under_way, rounds = np.arange(count), 0
    while under_way.size:
        states = zip(under_way.tolist(), drawn[under_way].tolist(), correct[under_way].tolist(), strict=True)
        sizes, chances = np.array([decide(rounds, n, k, plans[place]) for place, n, k in states]).T
        goes_on = (sizes > 0) & (rng.random(len(sizes)) < chances)
        under_way, sizes = under_way[goes_on], sizes[goes_on].astype(np.int64)
        drawn[under_way] += sizes
        correct[under_way] += rng.binomial(sizes, pass_rates[under_way])
        rounds += 1
    return drawn, correct


def learn(
    name: str,
    config: StrategyConfig,
    pass_rates: Float[np.ndarray, " P"],
    *,
    updates: int,
    draws: int,
    prompts_per_update: int,
    learning_rate: float,
    equal_lengths: bool = False,
    seed: int = 0,
) -> Curve:
    """Gradient ascent on the logits of independent prompts, with the groups that a strategy makes.

        theta_x <- theta_x + learning_rate * B * sum of A_i (r_i - p_x) / (rows of the update)

    for each of the B prompts of an update: the token-mean gradient of responses of equal lengths, times B so that the
    size of an update does not depend on how many prompts it has. Prompts take turns; `dapo` puts the next ones in the
    place of those it drops. `estimate` plans each update's draws with the estimator `ema` at its defaults.

    What the model leaves out: prompts do not help each other (no generalisation, and nothing for a held-out set to
    show), a prompt's responses differ in nothing but their verdict, there is no clipping, no momentum, and nothing
    off-policy. So it says how far the choice and the number of draws carry, and not what a run will reach.

    Args:
      name: of the curve.
      config: the strategy's.
      pass_rates: of the population before the first update; 0 and 1 stay there.
      updates: at least so many,
      draws: and until so many responses are drawn.
      prompts_per_update: B, at most P.
      learning_rate: in logits.
      equal_lengths: divide each update's gradient by its root mean square over the B prompts: strategies then differ
        in the direction of their updates, not in their size, which an optimiser such as Adam takes out too.
      seed: of all draws.
    """
    strategy, rng = strategies.build(config), np.random.default_rng(seed)
    count = len(pass_rates)
    with np.errstate(divide="ignore"):
        logits = np.log(pass_rates) - np.log1p(-pass_rates)
    settings = EstimatorConfig()
    ema = Ema(decay=settings.decay, prior_correct=settings.prior_correct, prior_wrong=settings.prior_wrong)
    candidates = min(count, prompts_per_update * (1 + strategy.extra_batches))
    terms = functools.cache(lambda drawn, correct: group_terms(canonical_group(strategy, drawn, correct)))
    names = [f"{place:06d}" for place in range(count)]
    spent, means, cursor = [0.0], [float(np.mean(pass_rates))], 0
    while len(spent) <= updates or spent[-1] < draws:
        batch = np.arange(cursor, cursor + candidates) % count
        p = 1.0 / (1.0 + np.exp(-logits[batch]))
        expected = planned = None
        if strategy.plan is not None:
            ids = [names[place] for place in batch]
            expected = ema.estimate_ids(ids)
            planned = np.asarray(strategy.plan(expected, ids))
        drawn, correct = draw_counts(strategy, p, rng, estimates=expected, planned=planned)
        found = np.array([terms(*pair) for pair in zip(drawn.tolist(), correct.tolist(), strict=True)], np.float64)
        rows = found[:, 0] + found[:, 1]
        # Candidates are opened in turn until enough are kept; the others were never drawn.
        opened = min(candidates, 1 + int(np.searchsorted(np.cumsum(rows > 0), prompts_per_update)))
        if not strategy.extra_batches:
            opened = prompts_per_update
        batch, p, found, rows = batch[:opened], p[:opened], found[:opened], rows[:opened]
        if strategy.plan is not None:
            for place, *counts in zip(batch.tolist(), drawn.tolist(), correct.tolist(), strict=False):
                ema.observe_counts(names[place], *counts)
        total = found[:, 2] * (1.0 - p) - found[:, 3] * p
        gradient = prompts_per_update * total / max(rows.sum(), 1.0)
        if equal_lengths:
            gradient = gradient / max(np.sqrt(np.square(gradient).sum() / prompts_per_update), 1e-12)
        logits[batch] += learning_rate * gradient
        cursor = (cursor + opened) % count
        spent.append(spent[-1] + float(drawn[:opened].sum()))
        means.append(float(np.mean(1.0 / (1.0 + np.exp(-logits)))))
    return Curve(name, np.array(spent), np.array(means))


def average(
    curves: Sequence[Curve], updates: Sequence[int], draws: Sequence[int]
) -> tuple[Float[np.ndarray, " U"], Float[np.ndarray, " D"], float]:
    """(mean pass rates after so many updates, after so many draws, largest standard error) of one strategy's seeds."""
    by_update = np.array([curve.pass_rate[list(updates)] for curve in curves])
    by_draws = np.array([np.interp(draws, curve.draws, curve.pass_rate) for curve in curves])
    error = np.concatenate([by_update, by_draws], axis=1).std(axis=0).max() / np.sqrt(max(len(curves) - 1, 1))
    return by_update.mean(axis=0), by_draws.mean(axis=0), float(error)
