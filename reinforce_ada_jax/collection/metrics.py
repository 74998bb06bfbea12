"""Metrics of one collection that follow from its groups alone (the `reward/` and `collection/` keys)."""

import collections
from collections.abc import Sequence

import numpy as np
from jaxtyping import Shaped

from reinforce_ada_jax.collection.advantages import Group

# Reasons of a verdict where the verifier failed; "no_answer" or "too_long" are failures of the response.
FAILURES = ("timeout", "crash", "error")
# The last round with a metric of its own: a strategy without a limit may draw hundreds.
MAX_ROUND_METRICS = 32


def sampling_dynamics(groups: Sequence[Group], group_size: int) -> dict[str, float | int]:
    """Computes how draws are distributed over prompts, and why rules were not met.

    Returns:
      Under `collection/`: `active_round_<k>`, prompts that drew a k-th round, for k = 1 to the last round drawn
      (at most 32); `draws_mean`, `draws_p10`, `draws_p50`, `draws_p90`, `draws_max`, responses per prompt;
      `extra_samples`, responses beyond the first n of each prompt; shares of all prompts whose rule was not met and
      that have no correct response (`unmet_no_correct_share`) or no wrong one (`unmet_no_wrong_share`). The rest of
      `unmet_share` has both, but too few of one.
    """
    pools = [group.pool for group in groups]
    rounds = np.array([pool.rounds for pool in pools])
    draws = np.array([len(pool.responses) for pool in pools])
    unmet = [pool for pool in pools if not pool.met]
    last = min(int(rounds.max()), MAX_ROUND_METRICS)
    p10, p50, p90 = np.percentile(draws, (10, 50, 90)).tolist()
    return {
        **{f"collection/active_round_{number}": int((rounds >= number).sum()) for number in range(1, last + 1)},
        "collection/draws_mean": float(draws.mean()),
        "collection/draws_p10": p10,
        "collection/draws_p50": p50,
        "collection/draws_p90": p90,
        "collection/draws_max": int(draws.max()),
        "collection/extra_samples": int(np.maximum(draws - group_size, 0).sum()),
        "collection/unmet_no_correct_share": sum(not pool.correct.any() for pool in unmet) / len(pools),
        "collection/unmet_no_wrong_share": sum(bool(pool.correct.all()) for pool in unmet) / len(pools),
    }


def _mean_of_firsts(values: Sequence[Shaped[np.ndarray, " _"]], counts: Sequence[int]) -> float:
    """Computes the mean over prompts of the mean of each one's first values."""
    return float(np.mean([each[:count].mean() for each, count in zip(values, counts, strict=True)]))


def collection_metrics(
    groups: Sequence[Group], group_size: int, num_prompts: int | None = None
) -> dict[str, float | int]:
    """Computes the metrics of one iteration's collection.

    `reward/first_round` is the one to compare strategies by: the mean over prompts of the mean reward of the first
    min(n, M) draws, where M is the size of the prompt's first round. No outcome decides their number; the first n draws
    of rounds smaller than n would be fewer where a prompt stops early. `reward/first_round_correct` is the same for
    correctness: an unbiased pass rate. `reward/pool`, the mean over all responses, is biased by the stopping rule.

    Args:
      groups: one for each prompt of the iteration, at least one; replacements last.
      group_size: n.
      num_prompts: number of prompts before any outcome was known, which `reward/first_round` covers. None: all.

    Returns:
      The keys above, `sampling_dynamics`, and `collection/verdict_<reason>`, counts of verdicts with a reason. Shares
      are in [0, 1]: of groups (`zero_signal`: all advantages 0; `dropped`: nothing kept; `weight_clipped`: a pass
      rate below the smallest one that w(p) is computed at), of prompts (`unmet`), of responses (`truncated`). `kept`
      counts responses that reach the update, `replacements` prompts beyond `num_prompts`.
    """
    pools = [group.pool for group in groups]
    first = pools[:num_prompts]
    first_draws = [min(group_size, pool.first_round_size) for pool in first]
    responses = [response for pool in pools for response in pool.responses]
    reasons = collections.Counter(verdict.reason for pool in pools for verdict in pool.verdicts if verdict.reason)
    return {
        "reward/first_round": _mean_of_firsts([pool.rewards for pool in first], first_draws),
        "reward/first_round_correct": _mean_of_firsts([pool.correct for pool in first], first_draws),
        "reward/pool": float(np.concatenate([pool.rewards for pool in pools]).mean()),
        "collection/responses": len(responses),
        "collection/tokens": sum(len(response.tokens) for response in responses),
        "collection/kept": sum(len(group.kept) for group in groups),
        "collection/replacements": len(pools) - len(first),
        "collection/rounds_mean": float(np.mean([pool.rounds for pool in pools])),
        "collection/zero_signal_share": float(np.mean([not group.advantages.any() for group in groups])),
        "collection/dropped_share": float(np.mean([not group.kept.size for group in groups])),
        "collection/weight_clipped_share": float(np.mean([group.weight_clipped for group in groups])),
        "collection/unmet_share": float(np.mean([not pool.met for pool in pools])),
        "collection/truncated_share": float(np.mean([response.truncated for response in responses])),
        **sampling_dynamics(groups, group_size),
        "collection/verifier_failures": sum(reasons[reason] for reason in FAILURES),
        **{f"collection/verdict_{reason}": reasons[reason] for reason in sorted(reasons)},
    }
