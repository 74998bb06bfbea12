"""Advantages: rewards compared with a baseline, and the group record that carries them to the update.

    group           r_i - mean(group)
    pool            r_i - mean(pool), the "global statistics" of the reference program
    leave_one_out   r_i - mean(the pool's other responses)
    anchored        r_i - mean(pool); negative ones are scaled so that the group sums to 0

Each may be divided by the standard deviation of the same rewards, and is multiplied by the prompt's weight. Length
penalties are added afterwards, without a weight (`length_terms`).
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int

from reinforce_ada_jax import user_code
from reinforce_ada_jax.collection.corrections import checked, relative_rewards
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
      kept: draw indices of these responses, ascending: row j of the group is `pool.responses[kept[j]]`. Without
        any, the prompt is dropped.
      advantages: aligned with `kept`.
      weight_clipped: the pass rate of the pool was below `Strategy.clips_below`; False with coefficients.
      weight: factor of the prompt (selection.py); `advantages` are multiplied by it already.
      per_prompt: `advantages` are coefficients a_i of the prompt's sum of scores (corrections.py): prompts count
        equally in the update, whatever their numbers of rows.
    """

    pool: Pool
    kept: Int[np.ndarray, " n"]
    advantages: Float[np.ndarray, " n"]
    weight_clipped: bool = False
    weight: float = 1.0
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


def anchored_advantages(rewards: Float[np.ndarray, " n"], pool_mean: float) -> Float[np.ndarray, " n"]:
    """Computes r_i - mean(pool) with the negative ones rescaled so that the sum is 0 (NGU, arXiv 2609.13443).

    For rewards 0 and 1: 1 - mean(pool) for correct responses, -(n+ / n-) (1 - mean(pool)) for wrong ones. The mean is
    over all responses of the pool; `rewards` are those of the kept responses. If old failures are left out, a success
    still counts as a rare event, and the fresh failures carry the weight of the old ones. With all kept, this is r_i -
    mean.

    If all differences are positive, they do not change (`Strategy.drop_unmet` drops such a group).
    """
    differences = np.asarray(rewards, np.float64) - pool_mean
    gain, loss = differences[differences > 0].sum(), -differences[differences < 0].sum()
    return np.where(differences < 0, differences * (gain / loss if loss else 1.0), differences)


