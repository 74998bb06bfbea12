"""Exact distributions against closed forms, and against every reward sequence there is through the real loop."""

import dataclasses
import functools
import itertools
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.analysis import enumeration
from reinforce_ada_jax.analysis.enumeration import expectations, progress
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.simulate import run_strategy
from reinforce_ada_jax.types import ScoreNoise
from tests import standins

RATES = np.array([0.0, 0.01, 0.1, 0.5, 0.73, 1.0])
COLUMNS = {field.name for field in dataclasses.fields(enumeration.Expectations)} - {"pass_rates", "rows"}

SGPO = pathlib.Path(__file__).parents[2] / "examples" / "rivals" / "sgpo.py"


def config(strategy: str, **settings: object) -> SimpleNamespace:
    sizes = {"group_size": 4, "samples_per_round": 8, "max_rounds": 4}
    return SimpleNamespace(**({"strategy": strategy} | sizes | settings))


def at_most(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) <= k)."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(min(k, n) + 1)) if k >= 0 else 0.0


# ---- closed forms ----------------------------------------------------------------------------------------------------


def test_binomial():
    """Probabilities are those of the formula, and sum to 1 also for 2,000 draws."""
    expected = [[math.comb(5, k) * p**k * (1 - p) ** (5 - k) for p in RATES] for k in range(6)]
    np.testing.assert_allclose(enumeration.binomial(5, RATES), expected, rtol=1e-14)
    assert enumeration.binomial(2000, RATES).sum(axis=0) == pytest.approx(1.0, abs=1e-11)


@pytest.mark.parametrize(
    ("size", "rounds", "k_pos"), [(2, 12, 1), (4, 8, 1), (8, 4, 1), (8, 4, 3), (5, 7, 9), (32, 2, 4)]
)
def test_draws_until_k_pos_are_correct(size, rounds, k_pos):
    sizes = {"group_size": 2, "samples_per_round": size, "max_rounds": rounds, "k_pos": k_pos, "keep": "pool"}
    found = expectations(config("positive", **sizes), RATES)
    # Round j + 1 is drawn where fewer than k_pos of the first j * M are correct.
    draws = [size * math.fsum(at_most(k_pos - 1, j * size, p) for j in range(rounds)) for p in RATES]
    np.testing.assert_allclose(found.draws, draws, rtol=1e-9)
    np.testing.assert_allclose(found.rounds, np.array(draws) / size, rtol=1e-9)
    np.testing.assert_allclose(found.unmet, [at_most(k_pos - 1, size * rounds, p) for p in RATES], atol=1e-12)


@pytest.mark.parametrize(("n", "size", "rounds"), [(2, 4, 3), (4, 8, 4), (5, 8, 4), (8, 8, 8)])
def test_balance(n, size, rounds):
    """Draws and unmet rules are those of the binomial distribution."""
    found = expectations(config("balance", group_size=n, samples_per_round=size, max_rounds=rounds), RATES)
    k_pos, k_neg = n // 2, n - n // 2

    def unmet(drawn: int, p: float) -> float:
        return 1.0 - max(0.0, at_most(drawn - k_neg, drawn, p) - at_most(k_pos - 1, drawn, p))

    np.testing.assert_allclose(found.unmet, [unmet(size * rounds, p) for p in RATES], atol=1e-9)
    draws = [size * math.fsum(unmet(j * size, p) if j else 1.0 for j in range(rounds)) for p in RATES]
    np.testing.assert_allclose(found.draws, draws, rtol=1e-9)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_grpo(n):
    """Zero signal, draws and signal are those of the closed forms for fixed groups."""
    found = expectations(config("grpo", group_size=n), RATES)
    np.testing.assert_allclose(found.zero_signal, RATES**n + (1 - RATES) ** n, atol=1e-14)
    np.testing.assert_array_equal(found.zero_signal, found.zero_variance)
    np.testing.assert_array_equal([found.draws, found.draws_std, found.rounds], [[n] * 6, [0] * 6, [1] * 6])
    np.testing.assert_allclose(found.kept_correct, n * RATES, atol=1e-12)
    # The group's own mean costs 1/n of the gradient; leaving each response out of its own mean costs nothing.
    np.testing.assert_allclose(found.signal[1:-1], 1 - 1 / n, rtol=1e-12)
    unbiased = expectations(config("grpo", group_size=n, baseline="leave_one_out"), RATES)
    np.testing.assert_allclose(unbiased.signal[1:-1], 1.0, rtol=1e-12)
    assert np.isnan(found.signal[[0, -1]]).all() and not np.isfinite(found.variance[[0, -1]]).any()


