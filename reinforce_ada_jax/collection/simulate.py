"""The collection loop on scripted rewards, without a model or a verifier.

analysis/enumeration.py computes the expected results of a strategy without sampling.
"""

from collections.abc import Iterator

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.collection.strategies import StrategyConfig
from reinforce_ada_jax.config import RewardConfig
from reinforce_ada_jax.types import Pool, Prompt, RequestQueue, Response, Verdict


def run_strategy(strategy_config: StrategyConfig, rewards: np.ndarray) -> list[Pool]:
    """Returns the pools that a strategy collects when response i of prompt p has reward `rewards[p, i]`.

    Args:
      strategy_config: has `strategy`, `group_size`, `samples_per_round` and `max_rounds`; other settings of the
        `collection` section where it has them, else their defaults.
      rewards: float[P, N_max], in [0, 1]; N_max is at least what the strategy may draw for a prompt.

    Returns:
      P pools; `len(pool.responses)` is the number of draws. Every response is one token long. A strategy that plans
      its draws gets an estimate of 0.5 for each prompt.

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
    threshold = RewardConfig().positive_threshold
    prompts = [Prompt(str(row), problem="", answer="", tokens=np.zeros(1, np.int32)) for row in range(len(rewards))]

    def sample(queue: RequestQueue) -> Iterator[list[Response]]:
        while requests := queue.take(rewards.size):
            token, logprob = np.zeros(1, np.int32), np.zeros(1, np.float32)
            yield [Response(request.prompt.id, request.draw, token, logprob, False) for request in requests]

    def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict]:
        scripted = [float(rewards[int(prompt.id), response.draw]) for prompt, response in pairs]
        return [Verdict(correct=reward > threshold, reward=reward) for reward in scripted]

    return collect(prompts, sample, verify, strategy, estimate_fn=lambda prompts: np.full(len(prompts), 0.5))
