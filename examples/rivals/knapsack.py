"""Knapsack RL: one budget of draws, shared so that the most value is expected (arXiv 2509.25849, section 3).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/knapsack \
        --config.collection.strategy=examples/rivals/knapsack.py:knapsack --config.collection.group_size=8

N draws for a prompt of pass rate p have the value (1 - p^N - (1 - p)^N) p (1 - p)^2: the probability of a group with a
signal, times what the update is expected to add to p. P prompts share P n draws, at least 2 each. One more draw adds
(p^N (1 - p) + (1 - p)^N p) p (1 - p)^2, less and less with N, so giving each draw where it adds most has the largest
sum. Value and least number are those of the authors' code (`solve_by_dp`). Its dynamic program takes the value of a
prompt with the least number for 0, so it gives more prompts a third draw.

Ours: p is the run's estimate (`estimator`), which is never 0 or 1, where the authors take the last success rate and
share what is left among prompts of 0; and the most draws for a prompt are samples_per_round * max_rounds.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, keep_all, one_round
from reinforce_ada_jax.config import CollectionConfig

LEAST = 2


def gain(p: float, draws: int) -> float:
    """Returns what draw number `draws` + 1 adds to the value."""
    return (p**draws * (1.0 - p) + (1.0 - p) ** draws * p) * p * (1.0 - p) ** 2


def allocate(pass_rates: np.ndarray, names: Sequence[str], budget: int, most: int) -> np.ndarray:
    """Returns the draws of largest value with this sum; among equals the first name has one more."""
    draws = dict.fromkeys(names, LEAST)
    rates = dict(zip(names, pass_rates.tolist(), strict=True))
    gains = [(-gain(rates[name], LEAST), name) for name in names if most > LEAST]
    heapq.heapify(gains)
    for _ in range(min(budget, most * len(names)) - LEAST * len(names)):
        _, name = gains[0]
        draws[name] += 1
        if draws[name] < most:
            heapq.heapreplace(gains, (-gain(rates[name], draws[name]), name))
        else:
            heapq.heappop(gains)
    return np.array([draws[name] for name in names])


def knapsack(config: CollectionConfig) -> Strategy:
    """Returns the strategy: one planned round, compared with its own mean."""
    most = config.samples_per_round * config.max_rounds

    def next_draws(progress: PromptProgress) -> int:
        return 0 if progress.rounds else progress.planned or LEAST

    def plan(pass_rates: np.ndarray, names: Sequence[str]) -> np.ndarray:
        return allocate(pass_rates, names, config.group_size * len(names), most)

    return Strategy(next_draws, one_round, keep_all, max_draws=most, max_kept=most, baseline="group", plan=plan)
