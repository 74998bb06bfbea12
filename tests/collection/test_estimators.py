"""Estimates of pass rates over iterations, worked by hand, and their calibration."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reinforce_ada_jax.collection.estimators import Ema, calibration
from reinforce_ada_jax.types import Pool, Prompt, Verdict


def make_prompt(name: str) -> Prompt:
    return Prompt(name, "", "", np.zeros(1, np.int32))


def make_pool(name: str, correct: int, drawn: int, estimate: float | None = None, reward: float = 1.0) -> Pool:
    verdicts = (Verdict(True, reward),) * correct + (Verdict(False, 0.0),) * (drawn - correct)
    return Pool(make_prompt(name), responses=(), verdicts=verdicts, rounds=1, met=True, estimate=estimate)


# ---- ema -------------------------------------------------------------------------------------------------------------


def test_three_iterations_by_hand():
    ema = Ema(decay=0.5, prior_correct=0.5, prior_wrong=1.5)
    prompts = [make_prompt("a"), make_prompt("b")]
    # The prior's mean before anything is seen: 0.5 / 2.
    np.testing.assert_array_equal(ema.estimate(prompts), [0.25, 0.25])
    # a: N = 8, K = 2. (2.5 / 10.) The other prompt is not touched.
    assert ema.observe([make_pool("a", 2, 8)]) == {}
    np.testing.assert_array_equal(ema.estimate(prompts), [0.25, 0.25])
    # a: N = 4 + 4, K = 1 + 4: 5.5 / 10. b: N = 2, K = 1: 1.5 / 4. Decaying what comes in, too: a 3 / 6.
    ema.observe([make_pool("a", 4, 4), make_pool("b", 1, 2)])
    np.testing.assert_array_equal(ema.estimate(prompts), [0.55, 0.375])
    # a was not drawn and stays as it is (decay would give 3 / 6); b: N = 1 + 1, K = 0.5: 1 / 4.
    ema.observe([make_pool("b", 0, 1)])
    np.testing.assert_array_equal(ema.estimate(prompts[::-1]), [0.25, 0.55])


def test_outcomes_count_not_rewards():
    # A penalty halved what correct responses are worth; they stay correct.
    ema = Ema()
    ema.observe([make_pool("a", 3, 4, reward=0.4)])
    np.testing.assert_array_equal(ema.estimate([make_prompt("a")]), [3.5 / 5])


@given(st.lists(st.tuples(st.integers(0, 32), st.booleans()), max_size=30))
def test_never_certain(history):
    """However long a history is one-sided, the estimate stays away from 0 and 1."""
    ema = Ema()
    for drawn, right in history:
        ema.observe([make_pool("a", drawn if right else 0, drawn)])
    (estimate,) = ema.estimate([make_prompt("a")])
    # N never passes 32 / (1 - 0.85) = 213.3, so at least 0.5 / 214.3 is left on either side.
    assert 0.0023 < estimate < 0.9977


def test_no_prompts():
    """No prompts have no estimates."""
    assert Ema().estimate([]).shape == (0,)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=12))
def test_json_and_back_to_the_last_bit(history):
    ema, prompts = Ema(), [make_prompt(name) for name in "abcd"]
    for name, correct in history:
        ema.observe([make_pool(name, correct, 9)])
    again = Ema()
    again.load_json(json.loads(json.dumps(ema.to_json())))
    np.testing.assert_array_equal(again.estimate(prompts), ema.estimate(prompts))
    for estimator in (ema, again):
        estimator.observe([make_pool("a", 1, 3)])
    np.testing.assert_array_equal(again.estimate(prompts), ema.estimate(prompts))
    assert again.to_json() == ema.to_json()


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_by_hand():
    pools = [
        make_pool("a", 1, 2, estimate=0.5),  # (0.5^2 + 0.5^2) / 2 = 0.25
        make_pool("b", 0, 3, estimate=0.4),  # 0.16, in the bin of 0.5, [0.4, 0.6)
        make_pool("c", 4, 4, estimate=1.0),  # 0; the last bin is closed
        make_pool("d", 1, 4, estimate=0.1),  # (0.81 + 3 * 0.01) / 4 = 0.21
        make_pool("e", 3, 3),  # without an estimate: not counted
    ]
    assert calibration(pools) == {
        # Mean over prompts, not over draws: 0.62 / 4; over the 13 draws it would be 0.141.
        "estimator/brier": pytest.approx(0.155),
        # Bin 2: estimates 0.45, outcomes (1/2 + 0) / 2 = 0.25, half of the prompts; bin 0: 0.1 and 0.25, a quarter.
        "estimator/calibration_error": pytest.approx(0.5 * 0.2 + 0.25 * 0.15),
        "estimator/bin_0_estimate": pytest.approx(0.1),
        "estimator/bin_0_outcome": pytest.approx(0.25),
        "estimator/bin_0_share": 0.25,
        "estimator/bin_2_estimate": pytest.approx(0.45),
        "estimator/bin_2_outcome": pytest.approx(0.25),
        "estimator/bin_2_share": 0.5,
        "estimator/bin_4_estimate": 1.0,
        "estimator/bin_4_outcome": 1.0,
        "estimator/bin_4_share": 0.25,
    }


def test_nothing_to_calibrate():
    """Pools without an estimate have no calibration."""
    assert calibration([make_pool("a", 1, 2)]) == calibration([]) == {}