def test_43_of_100_groups_of_eight_have_no_signal_at_a_pass_rate_of_a_tenth():
    # 0.9^8 = 0.43046721, and 10^-8 for eight correct ones; the paper prints 19 %.
    found = expectations(config("grpo", group_size=8), [0.1])
    assert found.zero_signal[0] == pytest.approx(0.43046722, abs=1e-12)


def test_the_probability_of_a_rare_state_keeps_its_digits():
    # 2 * 0.5^64 = 1.1e-19, where 1 minus the probability of mixed groups is 0 or -2e-16.
    found = expectations(config("grpo", group_size=64), [0.5])
    assert found.zero_signal[0] == found.zero_variance[0] == pytest.approx(0.5**63, rel=1e-9, abs=0.0)


def test_noise_of_a_pair():
    # Mixed with chance m = 2 p q, and then A = +-1/2 and the sum of A_i (r_i - p) is 1/2; so Var / E^2 = 1 / m - 1.
    p = RATES[1:-1]
    found = expectations(config("grpo", group_size=2), p)
    np.testing.assert_allclose(found.variance, 1 / (2 * p * (1 - p)) - 1, rtol=1e-12)
    np.testing.assert_allclose(found.variance_draws, 2 * found.variance, rtol=1e-15)


def test_a_balanced_group_weighs_hard_prompts_more():
    # Two correct rows of 1 - m and two wrong ones of -m, m the pool's mean: 2 (1 - m) q + 2 m p, over n = 4 rows. At
    # p = 0.3 that is about (p^2 + q^2) / (2 p q) = 1.38 times the gradient, not 1.
    found = expectations(config("balance", max_rounds=16), [0.3])
    mean, p = found.pool_mean[0], 0.3
    np.testing.assert_allclose(found.signal, (2 * (1 - mean) * (1 - p) + 2 * mean * p) / (4 * p * (1 - p)), rtol=1e-9)
    assert 1.30 < found.signal[0] < 1.38


HARD_TO_EASY = np.array([0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9])


@pytest.mark.parametrize(
    ("settings", "relative"),
    [
        # To two digits, relative to p = 1/2: ALGORITHM.md section 7, found there by another program.
        ({"strategy": "balance"}, [7.2, 5.9, 3.9, 1.6, 1.0, 1.6, 3.9]),
        # 3.0 4.3 3.7 1.6 1 1.5 3.7 times what 1 / p would be.
        ({"strategy": "balance", "objective": "log", "correction": "none"}, [75, 43, 18.5, 3.25, 1.0, 1.02, 2.06]),
        ({"strategy": "balance", "correction": "stratified"}, [1.24, 1.34, 1.31, 1.11, 1.0, 1.11, 1.31]),
        (
            {"strategy": "balance", "correction": "stratified", "objective": "log"},
            [11.5, 7.8, 4.6, 1.9, 1.0, 0.76, 0.73],
        ),
    ],
)
def test_signal_by_pass_rate(settings, relative):
    signal = expectations(config(**settings), HARD_TO_EASY).signal
    np.testing.assert_allclose((signal / signal[4])[: len(relative)], relative, rtol=0.025)


NINE = np.array([1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.95])


SIZES = [(8, 4), (4, 8), (1, 32), (16, 8)]
SERIES = ["identity", "log", "power 0.5", "power 0.25", "pass_at_k"]
EXACT = [
    ("positive", {}),
    ("positive", {"keep": "pool", "control_variate": "noise"}),
    ("balance", {"keep": "group"}),
    ("balance", {"control_variate": "0.2"}),
    ("balance", {"control_variate": "noise"}),
    ("ngu", {}),
    # The weights of later rounds make up for the retries that chance ends.
    ("ngu", {"retry_probability": 0.8, "control_variate": "noise"}),
]


def exact_cases():
    """All combinations; of the fast ones each strategy has each objective once, and the sizes in turn."""
    for (row, strategy), (column, objective), (number, sizes) in itertools.product(
        enumerate(EXACT), enumerate(SERIES), enumerate(SIZES)
    ):
        is_slow = number != (row + column) % len(SIZES)
        yield pytest.param(*strategy, objective, sizes, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("strategy", "settings", "objective", "sizes"), [*exact_cases()])
