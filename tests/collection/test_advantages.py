"""Advantages and kept responses against literal vectors, for every baseline, weight and rule of what is kept."""

import dataclasses
import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import (
    anchored_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_terms,
    make_group,
    pool_statistics,
)
from reinforce_ada_jax.collection.simulate import run_strategy
from reinforce_ada_jax.config import values
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.types import Pool

REFERENCE = pathlib.Path(__file__).parents[1] / "golden" / "reference" / "group_advantage.jsonl"


def drawn(rewards, strategy, **settings) -> tuple[Pool, strategies.Strategy]:
    """The pool of one prompt with scripted rewards, and the strategy: of two rounds of 4, and groups of 4."""
    config = SimpleNamespace(strategy=strategy, **{"group_size": 4, "samples_per_round": 4, "max_rounds": 2} | settings)
    (pool,) = run_strategy(config, np.array([rewards]))
    return pool, strategies.build(config)


def test_reference_vectors():
    """Advantages are those that the published program computed."""
    cases = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
    assert len(cases) == 80
    for case in cases:
        rewards, group_of, expected = np.array(case["rewards"]), np.array(case["group"]), np.array(case["expected"])
        for group, (positives, negatives) in enumerate(zip(case["positives"], case["negatives"], strict=True)):
            pool = {}
            if case["global_statistics"]:
                mean, std = pool_statistics(np.repeat([1.0, 0.0], [positives, negatives]))
                pool = {"pool_mean": mean, "pool_std": std}
            rows = group_of == group
            actual = group_advantages(rewards[rows], **pool, normalize_by_std=case["normalize_by_std"])
            np.testing.assert_allclose(actual, expected[rows], rtol=0, atol=1e-5)


def test_own_statistics():
    # Mean 1/4. Squared deviations 9/16 + 3 * 1/16 = 3/4; unbiased variance 3/4 / 3 = 1/4, deviation 1/2
    # (biased: sqrt(3/16) = 0.433, which would give 1.732 and -0.577).
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(group_advantages(rewards), [0.75, -0.25, -0.25, -0.25])
    normalized = group_advantages(rewards, normalize_by_std=True)
    np.testing.assert_allclose(normalized, [1.5, -0.5, -0.5, -0.5], rtol=0, atol=1e-5)


def test_the_pool_is_the_baseline_not_the_group():
    # A group of one correct and one wrong out of a pool with 1 hit in 8: mean 1/8. Its own mean would give +-0.5.
    np.testing.assert_array_equal(group_advantages(np.array([1.0, 0.0]), pool_mean=0.125), [0.875, -0.125])


def test_one_response_has_mean_0_and_deviation_1():
    assert pool_statistics(np.array([1.0])) == (0.0, 1.0)
    np.testing.assert_array_equal(group_advantages(np.array([0.4])), [0.4])


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 0.8, 1.0])
@pytest.mark.parametrize("size", [2, 3, 6, 7])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_give_exactly_no_signal(reward, size, normalize):
    # np.mean([0.8] * 3) is 0.8000000000000002: from the plain mean this group would seem to have a signal.
    advantages = group_advantages(np.full(size, reward), normalize_by_std=normalize)
    np.testing.assert_array_equal(advantages, np.zeros(size))


def test_half_given_pool_statistics_are_refused():
    rewards = np.array([1.0, 0.0])
    with pytest.raises(ValueError, match="without pool_mean"):
        group_advantages(rewards, pool_std=0.5)
    with pytest.raises(ValueError, match="needs pool_std"):
        group_advantages(rewards, pool_mean=0.5, normalize_by_std=True)


def test_make_group():
    """A group has the kept responses, with advantages from the pool's statistics."""
    # Round 1 has one hit, round 2 another: 8 draws, mean 1/4; kept the hits 2, 5 and the first wrong 0, 1.
    # From the group's own mean the advantages would be +-1/2.
    rewards = [0, 0, 1, 0, 0, 1, 0, 0]
    pool, strategy = drawn(rewards, "balance")
    group = make_group(pool, strategy)
    assert group.pool is pool
    assert group.kept.tolist() == [0, 1, 2, 5]
    np.testing.assert_array_equal(group.advantages, [-0.25, -0.25, 0.75, 0.75])
    # Variance of 2 hits in 8: (2 * 9/16 + 6 * 1/16) / 7 = 1.5 / 7, deviation 0.46291; 0.75 / 0.46291 = 1.62018.
    normalized = make_group(*drawn(rewards, "balance", normalize_by_std=True))
    np.testing.assert_allclose(normalized.advantages, [-0.54006, -0.54006, 1.62018, 1.62018], rtol=0, atol=1e-5)


