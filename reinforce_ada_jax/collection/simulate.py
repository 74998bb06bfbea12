"""A collection strategy on scripted rewards: no model, no verifier, the very same loop."""

from collections.abc import Iterator

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.types import Pool, Prompt, RequestQueue, Response, Verdict

# A reward above this counts as correct, as in the reference program.
POSITIVE_THRESHOLD = 0.7


def run_strategy(strategy_config: strategies.CollectionConfig, rewards: np.ndarray) -> list[Pool]:
    """What a strategy draws when response i of prompt p has reward `rewards[p, i]`.

    Args:
      strategy_config: has `strategy`, `group_size`, `samples_per_round` and `max_rounds`; nothing else is read.
      rewards: float[P, N_max], in [0, 1]; N_max is at least what the strategy may draw for a prompt.

    Returns:
      P pools; `len(pool.responses)` is the number of draws. Every response is one token long.

    Raises:
      ValueError: the rewards are too few, or not a matrix.
    """
    rewards = np.asarray(rewards, np.float64)
    strategy = strategies.build(strategy_config)
    if rewards.ndim != 2 or rewards.shape[1] < strategy.max_draws:
        raise ValueError(
            f"rewards has shape {rewards.shape}; {strategy_config.strategy} may draw {strategy.max_draws} responses "
            f"for a prompt, so it must be [P, {strategy.max_draws}] or wider."
        )
    prompts = [Prompt(str(row), problem="", answer="", tokens=np.zeros(1, np.int32)) for row in range(len(rewards))]

    def sample(queue: RequestQueue) -> Iterator[list[Response]]:
        while requests := queue.take(rewards.size):
            yield [
                Response(request.prompt.id, request.draw, np.zeros(1, np.int32), np.zeros(1, np.float32), False)
                for request in requests
            ]

    def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict]:
        scripted = [float(rewards[int(prompt.id), response.draw]) for prompt, response in pairs]
        return [Verdict(correct=reward > POSITIVE_THRESHOLD, reward=reward) for reward in scripted]

    return collect(prompts, sample, verify, strategy)
