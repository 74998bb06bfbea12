from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.analysis import learning_curves, studies
from reinforce_ada_jax.analysis.enumeration import expectations, planned_draws
from reinforce_ada_jax.analysis.learning_curves import Curve, average, draw_counts, population
from reinforce_ada_jax.collection import strategies


def config(strategy: str, **settings: object) -> SimpleNamespace:
    sizes = {"group_size": 4, "samples_per_round": 8, "max_rounds": 4}
    return SimpleNamespace(**({"strategy": strategy} | sizes | settings))


def test_zero_variance():
    found = studies.zero_variance_probability([2, 8], np.array([0.0, 0.1, 0.5]))
    # 0.1^2 + 0.9^2 = 0.82; 0.9^8 + 0.1^8.
    np.testing.assert_allclose(found, [[1, 0.82, 0.5], [1, 0.43046722, 2 / 256]], rtol=1e-12)


# ---- epsilon ---------------------------------------------------------------------------------------------------------


def test_draws_that_pay_everything_leave_only_the_baseline_s_bias():
    # 1 / p is 2 and 4, so 24 draws are 8 and 16, and advantages pay nothing. The pool's mean takes 1 / N of it.
    settings = config("estimate", allocation="sampling", budget=12.0)
    bias, noise = studies.epsilon_effect(settings, np.array([0.5, 0.25]), 0.0)
    np.testing.assert_allclose(bias, [7 / 8, 15 / 16], rtol=1e-9)
    fixed = [expectations(config("grpo", group_size=n), [p]).variance[0] for n, p in ((8, 0.5), (16, 0.25))]
    np.testing.assert_allclose(noise, fixed, rtol=1e-9)


def test_balance_feels_no_epsilon_below_the_least_pass_rate_of_a_pool():
    rates = np.array([0.01, 0.1, 0.5])
    without = studies.epsilon_effect(config("balance"), rates, 0.0)[0]
    # One in 32 draws is 0.03125.
    np.testing.assert_array_equal(studies.epsilon_effect(config("balance"), rates, 0.031)[0], without)
    bias = studies.epsilon_effect(config("balance"), rates, 0.1)[0]
    # At 0.5 a pool of 32 with no more than 3 correct is as good as never seen.
    assert bias[0] < 0.5 * without[0] and bias[2] == pytest.approx(without[2], rel=1e-4)
    np.testing.assert_array_equal(studies.where_epsilon_binds(rates, without, bias), [0.01, 0.1])


def test_log_of_grpo():
    # n = 2: mixed with chance 2 p q, pass rate 1/2, weight 2, sum 2 * 1/2 over 2 rows: E[g] = p q; exact is q.
    rates = np.array([0.1, 0.5])
    bias, _ = studies.epsilon_effect(config("grpo", group_size=2), rates, 1e-2)
    np.testing.assert_allclose(bias, rates, rtol=1e-12)


# ---- learning --------------------------------------------------------------------------------------------------------


def test_population():
    u = (np.arange(100) + 0.5) / 100
    np.testing.assert_allclose(population(100, 1.0, 1.0), u, atol=1e-9)
    np.testing.assert_allclose(population(100, 0.5, 1.0), u**2, atol=1e-9)
    np.testing.assert_allclose(population(100, 1.0, 3.0), 1 - (1 - u) ** (1 / 3), atol=1e-6)
    assert population(512).mean() == pytest.approx(0.6 / 1.8, abs=1e-4)


@pytest.mark.parametrize("name", ["grpo", "balance", "estimate", "ngu"])
def test_counts_are_those_of_the_exact_distribution(name):
    settings = config(name, objective="log", retry_probability=0.5, max_draws=32)
    strategy, rates = strategies.build(settings), np.repeat([0.03, 0.2, 0.7], 4000)
    planned = planned_draws(strategy, rates)
    found = draw_counts(strategy, rates, np.random.default_rng(0), estimates=rates, planned=planned)
    _, drawn, correct, *_ = found.T
    exact = expectations(settings, rates)
    for counts, expected in ((drawn, exact.draws), (correct / drawn, exact.pool_mean)):
        difference = (counts - expected).reshape(3, 4000)
        error = difference.std(axis=1) / np.sqrt(4000)
        assert (np.abs(difference.mean(axis=1)) <= 4 * error + 1e-12).all()


