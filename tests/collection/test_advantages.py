import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import group_advantages, make_group, pool_statistics
from reinforce_ada_jax.collection.simulate import run_strategy

REFERENCE = pathlib.Path(__file__).parents[1] / "golden" / "reference" / "group_advantage.jsonl"


def test_reference_vectors():
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
    config = SimpleNamespace(strategy="balance", group_size=4, samples_per_round=4, max_rounds=2)
    # Round 1 has one hit, round 2 another: 8 draws, mean 1/4; kept the hits 2, 5 and the first wrong 0, 1.
    # From the group's own mean the advantages would be +-1/2.
    (pool,) = run_strategy(config, np.array([[0, 0, 1, 0, 0, 1, 0, 0]]))
    group = make_group(pool, strategies.build(config), normalize_by_std=False)
    assert group.pool is pool
    assert group.kept.tolist() == [0, 1, 2, 5]
    np.testing.assert_array_equal(group.advantages, [-0.25, -0.25, 0.75, 0.75])
    # Variance of 2 hits in 8: (2 * 9/16 + 6 * 1/16) / 7 = 1.5 / 7, deviation 0.46291; 0.75 / 0.46291 = 1.62018.
    normalized = make_group(pool, strategies.build(config), normalize_by_std=True)
    np.testing.assert_allclose(normalized.advantages, [-0.54006, -0.54006, 1.62018, 1.62018], rtol=0, atol=1e-5)


def test_make_group_of_grpo_keeps_all_and_compares_with_itself():
    config = SimpleNamespace(strategy="grpo", group_size=4, samples_per_round=8, max_rounds=4)
    (pool,) = run_strategy(config, np.array([[0, 1, 1, 1]]))
    group = make_group(pool, strategies.build(config), normalize_by_std=False)
    assert group.kept.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(group.advantages, [-0.75, 0.25, 0.25, 0.25])
