"""A collection strategy on scripted or random rewards: no model, no verifier, the very same loop.

What the same numbers are without sampling is in enumeration.py.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.analysis import enumeration
from reinforce_ada_jax.analysis.enumeration import Expectations
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.collection.strategies import Strategy, StrategyConfig
from reinforce_ada_jax.config import RewardConfig
from reinforce_ada_jax.types import Pool, Prompt, RequestQueue, Response, Verdict


def run_strategy(strategy_config: StrategyConfig, rewards: np.ndarray) -> list[Pool]:
    """What a strategy draws when response i of prompt p has reward `rewards[p, i]`.

    Args:
      strategy_config: has `strategy`, `group_size`, `samples_per_round` and `max_rounds`; other settings of the
        `collection` section where it has them, else config.py's defaults.
      rewards: float[P, N_max], in [0, 1]; N_max is at least what the strategy may draw for a prompt.

    Returns:
      P pools; `len(pool.responses)` is the number of draws. Every response is one token long.

    Raises:
      ValueError: the rewards are too few, or not a matrix.
    """
    rewards = np.asarray(rewards, np.float64)
    strategy = strategies.build(strategy_config)
    most = rewards.shape[-1] if strategy.max_draws is None else strategy.max_draws
    if rewards.ndim != 2 or rewards.shape[1] < most:
        raise ValueError(
            f"rewards has shape {rewards.shape}; {strategy_config.strategy} may draw {most} responses for a prompt, so "
            f"it must be [P, {most}] or wider."
        )
    return _collect_scripted(strategy, rewards)


def _collect_scripted(
    strategy: Strategy, rewards: np.ndarray, *, estimate: float = 0.5, seed: int = 0, iteration: int = 0
) -> list[Pool]:
    """The pools of `rewards`; `estimate` is what strategies that plan are told of every prompt."""
    threshold = RewardConfig().positive_threshold
    prompts = [Prompt(str(row), problem="", answer="", tokens=np.zeros(1, np.int32)) for row in range(len(rewards))]

    def sample(queue: RequestQueue) -> Iterator[list[Response]]:
        while requests := queue.take(rewards.size):
            yield [
                Response(request.prompt.id, request.draw, np.zeros(1, np.int32), np.zeros(1, np.float32), False)
                for request in requests
            ]

    def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict]:
        scripted = [float(rewards[int(prompt.id), response.draw]) for prompt, response in pairs]
        return [Verdict(correct=reward > threshold, reward=reward) for reward in scripted]

    return collect(
        prompts,
        sample,
        verify,
        strategy,
        estimate_fn=lambda prompts: np.full(len(prompts), estimate),
        seed=seed,
        iteration=iteration,
    )


# ---- random rewards --------------------------------------------------------------------------------------------------


def _samples(
    strategy: Strategy, pass_rate: float, planned: int | None, samples: int, address: tuple[int, int]
) -> dict[str, np.ndarray]:
    """float64[samples] by name, of prompts of one pass rate: what `_block` of enumeration.py gives the means of."""
    most = strategy.max_draws
    if planned is not None:
        strategy = dataclasses.replace(strategy, plan=lambda estimates, names: np.full(len(estimates), planned))
    if most is None:  # as far as exact enumeration goes; fewer than one prompt in 10^12 draws more
        most = int(enumeration.outcomes(strategy, np.array([pass_rate])).drawn.max())
    rewards = np.random.default_rng(address).random((samples, most)) < pass_rate
    seed, iteration = address
    pools = _collect_scripted(strategy, rewards, estimate=pass_rate, seed=seed, iteration=iteration)
    groups = [make_group(pool, strategy) for pool in pools]
    kept_correct, kept_wrong, of_correct, of_wrong, zero = np.array(
        [enumeration.group_terms(group) for group in groups], np.float64
    ).T
    return {
        "draws": np.array([len(pool.verdicts) for pool in pools], np.float64),
        "rounds": np.array([pool.rounds for pool in pools], np.float64),
        "unmet": np.array([not pool.met for pool in pools], np.float64),
        "zero_signal": zero,
        "zero_variance": np.array([pool.correct.all() or not pool.correct.any() for pool in pools], np.float64),
        "kept_correct": kept_correct,
        "kept_wrong": kept_wrong,
        "pool_mean": np.array([pool.correct.mean() for pool in pools]),
        "gradient": of_correct * (1.0 - pass_rate) - of_wrong * pass_rate,
    }


def monte_carlo(
    config: StrategyConfig,
    pass_rates: Sequence[float] | Float[np.ndarray, " P"],
    samples: int,
    *,
    seed: int = 0,
) -> tuple[Expectations, Expectations]:
    """What `enumeration.expectations` computes, estimated from prompts drawn through the loop itself.

    Args:
      config: as there.
      pass_rates: as there.
      samples: prompts for each pass rate, at least 2.
      seed: decides every draw, and what a strategy leaves to chance.

    Returns:
      The estimates and their standard errors: of the ratios `signal`, `variance` and `variance_draws`, and of
      `draws_std`, to first order (delta method). Where all samples agree the error is 0, which for a chance that was
      never seen to come true says only that it is below about 3 / samples.
    """
    if samples < 2:
        raise ValueError(f"{samples} prompts for each pass rate have no standard error: take at least 2.")
    strategy, pass_rates = strategies.build(config), enumeration.check_pass_rates(pass_rates)
    planned = enumeration.planned_draws(strategy, pass_rates)
    drawn = [
        _samples(strategy, rate, None if planned is None else int(planned[place]), samples, (seed, place))
        for place, rate in enumerate(pass_rates.tolist())
    ]
    kept = [draws["kept_correct"] + draws["kept_wrong"] for draws in drawn]
    rows = float(np.mean(kept)), float(np.sqrt(sum(np.var(x) for x in kept) / samples) / len(kept))
    exact = enumeration.exact_gradient(config, pass_rates)
    found = [_estimates(drawn[place], exact[place], kept, place, rows[0]) for place in range(len(drawn))]
    both = (
        Expectations(
            pass_rates,
            **{name: np.array([pair[name][part] for pair in found]) for name in enumeration.COLUMNS},
            rows=rows[part],
        )
        for part in (0, 1)
    )
    return tuple(both)


def _estimates(
    draws: dict[str, np.ndarray], exact_gradient: float, kept: Sequence[np.ndarray], place: int, rows: float
) -> dict[str, tuple[float, float]]:
    """(estimate, standard error) of every column at one pass rate.

    A ratio's error is to first order that of the mean of its influence: of what one sample moves it by.
    """
    root = np.sqrt(len(kept[place]))
    count, total = draws["draws"], draws["gradient"]
    result = {name: (float(x.mean()), float(x.std() / root)) for name, x in draws.items() if name != "gradient"}
    spread = np.square(count - count.mean())
    error = spread.std() / (2.0 * count.std()) / root if count.std() else 0.0
    result["draws_std"] = float(count.std()), float(error)
    with np.errstate(divide="ignore", invalid="ignore"):
        gradient, centred = total.mean(), total - total.mean()
        ratio = np.var(total) / gradient**2
        influence = (np.square(centred) - np.var(total)) / gradient**2 - 2.0 * ratio * centred / gradient
        result["variance"] = float(ratio), float(influence.std() / root)
        influence = influence * count.mean() + ratio * (count - count.mean())
        result["variance_draws"] = float(ratio * count.mean()), float(influence.std() / root)
        # `rows` is the mean over all pass rates, whose samples so move the signal too.
        moved = [-gradient / rows / len(kept) * (kept_there - kept_there.mean()) for kept_there in kept]
        moved[place] = moved[place] + centred
        error = np.sqrt(sum(np.var(x) for x in moved)) / root
        result["signal"] = float(gradient / rows / exact_gradient), float(error / rows / exact_gradient)
    return result
