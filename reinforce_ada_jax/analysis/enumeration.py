"""Exact expectations of a collection strategy at given pass rates: draws, groups, and the gradient that they give.

Nothing is sampled. A strategy that decides by counts alone ends each prompt in one of a few hundred states (rounds,
draws, correct draws), whose probabilities follow from binomial rounds. Rewards are 0 and 1, and all responses are
fresh. The policy is the simplest there is: one logit per prompt, so the score of a response with reward r is r - p. Its
noise is a lower bound, because responses with the same verdict have different scores in a real policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.collection import objectives, strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, StrategyConfig
from reinforce_ada_jax.types import EQUAL_NOISE, Pool, Prompt, Response, ScoreNoise, Verdict

# A strategy without a limit is followed until less than this probability is left.
NEGLIGIBLE = 1e-12
# Such a strategy has at most this many rounds: retries with a probability of 0.95 are negligible after 540.
MAX_ROUNDS = 20_000
# `Outcomes.success_round` and `.success_correct` of a prompt without a correct draw.
NO_SUCCESS = (-1, 0)
# Number of pass rates that are followed together. It bounds the memory for 100,000 distinct ones.
BLOCK = 512

Rates = Float[np.ndarray, " P"]  # pass rates, or other numbers: one for each pass rate

PROMPT = Prompt("simulated", problem="", answer="", tokens=np.zeros(1, np.int32))
_RESPONSE = Response(PROMPT.id, 0, np.zeros(1, np.int32), np.zeros(1, np.float32), truncated=False)
_WRONG, _CORRECT = Verdict(correct=False, reward=0.0), Verdict(correct=True, reward=1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Outcomes:
    """Final states of a prompt, and their probabilities at P pass rates.

    A state has the numbers of rounds, draws and correct draws. For a strategy with `coefficients` it also has the first
    round with a correct draw (-1: none), and the correct draws of that round; for other strategies they are -1 and 0.

    A column of `probability` sums to 1 minus the part that was cut off. `cut` is the largest such part; it is 0 if the
    strategy has a limit of draws.
    """

    rounds: Int[np.ndarray, " S"]
    drawn: Int[np.ndarray, " S"]
    correct: Int[np.ndarray, " S"]
    success_round: Int[np.ndarray, " S"]
    success_correct: Int[np.ndarray, " S"]
    probability: Float[np.ndarray, "S P"]
    cut: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Expectations:
    """Expected results of a strategy at P pass rates.

    `variance` is the noise-to-signal ratio of one prompt, inf or nan where E[g] = 0. Two strategies with equal
    `variance_draws` learn equally much from equal numbers of draws, whatever the number of prompts. `score_noise` is
    the noise from scores that differ between responses of the same verdict, in units of the variance of one score;
    squares of correct responses are multiplied by `noise.success`, those of wrong ones by `noise.wrong`. In a large
    policy it is most of the noise.
    """

    pass_rates: Rates
    draws: Rates  # expected responses per prompt
    draws_std: Rates  # their standard deviation between prompts
    rounds: Rates  # expected rounds
    unmet: Rates  # probability that the stopping rule is not met
    zero_signal: Rates  # probability that every advantage is 0, or that nothing is kept
    zero_variance: Rates  # probability that the whole pool is correct, or all of it wrong
    kept_correct: Rates  # expected correct responses that reach the update
    kept_wrong: Rates  # expected wrong ones
    pool_mean: Rates  # expected mean of the pool, which the stopping rule biases
    signal: Rates  # expected weight of grad p in the update (see `expectations`); nan at p = 0 and 1
    relative_signal: Rates  # signal / f'(p) of the objective E[f(p)]; 1 where the update is unbiased
    variance: Rates  # Var(g) / E[g]^2
    variance_draws: Rates  # `variance` * `draws`
    score_noise: Rates  # E[sum of a_i^2] / signal^2
    rows: float  # mean number of kept responses over the P prompts


# ---- final states ----------------------------------------------------------------------------------------------------


def binomial(size: int, p: Rates) -> Float[np.ndarray, "K P"]:
    """Returns the probabilities of 0 to `size` correct draws, built draw by draw: nothing overflows or cancels."""
    probability = np.zeros((size + 1, len(p)))
    probability[0] = 1.0
    for _ in range(size):
        probability[1:] = probability[1:] * (1.0 - p) + probability[:-1] * p
        probability[0] *= 1.0 - p
    return probability


def outcomes(
    strategy: Strategy,
    pass_rates: Rates,
    estimate: float | None = None,
    planned: int | None = None,
    prompt: Prompt = PROMPT,
) -> Outcomes:
    """Returns the distribution of the states (`Outcomes`) with which a prompt of each pass rate ends.

    It goes from state to state by `next_draws`, `continue_probability` and binomial rounds, as collect.py does. The
    strategy sees only the counts in a PromptProgress, and this `estimate`, `planned` and `prompt` for all prompts. A
    strategy without `max_draws` is cut off when a probability below 1e-12 is left at every pass rate.

    Raises:
      ValueError: the strategy breaks its own bounds, or never ends.
    """
    by_size: dict[int, np.ndarray] = {}
    in_flight = {(0, 0, NO_SUCCESS): np.ones(len(pass_rates))}
    states, probabilities, rounds, cut = [], [], 0, 0.0
    while in_flight:
        following: dict[tuple[int, int, tuple[int, int]], np.ndarray] = {}
        for (drawn, correct, success), probability in in_flight.items():
            progress = PromptProgress(prompt, rounds, drawn, correct, estimate=estimate, planned=planned)
            size = strategies.round_size(strategy, progress)
            goes_on = 0.0 if size == 0 else (strategies.probability_of_more(strategy, progress) if rounds else 1.0)
            if goes_on < 1.0:
                states.append((rounds, drawn, correct, *success))
                probabilities.append((1.0 - goes_on) * probability)
            if goes_on > 0.0:
                if size not in by_size:
                    by_size[size] = binomial(size, pass_rates)
                for more, share in enumerate(by_size[size]):
                    first = more > 0 and success == NO_SUCCESS and strategy.coefficients is not None
                    state = drawn + size, correct + more, (rounds, more) if first else success
                    following[state] = following.get(state, 0.0) + goes_on * probability * share
        in_flight, rounds = following, rounds + 1
        if in_flight and strategy.max_draws is None:
            left = float(np.max(np.sum(list(in_flight.values()), axis=0), initial=0.0))
            if left < NEGLIGIBLE:
                in_flight, cut = {}, left
            elif rounds == MAX_ROUNDS:
                raise ValueError(
                    f"After {rounds:,} rounds {left:.1e} of all prompts are still being drawn. Set a limit "
                    "(max_draws), or a lower probability of another round."
                )
    rounds_of, drawn_of, correct_of, first_of, hits_of = np.array(states).T
    return Outcomes(rounds_of, drawn_of, correct_of, first_of, hits_of, np.array(probabilities), cut)


def planned_draws(strategy: Strategy, pass_rates: Rates) -> Int[np.ndarray, " P"] | None:
    """Returns the draws that a strategy plans for prompts whose estimates are exact; None where it does not plan."""
    if strategy.plan is None:
        return None
    width = len(str(len(pass_rates)))
    return strategies.plan_draws(strategy, pass_rates, [f"{index:0{width}}" for index in range(len(pass_rates))])


# ---- their groups ----------------------------------------------------------------------------------------------------


class GroupTerms(NamedTuple):
    """Sums over the kept responses of a pool."""

    kept_correct: int  # numbers of rows
    kept_wrong: int
    sum_correct: float  # sums of their advantages
    sum_wrong: float
    squares_correct: float  # sums of the squares of their advantages
    squares_wrong: float
    zero: bool  # all advantages are 0


def terms_by_state(
    strategy: Strategy,
    estimate: float | None = None,
    planned: int | None = None,
    noise: ScoreNoise = EQUAL_NOISE,
    prompt: Prompt = PROMPT,
) -> Callable[..., GroupTerms]:
    """Returns the terms of a pool as a function of its final state: the numbers of `Outcomes`, in their order.

    Correct responses come first in the pool. For a state with a success (round t, k correct draws), wrong responses
    fill the rounds before t. The built-in `keep` rules keep the same numbers of correct and of wrong responses in every
    order of draws. For a rule that depends on the order, the terms are those of this order.
    """

    def sizes_of(rounds: int) -> list[int]:
        """Returns the sizes of the first `rounds` rounds, when no round before the last has a correct draw."""
        sizes: list[int] = []
        while len(sizes) < rounds:
            progress = PromptProgress(prompt, len(sizes), sum(sizes), 0, estimate=estimate, planned=planned)
            sizes.append(strategies.round_size(strategy, progress))
        return sizes

    @functools.cache
    def distinct(rounds: int, drawn: int, correct: int, success_round: int, success_correct: int) -> GroupTerms:
        sizes, before, first, here = [drawn // rounds] * rounds, 0, correct, 0
        if strategy.coefficients is not None:
            sizes = sizes_of(success_round + 1 or rounds)  # the rounds after the success count as one
        if success_round >= 0:
            before, first, here = sum(sizes[:-1]), success_correct, sizes[-1] - success_correct
        later = drawn - sum(sizes)
        verdicts = (_WRONG,) * before + (_CORRECT,) * first + (_WRONG,) * here
        verdicts += (_CORRECT,) * (correct - first) + (_WRONG,) * (drawn - correct - before - here)
        met = not strategy.drop_unmet or strategy.met(PromptProgress(prompt, rounds, drawn, correct, estimate=estimate))
        round_sizes = (*sizes, later) if later else tuple(sizes)
        pool = Pool(prompt, (_RESPONSE,) * drawn, verdicts, rounds, met, estimate, round_sizes, noise=noise)
        group = make_group(pool, strategy)
        right, advantages = group.pool.correct[group.kept], group.advantages
        numbers = [int(right.sum()), int((~right).sum())]
        sums = [float(values[of].sum()) for values in (advantages, np.square(advantages)) for of in (right, ~right)]
        return GroupTerms(*numbers, *sums, zero=not advantages.any())

    def terms(rounds: int, drawn: int, correct: int, success_round: int, success_correct: int) -> GroupTerms:
        """Returns the terms of a state; states that differ only in numbers without an effect are computed once."""
        if strategy.coefficients is not None:
            return distinct(rounds, drawn, correct, success_round, success_correct)
        # A group depends on the number of rounds only if unmet prompts are dropped.
        return distinct(rounds if strategy.drop_unmet else 1, drawn, correct, *NO_SUCCESS)

    return terms


def _mean(ends: Outcomes, values: np.ndarray) -> Rates:
    """Returns the mean of `values`, one for each state, at each pass rate."""
    # The differences from the value of the likeliest state are averaged: the mean of equal values has exactly their
    # bits, and the probability of a rare state keeps its digits, where 1 - (1 - 1e-19) would be 0 or -2e-16.
    values = np.asarray(values, np.float64)
    likeliest = values[ends.probability.argmax(axis=0)]
    return likeliest + ((values[:, None] - likeliest) * ends.probability).sum(axis=0)


def _block(
    strategy: Strategy,
    pass_rates: Rates,
    estimate: float | None,
    planned: int | None,
    noise: ScoreNoise,
    prompt: Prompt = PROMPT,
) -> dict[str, Rates]:
    """Returns the columns of `Expectations` at some pass rates, and three numbers on the kept responses.

    These are mean and variance of the sum of A_i (r_i - p), and the mean of the sum of A_i^2, weighted by `noise`.
    """
    ends = outcomes(strategy, pass_rates, estimate, planned, prompt)
    numbers = ends.rounds, ends.drawn, ends.correct, ends.success_round, ends.success_correct
    states = np.stack(numbers, axis=1).tolist()
    terms = terms_by_state(strategy, estimate, planned, noise, prompt)
    found = np.array([terms(*state) for state in states], np.float64)
    kept_correct, kept_wrong, sum_correct, sum_wrong, squares_correct, squares_wrong, zero = found.T
    squares = noise.success * squares_correct + noise.wrong * squares_wrong
    final = (PromptProgress(prompt, *state[:3], estimate=estimate, planned=planned) for state in states)
    mean = functools.partial(_mean, ends)
    total = sum_correct[:, None] * (1.0 - pass_rates) - sum_wrong[:, None] * pass_rates
    gradient = (total * ends.probability).sum(0)
    draws = mean(ends.drawn)
    return {
        "draws": draws,
        "draws_std": np.sqrt((np.square(ends.drawn[:, None] - draws) * ends.probability).sum(0)),
        "rounds": mean(ends.rounds),
        "unmet": mean(np.array([not strategy.met(progress) for progress in final])),
        "zero_signal": mean(zero),
        "zero_variance": mean((ends.correct == 0) | (ends.correct == ends.drawn)),
        "kept_correct": mean(kept_correct),
        "kept_wrong": mean(kept_wrong),
        "pool_mean": mean(ends.correct / ends.drawn),
        "gradient": gradient,
        "gradient_variance": (np.square(total - gradient) * ends.probability).sum(0),
        "squares": (squares[:, None] * ends.probability).sum(0),
    }


def expectations(
    config: StrategyConfig, pass_rates: Sequence[float] | Rates, noise: ScoreNoise = EQUAL_NOISE
) -> Expectations:
    """Computes the expected results of a strategy for prompts of the given pass rates.

    A prompt adds g = sum of a_i s_i over its kept responses to the update, with the score s_i of response i and the
    weight a_i = A_i / rows. `rows` is the mean number of kept responses of all P prompts: a token-mean over a large
    minibatch of responses of equal lengths, in which a prompt that keeps more rows counts for more. Strategies with
    `coefficients` give a_i itself. For any stopping rule that sees outcomes only,

        E[g] = signal(p) grad p,    signal(p) = E[A+] / p - E[A-] / (1 - p)

    with A+ and A- the sums of a_i over correct and over wrong responses. The update climbs E[f(p)] where signal = f'. A
    fixed number n of draws, all kept, with their mean as baseline, has the signal (n - 1) / n. `variance` does not
    depend on `rows`. Where the strategy plans, the draws of all P prompts are planned together, as if the estimates
    were exact. A strategy of the user finds the pass rate in the prompt.

    Args:
      config: the `collection` section of a configuration, or any object with the attributes of `StrategyConfig`.
      pass_rates: of P prompts, in [0, 1]; several prompts may have the same.
      noise: noise of the scores; it weighs the squares in `score_noise`, and the control variate "noise" uses it.

    Raises:
      ValueError: the settings break a rule, or a pass rate is not in [0, 1].
    """
    strategy, pass_rates = strategies.build(config), check_pass_rates(pass_rates)
    planned = planned_draws(strategy, pass_rates)
    keys = pass_rates[None] if planned is None else np.stack([pass_rates, planned])
    distinct, index = np.unique(keys, axis=1, return_inverse=True)
    if planned is None and not strategy.needs_estimates and config.strategy in strategies.BUILT_IN:
        starts = range(0, distinct.shape[1], BLOCK)
        blocks = [_block(strategy, distinct[0, start : start + BLOCK], None, None, noise) for start in starts]
    else:  # a strategy of the user may read the pass rate of a prompt, too
        blocks = []
        for rate, *sizes in distinct.T.tolist():
            size, estimate = int(sizes[0]) if sizes else None, rate if strategy.estimates else None
            prompt = dataclasses.replace(PROMPT, pass_rate=rate)
            blocks.append(_block(strategy, np.array([rate]), estimate, size, noise, prompt))
    columns = {name: np.concatenate([block[name] for block in blocks])[index.reshape(-1)] for name in blocks[0]}
    gradient, gradient_variance = columns.pop("gradient"), columns.pop("gradient_variance")
    squares = columns.pop("squares")
    rows = float((columns["kept_correct"] + columns["kept_wrong"]).mean())
    section = strategies.with_defaults(config)
    inside = np.where((pass_rates > 0.0) & (pass_rates < 1.0), pass_rates, np.nan)
    slope = objectives.weight(section.objective, inside, alpha=section.objective_alpha, k=section.objective_k)
    with np.errstate(divide="ignore", invalid="ignore"):
        signal = gradient / (1.0 if strategy.coefficients else rows) / (inside * (1.0 - inside))
        variance = gradient_variance / np.square(gradient)
        score_noise = squares / np.square(gradient / (inside * (1.0 - inside)))
    return Expectations(
        pass_rates,
        signal=signal,
        relative_signal=signal / slope,
        variance=variance,
        variance_draws=variance * columns["draws"],
        score_noise=score_noise,
        rows=rows,
        **columns,
    )


def progress(found: Expectations) -> tuple[float, float]:
    """Returns the rise of the mean of p, and of log p, by the best step, per draw; all strategies have the same unit.

    A step eta raises the mean of f(p) by eta E[g] . grad f - eta^2 E[g^2] / 2, if all strategies have the same
    curvature. The best eta gives (E[g] . grad f)^2 / (2 E[g^2]). The sums over prompts are those of a policy with one
    logit per prompt. Prompts with p = 0 or 1 cost their draws, and add nothing.
    """
    rates = found.pass_rates
    mean = np.nan_to_num(found.signal) * rates * (1.0 - rates)
    squares = np.square(mean) @ (1.0 + np.where(mean == 0.0, 0.0, found.variance))
    if not squares:
        return 0.0, 0.0
    cost = 2.0 * squares * found.draws.sum()
    of_p, of_log = (float((mean @ slope) ** 2 / cost) for slope in (rates * (1.0 - rates), 1.0 - rates))
    return of_p, of_log


def check_pass_rates(pass_rates: Sequence[float] | Rates) -> Rates:
    """Returns `pass_rates` as an array; ValueError where there is none, or one is outside [0, 1]."""
    pass_rates = np.asarray(pass_rates, np.float64)
    if pass_rates.ndim != 1 or not pass_rates.size or not ((pass_rates >= 0) & (pass_rates <= 1)).all():
        raise ValueError(f"pass rates must be numbers in [0, 1], at least one; they are {pass_rates.tolist()}.")
    return pass_rates