def length_terms(penalties: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Computes the terms that length adds to advantages.

        correct: mean(penalties of correct responses) - penalty_i;   wrong: 0

    The terms sum to 0, and wrong responses have none. So length never reinforces a wrong response, and outcomes alone
    decide the expected weight of grad p. Given k correct responses, the terms climb -(k - 1) E[penalty | correct]:
    right answers get shorter, and neither more nor less frequent. The term of a single right answer is 0. Source: arXiv
    2502.04463 compares lengths within a prompt's correct responses, too.
    """
    if not (correct & (penalties != 0)).any():
        return np.zeros(len(penalties))
    return np.where(correct, penalties[correct].mean() - penalties, 0.0)


def _compared(pool: Pool, kept: Int[np.ndarray, " n"], strategy: Strategy) -> tuple[Float[np.ndarray, " n"], float]:
    """Returns (kept rewards - baseline, divisor), without the prompt's weight."""
    rewards = pool.rewards
    mean, std = pool_statistics(rewards[kept] if strategy.baseline == "group" else rewards)
    if strategy.baseline in ("group", "pool"):
        differences = group_advantages(rewards[kept], pool_mean=mean)
    elif strategy.baseline == "leave_one_out":
        differences = leave_one_out_advantages(rewards)[kept]
    elif strategy.baseline == "anchored":
        differences = anchored_advantages(rewards[kept], mean)
    else:
        raise ValueError(f"baseline is {strategy.baseline!r}; it must be one of group, pool, leave_one_out, anchored.")
    return differences, std + STD_EPSILON if strategy.normalize_by_std else 1.0


def _usable(pool: Pool, strategy: Strategy, ages: Int[np.ndarray, " N"] | None) -> Bool[np.ndarray, " N"]:
    """Returns which responses are young enough for the update."""
    if ages is None or strategy.max_age is None:
        return np.ones(len(pool.responses), bool)
    return np.asarray(ages) <= strategy.max_age


def keep_draws(strategy: Strategy, correct: Bool[np.ndarray, " N"]) -> Int[np.ndarray, " n"]:
    """Returns the draws that `keep` names; ValueError unless they ascend, are in the pool and at most `max_kept`."""
    kept = np.asarray(strategy.keep(correct))
    if kept.size == 0:
        return np.zeros(0, int)
    indices = kept.ndim == 1 and kept.dtype.kind == "i" and kept[0] >= 0 and kept[-1] < len(correct)
    if not (indices and (np.diff(kept) > 0).all()):
        raise user_code.wrong(
            strategy.keep,
            f"The strategy's keep must return indices of {len(correct)} draws, ascending; it returned {kept!r:.200}.",
        )
    _check_number(strategy, kept)
    return kept


def _check_number(strategy: Strategy, kept: Int[np.ndarray, " n"]) -> None:
    if strategy.max_kept is not None and kept.size > strategy.max_kept:
        raise user_code.wrong(
            strategy.coefficients or strategy.keep,
            f"The strategy keeps {kept.size} responses of a prompt, and its max_kept is {strategy.max_kept}.",
        )


def kept_draws(pool: Pool, strategy: Strategy, ages: Int[np.ndarray, " N"] | None = None) -> Int[np.ndarray, " n"]:
    """Returns the draw indices of the responses that reach the update, ascending; none: the prompt is dropped.

    The strategy decides by its `keep`, `max_age` and `drop_unmet`, in this order. `ages` are the updates since each
    response was drawn; None: all are fresh.
    """
    kept = keep_draws(strategy, pool.correct)
    kept = kept[_usable(pool, strategy, ages)[kept]]
    if strategy.drop_unmet and kept.size:
        differences = relative_rewards(pool)[kept]
        if not (pool.met and (differences > 0).any() and (differences < 0).any()):
            return kept[:0]
    return kept


def _weight(strategy: Strategy, pass_rate: float) -> float:
    """Returns `weight`; raises ValueError where it is no finite number."""
    returned = strategy.weight(pass_rate)
    try:
        weight = math.nan if isinstance(returned, str) else float(returned)
    except (TypeError, ValueError):
        weight = math.nan
    if not math.isfinite(weight):
        raise user_code.wrong(
            strategy.weight,
            f"weight of the strategy is {returned!r:.80} for a pass rate of {pass_rate:g}; it must be a finite number.",
        )
    return weight


def make_group(
    pool: Pool, strategy: Strategy, ages: Int[np.ndarray, " N"] | None = None, *, prompt_weight: float = 1.0
) -> Group:
    """Returns the group that `strategy` keeps of `pool`, with its advantages.

    Args:
      pool: every response of a prompt.
      strategy: decides what is kept, the baseline and the weight.
      ages: updates since each response was drawn; None: all are fresh.
      prompt_weight: factor of the prompt in the update (`Choice.weights`).
    """
    if strategy.coefficients is not None and strategy.extra_batches and not kept_draws(pool, strategy).size:
        # Another prompt replaced this one: with rows of both, the update would have too many prompts.
        return Group(pool, np.zeros(0, int), np.zeros(0), weight=prompt_weight, per_prompt=True)
    if strategy.coefficients is not None:
        kept, coefficients = checked(strategy.coefficients, pool, _usable(pool, strategy, ages))
        _check_number(strategy, kept)
        lengths = length_terms(pool.penalties[kept], pool.correct[kept])
        if lengths.any():
            coefficients = coefficients + lengths / len(pool.responses)
        return Group(pool, kept, prompt_weight * coefficients, weight=prompt_weight, per_prompt=True)
    kept = kept_draws(pool, strategy, ages)
    if not kept.size:
        return Group(pool, kept, np.zeros(0), weight=prompt_weight)
    pass_rate = float(pool.correct.mean())
    differences, scale = _compared(pool, kept, strategy)
    # Lengths without the weight: w(p) is for outcomes, and 0 at p = 1 for some objectives.
    advantages = _weight(strategy, pass_rate) / scale * differences
    advantages += length_terms(pool.penalties[kept], pool.correct[kept])
    return Group(pool, kept, prompt_weight * advantages, pass_rate < strategy.clips_below, prompt_weight)
