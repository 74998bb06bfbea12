"""The numbers of one collection that need nothing but its groups (the `reward/` and `collection/` keys)."""

import collections
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.collection.advantages import Group

# Reasons of a verdict that say the verifier failed, not the response ("no_answer" or "too_long" is the response's).
FAILURES = ("timeout", "crash", "error")


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
      The keys of metrics.jsonl that the groups decide, and `collection/verdict_<reason>`, counts of the verdicts
      that give a reason. Shares are in [0, 1]: of groups (`zero_signal`: all advantages 0; `dropped`: nothing kept;
      `weight_clipped`: a pass rate below the least that w(p) is computed at), of prompts (`unmet`), of responses
      (`truncated`). `kept` counts responses that reach the update, `replacements` prompts beyond `num_prompts`.
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
        "collection/verifier_failures": sum(reasons[reason] for reason in FAILURES),
        **{f"collection/verdict_{reason}": reasons[reason] for reason in sorted(reasons)},
    }
