"""Weights of an objective at each pass rate, and the series of its corrections."""

import numpy as np
import pytest

from reinforce_ada_jax.collection.objectives import Objective, weight
from reinforce_ada_jax.config import values

P = np.array([0.01, 0.25, 0.5, 1.0])
OBJECTIVES = {
    "identity": lambda p, alpha: p,
    "log": lambda p, alpha: np.log(p),
    "maxrl": lambda p, alpha: np.log(p),
    "power": lambda p, alpha: p**alpha,
    "pass_at_k": lambda p, alpha: 1 - (1 - p) ** 3,
}


@pytest.mark.parametrize(
    ("objective", "alpha", "expected"),
    [
        ("identity", 0.5, [1.0, 1.0, 1.0, 1.0]),
        ("log", 0.5, [100.0, 4.0, 2.0, 1.0]),
        ("power", 0.5, [5.0, 1.0, 0.5**0.5, 0.5]),  # 1 / (2 sqrt p)
        ("power", 2.0, [0.02, 0.5, 1.0, 2.0]),  # 2 p
        ("power", 1.0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_weights(objective, alpha, expected):
    """The weight of each objective is that of its formula."""
    np.testing.assert_allclose(weight(objective, P, alpha=alpha), expected, rtol=1e-15)
    # A number gives a number.
    assert weight(objective, 0.25, alpha=alpha) == pytest.approx(expected[1])


@pytest.mark.parametrize("objective", values.OBJECTIVES)
@pytest.mark.parametrize("alpha", [0.3, 0.5, 2.0])
def test_the_weight_is_the_derivative(objective, alpha):
    # Central difference, error h^2 f''' / 6: at p = 0.01 under log 1e-12 * 2e6 / 6 against a weight of 100.
    h = 1e-6
    f = OBJECTIVES[objective]
    slope = (f(P + h, alpha) - f(P - h, alpha)) / (2 * h)
    # At p = 1 the slope of pass@3 is 0; the difference there is h^2.
    np.testing.assert_allclose(weight(objective, P, alpha=alpha, k=3), slope, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize(
    ("allocation", "draws", "advantages"),
    [
        # Under log at p + epsilon = 1/4, w = 4.
        ("hybrid", 2.0, 2.0),
        ("sampling", 4.0, 1.0),
        # 4 sqrt(0.25 * 0.77) = sqrt(0.77 / 0.25): epsilon is added to 1 - p too, so that an estimate of 1 gets draws.
        ("variance", 3.08**0.5, 4 / 3.08**0.5),
    ],
)
def test_draws_and_advantages_share_the_weight(allocation, draws, advantages):
    objective = Objective("log", epsilon=0.01)
    np.testing.assert_allclose(objective.sample_weight(allocation, 0.24), draws, rtol=1e-15)
    np.testing.assert_allclose(objective.gradient_weight(allocation, 0.24), advantages, rtol=1e-15)


@pytest.mark.parametrize("allocation", values.ALLOCATIONS)
@pytest.mark.parametrize("objective", values.OBJECTIVES)
def test_together_they_pay_all_of_it(allocation, objective):
    terms, p = Objective(objective, alpha=0.3, epsilon=0.05), np.linspace(0, 1, 11)
    paid = terms.sample_weight(allocation, p) * terms.gradient_weight(allocation, p)
    np.testing.assert_allclose(paid, weight(objective, p + 0.05, alpha=0.3), rtol=1e-14)


@pytest.mark.parametrize(("objective", "alpha"), [("identity", 0.5), ("log", 0.5), ("power", 0.5), ("power", 2.0)])
def test_variance_allocates_with_the_least_variance(objective, alpha):
    # N_x draws leave w(p)^2 p (1 - p) / N_x of a prompt's gradient. By Cauchy and Schwarz the sum over prompts is at
    # least (sum of w sqrt(p (1 - p)))^2 / B for B draws in all, where N_x is proportional to those terms (v3, appendix
    # B). sqrt((1 - p) / p), which is this for log alone, misses the bound for each of the others.
    p, budget = np.array([0.02, 0.1, 0.3, 0.5, 0.8, 0.97]), 48.0
    noise = weight(objective, p, alpha=alpha) * np.sqrt(p * (1 - p))

    def variance(shares):
        return float(np.sum(np.square(noise) / (budget * shares / shares.sum())))

    least = noise.sum() ** 2 / budget
    terms = Objective(objective, alpha)
    assert variance(terms.sample_weight("variance", p)) == pytest.approx(least, rel=1e-12)
    others = [terms.sample_weight(name, p) for name in ("hybrid", "sampling")]
    others += [np.sqrt((1 - p) / p)] * (objective != "log")
    assert min(map(variance, others)) > 1.02 * least


def test_identity_is_uniform_where_nothing_is_said_of_variance():
    for allocation in ("hybrid", "sampling"):
        np.testing.assert_array_equal(Objective("identity").sample_weight(allocation, P), np.ones(4))


def test_an_unknown_name():
    """An unknown objective is named, with those that there are."""
    with pytest.raises(ValueError, match="'logit'; it must be one of identity, log, maxrl, power, pass_at_k"):
        weight("logit", 0.5)