def test_exact_is_the_series_of_the_objective(strategy, settings, objective, sizes):
    size, rounds = sizes
    name, _, alpha = objective.partition(" ")
    alpha = float(alpha or 0.5)
    sizes = {"samples_per_round": size, "max_rounds": rounds}
    if strategy == "ngu":  # its rounds are of n, at least 2
        size, rounds = max(size, 2), size * rounds // max(size, 2)
        sizes = {"group_size": size, "max_draws": size * rounds}
    found = expectations(
        config(strategy, **sizes | settings, objective=name, objective_alpha=alpha, objective_k=5, correction="exact"),
        NINE,
    )
    q, most = 1 - NINE, size * rounds
    if name == "power":
        log_c = [math.lgamma(j + 1 - alpha) - math.lgamma(1 - alpha) - math.lgamma(j + 1) for j in range(most)]
        expected = sum(alpha * math.exp(c) * q**j for j, c in enumerate(log_c))
    else:
        expected = {"identity": 1.0, "log": (1 - q**most) / NINE, "pass_at_k": 5 * q**4}[name]
    np.testing.assert_allclose(found.signal, expected + np.zeros(9), rtol=1e-9)


def test_exact_with_rounds_of_different_sizes(tmp_path):
    # Rounds of 4 and 2 while no response is correct, and two more draws after a success: 5 (1 - p)^4 all the same.
    (tmp_path / "mine.py").write_text("""
import dataclasses
from reinforce_ada_jax.collection import corrections, objectives, strategies

def uneven(config):
    exact = corrections.exact(objectives.Objective("pass_at_k", k=5))
    return dataclasses.replace(
        strategies.fixed(6), coefficients=exact, max_draws=8,
        next_draws=lambda progress: (4, 2, 2 * (progress.correct > 0), 0)[progress.rounds],
    )
""")
    found = expectations(config(f"{tmp_path}/mine.py:uneven"), NINE)
    np.testing.assert_allclose(found.signal, 5 * (1 - NINE) ** 4, rtol=1e-9)


@pytest.mark.parametrize("objective", ["identity", "log", "power"])
def test_stratified_is_the_pools_own_signal(objective):
    # E[w(p_hat) p_hat (1 - p_hat)] / (p q), with k binomial where the draws are fixed.
    found = expectations(config("grpo", group_size=16, objective=objective, correction="stratified"), NINE)
    weight = {"identity": lambda x: 1.0, "log": lambda x: 1 / x, "power": lambda x: 0.5 * x**-0.5}[objective]
    expected = [
        math.fsum(
            math.comb(16, k) * p**k * (1 - p) ** (16 - k) * weight(k / 16) * k / 16 * (1 - k / 16) for k in range(1, 17)
        )
        / (p * (1 - p))
        for p in NINE.tolist()
    ]
    np.testing.assert_allclose(found.signal, expected, rtol=1e-9)
    # A group of 4 stands for a pool of 16.
    sizes = {"group_size": 4, "samples_per_round": 16, "max_rounds": 1, "objective": objective}
    group = expectations(config("balance", **sizes, correction="stratified"), NINE)
    np.testing.assert_allclose(group.signal, expected, rtol=1e-9)


def test_maxrl_is_the_series_of_its_round():
    found = expectations(config("grpo", group_size=6, objective="maxrl"), NINE)
    np.testing.assert_allclose(found.signal, (1 - (1 - NINE) ** 5) / NINE, rtol=1e-9)


SINGLE_LOG = {"samples_per_round": 1, "max_rounds": 16, "objective": "log"}
RIVALS = [config("grpo", group_size=size, objective=name)
          for name, sizes in (("identity", (4, 8, 16)), ("maxrl", (4, 8, 16, 32))) for size in sizes]  # fmt: skip


