"""Coefficients of corrections, by hand and through the real collection; tests/analysis has their exact signals."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import corrections, strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, collect
from reinforce_ada_jax.collection.objectives import Objective
from reinforce_ada_jax.collection.simulate import run_strategy
from reinforce_ada_jax.types import EQUAL_NOISE, Pool, Prefetch, Prompt, Response, ScoreNoise, Verdict


def config(strategy: str, size: int, rounds: int, **settings: object) -> SimpleNamespace:
    sizes = {"group_size": 4, "samples_per_round": size, "max_rounds": rounds}
    return SimpleNamespace(**({"strategy": strategy, "objective": "log"} | sizes | settings))


def group_of(settings: SimpleNamespace, rewards: list[float]):
    (pool,) = run_strategy(settings, np.array([rewards]))
    return make_group(pool, strategies.build(settings))


# ---- the series of f' ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0, 2.0])
def test_the_series_of_a_power(alpha):
    # alpha Gamma(j + 1 - alpha) / (Gamma(1 - alpha) j!); for alpha = 1 and 2 it ends: 1, and 2 p = 2 - 2 (1 - p).
    if alpha < 1:
        expected = [
            alpha * math.exp(math.lgamma(j + 1 - alpha) - math.lgamma(1 - alpha) - math.lgamma(j + 1)) for j in range(9)
        ]
    else:
        expected = {1.0: [1.0, 0.0], 2.0: [2.0, -2.0]}[alpha] + [0.0] * 7
    np.testing.assert_allclose(Objective("power", alpha).series(9), expected, rtol=1e-12, atol=1e-15)
    p = 0.6
    total = Objective("power", alpha).series(200) @ (1 - p) ** np.arange(200)
    assert total == pytest.approx(alpha * p ** (alpha - 1), rel=1e-12)


def test_the_other_series():
    """Coefficients of each objective in powers of 1 - p."""
    assert Objective("identity").series(3).tolist() == [1.0, 0.0, 0.0]
    assert Objective("log").series(3).tolist() == Objective("maxrl").series(3).tolist() == [1.0, 1.0, 1.0]
    assert Objective("pass_at_k", k=2).series(3).tolist() == [0.0, 2.0, 0.0]  # 2 (1 - p)


# ---- exact -----------------------------------------------------------------------------------------------------------


def test_the_weight_of_a_round_by_hand():
    # The second round of 3, two correct: the first of them is draw 3 with 2 of the 3 orders, draw 4 with 1.
    square_root = Objective("power", 0.5)
    c = square_root.series(6)
    assert corrections.first_success_weight(square_root, 3, 3, 2) == pytest.approx((2 * c[3] + c[4]) / 3, rel=1e-14)
    # Under log every c_j is 1, so every first success weighs 1.
    for size, begin, hits in ((8, 0, 1), (8, 24, 5), (1, 31, 1)):
        assert corrections.first_success_weight(Objective("log"), size, begin, hits) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2), (2, 3), (1, 3, 2)])
def test_rounds_of_different_sizes_climb_the_same_series(sizes):
    # Every order of outcomes until the first round with a correct one; no coefficient is on a wrong response.
    p, most, objective = 0.3, sum(sizes), Objective("pass_at_k", k=5)
    coefficients, signal = corrections.exact(objective), 0.0
    for outcomes in itertools.product((0.0, 1.0), repeat=most):
        ends = np.cumsum(sizes)
        rounds = 1 + next((t for t, end in enumerate(ends) if any(outcomes[:end])), len(sizes) - 1)
        whole = run_strategy(config("grpo", most, 1, group_size=most), np.array([outcomes]))[0]
        drawn, round_sizes = int(ends[rounds - 1]), sizes[:rounds]
        pool = Pool(whole.prompt, whole.responses[:drawn], whole.verdicts[:drawn], rounds, True, None, round_sizes)
        kept, of_kept = coefficients(pool, np.ones(drawn, bool))
        assert pool.correct[kept].all()
        signal += p ** sum(outcomes) * (1 - p) ** (most - sum(outcomes)) * of_kept.sum() / p
    # f' = 5 (1 - p)^4, of which no round size changes anything.
    assert signal == pytest.approx(5 * 0.7**4 * (most >= 5), rel=1e-12)


def test_all_correct_draws_share_the_weight():
    # balance goes on after round 1 for a second correct response; the round after that has two more.
    group = group_of(config("balance", 4, 4), [0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0] + [0] * 4)
    assert group.kept.tolist() == [5, 8, 9]
    np.testing.assert_allclose(group.advantages, [1 / 3] * 3, rtol=1e-14)
    group = group_of(config("balance", 4, 4), [0, 1, 1, 0] + [0] * 12)
    assert (group.kept.tolist(), group.advantages.tolist()) == ([1, 2], [0.5, 0.5])
    # All correct is a success too, and never solved is nothing.
    assert group_of(config("positive", 4, 4), [1] * 16).advantages.tolist() == [0.25] * 4
    assert not group_of(config("positive", 4, 4), [0] * 16).kept.size
    # The first successful round sets it: of one correct draw among 4, c is that of the mean order, 1/4 for identity.
    group = group_of(config("balance", 4, 4, objective="identity", correction="exact"), [0, 0, 0, 1, 1] + [0] * 11)
    assert (group.kept.tolist(), group.advantages.tolist()) == ([3, 4], [0.125, 0.125])


def test_rows_of_correct_draws_are_limited_without_a_change_of_the_weight():
    # All correct, so balance looks for wrong ones until the end: 16 correct draws.
    for keep, rows in (("", 4), ("group", 2), ("pool", 16)):
        settings = config("balance", 4, 4, keep=keep, group_size=2)
        group = group_of(settings, [1] * 16)
        assert group.kept.tolist() == list(range(rows)) and group.advantages.sum() == pytest.approx(1.0, rel=1e-14)
        assert strategies.build(settings).max_kept == rows
    # Where rounds end by correct draws alone, no more rows are reserved than there can be.
    assert strategies.build(config("positive", 1, 16)).max_kept == 1
    assert strategies.build(config("positive", 8, 4)).max_kept == 8
    assert strategies.build(config("positive", 4, 8, k_pos=3, keep="pool")).max_kept == 6


def test_single_draws_until_the_first_success():
    group = group_of(config("positive", 1, 32), [0] * 20 + [1] * 12)
    assert (group.kept.tolist(), group.advantages.tolist(), len(group.pool.responses)) == ([20], [1.0], 21)


def test_a_group_limits_the_rows_and_not_the_weight():
    group = group_of(config("positive", 8, 4, keep="group"), [1] * 6 + [0] * 26)
    assert (group.kept.tolist(), group.advantages.tolist()) == ([0, 1, 2, 3], [0.25] * 4)


def test_the_control_variate_is_subtracted_from_the_whole_first_round():
    settings = {"control_variate": "0.1"}
    group = group_of(config("positive", 3, 4, **settings), [0, 0, 0, 0, 1, 0] + [0] * 6)
    assert group.kept.tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(group.advantages, [-0.1, -0.1, -0.1, 1.0], rtol=1e-14)
    group = group_of(config("positive", 3, 4, **settings), [0, 1, 0] + [0] * 9)
    np.testing.assert_allclose(group.advantages, [-0.1, 0.9, -0.1], rtol=1e-14)
    # A prompt without a success keeps its first round, and not the draws after it.
    assert group_of(config("positive", 3, 4, **settings), [0] * 12).kept.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("objective", "size", "begin", "noise", "expected"),
    [
        (Objective("log"), 1, 5, EQUAL_NOISE, 0.3),
        # Mean weight of a draw: that of the first success, over M.
        (Objective("identity"), 4, 0, EQUAL_NOISE, 0.3 / 4),
        (Objective("log"), 2, 2, EQUAL_NOISE, 0.3 * (1 + 0.7) / 2),
        # 3 (1 - p)^2 is the weight of draw 2 alone.
        (Objective("pass_at_k", k=3), 2, 0, EQUAL_NOISE, 0.0),
        (Objective("pass_at_k", k=3), 2, 2, EQUAL_NOISE, 0.3 * 3 / 2),
        (Objective("log"), 1, 0, ScoreNoise(0.5, 2.0, 4.0), 0.3 * 0.5 / (0.3 * 2 + 0.7 * 4)),
        (Objective("log"), 1, 0, ScoreNoise(0.0, 0.0, 0.0), 0.0),
    ],
)
def test_the_control_variate_of_a_round(objective, size, begin, noise, expected):
    found = corrections.control_variate_at(objective, size, begin, 0.3, noise)
    assert found == pytest.approx(expected, rel=1e-14)


def noisy_group(settings, rewards, noise=EQUAL_NOISE, estimate=0.5):
    (pool,) = run_strategy(settings, np.array([rewards]))
    pool = dataclasses.replace(pool, noise=ScoreNoise(*noise), estimate=estimate)
    return make_group(pool, strategies.build(settings))


def test_the_control_variate_by_noise_covers_the_draws_until_the_first_success():
    settings = config("positive", 1, 16, control_variate="noise")
    # After j failures the pass rate is 8 * 0.5 / (8 + j); the objective log and M = 1 have b = p.
    group = noisy_group(settings, [0, 0, 1] + [0] * 13)
    assert group.kept.tolist() == [0, 1, 2]
    np.testing.assert_allclose(group.advantages, [-4 / 8, -4 / 9, 1 - 4 / 10], rtol=1e-14)
    # Noise 0.2 of a success beyond its mean, of 0.4 in all, and 1 of a wrong one: b = 0.2 p / (0.4 p + 1 - p).
    group = noisy_group(settings, [1] + [0] * 15, noise=(0.2, 0.4, 1.0))
    np.testing.assert_allclose(group.advantages, [1 - 0.1 / 0.7], rtol=1e-14)
    # balance goes on after the success, without b. Its rounds of 2 weigh p + p (1 - p) over 2 at first.
    settings = config("balance", 2, 8, control_variate="noise")
    group = noisy_group(settings, [0, 1, 0, 0, 1, 0] + [0] * 10)
    assert group.kept.tolist() == [0, 1, 4]
    np.testing.assert_allclose(group.advantages, [-0.375, 0.5 - 0.375, 0.5], rtol=1e-14)


def test_the_control_variate_by_noise_adds_few_rows():
    settings = config("positive", 1, 16, control_variate="noise")
    assert noisy_group(settings, [0] * 16).kept.tolist() == list(range(8)), "draws beyond 8 are not covered"
    # p is 0.06, then 8 * 0.06 / 9 = 0.053 and 0.048: less than 0.05 is not worth a row.
    assert noisy_group(settings, [0] * 16, estimate=0.06).kept.tolist() == [0, 1]
    # Where each prompt has one correct response its score has no noise, so b is 0; so it is while nothing is known.
    for noise in ((0.0, 0.4, 1.0), (0.0, 0.0, 0.0)):
        group = noisy_group(settings, [0, 1] + [0] * 14, noise=noise)
        assert (group.kept.tolist(), group.advantages.tolist()) == ([1], [1.0])
    assert strategies.build(settings).max_kept == 9 and strategies.build(settings).needs_estimates
    # Rounds of 3 cover 9 draws, and 3 or 4 correct ones of a later round or group follow; or all 8 draws are rows.
    assert strategies.build(config("positive", 3, 6, control_variate="noise")).max_kept == 12
    assert strategies.build(config("balance", 3, 6, control_variate="noise")).max_kept == 13
    assert strategies.build(config("positive", 2, 4, control_variate="noise")).max_kept == 8


def test_a_control_variate_is_fixed_before_its_round():
    # Everything that b of round t may depend on is in the rounds before it: their sizes, since none had a success.
    settings = config("positive", 2, 8, control_variate="noise")
    longest = noisy_group(settings, [0] * 16).advantages
    for draws in itertools.product((0, 1), repeat=6):
        group = noisy_group(settings, [*draws] + [0] * 10)
        correct = group.pool.correct
        before_success = 2 + int(np.flatnonzero(correct)[0]) // 2 * 2 if correct.any() else 8
        weights = np.where(correct, 1 / max(correct.sum(), 1), 0.0)[:before_success]
        np.testing.assert_allclose(group.advantages, weights + longest[:before_success], rtol=1e-14)


def test_a_reward_scales_its_own_response():
    # A length penalty on a correct response: its own share of the weight shrinks. Wrong responses have no part.
    group = group_of(config("positive", 4, 2), [0.8, 1.0, 0.3, 0.0] + [0] * 4)
    assert (group.kept.tolist(), group.advantages.tolist()) == ([0, 1], [0.4, 0.5])


def test_retries_by_chance_are_paid_for():
    # Round 2 is reached with probability 1/4, whatever its outcomes, so a success there weighs 4.
    settings = config("ngu", 8, 4, group_size=2, retry_probability=0.5, max_draws=0)
    strategy = strategies.build(settings)
    pool = run_strategy(config("ngu", 8, 4, group_size=2, retry_probability=1.0), np.array([[0, 0, 0, 0, 0, 1] * 6]))[0]
    assert make_group(pool, strategy).advantages.tolist() == [4.0]


# ---- stratified and maxrl --------------------------------------------------------------------------------------------


def test_a_stratified_group_stands_for_its_pool():
    # k = 2 of N = 8, p_hat = 1/4, w = 4: A+ = w p_hat (1 - p_hat) = 3/4, of two correct rows; -3/4 of two wrong ones.
    group = group_of(config("balance", 8, 1, correction="stratified"), [0, 1, 0, 0, 0, 0, 1, 0])
    assert group.kept.tolist() == [0, 1, 2, 6]
    np.testing.assert_allclose(group.advantages, [-0.375, 0.375, -0.375, 0.375], rtol=1e-14)
    # The whole pool has the same sums.
    group = group_of(config("balance", 8, 1, correction="stratified", keep="pool"), [0, 1, 0, 0, 0, 0, 1, 0])
    np.testing.assert_allclose(group.advantages, np.where([0, 1, 0, 0, 0, 0, 1, 0], 0.375, -0.125), rtol=1e-14)


@pytest.mark.parametrize(("rewards", "kept"), [([1], [0]), ([0, 1], [0, 1]), ([0] * 5 + [1], [0, 1, 2, 5])])
def test_a_pool_smaller_than_a_group_is_kept_whole(rewards, kept):
    group = group_of(config("positive", 1, 6, correction="stratified"), rewards + [0] * (6 - len(rewards)))
    assert group.kept.tolist() == kept
    assert group.advantages.sum() == pytest.approx(0.0, abs=1e-15)


def test_maxrl_by_hand():
    settings = config("grpo", 8, 4, objective="maxrl")
    np.testing.assert_allclose(group_of(settings, [0, 1, 0, 0]).advantages, [-0.25, 0.75, -0.25, -0.25])
    for alike in (0, 1):
        assert not group_of(settings, [alike] * 4).advantages.any()


# ---- a policy of two tokens, through the real loop -------------------------------------------------------------------

PASS_RATE, PROMPTS = 0.15, 3000


def gradient(settings: SimpleNamespace, *, barrier: bool = False, overlap: bool = False) -> np.ndarray:
    """Returns sum_i a_i (r_i - p) / (p q) of each prompt: its mean is the signal, without any enumeration.

    The policy answers with token 1 (right) with probability p, else 0; its score is r - p in units of its logit.
    """
    rng, strategy = np.random.default_rng(7), strategies.build(settings)
    tokens = (rng.random((2 * PROMPTS, 64)) < PASS_RATE).astype(np.int32)
    prompts = [Prompt(str(row), problem="", answer="", tokens=np.zeros(1, np.int32)) for row in range(2 * PROMPTS)]

    def sample(queue):
        in_flight = []
        while True:
            in_flight += queue.take(5000)
            in_flight += queue.take_prefetch(5000 - len(in_flight)) if overlap else []
            if not in_flight:
                return
            # A part of what is in flight ends, in an order that has nothing to do with that of the requests.
            rng.shuffle(in_flight)
            half = (len(in_flight) + 1) // 2
            ended, in_flight = in_flight[:half], in_flight[half:]
            yield [
                Response(
                    request.prompt.id, request.draw, tokens[int(request.prompt.id), request.draw : request.draw + 1],
                    np.zeros(1, np.float32), truncated=False,
                ) for request in ended
            ]  # fmt: skip

    def verify(pairs):
        return [Verdict(bool(response.tokens[0]), float(response.tokens[0])) for _, response in pairs]

    if overlap:
        prefetch = Prefetch(prompts[PROMPTS:])
        collect(prompts[:PROMPTS], sample, verify, strategy, carried=CarriedRollouts(prefetch=prefetch))
        assert prefetch.partial
        pools = collect(prompts[PROMPTS:], sample, verify, strategy, carried=CarriedRollouts(partial=prefetch.partial))
    else:
        pools = collect(prompts[:PROMPTS], sample, verify, strategy, CollectOptions(barrier=barrier))
    groups = [make_group(pool, strategy) for pool in pools]
    sums = [np.dot(group.advantages, group.pool.correct[group.kept] - PASS_RATE) for group in groups]
    return np.array(sums) / (PASS_RATE * (1 - PASS_RATE))


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        pytest.param(config("positive", 2, 8), {}, marks=pytest.mark.slow),  # the next ones differ in `how` alone
        # test_collect.py has barriers.
        pytest.param(config("positive", 2, 8), {"barrier": True}, marks=pytest.mark.slow),
        (config("positive", 2, 8), {"overlap": True}),
        # test_enumeration.py has control variates of any number, without chance.
        pytest.param(config("positive", 1, 16, control_variate="0.15"), {}, marks=pytest.mark.slow),
        (config("balance", 4, 4, objective="power", control_variate="noise"), {}),
        (config("positive", 1, 16, control_variate="noise"), {}),
        (config("ngu", 8, 4, group_size=2, retry_probability=1.0, max_draws=16), {}),
    ],
)
def test_monte_carlo_through_the_loop(settings, how):
    found = gradient(settings, **how)
    expected = Objective(settings.objective).series(16) @ (1 - PASS_RATE) ** np.arange(16)
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - expected) < 4 * error
    # The test can tell it from signals that are wrong by a tenth.
    assert error < expected / 25
