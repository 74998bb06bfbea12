"""The collection loop on scripted rewards, without a model or a verifier.

analysis/enumeration.py computes the expected results of a strategy without sampling.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from reinforce_ada_jax import user_code
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.collection.strategies import Strategy, StrategyConfig
from reinforce_ada_jax.config import RewardConfig
from reinforce_ada_jax.types import Pool, Prompt, RequestQueue, Response, Verdict

# Most draws of a prompt in the trial of a strategy that names no bound.
TRIAL_DRAWS = 2000


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
    prompts = [Prompt(str(row), problem="", answer="", tokens=np.zeros(1, np.int32)) for row in range(len(rewards))]
    return _play(strategy, rewards, prompts)


def check_own(config: StrategyConfig, strategy: Strategy, prompts: Sequence[Prompt]) -> None:
    """Runs a user's strategy on prompts whose responses are wrong and correct in turn, all correct, and all wrong.

    A strategy without `max_draws` may wait for a correct response, so it gets no prompt with wrong ones alone. Raises
    ValueError if one of its functions fails, breaks its bounds, or asks for more than TRIAL_DRAWS without end; or if it
    keeps no response of any of these prompts.
    """
    if config.strategy in strategies.BUILT_IN:
        return
    most = TRIAL_DRAWS if strategy.max_draws is None else strategy.max_draws
    rewards = np.array([[0, 1], [1, 1], [0, 0]], float)[: 2 if strategy.max_draws is None else 3]  # again and again
    prompts = prompts[: len(rewards)]
    path, setting = pathlib.Path(config.strategy.rpartition(":")[0]), f"collection.strategy is {config.strategy!r}"
    tried = f" (without max_draws; the limit of this trial is {most})" if strategy.max_draws is None else ""
    with user_code.failures(path, setting + tried):
        pools = _play(dataclasses.replace(strategy, max_draws=most), rewards, prompts)
        groups = [make_group(pool, strategy) for pool in pools]
    for group in groups:
        if not np.isfinite(group.advantages).all():
            raise ValueError(
                f"{setting}: an advantage of {group.pool.correct.mean():.0%} correct responses is not finite."
            )
    if not any(group.kept.size for group in groups):
        raise ValueError(
            f"{setting}, which keeps no response of a prompt, whether they are right, wrong or both: nothing would be "
            "trained on. Return indices of draws from keep."
        )


def _play(strategy: Strategy, rewards: np.ndarray, prompts: Sequence[Prompt]) -> list[Pool]:
    """Returns the pool of each row of `rewards`: response i has the reward rewards[row, i]."""
    threshold, rows = RewardConfig().positive_threshold, {prompt.id: row for row, prompt in enumerate(prompts)}
    width = rewards.shape[1]

    def sample(queue: RequestQueue) -> Iterator[list[Response]]:
        while requests := queue.take(TRIAL_DRAWS):
            token, logprob = np.zeros(1, np.int32), np.zeros(1, np.float32)
            yield [Response(request.prompt.id, request.draw, token, logprob, False) for request in requests]

    def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict]:
        scripted = [float(rewards[rows[prompt.id], response.draw % width]) for prompt, response in pairs]
        return [Verdict(correct=reward > threshold, reward=reward) for reward in scripted]

    return collect(prompts, sample, verify, strategy)
