"""The numbers of one collection that need nothing but its groups (the `reward/` and `collection/` keys)."""

import collections
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.collection.advantages import Group

# Reasons of a verdict that say the verifier failed, not the response ("no_answer" or "too_long" is the response's).
FAILURES = ("timeout", "crash", "error")
# Rounds that have a key of their own: a strategy without a limit may go on for hundreds.
MOST_ROUNDS = 32


def sampling_dynamics(groups: Sequence[Group], group_size: int) -> dict[str, float]:
    """How the draws were spread over the prompts, and why rounds went on to their end.

    Returns:
      Under `collection/`: `active_round_<k>`, prompts that drew a k-th round, for k = 1 to the last round drawn
      (at most 32); `draws_mean`, `draws_p10`, `draws_p50`, `draws_p90`, `draws_max`, of responses for a prompt;
      `extra_samples`, responses beyond the first n of each prompt; of all prompts those whose rule was not met and
      that have no correct response (`unmet_no_correct_share`) or no wrong one (`unmet_no_wrong_share`). What is left
      of `unmet_share` has both, but too few of one.
    """
    pools = [group.pool for group in groups]
    rounds = np.array([pool.rounds for pool in pools])
    draws = np.array([len(pool.responses) for pool in pools])
    unmet = [pool for pool in pools if not pool.met]
    last = min(int(rounds.max()), MOST_ROUNDS)
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


def collection_metrics(groups: Sequence[Group], group_size: int, num_prompts: int | None = None) -> dict[str, float]:
    """What one iteration's collection gave and cost.

    `reward/first_round` is the figure to compare between strategies: the mean over prompts of the mean reward of the
    first min(n, N) draws, and `reward/first_round_correct` the same of outcomes: an unbiased pass rate. `reward/pool`,
    the mean over all responses, is biased by the stopping rule.

    Args:
      groups: one for each prompt of the iteration, at least one; those that took the place of dropped ones last.
      group_size: n.
      num_prompts: with how many prompts the iteration began, before any outcome was known: those that
        `reward/first_round` is of. None: all.

    Returns:
      The keys of metrics.jsonl that the groups decide: these, `sampling_dynamics`, and
      `collection/verdict_<reason>`, counts of the verdicts that give a reason. Shares are in [0, 1]: of groups
      (`zero_signal`: all advantages 0; `dropped`: nothing kept; `weight_clipped`: a pass rate below the least that
      w(p) is computed at), of prompts (`unmet`), of responses (`truncated`). `kept` counts responses that reach the
      update, `replacements` prompts beyond `num_prompts`.
    """
    pools = [group.pool for group in groups]
    first = pools[:num_prompts]
    responses = [response for pool in pools for response in pool.responses]
    reasons = collections.Counter(verdict.reason for pool in pools for verdict in pool.verdicts if verdict.reason)
    return {
        "reward/first_round": float(np.mean([pool.rewards[:group_size].mean() for pool in first])),
        "reward/first_round_correct": float(np.mean([pool.correct[:group_size].mean() for pool in first])),
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
