"""The expected gradient of `estimate`, by enumeration: every outcome of N draws of a policy of two tokens.

A response is two tokens, each 0 or 1, drawn independently with chances of a 1 of sigmoid(theta_0) and sigmoid(theta_1).
So there are four responses, and d log pi(response) / d theta_i = token_i - sigmoid(theta_i) exactly. All responses are
equally long, so the token mean of the update only divides by a constant, and is left out.
"""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import objectives, strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.allocation import fill
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict
from tests.test_docs import table_below

RESPONSES = list(itertools.product((0, 1), repeat=2))
THETAS = [(0.3, -1.1), (-2.0, 0.4), (1.5, 1.5)]
# Which of the responses are correct, for three prompts of one iteration.
CORRECT = [{(1, 1)}, {(0, 1), (1, 0)}, {(0, 0), (0, 1), (1, 1)}]
# Objectives under which w(p) is not constant, and every way to pay it.
TERMS = [
    (allocation, objective, alpha)
    for allocation in ("hybrid", "sampling", "variance")
    for objective, alpha in (("log", 0.5), ("power", 0.5), ("power", 2.0))
]
PROMPT = Prompt("p", "", "", np.zeros(1, np.int32))


class Policy:
    """The four responses' chances and scores (gradients of their log chance) at theta."""

    def __init__(self, theta):
        ones = 1 / (1 + np.exp(-np.asarray(theta)))
        self.chances = {r: float(np.prod(np.where(r, ones, 1 - ones))) for r in RESPONSES}
        self.scores = {r: np.array(r) - ones for r in RESPONSES}

    def pass_rate(self, correct) -> float:
        return sum(self.chances[response] for response in correct)

    def gradient(self, correct) -> np.ndarray:
        """Returns the gradient of the pass rate: the sum of d pi = pi d log pi over the correct responses."""
        return sum(self.chances[response] * self.scores[response] for response in correct)


def make_pool(outcomes) -> Pool:
    """A pool of responses that are correct or not, of which nothing else is known."""
    responses = tuple(
        Response("p", draw, np.zeros(2, np.int32), np.zeros(2, np.float32), False) for draw in range(len(outcomes))
    )
    return Pool(PROMPT, responses, tuple(Verdict(bool(o), float(o)) for o in outcomes), rounds=1, met=True)


def build(**settings) -> strategies.Strategy:
    sizes = {"group_size": 4, "samples_per_round": 8, "max_rounds": 4}
    return strategies.build(SimpleNamespace(strategy="estimate", **sizes, **settings))


def expected_gradient(policy, correct, draws: int, strategy, weight=None) -> np.ndarray:
    """E[1/N sum_i A_i score_i] over all 4^N outcomes; with `weight`, that instead of the weight of the pool's k/N."""
    total = np.zeros(2)
    for responses in itertools.product(RESPONSES, repeat=draws):
        group = make_group(make_pool([response in correct for response in responses]), strategy)
        advantages = group.advantages
        if weight is not None:
            advantages = advantages / strategy.weight(float(group.pool.correct.mean())) * weight
        chance = math.prod(policy.chances[response] for response in responses)
        scores = np.array([policy.scores[response] for response in responses])
        total += chance * advantages @ scores / draws
    return total


def test_the_policy_is_differentiated_right():
    # Against central differences: error h^2 f''' / 6, below 1e-12.
    for theta, correct in itertools.product(THETAS, CORRECT):
        assert sum(Policy(theta).chances.values()) == pytest.approx(1)
        for axis, step in enumerate(np.eye(2) * 1e-5):
            above, below = (Policy(theta + sign * step).pass_rate(correct) for sign in (1, -1))
            assert Policy(theta).gradient(correct)[axis] == pytest.approx((above - below) / 2e-5, abs=1e-9)