@pytest.mark.parametrize(
    "noise", [ScoreNoise(1, 1, 0.25), ScoreNoise(1, 1, 1), ScoreNoise(1, 1, 4), ScoreNoise(0, 1, 1)]
)
def test_the_control_variate_by_noise_has_no_more_noise_than_fixed_groups(noise):
    rates = np.linspace(0.02, 0.98, 49)

    def noise_times_draws(settings):
        found = expectations(settings, rates, noise)
        return found.score_noise * found.draws

    best = np.min([noise_times_draws(rival) for rival in RIVALS], axis=0)
    none = noise_times_draws(config("positive", **SINGLE_LOG))
    by_noise = noise_times_draws(config("positive", **SINGLE_LOG, control_variate="noise"))
    assert (by_noise <= best).all() and (by_noise <= none * (1 + 1e-9)).all()
    np.testing.assert_allclose(none, noise.success * rates, rtol=1e-9)
    # Without a control variate easy prompts are noisier, unless correct responses have no noise.
    assert (none > best)[rates > 0.8].all() == (noise.success > 0)


def test_the_control_variate_of_a_known_pass_rate_comes_near_the_least_noise():
    # With single draws without end the noise times draws is p s (1 - b) at the best b. Easy prompts have few failures,
    # so an estimate that falls with each of them is nearly that.
    rates, noise = np.array([0.8, 0.95]), ScoreNoise(1.0, 1.0, 0.5)
    found = expectations(config("positive", **SINGLE_LOG, control_variate="noise"), rates, noise)
    least = 1 - rates / (rates + (1 - rates) * 0.5)
    ratio = found.score_noise * found.draws / (rates * least)
    assert ((ratio >= 1 - 1e-9) & (ratio < 1.02)).all()


def test_signal_is_absolute():
    # 1 - 1/n at every pass rate. With log, relative_signal is divided by f'(p) = 1 / p, and signal is not.
    found = expectations(config("grpo", group_size=4, objective="log"), HARD_TO_EASY)
    np.testing.assert_allclose(found.relative_signal, found.signal * HARD_TO_EASY, rtol=1e-12)
    # n = 2: a pair is mixed with probability 2 p q; p_hat = 1/2 then, so A = +-1/2 * 2, and a_i = A / 2 rows. Hence
    # signal = 2 p q * (1/2 / p + 1/2 / q) = 1, which is p times f'.
    found = expectations(config("grpo", group_size=2, objective="log"), HARD_TO_EASY)
    np.testing.assert_allclose(found.signal, 1.0, rtol=1e-12)
    # balance with draws enough keeps n/2 and n/2, with the unbiased mean of 128 as baseline.
    p = HARD_TO_EASY[2:]
    many = expectations(config("balance", samples_per_round=128, max_rounds=1), p)
    np.testing.assert_allclose(many.signal, ((1 - p) / p + p / (1 - p)) / 2, rtol=1e-3)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.8, pytest.param(0.95, marks=pytest.mark.slow)])
def test_retries_without_a_limit(chance):
    # A round of n is all wrong with chance u = q^n, and is then followed by another with chance c: geometric.
    p = np.array([1e-3, 0.01, 0.1, 0.5])
    found = expectations(config("ngu", retry_probability=chance, max_draws=0), p)
    u = (1 - p) ** 4
    rounds = 1 / (1 - chance * u)
    np.testing.assert_allclose(found.rounds, rounds, rtol=1e-9)
    np.testing.assert_allclose(found.draws, 4 * rounds, rtol=1e-9)
    np.testing.assert_allclose(found.draws_std, 4 * np.sqrt(chance * u) / (1 - chance * u), rtol=1e-7)
    np.testing.assert_allclose(found.unmet, (1 - chance) * u / (1 - chance * u), rtol=1e-9)
    # All correct is dropped, which only a first round can be: one correct response ends the retries.
    np.testing.assert_allclose(found.zero_signal, found.unmet + p**4, rtol=1e-9)


def test_what_is_cut_is_negligible():
    strategy = strategies.build(config("ngu", retry_probability=0.95, max_draws=0))
    ends = enumeration.outcomes(strategy, np.array([0.0, 0.5]))
    # 0.95^539 = 9.8e-13 is the first below 1e-12.
    assert 0 < ends.cut < 1e-12 and ends.rounds.max() == 539
    assert 1.0 - ends.probability.sum(axis=0) == pytest.approx([ends.cut, 0.0], abs=1e-13)


# ---- every sequence --------------------------------------------------------------------------------------------------


def sizes(group_size: int, samples_per_round: int, max_rounds: int) -> dict[str, int]:
    return {"group_size": group_size, "samples_per_round": samples_per_round, "max_rounds": max_rounds}


