"""Metrics of one collection that follow from its groups alone; docs/reference/metrics.md describes each key."""

import collections
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.types import FAILURES, Pool, counted_rewards

# The last round with a metric of its own: a strategy without a limit may draw hundreds.
MAX_ROUND_METRICS = 32


def sampling_dynamics(
    groups: Sequence[Group], group_size: int, num_prompts: int, thresholds: tuple[int, int]
) -> dict[str, float | int]:
    """Computes how draws are distributed over prompts, when rules were met, and why others were not.

    `thresholds` are (k_pos, k_neg), and `num_prompts` is the number of prompts before replacements. Unmet prompts with
    correct and wrong responses have too few of one kind.
    """
    pools = [group.pool for group in groups]
    rounds = np.array([pool.rounds for pool in pools])
    met = np.array([pool.met for pool in pools])
    draws = np.array([len(pool.responses) for pool in pools])
    num_correct = np.array([pool.correct.sum() for pool in pools])
    unmet = [pool for pool in pools if not pool.met]
    k_pos, k_neg = thresholds
    last = min(int(rounds.max()), MAX_ROUND_METRICS)
    p10, p50, p90 = np.percentile(draws, (10, 50, 90)).tolist()
    return {
        **{f"collection/active_round_{number}": int((rounds >= number).sum()) for number in range(1, last + 1)},
        **{f"collection/met_round_{number}": int((met & (rounds <= number)).sum()) for number in range(1, last + 1)},
        **{
            f"collection/met_k_pos_round_{number}": sum(
                int(pool.correct[: sum(pool.round_sizes[:number])].sum()) >= k_pos for pool in pools
            )
            for number in range(1, last + 1)
        },
        "collection/draws_mean": float(draws.mean()),
        "collection/draws_p10": p10,
        "collection/draws_p50": p50,
        "collection/draws_p90": p90,
        "collection/draws_max": int(draws.max()),
        "collection/extra_samples": int(draws.sum()) - group_size * num_prompts,
        "collection/below_k_pos_share": float(np.mean(num_correct < k_pos)),
        "collection/below_k_neg_share": float(np.mean(draws - num_correct < k_neg)),
        "collection/unmet_no_correct_share": sum(not pool.correct.any() for pool in unmet) / len(pools),
        "collection/unmet_no_wrong_share": sum(bool(pool.correct.all()) for pool in unmet) / len(pools),
    }


def discarded_metrics(pools: Sequence[Pool]) -> dict[str, int]:
    """Counts speculative draws that no round needed, and their tokens; `collection/slot_utilisation` includes them."""
    return {
        "collection/discarded_responses": sum(len(pool.discarded) for pool in pools),
        "collection/discarded_tokens": sum(sum(pool.discarded) for pool in pools),
    }


def turn_metrics(pools: Sequence[Pool]) -> dict[str, float | int]:
    """Computes metrics of trajectories: turns of the model, and the environment's tokens, over all responses."""
    responses = [response for pool in pools for response in pool.responses]
    return {
        "collection/turns_mean": float(np.mean([len(response.segments) // 2 + 1 for response in responses])),
        "collection/environment_tokens": sum(len(response.tokens) - response.num_sampled for response in responses),
    }


def reward_means(pools: Sequence[Pool]) -> dict[str, float]:
    """Computes `rewards/<name>/mean` for each reward function of the user's, over the responses that it applies to."""
    rewards: dict[str, list[float]] = collections.defaultdict(list)
    for verdict in (verdict for pool in pools for verdict in pool.verdicts):
        for name, reward in verdict.rewards.items():
            rewards[name].append(reward)
    return {f"rewards/{name}/mean": float(np.mean(rewards[name])) for name in sorted(rewards)}


def collection_metrics(
    groups: Sequence[Group], group_size: int, num_prompts: int, thresholds: tuple[int, int]
) -> dict[str, float | int]:
    """Computes the metrics of one iteration's collection; in `groups` replacements come last.

    `reward/first_round` is the one to compare strategies by: the mean over prompts of the mean reward of the first
    min(n, M) draws, where M is the size of the prompt's first round. No outcome decides this number. (If rounds
    are smaller than n, a prompt that stops early would have fewer than n draws.) It covers the first `num_prompts`
    prompts, which were chosen before any outcome was known. `collection/entropy` covers the same draws. No outcome
    selects them; those of `update/entropy` are selected by outcomes.
    """
    pools = [group.pool for group in groups]
    firsts = [(pool, min(group_size, pool.round_sizes[0])) for pool in pools[:num_prompts]]
    logprobs = [draw.logprobs[draw.sampled] for pool, count in firsts for draw in pool.responses[:count]]
    responses = [response for pool in pools for response in pool.responses]
    penalties = [verdict.penalty for pool in pools for verdict in pool.verdicts if verdict.correct]
    reasons = collections.Counter(verdict.reason for pool in pools for verdict in pool.verdicts if verdict.reason)
    return {
        "reward/first_round": float(np.mean([counted_rewards(pool.verdicts[:count]).mean() for pool, count in firsts])),
        "reward/first_round_correct": float(np.mean([pool.correct[:count].mean() for pool, count in firsts])),
        "reward/pool": float(np.concatenate([pool.rewards for pool in pools]).mean()),
        "collection/entropy": -float(np.concatenate(logprobs).mean(dtype=np.float64)),  # nats a token
        "collection/responses": len(responses),
        "collection/tokens": sum(response.num_sampled for response in responses),
        "collection/kept": sum(len(group.kept) for group in groups),
        "collection/replacements": len(pools) - len(firsts),
        "collection/rounds_mean": float(np.mean([pool.rounds for pool in pools])),
        "collection/zero_signal_share": float(np.mean([not group.advantages.any() for group in groups])),
        "collection/dropped_share": float(np.mean([not group.kept.size for group in groups])),
        "collection/weight_clipped_share": float(np.mean([group.weight_clipped for group in groups])),
        "collection/unmet_share": float(np.mean([not pool.met for pool in pools])),
        "collection/truncated_share": float(np.mean([response.truncated for response in responses])),
        **sampling_dynamics(groups, group_size, num_prompts, thresholds),
        "collection/verifier_failures": sum(reasons[reason] for reason in FAILURES),
        # Under the names that TRL gives them.
        "frac_reward_zero_std": float(np.mean([np.ptp(pool.rewards) == 0 for pool in pools])),
        "completions/mean_length": float(np.mean([response.num_sampled for response in responses])),
        **reward_means(pools),
        **({"reward/penalty": float(np.mean(penalties))} if any(penalties) else {}),
        **{f"collection/verdict_{reason}": reasons[reason] for reason in sorted(reasons)},
    }