# ---- with the exact pass rate, nothing is biased ---------------------------------------------------------------------


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize(("allocation", "objective", "alpha"), TERMS)
@pytest.mark.parametrize(("baseline", "draws"), [("leave_one_out", 2), ("leave_one_out", 3), ("pool", 2), ("pool", 3)])
def test_the_expected_gradient_is_the_objectives(theta, allocation, objective, alpha, baseline, draws):
    # sum_x N_x E[1/N sum_i A_i score_i] = c sum_x grad f(p_x), where c = total / sum_x w_sample(p_x) is the level of
    # the allocation: one number for the iteration, like a learning rate, whatever the prompt and the parameter.
    policy = Policy(theta)
    strategy = build(baseline=baseline)  # identity: the weight is put in below, at the exact pass rate
    rates = np.array([policy.pass_rate(correct) for correct in CORRECT])
    terms = objectives.Objective(objective, alpha)
    paid = terms.sample_weight(allocation, rates)
    shares = fill(paid, 24.0, 0.0, 1000.0)
    level = 24.0 / paid.sum()
    # The pool's mean holds the response itself, which leaves (N - 1)/N of its advantage.
    shrinkage = (draws - 1) / draws if baseline == "pool" else 1.0
    for share, rate, correct in zip(shares, rates, CORRECT, strict=True):
        weight = float(terms.gradient_weight(allocation, rate))
        actual = share * expected_gradient(policy, correct, draws, strategy, weight)
        exact = float(objectives.weight(objective, rate, alpha=alpha)) * policy.gradient(correct)
        np.testing.assert_allclose(actual, level * shrinkage * exact, rtol=1e-12)


def test_grpo_has_the_gradient_of_the_pass_rate_and_dividing_by_the_deviation_has_not():
    # Plain advantages of a group of n: (n - 1)/n of grad p for every prompt.
    sizes = {"group_size": 3, "samples_per_round": 8, "max_rounds": 4}
    policy, ratios = Policy(THETAS[0]), []
    for normalize in (False, True):
        strategy = strategies.build(SimpleNamespace(strategy="grpo", normalize_by_std=normalize, **sizes))
        ratios.append(
            [expected_gradient(policy, correct, 3, strategy) / policy.gradient(correct) for correct in CORRECT]
        )
    np.testing.assert_allclose(ratios[0], 2 / 3, rtol=1e-12)
    # Every mixed group of 3 has the deviation sqrt(1/3), so dividing only scales. A group of 4 has sqrt(1/4) with one
    # or three correct and sqrt(1/3) with two: prompts near 0 and 1 then count for more than their pass rate's gradient.
    np.testing.assert_allclose(ratios[1], 2 / 3 * math.sqrt(3), rtol=1e-5)
    sizes["group_size"] = 4
    strategy = strategies.build(SimpleNamespace(strategy="grpo", normalize_by_std=True, **sizes))
    ratios = [(expected_gradient(policy, correct, 4, strategy) / policy.gradient(correct))[0] for correct in CORRECT]
    assert max(ratios) / min(ratios) > 1.02


# ---- length penalties ------------------------------------------------------------------------------------------------

PENALTIES = {(0, 0): 0.0, (0, 1): 0.4, (1, 0): 0.9, (1, 1): 0.1}


@pytest.mark.parametrize("objective", ["identity", "log"])
def test_a_length_penalty_climbs_its_mean_over_right_answers(objective):
    # E[penalty | correct] = sum over right answers of pi/p penalty, and d(pi/p) = pi/p (score - its mean over them).
    # Given k right answers the terms sum to -(k - 1) of its gradient, and E[max(k - 1, 0)] = N p - 1 + (1 - p)^N. That
    # is the whole difference, with w(p) or without: the pass rate's gradient keeps its factor.
    sizes = {"group_size": 3, "samples_per_round": 8, "max_rounds": 4}
    strategy = strategies.build(SimpleNamespace(strategy="grpo", objective=objective, **sizes))
    for theta, correct in itertools.product(THETAS, CORRECT):
        policy, added = Policy(theta), np.zeros(2)
        for responses in itertools.product(RESPONSES, repeat=3):
            pool = make_pool([response in correct for response in responses])
            verdicts = [
                dataclasses.replace(verdict, penalty=PENALTIES[response] * verdict.correct)
                for verdict, response in zip(pool.verdicts, responses, strict=True)
            ]
            penalised = make_group(dataclasses.replace(pool, verdicts=tuple(verdicts)), strategy)
            difference = penalised.advantages - make_group(pool, strategy).advantages
            chance = math.prod(policy.chances[response] for response in responses)
            added += chance * difference @ np.array([policy.scores[response] for response in responses])
        p = policy.pass_rate(correct)
        share = {response: policy.chances[response] / p for response in correct}
        mean = sum(share[response] * PENALTIES[response] for response in correct)
        gradient = sum(share[response] * (PENALTIES[response] - mean) * policy.scores[response] for response in correct)
        np.testing.assert_allclose(added, -(3 * p - 1 + (1 - p) ** 3) * gradient, atol=1e-14)


# ---- the pool's own pass rate in its place ---------------------------------------------------------------------------

BASELINES = ("pool", "leave_one_out")
TABLE_RATES = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
TABLE_DRAWS = (4, 8, 16, 32)


