"""What a strategy comes to for a prompt of known pass rate, exactly: draws, groups, and the gradient they give.

No sampling. A strategy that decides by counts alone ends each prompt in one of a few hundred states (rounds, draws,
correct ones); their probabilities follow from binomial rounds. Rewards are 0 and 1, and all responses are fresh.
The policy is the simplest there is: one logit, correct with chance p, so that a response's score is r - p. Its noise
is a lower bound: responses with the same verdict have scores of their own in a real one.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.collection import objectives, strategies
from reinforce_ada_jax.collection.advantages import Group, make_group
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, StrategyConfig
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict

# A strategy without a limit is followed until less than this is still under way.
NEGLIGIBLE = 1e-12
# And no further than this, whatever is: retries with a chance of 0.95 are negligible after 540 rounds.
MAX_ROUNDS = 20_000
# Pass rates followed side by side: bounds the memory that a set of 100,000 distinct ones takes.
BLOCK = 512

PROMPT = Prompt("simulated", problem="", answer="", tokens=np.zeros(1, np.int32))
_RESPONSE = Response(PROMPT.id, 0, np.zeros(1, np.int32), np.zeros(1, np.float32), truncated=False)
_WRONG, _CORRECT = Verdict(correct=False, reward=0.0), Verdict(correct=True, reward=1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Outcomes:
    """How a prompt may end.

    Attributes:
      rounds: int[S] of each final state,
      drawn: int[S],
      correct: int[S].
      probability: float64[S, P], at each pass rate; a column sums to 1 less what is cut.
      cut: the most probability left out at any pass rate; 0 for strategies with a limit.
    """

    rounds: np.ndarray
    drawn: np.ndarray
    correct: np.ndarray
    probability: np.ndarray
    cut: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Expectations:
    """What a strategy comes to at P pass rates.

    Attributes:
      pass_rates: float[P].
      draws: expected responses; draws_std: their standard deviation from prompt to prompt.
      rounds: expected rounds.
      unmet: chance that the stopping rule is not met.
      zero_signal: chance that every advantage is 0, or that nothing is kept.
      zero_variance: chance that the whole pool is correct, or all of it wrong.
      kept_correct: expected correct responses that reach the update; kept_wrong: wrong ones.
      pool_mean: expected mean of the pool, which the stopping rule biases.
      signal: E[g] / (w(p) p (1 - p)), the gradient as a multiple of the exact one of E[f(p)]; nan at p = 0 and 1.
      variance: Var(g) / E[g]^2, noise to signal of one prompt; inf or nan where E[g] = 0.
      variance_draws: `variance` * `draws`: the noise to signal that one draw's worth of prompts has. Two strategies
        of equal `variance_draws` learn as much from equal numbers of draws, however many prompts these are spent on.
      rows: mean number of kept responses over the pass rates; what g is divided by (see `expectations`).
    """

    pass_rates: np.ndarray
    draws: np.ndarray
    draws_std: np.ndarray
    rounds: np.ndarray
    unmet: np.ndarray
    zero_signal: np.ndarray
    zero_variance: np.ndarray
    kept_correct: np.ndarray
    kept_wrong: np.ndarray
    pool_mean: np.ndarray
    signal: np.ndarray
    variance: np.ndarray
    variance_draws: np.ndarray
    rows: float


COLUMNS = tuple(field.name for field in dataclasses.fields(Expectations) if field.name not in ("pass_rates", "rows"))


# ---- where a prompt ends ---------------------------------------------------------------------------------------------


def binomial(size: int, p: Float[np.ndarray, " P"]) -> Float[np.ndarray, "K P"]:
    """Chances of 0 to `size` correct ones among `size` draws, built up draw by draw: nothing overflows or cancels."""
    p = np.asarray(p, np.float64)
    chances = np.zeros((size + 1, len(p)))
    chances[0] = 1.0
    for _ in range(size):
        chances[1:] = chances[1:] * (1.0 - p) + chances[:-1] * p
        chances[0] *= 1.0 - p
    return chances


def outcomes(
    strategy: Strategy,
    pass_rates: Float[np.ndarray, " P"],
    *,
    estimate: float | None = None,
    planned: int | None = None,
) -> Outcomes:
    """The distribution of (rounds, draws, correct ones) with which a prompt of each pass rate ends.

    From state to state by `next_draws`, `chance` and binomial rounds, as collect.py goes. A strategy without
    `max_draws` is cut where less than 1e-12 is still under way at every pass rate.

    Args:
      strategy: decides by the counts in a PromptProgress, and by nothing else.
      pass_rates: in [0, 1].
      estimate: `PromptProgress.estimate` of all of them, where the strategy plans.
      planned: `PromptProgress.planned`.

    Raises:
      ValueError: the strategy breaks its own bounds, or goes on for ever.
    """
    pass_rates = np.asarray(pass_rates, np.float64)
    by_size: dict[int, np.ndarray] = {}
    under_way = {(0, 0): np.ones(len(pass_rates))}
    states, probabilities, rounds, cut = [], [], 0, 0.0
    while under_way:
        following: dict[tuple[int, int], np.ndarray] = {}
        for (drawn, correct), probability in under_way.items():
            record = PromptProgress(PROMPT, rounds, drawn, correct, estimate=estimate, planned=planned)
            size = strategies.asked_for(strategy, record)
            goes_on = 0.0 if size == 0 else (strategy.continue_probability(record) if rounds else 1.0)
            if goes_on < 1.0:
                states.append((rounds, drawn, correct))
                probabilities.append((1.0 - goes_on) * probability)
            if goes_on > 0.0:
                if size not in by_size:
                    by_size[size] = binomial(size, pass_rates)
                for more, chances in enumerate(by_size[size]):
                    state = drawn + size, correct + more
                    following[state] = following.get(state, 0.0) + goes_on * probability * chances
        under_way, rounds = following, rounds + 1
        if under_way and strategy.max_draws is None:
            left = float(np.max(sum(under_way.values()), initial=0.0))
            if left < NEGLIGIBLE:
                under_way, cut = {}, left
            elif rounds == MAX_ROUNDS:
                raise ValueError(
                    f"After {rounds:,} rounds {left:.1e} of all prompts are still under way: give the strategy a limit "
                    "(max_draws), or a lower chance of going on."
                )
    return Outcomes(*np.array(states).T, np.array(probabilities), cut)


def planned_draws(strategy: Strategy, pass_rates: Float[np.ndarray, " P"]) -> Int[np.ndarray, " P"] | None:
    """What a strategy that plans allots to prompts whose estimates are exact; None where it does not plan."""
    if strategy.plan is None:
        return None
    width = len(str(len(pass_rates)))
    names = [f"{place:0{width}}" for place in range(len(pass_rates))]
    return np.asarray(strategy.plan(np.asarray(pass_rates, np.float64), names))


# ---- what its group is worth -----------------------------------------------------------------------------------------


def canonical_group(strategy: Strategy, drawn: int, correct: int) -> Group:
    """The group of a pool of these counts with its correct responses first.

    The built-in `keep` rules keep as many correct and wrong ones whatever the order; for one that looks at the order,
    this is its answer to this order, and only draws through the loop (collection/simulate.py) are exact.
    """
    verdicts = (_CORRECT,) * correct + (_WRONG,) * (drawn - correct)
    return make_group(Pool(PROMPT, (_RESPONSE,) * drawn, verdicts, rounds=1, met=True), strategy)


def group_terms(group: Group) -> tuple[int, int, float, float, bool]:
    """(correct rows, wrong rows, sum of advantages of the first, of the second, all advantages are 0)."""
    correct = group.pool.correct[group.kept]
    return (
        int(correct.sum()),
        int((~correct).sum()),
        float(group.advantages[correct].sum()),
        float(group.advantages[~correct].sum()),
        not group.advantages.any(),
    )


def terms_table(
    strategy: Strategy, drawn: Int[np.ndarray, " S"], correct: Int[np.ndarray, " S"]
) -> Float[np.ndarray, "5 S"]:
    """`group_terms` of canonical pools, as float64 columns; each pair of counts is worked out once."""
    pairs, places = np.unique(np.stack([drawn, correct]), axis=1, return_inverse=True)
    found = [group_terms(canonical_group(strategy, *pair)) for pair in pairs.T.tolist()]
    return np.array(found, np.float64).reshape(-1, 5).T[:, places.reshape(-1)]


def _mean(ends: Outcomes, values: np.ndarray) -> np.ndarray:
    """At each pass rate, of a number in each state."""
    # Measured from the first, so that what is the same in all states keeps its own value to the last bit.
    values = np.asarray(values, np.float64)
    return values[0] + (values - values[0]) @ ends.probability


def _block(
    strategy: Strategy, pass_rates: np.ndarray, estimate: float | None, planned: int | None
) -> dict[str, np.ndarray]:
    """The means at some pass rates, with the mean and the variance of the sum of A_i (r_i - p) over kept responses."""
    ends = outcomes(strategy, pass_rates, estimate=estimate, planned=planned)
    kept_correct, kept_wrong, of_correct, of_wrong, zero = terms_table(strategy, ends.drawn, ends.correct)
    records = (
        PromptProgress(PROMPT, *state, estimate=estimate, planned=planned)
        for state in zip(ends.rounds.tolist(), ends.drawn.tolist(), ends.correct.tolist(), strict=True)
    )
    unmet = np.array([not strategy.met(record) for record in records], np.float64)

    mean = functools.partial(_mean, ends)
    total = of_correct[:, None] * (1.0 - pass_rates) - of_wrong[:, None] * pass_rates
    gradient = (total * ends.probability).sum(0)
    draws = mean(ends.drawn)
    return {
        "draws": draws,
        "draws_std": np.sqrt((np.square(ends.drawn[:, None] - draws) * ends.probability).sum(0)),
        "rounds": mean(ends.rounds),
        "unmet": mean(unmet),
        "zero_signal": mean(zero),
        "zero_variance": mean((ends.correct == 0) | (ends.correct == ends.drawn)),
        "kept_correct": mean(kept_correct),
        "kept_wrong": mean(kept_wrong),
        "pool_mean": mean(ends.correct / ends.drawn),
        "gradient": gradient,
        "gradient_variance": (np.square(total - gradient) * ends.probability).sum(0),
    }


def exact_gradient(config: StrategyConfig, pass_rates: Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """d f(p) / d logit = w(p) p (1 - p), of the objective that `config` names, without its epsilon; nan at 0 and 1."""
    config = strategies.with_defaults(config)
    pass_rates = np.asarray(pass_rates, np.float64)
    inside = np.where((pass_rates > 0.0) & (pass_rates < 1.0), pass_rates, np.nan)
    return objectives.weight(config.objective, inside, alpha=config.objective_alpha) * inside * (1.0 - inside)


def expectations(config: StrategyConfig, pass_rates: Sequence[float] | Float[np.ndarray, " P"]) -> Expectations:
    """What a strategy comes to for prompts of the given pass rates.

    The gradient of a prompt is what it adds to a token-mean over a large minibatch of responses of equal lengths:

        g = sum over kept responses of A_i (r_i - p), divided by `rows`

    with `rows` the mean number of kept responses of all P prompts. So a prompt that keeps more rows counts for more,
    as it does in the update; where all keep n it is the mean over the group. `variance` does not depend on it.
    Where the strategy plans, the draws of all P prompts are allotted together, as if the estimates were exact.

    Args:
      config: the `collection` section of a configuration; strategies.py says what it must have.
      pass_rates: of P prompts, in [0, 1], repeated where several prompts have the same.

    Raises:
      ValueError: the settings break a rule, or a pass rate is none.
    """
    strategy, pass_rates = strategies.build(config), check_pass_rates(pass_rates)
    planned = planned_draws(strategy, pass_rates)
    keys = pass_rates[None] if planned is None else np.stack([pass_rates, planned])
    distinct, places = np.unique(keys, axis=1, return_inverse=True)
    if planned is None:
        starts = range(0, distinct.shape[1], BLOCK)
        blocks = [_block(strategy, distinct[0, start : start + BLOCK], None, None) for start in starts]
    else:
        blocks = [_block(strategy, np.array([rate]), rate, int(size)) for rate, size in distinct.T.tolist()]
    joined = {name: np.concatenate([block[name] for block in blocks])[places.reshape(-1)] for name in blocks[0]}
    gradient, spread = joined.pop("gradient"), joined.pop("gradient_variance")
    rows = float((joined["kept_correct"] + joined["kept_wrong"]).mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = spread / np.square(gradient)
        signal = gradient / rows / exact_gradient(config, pass_rates)
    return Expectations(
        pass_rates, signal=signal, variance=variance, variance_draws=variance * joined["draws"], rows=rows, **joined
    )


def expected_draws(config: StrategyConfig, pass_rates: Sequence[float] | Float[np.ndarray, " P"]) -> np.ndarray:
    """float[P]: `expectations(...).draws` alone, of a strategy that doesn't plan.

    Nothing is kept and no group made: where a pool may have thousands of draws, that is what takes the time (`ngu`
    without a limit and a retry_probability of 0.99: 0.07 s in place of 13 s).

    Raises:
      ValueError: the settings break a rule, a pass rate is none, or the strategy goes on for ever.
    """
    strategy, pass_rates = strategies.build(config), check_pass_rates(pass_rates)
    ends = [outcomes(strategy, pass_rates[start : start + BLOCK]) for start in range(0, len(pass_rates), BLOCK)]
    return np.concatenate([_mean(block, block.drawn) for block in ends])


def check_pass_rates(pass_rates: Sequence[float] | Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """`pass_rates` as an array.

    Raises:
      ValueError: there is none, or one is outside of [0, 1].
    """
    pass_rates = np.asarray(pass_rates, np.float64)
    if pass_rates.ndim != 1 or not pass_rates.size or not ((pass_rates >= 0) & (pass_rates <= 1)).all():
        raise ValueError(f"pass rates must be numbers in [0, 1], at least one; they are {pass_rates.tolist()}.")
    return pass_rates
