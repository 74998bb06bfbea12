"""What a response is worth: its reward against a baseline, and the group record that carries this to the update.

The baseline comes from the group itself or from the prompt's whole pool ("global statistics" of the reference program).
"""

import dataclasses

import numpy as np

from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.types import Pool

# Of the reference program: the least standard deviation, and what is added to it before dividing.
MIN_STD = 1e-6
STD_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The responses of one pool that reach the update.

    Attributes:
      pool: where they come from.
      kept: int[n], their draw indices, ascending: row j of the group is `pool.responses[kept[j]]`.
      advantages: float64[n], aligned with `kept`.
    """

    pool: Pool
    kept: np.ndarray
    advantages: np.ndarray


def pool_statistics(rewards: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of rewards.

    The deviation is unbiased (divisor N - 1) and at least 1e-6. Of fewer than two rewards the mean is 0 and the
    deviation 1. Source: the reference program (arXiv 2510.04996).

    Args:
      rewards: float[N], in [0, 1].
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.size < 2:
        return 0.0, 1.0
    # Measured from the first, so that equal rewards have exactly their own mean and an advantage of exactly 0; the
    # plain mean of three times 0.8 is 0.8000000000000002.
    mean = rewards[0] + np.mean(rewards - rewards[0])
    return float(mean), max(float(np.std(rewards, ddof=1)), MIN_STD)


def group_advantages(
    rewards: np.ndarray,
    *,
    pool_mean: float | None = None,
    pool_std: float | None = None,
    normalize_by_std: bool = False,
) -> np.ndarray:
    """The advantages of one group: r_i - mean, or (r_i - mean) / (std + 1e-6).

    Source: the reference program (arXiv 2510.04996, section 3); tests/golden/reference/group_advantage.jsonl.

    Args:
      rewards: float[n], rewards of the group, in [0, 1].
      pool_mean: the baseline, of the prompt's whole pool (`pool_statistics`). None: the group's own statistics.
      pool_std: the pool's standard deviation; read only with `normalize_by_std`.
      normalize_by_std: divide by the deviation. Off by default: a pool of 512 with one hit would scale by 22.

    Returns:
      float64[n].

    Raises:
      ValueError: one of the two pool statistics is given where both are needed.
    """
    rewards = np.asarray(rewards, np.float64)
    if pool_mean is None:
        if pool_std is not None:
            raise ValueError("pool_std was given without pool_mean: give both, or neither for the group's own.")
        pool_mean, pool_std = pool_statistics(rewards)
    advantages = rewards - pool_mean
    if not normalize_by_std:
        return advantages
    if pool_std is None:
        raise ValueError("normalize_by_std with pool_mean needs pool_std too.")
    return advantages / (pool_std + STD_EPSILON)


def make_group(pool: Pool, strategy: Strategy, normalize_by_std: bool) -> Group:
    """The group that `strategy` keeps of `pool`, with its advantages."""
    kept = strategy.keep(pool.correct)
    rewards = pool.rewards[kept]
    mean, std = pool_statistics(pool.rewards if strategy.pool_baseline else rewards)
    advantages = group_advantages(rewards, pool_mean=mean, pool_std=std, normalize_by_std=normalize_by_std)
    return Group(pool, kept, advantages)
