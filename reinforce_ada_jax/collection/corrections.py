"""Coefficients a_i of a prompt's responses: with them the update climbs E[f(p)], whatever the stopping rule has drawn.

If a stopping rule sees outcomes only, a correct draw is a sample of the policy given that it is correct, and a wrong
one given that it is wrong. With coefficients a_i that depend on outcomes only, scores s_i = grad log pi(a_i | x) and
pass rate p, a prompt adds

    E[sum_i a_i s_i] = signal(p) grad p,    signal(p) = E[A+] / p - E[A-] / (1 - p)

to the update; A+ and A- are the sums of a_i over correct and over wrong responses. The update climbs E[f(p)] where
signal = f'. analysis/enumeration.py computes the signal of every strategy.

    stratified   the kept group stands for the whole pool: signal = E[w(p_hat) p_hat (1 - p_hat)] / (p (1 - p))
    exact        the first round with a correct response sets the weight that all correct draws share: signal = the
                 series of f', cut off at the limit of draws
    maxrl        (r - p_hat) / p_hat over one round of N: the series of 1 / p, cut at N - 1 draws (arXiv 2602.02710)

Each is a function (pool, mask of its usable draws) -> (draw indices that are kept, their coefficients). Prompts count
equally in the update, whatever their numbers of rows: its gradient is the sum of a_i s_i over its prompts, divided by a
number that no outcome of the iteration decides (training/updates.py).
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from reinforce_ada_jax import user_code
from reinforce_ada_jax.collection.groups import balanced_group
from reinforce_ada_jax.collection.objectives import Objective
from reinforce_ada_jax.config import CollectionConfig, collection_rules
from reinforce_ada_jax.types import Pool, ScoreNoise

Coefficients = tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]
CoefficientsFn = Callable[[Pool, Bool[np.ndarray, " N"]], Coefficients]


def checked(coefficients: CoefficientsFn, pool: Pool, usable: Bool[np.ndarray, " N"]) -> Coefficients:
    """Returns a strategy's `coefficients` of a pool; ValueError unless they are indices and as many numbers."""
    returned, draws = coefficients(pool, usable), len(pool.responses)
    arrays = returned if isinstance(returned, tuple | list) and len(returned) == 2 else ()
    kept: np.ndarray
    values: np.ndarray
    try:
        kept, values = (np.asarray(each) if np.size(each) else np.zeros(0, int) for each in arrays)
    except ValueError:  # two arrays are missing, or one has rows of several lengths
        kept = values = np.zeros(())
    indices = kept.ndim == 1 and kept.dtype.kind in "iu" and (np.diff(kept, prepend=-1, append=draws) > 0).all()
    if not (indices and values.shape == kept.shape and values.dtype.kind in "iuf"):
        name = getattr(coefficients, "__name__", "coefficients")
        raise user_code.wrong(
            coefficients,
            f"coefficients of the Strategy ({name}) returned {_described(returned)} for a prompt with {draws} draws. "
            "It must return two arrays of the same length: the indices of the draws to keep, whole numbers from 0 to "
            f"{draws - 1}, ascending, and the coefficient of each, a number.",
        )
    if not usable[kept].all():
        old = kept[~usable[kept]][0]
        message = f"The strategy's coefficients keep draw {old}, which is older than its max_age: leave it out."
        raise user_code.wrong(coefficients, message)
    return kept.astype(int), values.astype(float)


