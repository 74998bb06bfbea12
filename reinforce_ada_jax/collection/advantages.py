"""What a response is worth: its reward against a baseline, and the group record that carries this to the update.

    group           r_i - mean(group)
    pool            r_i - mean(pool), the "global statistics" of the reference program
    leave_one_out   r_i - mean(the pool's other responses)
    anchored        correct ones r_i - mean(pool); wrong ones share the negative of their sum equally

Each may be divided by the standard deviation of what its mean is taken of, and is multiplied by the prompt's weight.
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
      kept: int[n], their draw indices, ascending: row j of the group is `pool.responses[kept[j]]`. Empty: dropped.
      advantages: float64[n], aligned with `kept`: weight * (reward - baseline).
      baselines: float64[n], what each kept reward is compared with.
      weight: factor of the differences: the prompt's weight, over the deviation where that divides them.
      weight_clipped: the prompt's pass rate was below the least that its weight is computed at.
    """

    pool: Pool
    kept: np.ndarray
    advantages: np.ndarray
    baselines: np.ndarray
    weight: float
    weight_clipped: bool = False


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


def leave_one_out_advantages(rewards: np.ndarray) -> np.ndarray:
    """r_i - mean of the others: the baseline that leaves the gradient unbiased (RLOO, arXiv 2402.14740).

    A pool of one has no others; its mean is 0.

    Args:
      rewards: float[N], in [0, 1].
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.size < 2:
        return rewards.copy()
    return (rewards - pool_statistics(rewards)[0]) * (rewards.size / (rewards.size - 1))


def anchored_advantages(rewards: np.ndarray, correct: np.ndarray, pool_mean: float) -> np.ndarray:
    """Positives anchored at the pool, negatives so that the group sums to 0 (NGU, arXiv 2609.13443).

        correct: r_i - mean(pool);   wrong: -(sum of those) / n-,   for 0/1 rewards -(n+ / n-) (1 - mean(pool))

    Args:
      rewards: float[n], of the kept responses.
      correct: bool[n], their verdicts.
      pool_mean: over every response ever drawn, those no longer kept included.
    """
    advantages = np.where(correct, np.asarray(rewards, np.float64) - pool_mean, 0.0)
    num_wrong = int((~correct).sum())
    return np.where(correct, advantages, -advantages.sum() / max(num_wrong, 1))


def _compared(pool: Pool, kept: np.ndarray, strategy: Strategy) -> tuple[np.ndarray, float]:
    """(kept rewards less the strategy's baseline, what they are to be divided by), without the prompt's weight."""
    rewards = pool.rewards
    mean, std = pool_statistics(rewards[kept] if strategy.baseline == "group" else rewards)
    if strategy.baseline in ("group", "pool"):
        differences = group_advantages(rewards[kept], pool_mean=mean)
    elif strategy.baseline == "leave_one_out":
        differences = leave_one_out_advantages(rewards)[kept]
    elif strategy.baseline == "anchored":
        differences = anchored_advantages(rewards[kept], pool.correct[kept], mean)
    else:
        raise ValueError(f"baseline is {strategy.baseline!r}; it must be one of group, pool, leave_one_out, anchored.")
    return differences, std + STD_EPSILON if strategy.normalize_by_std else 1.0


def make_group(pool: Pool, strategy: Strategy, ages: np.ndarray | None = None) -> Group:
    """The group that `strategy` keeps of `pool`, with its advantages.

    Args:
      pool: every response of a prompt.
      strategy: what it keeps, and what it compares with.
      ages: int[N], updates since each response was drawn; None: all are fresh.
    """
    kept = strategy.keep(pool.correct)
    if ages is not None and strategy.max_age is not None:
        kept = kept[np.asarray(ages)[kept] <= strategy.max_age]
    if not kept.size:
        return Group(pool, kept, np.zeros(0), np.zeros(0), 0.0)
    pass_rate = float(pool.correct.mean())
    differences, scale = _compared(pool, kept, strategy)
    weight = strategy.weight(pass_rate) / scale
    return Group(
        pool,
        kept,
        advantages=weight * differences,
        baselines=pool.rewards[kept] - differences,
        weight=weight,
        weight_clipped=pass_rate < strategy.clips_below,
    )