LOG, RETRIED = {"objective": "log"}, {"group_size": 3, "max_draws": 9, "retry_probability": 1.0}
SMALL = {
    "grpo": {"group_size": 5},
    "positive": sizes(3, 3, 3),
    "balance": sizes(3, 4, 3),
    "balance_whole_pool": sizes(3, 3, 3) | {"keep": "pool"},
    "balance_log": sizes(2, 3, 3) | LOG | {"correction": "none"},
    "positive_exact": sizes(4, 3, 3) | LOG,
    "positive_exact_singles": sizes(4, 1, 8) | LOG | {"control_variate": "noise"},
    "positive_exact_constant": sizes(4, 3, 3) | LOG | {"control_variate": "0.2"},
    "balance_exact": sizes(4, 4, 2) | LOG | {"keep": "group", "control_variate": "0.03"},
    "ngu_exact": RETRIED | LOG,
    "balance_stratified": sizes(4, 3, 3) | LOG | {"correction": "stratified"},
    "ngu_stratified": RETRIED | LOG | {"correction": "stratified"},
    "grpo_maxrl": {"group_size": 5, "objective": "maxrl"},
    "estimate": {"samples_per_round": 7, "max_draws": 9, "objective": "log"},
    "dapo": {"group_size": 4, "normalize_by_std": True},
    "ngu": RETRIED,
}


@functools.cache
def all_sequences(name: str):
    """The settings, every reward sequence of 0 and 1 there is, and the pool and the group that each gives."""
    settings = config(name.partition("_")[0], **SMALL[name])
    strategy = strategies.build(settings)
    sequences = np.array(list(itertools.product([0.0, 1.0], repeat=strategy.max_draws)))
    pools = run_strategy(settings, sequences)
    return settings, sequences, pools, [make_group(pool, strategy) for pool in pools]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("p", [0.07, 0.5, 0.8])