def test_make_group_of_grpo_keeps_all_and_compares_with_itself():
    group = make_group(*drawn([0, 1, 1, 1], "grpo", samples_per_round=8, max_rounds=4))
    assert group.kept.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(group.advantages, [-0.75, 0.25, 0.25, 0.25])


# ---- baselines -------------------------------------------------------------------------------------------------------

# `balance` with n = 4 and M = 4: the second round has the second hit, so S is 01000010 with k/N = 2/8; the group is the
# hits 1 and 6 and the first two wrong ones, 0 and 2. Deviation of the group sqrt(4 * 1/4 / 3) = 0.577350, of the pool
# sqrt((2 * 9/16 + 6 * 1/16) / 7) = 0.462910.
ADVANTAGES = {
    # (of a hit, of a wrong one), plain and divided by the deviation.
    "group": ((1 / 2, -1 / 2), (0.866025, -0.866025)),
    "pool": ((3 / 4, -1 / 4), (1.620185, -0.540062)),
    # A hit sees 1 other hit in 7, a wrong one 2 in 7; within the group alone they would see 1 and 2 in 3.
    "leave_one_out": ((6 / 7, -2 / 7), (1.851640, -0.617213)),
    # The two hits sum to 3/2, which the two wrong ones share.
    "anchored": ((3 / 4, -3 / 4), (1.620185, -1.620185)),
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", ADVANTAGES)
def test_baselines(baseline, normalize):
    """Each baseline has its advantages by hand."""
    rewards, settings = [0, 1, 0, 0, 0, 0, 1, 0], {"baseline": baseline, "normalize_by_std": normalize}
    group = make_group(*drawn(rewards, "balance", **settings))
    assert group.kept.tolist() == [0, 1, 2, 6]
    hit, wrong = ADVANTAGES[baseline][normalize]
    # The 1e-6 added to a deviation moves these by up to 5e-6.
    np.testing.assert_allclose(group.advantages, [wrong, hit, wrong, hit], rtol=0, atol=5e-6)


def test_an_unknown_baseline_of_a_users_strategy_is_refused():
    pool, strategy = drawn([0, 1], "grpo", group_size=2, samples_per_round=2, max_rounds=1)
    with pytest.raises(ValueError, match="'median'; it must be one of group, pool, leave_one_out, anchored"):
        make_group(pool, dataclasses.replace(strategy, baseline="median"))


def test_leave_one_out_by_hand():
    # Others' means: (0 + 1/2) / 2, (1 + 1/2) / 2, (1 + 0) / 2.
    np.testing.assert_allclose(leave_one_out_advantages(np.array([1.0, 0.0, 0.5])), [0.75, -0.75, 0.0], atol=1e-15)
    np.testing.assert_array_equal(leave_one_out_advantages(np.array([0.8, 0.8, 0.8])), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(leave_one_out_advantages(np.array([0.4])), [0.4])  # nothing else to compare with


def test_anchored_by_hand():
    # Published form for 0/1 rewards: hits 1 - mean, wrong ones -(n+/n-)(1 - mean), with n+ = 1, n- = 3, mean 1/5.
    anchored = anchored_advantages(np.array([0.0, 1.0, 0.0, 0.0]), 0.2)
    np.testing.assert_allclose(anchored, [-0.8 / 3, 0.8, -0.8 / 3, -0.8 / 3], rtol=1e-15)
    # The authors' example: of 4 old and 4 fresh responses one fresh one is right, mean 1/8. The hit keeps 7/8, and the
    # fresh failures are scaled by 7/3, from -1/8 to -7/24; unscaled they would leave 7/8 - 3/8 > 0.
    np.testing.assert_allclose(
        anchored_advantages(np.array([0.0, 0.0, 0.0, 1.0]), 1 / 8), [-7 / 24] * 3 + [7 / 8], rtol=1e-15
    )
    # Graded: 0.6 + 0.1 above the mean, 0.1 and 0.25 below it, which are scaled by 2 and keep their order. No response
    # has to be correct.
    graded = anchored_advantages(np.array([1.0, 0.5, 0.3, 0.15]), 0.4)
    np.testing.assert_allclose(graded, [0.6, 0.1, -0.2, -0.5], rtol=1e-14)
    # Where all are kept, nothing is left to balance.
    every = np.array([0.7, 0.2, 0.2, 0.1])
    np.testing.assert_allclose(anchored_advantages(every, 0.3), every - 0.3, rtol=1e-14)
    # Only hits, or none: nobody to share with, nothing to share.
    np.testing.assert_allclose(anchored_advantages(np.ones(2), 0.25), [0.75, 0.75])
    np.testing.assert_array_equal(anchored_advantages(np.zeros(2), 0.0), [0.0, 0.0])


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"objective": "identity"}, 1.0),
        ({"objective": "log"}, 4.0),  # the whole 1/p at k/N = 1/4; at p + eps it would be 1 / 0.26 = 3.846
        ({"objective": "power"}, 1.0),  # 1 / (2 sqrt(1/4))
        ({"objective": "power", "objective_alpha": 0.25}, 0.25 * 4**0.75),
        ({"objective": "power", "objective_alpha": 2.0}, 0.5),  # 2 p
        ({"objective": "log", "objective_epsilon": 0.5}, 2.0),  # 1/4 counts as 1/2, and weight_clipped is set
        ({"objective": "log", "objective_epsilon": 0.25}, 4.0),  # at the bound nothing is cut off
    ],
)
def test_a_fixed_group_takes_the_whole_weight(settings, factor):
    group = make_group(*drawn([0, 1, 0, 0, 0, 0, 1, 0], "balance", correction="none", **settings))
    np.testing.assert_allclose(group.advantages, factor * np.array([-0.25, 0.75, -0.25, 0.75]), rtol=1e-14)
    assert group.weight_clipped == (settings.get("objective_epsilon") == 0.5)


