"""Learning curves of a population of independent prompts, one logit each, under a collection strategy.

The model leaves out much: prompts do not help each other (no generalisation, so a held-out set would show nothing), the
responses of a prompt differ only in their verdict, and there is no clipping, no momentum, and no off-policy data. It
shows the effect of the choice and the number of draws, not the accuracy that a run will reach.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.analysis.enumeration import NO_SUCCESS, PROMPT, terms_by_state
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.estimators import Ema
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, StrategyConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """Responses drawn and mean pass rate of a population after 0, 1, 2, ... updates."""

    draws: Float[np.ndarray, " U"]
    pass_rate: Float[np.ndarray, " U"]


def population(size: int, a: float = 0.6, b: float = 1.2) -> Float[np.ndarray, " P"]:
    """Returns the pass rates of `size` prompts: quantiles of Beta(a, b) at (i + 1/2) / size; many hard, a few solved.

    With u = p^a the density p^(a - 1) (1 - p)^(b - 1) has no pole at 0, so a trapezoid sum is enough. b is at least 1.
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
) -> Int[np.ndarray, "P 5"]:
    """Samples the final state of one prompt of each pass rate, hundreds of times as fast as the collection loop.

    The columns are those of `enumeration.Outcomes`: rounds, draws, correct draws, first round with a correct draw and
    its correct draws.
    """
    count = len(pass_rates)
    plans: list[tuple[float | None, int | None]] = [(None, None)] * count
    if estimates is not None:
        sizes = [None] * count if planned is None else planned.tolist()
        plans = list(zip(estimates.tolist(), sizes, strict=True))

    @functools.cache
    def decide(rounds: int, drawn: int, correct: int, plan: tuple[float | None, int | None]) -> tuple[int, float]:
        progress = PromptProgress(PROMPT, rounds, drawn, correct, *plan)
        size = strategies.round_size(strategy, progress)
        return size, strategy.continue_probability(progress) if size and rounds else 1.0

    drawn, correct, num_rounds, success_correct = np.zeros((4, count), np.int64)
    success_round = np.full(count, NO_SUCCESS[0])
    in_flight, rounds = np.arange(count), 0
    while in_flight.size:
        states = zip(in_flight.tolist(), drawn[in_flight].tolist(), correct[in_flight].tolist(), strict=True)
        sizes, probabilities = np.array([decide(rounds, n, k, plans[index]) for index, n, k in states]).T
        goes_on = (sizes > 0) & (rng.random(len(sizes)) < probabilities)
        in_flight, sizes = in_flight[goes_on], sizes[goes_on].astype(np.int64)
        drawn[in_flight] += sizes
        hits = rng.binomial(sizes, pass_rates[in_flight])
        first = (hits > 0) & (correct[in_flight] == 0)
        success_round[in_flight[first]], success_correct[in_flight[first]] = rounds, hits[first]
        correct[in_flight] += hits
        rounds += 1
        num_rounds[in_flight] = rounds
    return np.stack([num_rounds, drawn, correct, success_round, success_correct], axis=1)


def learn(
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
    """Computes gradient ascent on the logits of independent prompts, with the groups that a strategy makes.

        theta_x <- theta_x + learning_rate * B * sum of A_i (r_i - p_x) / (rows of the update)

    for each of the B prompts of an update: the token-mean gradient of responses of equal lengths, times B, so that the
    size of an update does not depend on the number of prompts. Prompts take turns; with `dapo` the next ones replace
    those that are dropped. `estimate` plans the draws of each update with the estimator `ema` at its defaults.

    Args:
      config: settings of the strategy.
      pass_rates: of the population before the first update; 0 and 1 stay there.
      updates: least number of updates; more follow until `draws` responses are drawn.
      draws: least number of responses.
      prompts_per_update: B, at most P.
      learning_rate: in logits.
      equal_lengths: divide the gradient of each update by its root mean square over the B prompts. Strategies then
        differ in the direction of their updates, not in their size, which an optimiser such as Adam removes too.
      seed: seed of all draws.
    """
    strategy, rng = strategies.build(config), np.random.default_rng(seed)
    if strategy.needs_estimates or (strategy.coefficients is not None and strategy.plan is not None):
        raise ValueError(
            "learning curves follow no estimates of a control variate or of other coefficients: use a number "
            "as control variate, or leave out the plan or the coefficients."
        )
    ema = Ema()
    names = [f"{index:06d}" for index in range(len(pass_rates))]

    terms = terms_by_state(strategy)
    with np.errstate(divide="ignore"):
        logits = np.log(pass_rates) - np.log1p(-pass_rates)
    spent, means, cursor = [0.0], [float(np.mean(pass_rates))], 0
    num_candidates = min(len(pass_rates), prompts_per_update * (1 + strategy.extra_batches))
    while len(spent) <= updates or spent[-1] < draws:
        batch = np.arange(cursor, cursor + num_candidates) % len(pass_rates)
        p = 1.0 / (1.0 + np.exp(-logits[batch]))
        estimates = planned = None
        if strategy.plan is not None:
            ids = [names[index] for index in batch]
            estimates = ema.estimate_ids(ids)
            planned = strategies.plan_draws(strategy, estimates, ids)
        counts = draw_counts(strategy, p, rng, estimates=estimates, planned=planned)
        states = counts.tolist()
        found = np.array([terms(*state) for state in states], np.float64)
        rows = found[:, 0] + found[:, 1]
        # In a run candidates are drawn one by one until enough are kept: the others do not count as drawn.
        used = prompts_per_update
        if strategy.extra_batches:
            used = min(num_candidates, 1 + int(np.searchsorted(np.cumsum(rows > 0), prompts_per_update)))
        batch, p, found, rows = batch[:used], p[:used], found[:used], rows[:used]
        if strategy.plan is not None:
            for index, state in zip(batch.tolist(), states[:used], strict=True):
                ema.observe_counts(names[index], *state[1:3])
        total = found[:, 2] * (1.0 - p) - found[:, 3] * p
        # Coefficients count each prompt once, advantages each row.
        gradient = total if strategy.coefficients else prompts_per_update * total / max(rows.sum(), 1.0)
        if equal_lengths:
            gradient = gradient / max(np.sqrt(np.square(gradient).sum() / prompts_per_update), 1e-12)
        logits[batch] += learning_rate * gradient
        cursor = (cursor + used) % len(pass_rates)
        spent.append(spent[-1] + float(counts[:used, 1].sum()))
        means.append(float(np.mean(1.0 / (1.0 + np.exp(-logits)))))
    return Curve(np.array(spent), np.array(means))


def average(
    curves: Sequence[Curve], updates: Sequence[int], draws: Sequence[int]
) -> tuple[Float[np.ndarray, " U"], Float[np.ndarray, " D"], float]:
    """Returns (mean pass rates after these updates, after these draws, largest standard error) over seeds."""
    by_update = np.array([curve.pass_rate[list(updates)] for curve in curves])
    by_draws = np.array([np.interp(draws, curve.draws, curve.pass_rate) for curve in curves])
    error = np.concatenate([by_update, by_draws], axis=1).std(axis=0).max() / np.sqrt(max(len(curves) - 1, 1))
    return by_update.mean(axis=0), by_draws.mean(axis=0), float(error)