def test_every_sequence_through_the_loop(name, p):
    settings, sequences, pools, groups = all_sequences(name)
    strategy = strategies.build(settings)
    if strategy.coefficients is not None and strategy.needs_estimates:  # whose draws do not depend on them
        groups = [make_group(dataclasses.replace(pool, estimate=p), strategy) for pool in pools]
    chance = np.prod(np.where(sequences == 1, p, 1 - p), axis=1)

    def mean(values) -> float:
        return float(np.dot(chance, np.asarray(values, np.float64)))

    rewards = [group.pool.rewards[group.kept] for group in groups]
    sums = np.array([[group.advantages[r == outcome].sum() for group, r in zip(groups, rewards, strict=True)]
                     for outcome in (1, 0)])  # fmt: skip
    gradients = np.array([np.dot(group.advantages, r - p) for group, r in zip(groups, rewards, strict=True)])
    draws = np.array([len(pool.verdicts) for pool in pools])
    rows = mean([len(group.kept) for group in groups])
    # Coefficients are of a prompt, advantages of a row.
    unit = 1.0 if groups[0].per_prompt else rows
    signal = mean(sums[0]) / unit / p - mean(sums[1]) / unit / (1 - p)
    weight = 1 / p if "objective" in SMALL[name] else 1.0
    variance = (mean(gradients**2) - mean(gradients) ** 2) / mean(gradients) ** 2
    expected = {
        "draws": mean(draws),
        "draws_std": np.sqrt(max(mean(draws**2) - mean(draws) ** 2, 0.0)),
        "rounds": mean([pool.rounds for pool in pools]),
        "unmet": mean([not pool.met for pool in pools]),
        "zero_signal": mean([not group.advantages.any() for group in groups]),
        "zero_variance": mean([len(set(pool.rewards)) == 1 for pool in pools]),
        "kept_correct": mean([r.sum() for r in rewards]),
        "kept_wrong": mean([(1 - r).sum() for r in rewards]),
        "pool_mean": mean([pool.rewards.mean() for pool in pools]),
        "signal": signal,
        "relative_signal": mean(gradients) / unit / (weight * p * (1 - p)),
        "variance": variance,
        "variance_draws": variance * mean(draws),
        "score_noise": mean([np.square(group.advantages).sum() for group in groups]) / (unit * signal) ** 2,
    }
    found = expectations(settings, [p])
    assert set(expected) == COLUMNS
    for column, value in expected.items():
        # A deviation of 0 is the root of what rounding left.
        tolerance = 1e-6 if column == "draws_std" else 1e-9
        assert getattr(found, column)[0] == pytest.approx(value, rel=1e-9, abs=tolerance), column
    assert found.rows == pytest.approx(rows, rel=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_the_first_round_is_the_unbiased_pass_rate(name):
    settings, sequences, pools, groups = all_sequences(name)
    p = 0.2
    chance = np.prod(np.where(sequences == 1, p, 1 - p), axis=1)
    # The first n draws, or a first round that is shorter than n.
    size = min(settings.group_size, len(pools[-1].verdicts) // pools[-1].rounds)
    assert np.dot(chance, [pool.rewards[:size].mean() for pool in pools]) == pytest.approx(p, abs=1e-12)
    pool = np.dot(chance, [pool.rewards.mean() for pool in pools])
    kept = [(weight, group.pool.rewards[group.kept].mean()) for weight, group in zip(chance, groups, strict=True)
            if group.kept.size]  # fmt: skip
    group = sum(weight * mean for weight, mean in kept) / sum(weight for weight, _ in kept)
    stops_by_outcome = settings.strategy in ("positive", "balance", "ngu")
    assert (abs(pool - p) > 0.005) == stops_by_outcome
    assert (abs(group - p) > 0.005) == (stops_by_outcome or settings.strategy == "dapo")


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_retries_by_chance_through_the_loop(p):
    # A retry with probability 1/2 is decided inside of the loop, so its results are random even for given rewards.
    settings = config("ngu", max_draws=24, retry_probability=0.5)
    strategy, exact = strategies.build(settings), expectations(settings, [p])
    pools = run_strategy(settings, (np.random.default_rng(1).random((1500, 24)) < p).astype(float))
    groups = [make_group(pool, strategy) for pool in pools]
    gradients = [np.dot(group.advantages, group.pool.rewards[group.kept] - p) for group in groups]
    for found, expected in (
        ([len(pool.verdicts) for pool in pools], exact.draws[0]),
        ([not pool.met for pool in pools], exact.unmet[0]),
        (gradients, exact.signal[0] * exact.rows * p * (1 - p)),
    ):
        assert abs(np.mean(found) - expected) <= 4 * np.std(found) / np.sqrt(len(found))


# ---- plans, sets, and strategies of others ---------------------------------------------------------------------------


def test_a_plan_shares_the_budget_among_the_prompts_given():
    # sqrt(1 / p) of 0.04, 0.16, 0.64 is 5, 2.5, 1.25; 21 draws in these proportions are 12, 6, 3.
    settings = config("estimate", samples_per_round=7, objective="log", objective_epsilon=1e-9, allocation="hybrid")
    found = expectations(settings, [0.64, 0.04, 0.16])
    np.testing.assert_array_equal(found.draws, [3, 12, 6])
    np.testing.assert_array_equal(found.draws_std, 0)
    assert found.rows == 7.0


def test_repeated_pass_rates_are_several_prompts():
    few = expectations(config("balance"), [0.1, 0.5])
    many = expectations(config("balance"), [0.5, 0.1, 0.5, 0.1])
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(many, column), np.tile(getattr(few, column)[::-1], 2))
    rates = np.linspace(0, 1, 2 * enumeration.BLOCK + 1)
    blocks = expectations(config("balance"), rates)
    np.testing.assert_allclose(blocks.draws[::700], expectations(config("balance"), rates[::700]).draws, rtol=1e-14)


def test_rows_make_prompts_that_keep_more_count_for_more():
    # The whole pool of `ngu` grows with its retries: 4 rows at p = 1/2, many at 0.02.
    alone = expectations(config("ngu", max_draws=64), [0.02]), expectations(config("ngu", max_draws=64), [0.5])
    both = expectations(config("ngu", max_draws=64), [0.02, 0.5])
    assert both.rows == pytest.approx((alone[0].rows + alone[1].rows) / 2, rel=1e-12)
    signals = [one.signal[0] * one.rows / both.rows for one in alone]
    np.testing.assert_allclose(both.signal, signals, rtol=1e-12)


def test_a_users_strategy_by_counts():
    # Rounds of 1, then 2, and a third of 3 with chance 1/4, whatever the outcomes: 3 * 3/4 + 6 * 1/4 draws.
    sizes = (1, 2, 3, 0)
    strategy = dataclasses.replace(
        strategies.fixed(6),
        next_draws=lambda record: sizes[record.rounds],
        continue_probability=lambda record: 0.25 if record.rounds == 2 else 1.0,
        max_draws=6,
    )
    ends = enumeration.outcomes(strategy, np.array([0.3]))
    assert np.dot(ends.drawn, ends.probability[:, 0]) == pytest.approx(3.75, abs=1e-15)
    assert np.dot(ends.correct, ends.probability[:, 0]) == pytest.approx(0.3 * 3.75, abs=1e-15)


def test_a_users_strategy_finds_the_pass_rate_in_the_prompt():
    """sgpo draws 1 / p responses, rounded down to a power of two, at least 2; of p = 0 and 1/16 the most, 8."""
    sgpo = config(f"{SGPO}:sgpo", samples_per_round=8, max_rounds=1)
    found = expectations(sgpo, [0.5, 0.0, 0.25, 0.0625, 0.24])
    assert found.draws.tolist() == [2, 8, 4, 8, 4]
    np.testing.assert_allclose(found.zero_signal[[0, 2]], [0.5, 0.75**4 + 0.25**4], rtol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "most", "parts"),
    [
        ((0,), 4, "asks for 0 more responses of prompt 'simulated' after 0 rounds and 0 responses"),
        (
            (4, 4, 0),
            7,
            "asks for 4 more responses of prompt 'simulated' after 1 rounds and 4 responses; .* max_draws = 7",
        ),
        ((4, -1), 8, "asks for -1 more"),
    ],
)
def test_no_outcomes_are_enumerated_of_a_strategy_that_breaks_its_bounds(sizes, most, parts):
    broken = dataclasses.replace(strategies.fixed(4), next_draws=lambda record: sizes[record.rounds], max_draws=most)
    with pytest.raises(ValueError, match=parts):
        enumeration.outcomes(broken, np.array([0.5]))


