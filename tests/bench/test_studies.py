"""The studies of docs/: their expectations against numbers worked by hand, and what they write and refuse."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from bench import learning_curves, objective_studies, selection_studies, studies
from bench.learning_curves import Curve, average, draw_counts, population
from reinforce_ada_jax.analysis.enumeration import expectations, planned_draws
from reinforce_ada_jax.analysis.inputs import strategy_settings
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.objectives import Objective
from reinforce_ada_jax.config import CollectionConfig
from tests import standins
from tests.analysis import test_simulate
from tests.analysis.test_simulate import lines_after, result
from tests.collection.test_objectives import OBJECTIVES
from tests.running import refused

run = functools.partial(test_simulate.run, command=studies)
prompt_file = test_simulate.prompt_file


def config(strategy: str, **settings: object) -> SimpleNamespace:
    sizes = {"group_size": 4, "samples_per_round": 8, "max_rounds": 4}
    return SimpleNamespace(**({"strategy": strategy} | sizes | settings))


def test_zero_variance():
    """The probability of equal rewards in a group is p^n + (1 - p)^n."""
    found = studies.zero_variance_probability([2, 8], np.array([0.0, 0.1, 0.5]))
    # 0.1^2 + 0.9^2 = 0.82; 0.9^8 + 0.1^8.
    np.testing.assert_allclose(found, [[1, 0.82, 0.5], [1, 0.43046722, 2 / 256]], rtol=1e-12)


@pytest.mark.parametrize(
    ("share", "rates", "size"),
    [
        (0.25, [0.5], 3),  # 2 / 2^3; one of the two terms alone would need 2 draws
        (0.28, [0.4, 0.5], 3),  # 0.4^3 + 0.6^3
        (0.43046722, [0.05, 0.9], 17),  # 0.9^8 + 0.1^8; at 0.05, 0.95^16 is 0.440 and 0.95^17 0.418
    ],
)
def test_groups_that_lose_no_more_at_any_pass_rate(share, rates, size):
    assert studies.equal_group_size(share, np.array(rates)) == size


# ---- epsilon ---------------------------------------------------------------------------------------------------------


def test_draws_that_pay_everything_leave_only_the_baseline_s_bias():
    # 1 / p is 2 and 4, so 24 draws are 8 and 16, and advantages pay nothing. The pool's mean takes 1 / N of it.
    settings = config("estimate", allocation="sampling", samples_per_round=12)
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
    """Pass rates are evenly spaced quantiles of their distribution."""
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
        strategies.fixed(1), coefficients=coefficients, max_draws=4, max_kept=4,
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
    """Curves are averaged at equal updates and at equal draws, with a standard error."""
    curves = [
        Curve(np.array([0.0, 10.0, 20.0]), np.array([0.1, 0.2, 0.4])),
        Curve(np.array([0.0, 20.0, 40.0]), np.array([0.1, 0.4, 0.6])),
    ]
    by_update, by_draws, error = average(curves, (1, 2), (5, 20))
    np.testing.assert_allclose(by_update, [0.3, 0.5])
    np.testing.assert_allclose(by_draws, [(0.15 + 0.175) / 2, 0.4])
    assert error == pytest.approx(0.1)  # deviation 0.1 * sqrt(2) of two, over sqrt(2)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_study_of_zero_variance(prompt_file, tmp_path, capsys):
    folder = tmp_path / "out"
    flag = ("--pass_rates=0.1,0.5", f"--histogram={prompt_file}", f"--output={folder}")
    run("--study=zero_variance", "--strategy=positive", *flag)
    shown = capsys.readouterr().out
    found = result(folder, "zero_variance")
    groups = [[p**n + (1 - p) ** n for p in (0.1, 0.5)] for n in found["group_sizes"]]
    np.testing.assert_allclose(found["groups"], groups, rtol=1e-12)
    first = lines_after(shown, "pass rate")[0]
    # n = 8 is the third of the sizes; `positive` stops at the first correct one, or after 32 wrong ones.
    assert first[3] == "0.4305" and first[-2] == f"{0.9**32 + 0.1**8:.4f}"
    assert "groups of one size that lose no more have n = 32, everywhere" in shown
    mean = [np.mean([1, 0.95**n + 0.05**n, 2 * 0.5**n, 1]) for n in found["group_sizes"]]
    np.testing.assert_allclose(found["prompt_set"], mean, rtol=1e-12)


@pytest.mark.slow  # a study of bench/ alone
def test_epsilon(tmp_path, capsys):
    """The study names the epsilon that moves the gradient."""
    folder = tmp_path / "out"
    run("--study=epsilon", "--pass_rates=0.02,0.1,0.5", f"--output={folder}")
    shown = capsys.readouterr().out
    found = result(folder, "epsilon")
    assert list(found["balance"]["bias"]) == [f"eps={eps:g}" for eps in (0, 1e-4, 1e-3, 1e-2, 3e-2, 0.1)]
    # 32 draws of which one is correct: no pool's pass rate is below 0.031 unless it is 0.
    np.testing.assert_allclose(found["balance"]["bias"]["eps=0.03"], found["balance"]["bias"]["eps=0"], rtol=1e-12)
    assert "balance, eps = 0.03: moves the gradient by more than a tenth nowhere" in shown
    assert "balance, eps = 0.1: moves the gradient by more than a tenth at p = 0.0200, 0.1000" in shown
    assert shown.count("shares of a budget are whole draws") == 1
    # `estimate` adds it to every pass rate: p / (p + eps) = 1/6 at 0.02, and a little more because 1 / sqrt(k/N + eps)
    # is drawn as well as N.
    ratio = found["estimate"]["bias"]["eps=0.1"][0] / found["estimate"]["bias"]["eps=0"][0]
    assert 1 / 6 < ratio < 0.3


@pytest.mark.slow  # its numbers are tried above; test_epsilon writes the files of a study
def test_objectives_and_their_allocations(tmp_path, capsys):
    folder = tmp_path / "out"
    flag = ("--objective_epsilon=1e-9", "--samples_per_round=7", "--pass_rates=0.04,0.16,0.64", "--objective_k=2")
    run("--study=objectives", "--strategy=estimate+log", *flag, f"--output={folder}")
    found = result(folder, "objectives")
    p = np.array(found["pass_rates"])
    expected = {"identity": p, "log": np.log(p), "power(0.5)": [0.2, 0.4, 0.8], "pass_at_k(2)": 2 * p - p**2}
    assert list(found["f"]) == list(found["weight"]) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found["f"][name], values, rtol=1e-12)
    np.testing.assert_allclose(found["weight"]["log"], 1 / p, rtol=1e-12)
    np.testing.assert_allclose(found["weight"]["pass_at_k(2)"], 2 - 2 * p, rtol=1e-12)
    # 21 draws. 1 / sqrt(p) is 5, 2.5, 1.25. 1 / p is 25, 6.25 and (at its bound of 2) 1.6: 19 are left, 15.2 and 3.8.
    # sqrt((1 - p) / p) is 4.9, 2.3 and 0.75: at its bound again, and of 19 12.95 and 6.05.
    draws = found["draws"]["estimate+log"]
    assert draws == {"hybrid": [12, 6, 3], "sampling": [15, 4, 2], "variance": [13, 6, 2]}
    assert lines_after(capsys.readouterr().out, "pass rate")[0][:3] == ["0.0400", "0.0400", "-3.22"]


def markdown_tables(text: str) -> list[dict[str, list[str]]]:
    """The Markdown tables in a text: cells by the first one of their row."""
    tables = []
    for block in text.split("\n\n"):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")]
        tables += [{first: others for first, *others in rows}] if rows else []
    return tables


@pytest.mark.slow  # its numbers are tried above; test_epsilon writes the files of a study
def test_what_strategies_climb(tmp_path, capsys):
    """The tables have signal, draws and noise of each strategy."""
    folder = tmp_path / "out"
    flag = ("--pass_rates=0.1,0.5", f"--output={folder}")
    run("--study=signal", "--strategy=grpo@4,balance,balance+log+exact,positive/1x32+log", *flag)
    shown = capsys.readouterr().out
    signals, draws, noise, _ = markdown_tables(shown)
    # log p cut at 32 draws: (1 - 0.9^32) / 0.1 = 9.66, (1 - 2^-32) / 0.5.
    assert signals == {
        "signal(p)": ["p = 0.1", "p = 0.5"], "---:": ["---:"] * 2,
        "**f' of identity**": ["1", "1"], "`grpo@4`": ["0.75", "0.75"],
        "`balance`": ["3.95", "1"], "balance, many draws": ["4.56", "1"],
        "**f' of log**": ["10", "2"], "`balance+log+exact`": ["9.66", "2"], "`positive/1x32+log`": ["9.66", "2"],
    }  # fmt: skip
    # Single draws until the first success are as many as the signal: the sum over j < 32 of (1 - p)^j.
    assert draws["`positive/1x32+log`"] == ["9.66", "2"] and draws["`grpo@4`"] == ["4", "4"]
    # n = 4, p = 1/2: the sum of A_i (r_i - p) is 4 times the variance of the group, of mean 3/4. It is 0 in 2 of 16
    # outcomes, 3/4 in 8, 1 in 6: (8 * 9/16 + 6) / 16 = 21/32, minus 9/16 is 3/32; times 4 over 9/16 is 2/3.
    assert noise["`grpo@4`"][1] == "0.667"
    assert "climbs: log(p / (1 - p)) / 2 - p" in shown
    found = result(folder, "signal")["exact"]["positive/1x32+log"]
    np.testing.assert_allclose(found["signal"], [(1 - 0.9**32) / 0.1, (1 - 2**-32) / 0.5], rtol=1e-12)


def test_balance_climbs_another_objective_than_the_pass_rate():
    p = np.array([0.05, 0.2, 0.5, 0.7, 0.95])
    limit = objective_studies.balance_limit(p)
    # The slope of log(p / (1 - p)) / 2 - p.
    step = 1e-6
    f = [np.log(x / (1 - x)) / 2 - x for x in (p - step, p + step)]
    np.testing.assert_allclose(limit, (f[1] - f[0]) / (2 * step), rtol=1e-6)
    # One round of 600 meets the rule, and its mean is not biased.
    settings = strategy_settings("balance/600x1", CollectionConfig())
    np.testing.assert_allclose(expectations(settings, p).signal, limit, rtol=1e-9)


def test_the_strategies_that_the_study_shows_are_allowed():
    for entry in studies.STRATEGIES["signal"]:
        assert entry.startswith(strategy_settings(entry, CollectionConfig()).strategy)


@pytest.mark.slow  # its numbers are tried above; test_epsilon writes the files of a study
def test_learning(tmp_path, capsys, monkeypatch):
    """The study of learning compares strategies after equal updates and equal draws."""
    standins.constants(monkeypatch, studies, UPDATES=(1, 4), DRAWS=(1000, 4000), POPULATION=64)
    folder = tmp_path / "out"
    run("--study=learning", f"--output={folder}")
    shown = capsys.readouterr().out
    found = result(folder, "learning")
    assert len(found["start"]) == 64 and np.mean(found["start"]) == pytest.approx(1 / 3, abs=1e-3)
    for title in ("gradients as they are", "gradients of equal lengths, as Adam makes them"):
        assert list(found[title]) == list(studies.STRATEGIES["learning"])
        assert all(1 / 3 < entry["by_update"][0] < entry["by_update"][1] < 1 for entry in found[title].values())
    # Draws are 8 a prompt on average with either strategy; 64 prompts an update.
    cells = {row[0]: row for row in lines_after(shown, "1 up.")}
    assert cells["grpo@8"][-2] == cells["estimate+log"][-2] == "8.0" and cells["grpo@4"][-2] == "4.0"
    assert shown.count("Farthest after 4 updates: ") == 2
    assert math.isclose(
        float(cells["grpo@4"][1]), found["gradients as they are"]["grpo@4"]["by_update"][0], abs_tol=5e-4
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--study=objectives", "--strategy=balance"], ["balance plans none", "estimate+log"]),
        (["--study=objectives", "--strategy=estimate+log", "--pass_rates=0,0.5"], ["above 0 and below 1"]),
        (["--study=signal", "--pass_rates=0.5,1"], ["above 0 and below 1"]),
        (["--study=epsilon", "--pass_rates=0,0.5"], ["--study=epsilon", "above 0 and below 1"]),
    ],
)
def test_mistakes(capsys, arguments, parts):
    """A wrong flag is named, with what is allowed."""
    shown = refused(capsys, run, *arguments).err
    assert all(part in shown for part in parts), shown


# ---- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["identity", "log", "power", "pass_at_k"])
def test_noise_and_draws_of_single_draws_have_closed_forms(objective):
    # The first success is number j with probability p (1 - p)^j, and has the coefficient c_j: v = sum c_j^2 p (1-p)^j.
    section = strategy_settings(f"positive/1x32+{objective}+exact", CollectionConfig())
    p, j = np.array([0.02, 0.3, 0.9]), np.arange(32)
    noise, draws = selection_studies.noise_and_draws(section, p)
    squares = Objective(objective, 0.5, k=8).series(32) ** 2
    np.testing.assert_allclose(noise, p * (squares @ (1 - p) ** j[:, None]), rtol=1e-9)
    np.testing.assert_allclose(draws, (1 - (1 - p) ** 32) / p, rtol=1e-9)
    if objective == "log":
        np.testing.assert_allclose(noise / draws, p, rtol=1e-9)


def test_savings_by_hand():
    # Two kinds of prompts, p = 1/4 and 1/2, one draw each for the objective identity: v = p, c = 1.
    section = strategy_settings("positive/1x1+exact", CollectionConfig())
    best, visited = selection_studies.savings(section, np.array([0.25, 0.5]), np.array([0.5, 0.5]))
    # E[sqrt(v)]^2 / E[v] = (0.5 + 0.7071)^2 / 4 / 0.375
    assert best == pytest.approx((0.5 + 0.5**0.5) ** 2 / 4 / 0.375)
    # Two draws give (K + 0.5) / (1.7 + 1) with K = 0, 0.7, 1, 1.7: bins 1, 4, 5 and 8.
    states = np.array([[9, 3, 3, 1], [4, 4, 4, 4]]) / 16
    share = states.mean(axis=0)
    rate = states.T @ [0.25, 0.5] / 2 / share  # mean of v in each state
    q = 0.25 + 0.75 * np.sqrt(rate) / (share @ np.sqrt(rate))
    assert visited == pytest.approx((share * rate) @ (1 / q) / 0.375)
    assert best < visited < 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_values_of_objectives(objective):
    """The value of each objective is that of its formula."""
    p, alpha = np.array([0.01, 0.25, 0.5]), 0.3
    found = objective_studies.value(Objective(objective, alpha, k=3), p)
    np.testing.assert_allclose(found, OBJECTIVES[objective](p, alpha), rtol=1e-12)
