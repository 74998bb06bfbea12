"""Advantages: rewards compared with a baseline, and the group record that carries them to the update.

    group           r_i - mean(group)
    pool            r_i - mean(pool), the "global statistics" of the reference program
    leave_one_out   r_i - mean(the pool's other responses)
    anchored        correct ones r_i - mean(pool); wrong ones share the negative of their sum equally

Each may be divided by the standard deviation of the rewards in its mean, and is multiplied by the prompt's weight.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.types import Pool

# From the reference program: the smallest standard deviation, and the number added to it before dividing.
MIN_STD = 1e-6
STD_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The responses of one pool that reach the update.

    Attributes:
      pool: the pool.
      kept: their draw indices, ascending: row j of the group is `pool.responses[kept[j]]`. Empty: dropped.
      advantages: aligned with `kept`: weight * (reward - baseline).
      baselines: aligned with `kept`.
      weight: factor of the differences: the prompt's weight, divided by the deviation where that is set.
      weight_clipped: the pass rate of the pool was below the smallest one that weights are computed at.
      per_prompt: `advantages` are coefficients a_i of the prompt's sum of scores (corrections.py): prompts count
        equally in the update, whatever their numbers of rows. `baselines` are 0 and `weight` is 1.
    """

    pool: Pool
    kept: Int[np.ndarray, " n"]
    advantages: Float[np.ndarray, " n"]
    baselines: Float[np.ndarray, " n"]
    weight: float
    weight_clipped: bool = False
    per_prompt: bool = False


def pool_statistics(rewards: Float[np.ndarray, " N"]) -> tuple[float, float]:
    """Returns mean and standard deviation of rewards.

    The deviation is unbiased (divisor N - 1) and at least 1e-6. With fewer than two rewards the mean is 0 and the
    deviation 1. Source: the reference program (arXiv 2510.04996).
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.size < 2:
        return 0.0, 1.0
    # Relative to the first reward, so that equal rewards have an advantage of exactly 0: the plain mean of three times
    # 0.8 is 0.8000000000000002.
    mean = rewards[0] + np.mean(rewards - rewards[0])
    return float(mean), max(float(np.std(rewards, ddof=1)), MIN_STD)


def group_advantages(
    rewards: Float[np.ndarray, " n"],
    *,
    pool_mean: float | None = None,
    pool_std: float | None = None,
    normalize_by_std: bool = False,
) -> Float[np.ndarray, " n"]:
    """Computes the advantages of one group: r_i - mean, or (r_i - mean) / (std + 1e-6).

    Source: the reference program (arXiv 2510.04996, section 3); tests/golden/reference/group_advantage.jsonl.

    Args:
      rewards: rewards of the group, in [0, 1].
      pool_mean: mean of the prompt's whole pool (`pool_statistics`). None: the group's own statistics.
      pool_std: the pool's standard deviation; used with `normalize_by_std` only.
      normalize_by_std: divide by the deviation. Off by default: a pool of 512 with one hit would scale by 22.

    Raises:
      ValueError: only one of the two pool statistics is given where both are needed.
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


def leave_one_out_advantages(rewards: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Computes r_i - mean of the others: the baseline that leaves the gradient unbiased (RLOO, arXiv 2402.14740).

    A pool of one has no others; its mean is 0.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.size < 2:
        return rewards.copy()
    return (rewards - pool_statistics(rewards)[0]) * (rewards.size / (rewards.size - 1))


def anchored_advantages(
    rewards: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"], pool_mean: float
) -> Float[np.ndarray, " n"]:
    """Computes advantages of positives relative to the pool, and of negatives so that the sum is 0 (NGU, 2609.13443).

        correct: r_i - mean(pool);   wrong: -(sum of those) / n-,   for 0/1 rewards -(n+ / n-) (1 - mean(pool))

    `rewards` and `correct` are those of the kept responses, `pool_mean` is over all responses of the pool.
    """
    advantages = np.where(correct, np.asarray(rewards, np.float64) - pool_mean, 0.0)
    num_wrong = int((~correct).sum())
    return np.where(correct, advantages, -advantages.sum() / max(num_wrong, 1))


def _compared(pool: Pool, kept: Int[np.ndarray, " n"], strategy: Strategy) -> tuple[Float[np.ndarray, " n"], float]:
    """Returns (kept rewards - baseline, divisor), without the prompt's weight."""
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


def make_group(pool: Pool, strategy: Strategy, ages: Int[np.ndarray, " N"] | None = None) -> Group:
    """Returns the group that `strategy` keeps of `pool`, with its advantages.

    Args:
      pool: every response of a prompt.
      strategy: decides what is kept, the baseline and the weight.
      ages: updates since each response was drawn; None: all are fresh.
    """
    usable = np.ones(len(pool.responses), bool)
    if ages is not None and strategy.max_age is not None:
        usable = np.asarray(ages) <= strategy.max_age
    if strategy.coefficients is not None:
        kept, coefficients = strategy.coefficients(pool, usable)
        return Group(pool, kept, coefficients, np.zeros(len(kept)), 1.0, per_prompt=True)
    kept = strategy.keep(pool.correct)
    kept = kept[usable[kept]]
    if not kept.size:
        return Group(pool, kept, np.zeros(0), np.zeros(0), 0.0)
    pass_rate = float(pool.correct.mean())
    differences, scale = _compared(pool, kept, strategy)
    weight = strategy.weight(pass_rate) / scale
    baselines = pool.rewards[kept] - differences
    return Group(pool, kept, weight * differences, baselines, weight, weight_clipped=pass_rate < strategy.clips_below)