def test_a_strategy_without_end(monkeypatch):
    standins.constants(monkeypatch, enumeration, MAX_ROUNDS=50)
    endless = strategies.build(config("ngu", retry_probability=0.9, max_draws=0))
    # 0.9^49 = 5.7e-3: the fiftieth round is drawn after 49 retries.
    with pytest.raises(ValueError, match=r"After 50 rounds 5\.7e-03 of all prompts are still being drawn.*max_draws"):
        enumeration.outcomes(endless, np.array([0.0]))


@pytest.mark.parametrize("rates", [[], [0.5, 1.5], [-0.1], [float("nan")]])
def test_what_is_no_pass_rate(rates):
    with pytest.raises(ValueError, match=r"pass rates must be numbers in \[0, 1\]"):
        expectations(config("grpo"), rates)


# ---- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_progress_of_two_draws_by_hand(p):
    """Two draws differ with probability q = 2 p (1 - p), and then g is a constant: E[g]^2 / E[g^2] = q."""
    section = config("grpo", group_size=2)
    of_p, of_log = progress(expectations(section, np.full(7, p)))
    q, num_draws = 2 * p * (1 - p), 2
    assert of_p == pytest.approx(q * (p * (1 - p)) ** 2 / (2 * num_draws))
    assert of_log == pytest.approx(q * (1 - p) ** 2 / (2 * num_draws))


def test_progress_follows_from_prompts_that_teach():
    """Prompts that nobody or everybody solves add nothing but their draws; with no other ones there is no progress."""
    section = config("positive", objective="log", samples_per_round=1)
    some, more, none = (expectations(section, rates) for rates in ([0.3, 0.6], [0.3, 0.6, 0.0, 1.0], [0.0, 1.0]))
    assert more.draws[2:].tolist() == [4.0, 1.0]
    for one, other in zip(progress(some), progress(more), strict=True):
        assert one * some.draws.sum() == pytest.approx(other * more.draws.sum())
    assert progress(none) == (0.0, 0.0)


def test_progress_does_not_depend_on_the_scale_of_advantages():
    section = config("estimate", objective="log")
    found = expectations(section, np.linspace(0.1, 0.9, 9))
    assert progress(dataclasses.replace(found, signal=3.0 * found.signal)) == pytest.approx(progress(found))
