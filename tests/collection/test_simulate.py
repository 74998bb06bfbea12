import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.analysis import enumeration
from reinforce_ada_jax.analysis.enumeration import expectations
from reinforce_ada_jax.collection.groups import balanced_group
from reinforce_ada_jax.collection.simulate import monte_carlo, run_strategy

REFERENCE = pathlib.Path(__file__).parents[1] / "golden" / "reference" / "adaptive_rounds.jsonl"
CASES = [json.loads(line) for line in REFERENCE.read_text().splitlines()]


def config_of(case: dict) -> SimpleNamespace:
    return SimpleNamespace(**{key: case[key] for key in ("strategy", "group_size", "samples_per_round", "max_rounds")})


@pytest.mark.parametrize("case", CASES)
def test_reference_rounds(case):
    pools = run_strategy(config_of(case), np.array(case["rewards"]))
    expected = case["expected"]
    assert [len(pool.responses) for pool in pools] == expected["samples_drawn"]
    kept = [balanced_group(pool.correct, case["group_size"]).tolist() for pool in pools]
    assert kept == expected["selected"]
    assert [int(pool.correct.sum()) for pool in pools] == expected["positives"]
    assert [int((~pool.correct).sum()) for pool in pools] == expected["negatives"]
    active = [sum(pool.rounds > rounds for pool in pools) for rounds in range(case["max_rounds"])]
    assert [count for count in active if count] == expected["active_prompts_per_round"]


def test_all_60_reference_cases_are_here():
    assert len(CASES) == 60


def test_the_pool_is_the_script():
    config = SimpleNamespace(strategy="positive", group_size=2, samples_per_round=2, max_rounds=2)
    rewards = np.array([[0.2, 0.7, 0.71, 0.0], [0.0, 1.0, 0.5, 0.5]])
    first, second = run_strategy(config, rewards)
    # 0.7 is not above the threshold of 0.7, so the first prompt needs its second round.
    np.testing.assert_array_equal(first.rewards, [0.2, 0.7, 0.71, 0.0])
    assert first.correct.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(second.rewards, [0.0, 1.0])
    assert [first.rounds, second.rounds] == [2, 1]
    assert [response.draw for response in first.responses] == [0, 1, 2, 3]


def test_grpo_draws_its_group():
    config = SimpleNamespace(strategy="grpo", group_size=4, samples_per_round=8, max_rounds=4)
    assert [len(pool.responses) for pool in run_strategy(config, np.zeros((2, 4)))] == [4, 4]


def test_too_few_columns_are_refused():
    config = SimpleNamespace(strategy="balance", group_size=4, samples_per_round=8, max_rounds=4)
    # Refused although both rules are met in the first round: balance *may* draw 32.
    with pytest.raises(ValueError, match=r"\(2, 31\); balance may draw 32 .* \[P, 32\] or wider"):
        run_strategy(config, np.tile([0.0, 1.0], (2, 16))[:, :31])


def test_no_prompts_no_pools():
    config = SimpleNamespace(strategy="balance", group_size=4, samples_per_round=8, max_rounds=4)
    assert run_strategy(config, np.zeros((0, 32))) == []


# ---- random rewards --------------------------------------------------------------------------------------------------

STRATEGIES = {
    "grpo": {},
    "positive": {},
    "balance": {"objective": "log"},
    "estimate": {"objective": "log"},
    "dapo": {},
    "ngu": {"max_draws": 0, "retry_probability": 0.5},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_draws_through_the_loop_agree_with_the_exact_distribution(name):
    sizes = {"group_size": 4, "samples_per_round": 8, "max_rounds": 3}
    config = SimpleNamespace(strategy=name, **sizes, **STRATEGIES[name])
    rates = [0.05, 0.3, 0.8]
    exact, (means, errors) = expectations(config, rates), monte_carlo(config, rates, 600, seed=1)
    compared = 0
    for column in enumeration.COLUMNS:
        there, here, error = (getattr(found, column) for found in (exact, means, errors))
        # What is the same for all samples has no error; an event never seen in them may have a chance of 1 in 1,000,
        # and a second round of 8 with a chance of 0.2^8 adds 0.013 to the deviation of draws.
        least = 0.02 if column == "draws_std" else 1e-3
        assert (np.abs(here - there) <= np.where(error > 0, 4 * error, least)).all(), column
        compared += int((error > 0).sum())
    assert compared > 20
    assert abs(means.rows - exact.rows) <= 4 * errors.rows + 1e-12


def test_the_seed_decides():
    config = SimpleNamespace(strategy="ngu", group_size=2, samples_per_round=4, max_rounds=3, retry_probability=0.5)
    first, again, other = (monte_carlo(config, [0.1, 0.1], 50, seed=seed)[0].draws for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all() and first[0] != first[1]  # two prompts of one pass rate draw for themselves


def test_standard_errors():
    # 100 groups of two, and of each how many rows are correct: the sample's own deviation / 10.
    config = SimpleNamespace(strategy="grpo", group_size=2, samples_per_round=4, max_rounds=3)
    means, errors = monte_carlo(config, [0.5], 100)
    mixed = 1 - means.zero_signal[0]
    assert errors.zero_signal[0] == pytest.approx(np.sqrt(mixed * (1 - mixed) / 100), rel=1e-12)
    # variance = 1 / mixed - 1, whose slope is -1 / mixed^2.
    assert means.variance[0] == pytest.approx(1 / mixed - 1, rel=1e-12)
    assert errors.variance[0] == pytest.approx(errors.zero_signal[0] / mixed**2, rel=1e-9)
    assert errors.variance_draws[0] == pytest.approx(2 * errors.variance[0], rel=1e-12)
    assert errors.signal[0] == pytest.approx(means.signal[0] * errors.zero_signal[0] / mixed, rel=1e-9)
    assert errors.draws[0] == errors.draws_std[0] == 0


def test_one_sample_has_no_error():
    config = SimpleNamespace(strategy="grpo", group_size=2, samples_per_round=4, max_rounds=3)
    with pytest.raises(ValueError, match="1 prompts for each pass rate .* at least 2"):
        monte_carlo(config, [0.5], 1)