def test_an_all_wrong_pool_is_clipped_and_has_no_signal():
    group = make_group(*drawn([0] * 8, "balance", objective="log", correction="none"))
    assert group.weight_clipped and not group.advantages.any()


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"objective": "log"}, 1.961161),  # hybrid: 1 / sqrt(0.25 + 0.01); at k/N alone it would be 2
        ({"objective": "log", "allocation": "sampling"}, 1.0),
        # 1 / 0.26 over sqrt((0.75 + 0.01) / 0.26) = 3.846154 / 1.709701
        ({"objective": "log", "allocation": "variance"}, 2.249606),
        # sqrt(1 / (2 sqrt(0.26))) = sqrt(0.980581)
        ({"objective": "power"}, 0.990243),
        # The observed rate again: w sqrt(p (1 - p)) draws leave 1 / sqrt(0.26 * 0.76) = 1 / 0.444522 for every f.
        ({"objective": "identity"}, 2.249606),
        ({"objective": "power", "allocation": "variance"}, 2.249606),
    ],
)
def test_estimate_takes_what_draws_did_not_pay(settings, factor):
    group = make_group(*drawn([0, 1, 0, 0, 0, 0, 0, 0], "estimate", objective_epsilon=0.01, **settings))
    assert group.kept.tolist() == [0, 1, 2, 3]  # one prompt: the whole budget, M = 4
    np.testing.assert_allclose(group.advantages, factor * np.array([-0.25, 0.75, -0.25, -0.25]), rtol=1e-6)
    assert not group.weight_clipped


# ---- age -------------------------------------------------------------------------------------------------------------


def test_old_responses_are_not_kept_and_still_count_in_the_mean():
    pool, strategy = drawn([0, 0, 0, 1] + [0] * 28, "ngu", samples_per_round=8, max_rounds=4, max_age=4)
    group = make_group(pool, strategy, ages=np.array([5, 5, 0, 4]))
    # An age of exactly 4 is kept. Mean over all four responses 1/4; over the two kept it would be 1/2, and +-1/2.
    assert group.kept.tolist() == [2, 3]
    np.testing.assert_array_equal(group.advantages, [-0.75, 0.75])
    nothing = make_group(pool, strategy, ages=np.full(4, 5))
    assert nothing.kept.tolist() == nothing.advantages.tolist() == []
    # Of one side alone no group can be formed whose advantages sum to 0: the fresh hit would have +0.75.
    for ages in ([5, 5, 5, 0], [0, 0, 0, 5]):
        one_sided = make_group(pool, strategy, ages=np.array(ages))
        assert one_sided.kept.tolist() == one_sided.advantages.tolist() == []
    fresh = make_group(pool, strategy)
    np.testing.assert_array_equal(fresh.advantages, [-0.25, -0.25, -0.25, 0.75])
    # Strategies without a limit keep whatever the age is.
    assert make_group(pool, strategies.fixed(4), ages=np.full(4, 100)).kept.tolist() == [0, 1, 2, 3]