def signal(outcomes: np.ndarray, advantages: np.ndarray, rate: float) -> float:
    """E[1/N sum_i A_i score_i | outcomes] in units of grad p.

    E[score | correct] = grad p / p and E[score | wrong] = -grad p / (1 - p): only the number of correct ones matters.
    """
    return float(advantages @ np.where(outcomes, 1 / rate, -1 / (1 - rate))) / len(outcomes)


def share_of_the_exact(strategy: strategies.Strategy, draws: int, rate: float) -> float:
    """The expected gradient of one prompt under `strategy`, in units of w_grad(p) grad p."""
    total = 0.0
    for right in range(draws + 1):
        outcomes = np.arange(draws) < right
        chance = math.comb(draws, right) * rate**right * (1 - rate) ** (draws - right)
        total += chance * signal(outcomes, make_group(make_pool(outcomes), strategy).advantages, rate)
    return total / strategy.weight(rate)


def bias_table(baseline: str) -> list[list[float]]:
    """Relative bias by pass rate and number of draws: `estimate` under `log`, hybrid, epsilon 0.01."""
    strategy = build(objective="log", baseline=baseline)
    return [[share_of_the_exact(strategy, draws, rate) - 1 for draws in TABLE_DRAWS] for rate in TABLE_RATES]


@pytest.mark.parametrize("baseline", BASELINES)
def test_counting_the_correct_ones_is_enumerating_all(baseline):
    strategy = build(objective="log", baseline=baseline)
    for theta, correct in itertools.product(THETAS, CORRECT):
        policy = Policy(theta)
        rate = policy.pass_rate(correct)
        expected = share_of_the_exact(strategy, 4, rate) * strategy.weight(rate) * policy.gradient(correct)
        np.testing.assert_allclose(expected_gradient(policy, correct, 4, strategy), expected, rtol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_bias_of_the_observed_weight_shrinks_with_the_draws(baseline):
    sizes = np.abs(bias_table(baseline))
    assert (np.diff(sizes, axis=1) < 0).all()
    # As 1/N in the end: twice the draws, half the bias, where an outcome of either kind is all but sure to show.
    np.testing.assert_allclose(sizes[4:, 3] / sizes[4:, 2], 0.5, atol=0.03)


@pytest.mark.parametrize("rate", TABLE_RATES)
@pytest.mark.parametrize("draws", TABLE_DRAWS)
def test_the_whole_weight_at_the_observed_rate_in_closed_form(draws, rate):
    # All of 1/p in advantages (N fixed), baseline of the pool. With k correct, A sums to k (1 - k/N) over the correct
    # ones; times N/k that is N - k, so the signal is (N - k)/N (1/p + ...) = (1 - k/N) / (p (1 - p)) for k > 0, and
    # E[(1 - k/N) 1(k > 0)] / (1 - p) = (1 - p - (1 - p)^N) / (1 - p) = 1 - (1 - p)^(N - 1).
    strategy = build(objective="log", allocation="sampling", objective_epsilon=1e-9)
    paid_here = SimpleNamespace(strategy="grpo", group_size=draws, samples_per_round=8, max_rounds=4)
    paid_here.baseline, paid_here.objective, paid_here.objective_epsilon = "pool", "log", 1e-9
    share = share_of_the_exact(strategies.build(paid_here), draws, rate)
    assert share == pytest.approx(1 - (1 - rate) ** (draws - 1), rel=1e-9)
    # Over p, that is the derivative of -sum_{j < N} (1 - p)^j / j, the first N - 1 terms of log p.
    assert share / rate == pytest.approx(sum((1 - rate) ** (j - 1) for j in range(1, draws)), rel=1e-9)
    # Paid by draws alone nothing is observed, and only the (N - 1)/N of the pool's mean is left.
    assert share_of_the_exact(strategy, draws, rate) == pytest.approx((draws - 1) / draws, rel=1e-9)


@pytest.mark.parametrize(
    ("baseline", "heading"), [("pool", "Baseline `pool`:"), ("leave_one_out", "Baseline `leave_one_out`:")]
)
def test_the_documented_table_is_the_computed_one(baseline, heading):
    computed = [
        [f"{rate:g}", *(f"{100 * bias:+.1f} %" for bias in biases)]
        for rate, biases in zip(TABLE_RATES, bias_table(baseline), strict=True)
    ]
    print("\n".join(f"| {' | '.join(row)} |" for row in computed))
    assert table_below("algorithms.md", heading) == computed