def _described(value: Any) -> str:
    """Returns the type of a value, with the shape and the content of an array, as a part of a message."""
    if isinstance(value, tuple | list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        more = ", ..." if len(value) > 3 else ""
        return f"{opening}{', '.join(_described(each) for each in value[:3])}{more}{closing}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with the shape {value.shape} ({value.tolist()!r:.60})"
    return f"{value!r:.60}"


def relative_rewards(pool: Pool) -> Float[np.ndarray, " N"]:
    """Returns rewards minus their mean: exactly 0 where all are equal, a pool of one included."""
    rewards = pool.rewards
    relative = rewards - rewards[0]
    return relative - relative.mean()


def stratified(objective: Objective, keep: Callable[[np.ndarray], np.ndarray]) -> CoefficientsFn:
    """Returns coefficients: kept correct rows stand for all correct draws, and kept wrong rows for all wrong ones.

        a_i = w(p_hat) (r_i - mean) / N * (k / k_kept for correct rows, (N - k) / (n - k_kept) for wrong ones)

    Then A+ = w p_hat (1 - p_hat) = -A-, as for the whole pool. The bias of the stopping rule and of p_hat remains.
    `keep` maps the verdicts of the usable draws to the indices of those to keep.
    """

    def coefficients(pool: Pool, usable: Bool[np.ndarray, " N"]) -> Coefficients:
        correct, candidates = pool.correct, np.flatnonzero(usable)
        kept = candidates[keep(correct[candidates])]
        strata = np.where(correct, correct.sum(), (~correct).sum())[kept]
        num_rows = np.where(correct[kept], correct[kept].sum(), (~correct[kept]).sum())
        weight = float(objective.clipped_weight(correct.mean()))
        return kept, weight * relative_rewards(pool)[kept] / len(correct) * strata / num_rows

    return coefficients


def first_success_weight(objective: Objective, round_size: int, begin: int, num_correct: int) -> float:
    """Computes the weight of the first round with a correct response: C(b, k).

        C(b, k) = sum over j < M of c_{b + j} binom(M - j - 1, k - 1) / binom(M, k)

    With probability p (1 - p)^j, draw j is the first correct one. With the weight c_j its signal is the sum of c_j (1 -
    p)^j, the series of f'(p). C(b, k) is the mean of this weight over all orders of the round's M draws, k of which are
    correct. In the rounds before, b draws were made.
    """
    series = objective.series(begin + round_size)[begin:]
    ways = [math.comb(round_size - j - 1, num_correct - 1) for j in range(round_size)]
    every = math.comb(round_size, num_correct)
    return math.fsum(c * (count / every) for c, count in zip(series.tolist(), ways, strict=True))


# Draws of a prompt that the control variate "noise" may cover: each is a row of the update. At p = 0.1 these 8 give 57
# % of the gain of all draws up to the first success, at p = 0.2 83 %; harder prompts gain less than 10 %.
MAX_COVERED = 8
# With a smaller b a draw would lower the noise by less than 5 % and cost a row, so it is left out.
MIN_CONTROL_VARIATE = 0.05
# The estimated pass rate counts as much as this number of draws.
ESTIMATE_STRENGTH = 8.0

ControlVariateFn = Callable[[Pool], Iterable[float]]


def control_variate_at(objective: Objective, round_size: int, begin: int, estimate: float, noise: ScoreNoise) -> float:
    """Computes the b of least noise for the M draws of a round, after b0 = `begin` failures, at a pass rate p.

        b = p sum_{j < M} c_{b0 + j} (1 - p)^j / M * success / (p correct + (1 - p) wrong)

    b times the sum of the M scores is subtracted. The covariance of this sum with the sum of a_i s_i is the fraction
    before `success`, times M and the noise of a success; its variance is M times the last divisor. For the objective
    log, M = 1 and equal noise, b = p. The formula is exact for log without a limit of draws.
    """
    powers = (1.0 - estimate) ** np.arange(round_size)
    weight = estimate * (objective.series(begin + round_size)[begin:] @ powers) / round_size
    variance = estimate * noise.correct + (1.0 - estimate) * noise.wrong
    return float(weight * noise.success / variance) if variance else 0.0


def by_noise(objective: Objective) -> ControlVariateFn:
    """Returns the control variate of the draws up to the first success: of `MAX_COVERED`, and where b is not small.

    After j failures the pass rate is the mean of a Beta distribution, S p / (S + j) with S = `ESTIMATE_STRENGTH`. So
    b_j depends only on what came before draw j, and the sum of b_j times the score of draw j has the mean 0.
    """

    def values(pool: Pool) -> Iterator[float]:
        begin, estimate = 0, _estimate(pool)
        for size in pool.round_sizes:
            if begin >= MAX_COVERED:
                return
            expected = ESTIMATE_STRENGTH * estimate / (ESTIMATE_STRENGTH + begin)
            value = control_variate_at(objective, size, begin, expected, pool.noise)
            yield value if value >= MIN_CONTROL_VARIATE else 0.0
            begin += size

    return values


def exact(
    objective: Objective,
    *,
    max_rows: int | None = None,
    control_variate: ControlVariateFn | None = None,
    continue_probability: float = 1.0,
) -> CoefficientsFn:
    """Returns coefficients with which the update climbs E[f(p)] without bias, for any stopping rule by whole rounds.

    The rule must not stop before the first round with a correct response, except at its limit of draws. That round's k
    correct draws, and the t draws before it, decide the weight C(t, k). All correct draws of the pool share it, times
    their rewards: they are samples of one distribution, and signal(p) depends only on the sum of their coefficients.
    All other draws have 0. The signal is the series of f', cut off at the limit of draws. A prompt that is never solved
    adds nothing. The rounds before the first correct response may have any sizes. Only the first `max_rows` correct
    draws are kept: the expectation is the same with fewer rows.

    `control_variate` returns b of each round of a pool, from what was known before the round. It is subtracted from the
    draws up to the first round with a correct response. Earlier rounds alone decide whether a round is drawn, and what
    is subtracted from it. So the sum of b_j s_j has the mean 0 and changes no expectation. Weights are divided by
    `continue_probability` once for each round after the first, because chance decides about these rounds.
    """
    weight = functools.cache(functools.partial(first_success_weight, objective))

    def coefficients(pool: Pool, usable: Bool[np.ndarray, " N"]) -> Coefficients:
        coefficient = np.zeros(len(pool.responses))
        correct, ends = np.flatnonzero(pool.correct), np.cumsum(pool.round_sizes)
        number = len(ends) - 1  # of the first successful round; if there is none, of the last one
        if correct.size:
            number = int(np.searchsorted(ends, correct[0], side="right"))
            size, hits = pool.round_sizes[number], int((correct < ends[number]).sum())
            rows = correct[:max_rows]
            share = weight(size, int(ends[number]) - size, hits) / continue_probability**number / len(rows)
            coefficient[rows] = share * pool.rewards[rows]
        if control_variate is not None:
            rounds = zip(ends[: number + 1], pool.round_sizes, control_variate(pool), strict=False)
            for end, size, value in rounds:
                coefficient[end - size : end] -= value
        kept = np.flatnonzero((coefficient != 0.0) & usable)
        return kept, coefficient[kept]

    return coefficients


def _estimate(pool: Pool) -> float:
    """Returns the pass rate expected before drawing; 1/2 where nothing is known."""
    known = (pool.estimate, pool.prompt.pass_rate)
    return next((float(one) for one in known if one is not None), 0.5)


def with_first_round(coefficients: CoefficientsFn) -> CoefficientsFn:
    """Returns the same coefficients, and a row with 0 for every other usable draw of the first round.

    The first round is drawn whatever its outcomes are, so its draws are a sample of the policy. The entropy and the KL
    term are means over them (training/updates.py).
    """

    def with_all(pool: Pool, usable: Bool[np.ndarray, " N"]) -> Coefficients:
        kept, of_kept = checked(coefficients, pool, usable)
        coefficient = np.zeros(len(pool.responses))
        coefficient[kept] = of_kept
        rows = np.union1d(kept, np.flatnonzero(usable[: pool.round_sizes[0]]))
        return rows, coefficient[rows]

    return with_all


def maxrl(pool: Pool, usable: Bool[np.ndarray, " N"]) -> Coefficients:
    """Returns the coefficients of maximum-likelihood RL: (r_i - mean) / (p_hat N) (arXiv 2602.02710).

    With N draws the signal is the sum over j < N - 1 of (1 - p)^j.
    """
    pass_rate, kept = pool.correct.mean(), np.flatnonzero(usable)
    if not pass_rate:
        return kept, np.zeros(len(kept))
    return kept, (relative_rewards(pool) / (pass_rate * len(usable)))[kept]


# ---- from a configuration --------------------------------------------------------------------------------------------


def from_settings(config: CollectionConfig, objective: Objective, max_draws: int | None) -> dict[str, Any]:
    """Returns the fields of a `Strategy` that a correction sets; none where advantages are as published."""
    kind = collection_rules.correction(config)
    if kind == "exact":
        return _exact(config, objective, max_draws)
    if kind == "stratified":
        return _stratified(config, objective, max_draws)
    if config.objective == "maxrl":
        return {"coefficients": maxrl, "max_kept": max_draws}
    return {}


def _exact(config: CollectionConfig, objective: Objective, max_draws: int | None) -> dict[str, Any]:
    """Returns the correction `exact`.

    The limit of correct rows is n with `keep` = "group". With "pool" it is as many as the rule allows, and otherwise
    the size of a round or of a group, whichever is larger. Each draw that the control variate covers is a row, too.
    """
    size = collection_rules.first_round(config)
    assert size is not None  # `correction_fits`
    control_variate, covered = None, 0
    if config.control_variate == "noise":
        control_variate, covered = by_noise(objective), size * -(-MAX_COVERED // size)
    elif config.control_variate != "none":
        constant = float(config.control_variate)
        control_variate, covered = (lambda pool: [constant]), size
    limit = {"group": config.group_size, "pool": None}.get(config.keep, max(size, config.group_size))
    most = [covered + number for number in (limit, collection_rules.max_correct(config)) if number is not None]
    probability = config.retry_probability if config.strategy == "ngu" else 1.0
    coefficients = exact(objective, max_rows=limit, control_variate=control_variate, continue_probability=probability)
    return {
        "coefficients": coefficients,
        "max_kept": min([*most, *([] if max_draws is None else [max_draws])], default=None),
        "needs_estimates": config.control_variate == "noise",
    }


def _stratified(config: CollectionConfig, objective: Objective, max_draws: int | None) -> dict[str, Any]:
    """Returns the correction `stratified` of the strategy's own rows: a balanced group of n or less, or the pool."""
    if config.keep == "pool" or (config.strategy in ("grpo", "ngu") and not config.keep):
        return {"coefficients": stratified(objective, lambda correct: np.arange(len(correct))), "max_kept": max_draws}
    size = config.group_size
    coefficients = stratified(objective, lambda correct: balanced_group(correct, min(size, len(correct))))
    return {"coefficients": coefficients, "max_kept": size}