# ---- length penalties ------------------------------------------------------------------------------------------------

SHAPING = Shaping(positive_threshold=0.7, overlong_tokens=8, max_response_tokens=10)


def with_lengths(pool: Pool, lengths: np.ndarray) -> Pool:
    """The pool as it is when its responses have these lengths."""
    verdicts = SHAPING.all(list(pool.verdicts), lengths[: len(pool.verdicts)].tolist())
    return dataclasses.replace(pool, verdicts=tuple(verdicts))


def test_length_terms_by_hand():
    # Right answers pay 0.5, 0 and 0.1, 0.2 on average.
    penalties, correct = np.array([0.5, 0.0, 0.0, 0.1]), np.array([True, False, True, True])
    np.testing.assert_allclose(length_terms(penalties, correct), [-0.3, 0.0, 0.2, 0.1], atol=1e-15)
    # A single right answer has nothing to be compared with; a penalty of a wrong one, from code of the user's, is none.
    np.testing.assert_array_equal(length_terms(np.array([0.5, 0.0]), np.array([True, False])), [0.0, 0.0])
    np.testing.assert_array_equal(length_terms(np.array([0.5, 0.2]), np.array([False, False])), [0.0, 0.0])


# Each strategy as published, and with the correction that is the default under log. Only ngu with log and no correction
# is missing: it would pay w(p) twice, and is refused.
LENGTH_CASES = [
    (name, correction, objective)
    for name in values.STRATEGIES
    for correction in ("none", "")
    for objective in ("identity", "log")
    if (name, correction, objective) != ("ngu", "none", "log")
]


@pytest.mark.parametrize(("name", "correction", "objective"), LENGTH_CASES)
def test_length_never_reinforces_a_wrong_answer(name, correction, objective):
    settings = {"strategy": name, "group_size": 4, "samples_per_round": 8, "max_rounds": 2, "correction": correction}
    strategy = strategies.build(SimpleNamespace(**settings, objective=objective))
    rng, shortened = np.random.default_rng(0), 0
    for right in (0.0, 0.1, 0.5, 0.9, 1.0):
        (plain,) = run_strategy(SimpleNamespace(**settings), (rng.random((1, 32)) < right).astype(float))
        lengths = rng.integers(1, 11, 32)
        pool = with_lengths(plain, lengths)
        assert pool.rewards.tolist() == plain.rewards.tolist() and not pool.penalties[~pool.correct].any()
        without, group = make_group(plain, strategy), make_group(pool, strategy)
        assert group.kept.tolist() == without.kept.tolist()
        correct, added = pool.correct[group.kept], group.advantages - without.advantages
        # DAPO's penalty, subtracted from every reward, would give the short ones of an all-wrong group up to 1/2, times
        # w = 100 under log.
        np.testing.assert_array_equal(group.advantages[~correct], without.advantages[~correct])
        assert (group.advantages[~correct] <= 0).all()
        np.testing.assert_allclose(added.sum(), 0.0, atol=1e-12)
        # The longer of two right answers is worth less by its penalty, whatever w(p) is; in units of 1 / N per prompt.
        paid = pool.penalties[group.kept][correct] / (len(pool.responses) if group.per_prompt else 1)
        np.testing.assert_allclose(np.diff(added[correct]), -np.diff(paid), atol=1e-12)
        shortened += bool(added.any())
    assert shortened


def test_lengths_count_where_the_weight_is_0():
    # w(1) = 4 (1 - 1)^3: four right answers with penalties of 0.5, 0, 0 and 0.1 differ in their lengths alone.
    plain, strategy = drawn([1] * 4, "grpo", max_rounds=1, objective="pass_at_k", objective_k=4)
    verdicts = [dataclasses.replace(plain.verdicts[0], penalty=penalty) for penalty in (0.5, 0.0, 0.0, 0.1)]
    group = make_group(dataclasses.replace(plain, verdicts=tuple(verdicts)), strategy)
    np.testing.assert_allclose(group.advantages, [-0.35, 0.15, 0.15, 0.05], atol=1e-15)