def learn(settings: SimpleNamespace, rates: list[float], **changes: object) -> Curve:
    arguments = {"updates": 1, "draws": 0, "prompts_per_update": 2, "learning_rate": 1.0} | changes
    return learning_curves.learn(settings, np.array(rates), **arguments)


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def test_one_update():
    # Balanced at p = 1/2: 2 (1 - m) / 2 + 2 m / 2 = 1 over 4 rows, whatever m; so each logit moves by 1/4.
    settings = config("balance", samples_per_round=64)
    curve = learn(settings, [0.5, 0.5])
    np.testing.assert_allclose(curve.pass_rate, [0.5, sigmoid(0.25)], rtol=1e-12)
    np.testing.assert_array_equal(curve.draws, [0, 128])
    # Equal lengths: a root mean square of the learning rate itself.
    curve = learn(settings, [0.5, 0.5], equal_lengths=True, learning_rate=0.1)
    assert curve.pass_rate[1] == pytest.approx(sigmoid(0.1), rel=1e-12)
    # Prompts take turns: two of three in the first update.
    curve = learn(settings, [0.5, 0.5, 0.5], updates=2)
    np.testing.assert_allclose(curve.pass_rate[1], (2 * sigmoid(0.25) + 0.5) / 3, rtol=1e-12)


def test_dropped_prompts_give_their_place():
    # Two prompts that can't be solved, then ones that are mixed for certain: four are opened, the fifth is not drawn.
    settings = config("dapo", group_size=64)
    curve = learn(settings, [0.0, 0.0, 0.5, 0.5, 0.5])
    assert curve.draws[1] == 4 * 64
    # Group mean of 64: (1 - 1/64) p q on average, and rows of the two kept ones only; with all four it would
    # be half of that, and 1.561.
    assert curve.pass_rate[1] * 5 == pytest.approx(2 * sigmoid(0.25 * 63 / 64) + 0.5, abs=1e-2)
    # Fewer than wanted: at most B * (1 + max_extra_batches) are tried, and what there is is learned from.
    curve = learn(settings, [0.0] * 7 + [0.5] * 2)
    assert curve.draws[1] == 8 * 64


def test_nothing_is_learned_of_what_is_certain():
    for name in strategies.BUILT_IN:
        curve = learn(config(name), [0.0, 1.0, 0.0, 1.0], updates=3)
        np.testing.assert_array_equal(curve.pass_rate, 0.5)
        assert (np.diff(curve.draws) > 0).all()


def test_rounds_of_different_sizes_of_a_users_strategy(tmp_path):
    # A round of 1 without a success, and then one of 3, whose coefficients are 1 for each correct draw.
    (tmp_path / "mine.py").write_text("""
import dataclasses
import numpy as np
from reinforce_ada_jax.collection import strategies

def uneven(config):
    def coefficients(pool, usable):
        assert pool.round_sizes in ((1,), (1, 3)), pool.round_sizes
        return np.arange(len(usable)), pool.correct.astype(float)
    return dataclasses.replace(
        strategies.fixed(1), coefficients=coefficients, max_draws=4,
        next_draws=lambda progress: (1, 3 * (progress.correct == 0), 0)[progress.rounds],
    )

def planned(config):
    return dataclasses.replace(uneven(config), plan=lambda estimates, ids: np.ones(len(ids), int))
""")
    curve = learn(config(f"{tmp_path}/mine.py:uneven"), [0.0, 0.2, 0.5, 1.0], prompts_per_update=4, updates=5)
    assert curve.draws[1] in (4 + 1 + 1 + 1, 4 + 4 + 1 + 1, 4 + 1 + 4 + 1, 4 + 4 + 4 + 1)
    with pytest.raises(ValueError, match="learning curves follow no estimates"):
        learn(config(f"{tmp_path}/mine.py:planned"), [0.5, 0.5])


def test_a_users_rule_that_looks_at_rounds_and_drops(tmp_path):
    # Two draws, and two more if none is correct: the group of a prompt that needed these is dropped.
    (tmp_path / "mine.py").write_text("""
import dataclasses
from reinforce_ada_jax.collection import strategies

def second(config):
    return dataclasses.replace(
        strategies.fixed(2), drop_unmet=True, max_draws=4, max_kept=4,
        next_draws=lambda progress: 2 * (progress.rounds == 0 or (progress.rounds == 1 and progress.correct == 0)),
        met=lambda progress: progress.rounds == 1,
    )
""")
    found = expectations(config(f"{tmp_path}/mine.py:second"), np.array([0.5]))
    # Kept: one correct and one wrong response, where the first round has one of each, with probability 1/2.
    assert found.kept_correct[0] == pytest.approx(0.5) and found.unmet[0] == pytest.approx(0.25)


def test_average():
    curves = [
        Curve(np.array([0.0, 10.0, 20.0]), np.array([0.1, 0.2, 0.4])),
        Curve(np.array([0.0, 20.0, 40.0]), np.array([0.1, 0.4, 0.6])),
    ]
    by_update, by_draws, error = average(curves, (1, 2), (5, 20))
    np.testing.assert_allclose(by_update, [0.3, 0.5])
    np.testing.assert_allclose(by_draws, [(0.15 + 0.175) / 2, 0.4])
    assert error == pytest.approx(0.1)  # deviation 0.1 * sqrt(2) of two, over sqrt(2)
