"""Draws and kept responses of every strategy, by hand. Advantages are in test_advantages.py."""

import dataclasses
import importlib
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax import config as config_module
from reinforce_ada_jax.analysis.enumeration import expectations
from reinforce_ada_jax.collection import corrections, strategies
from reinforce_ada_jax.collection.advantages import keep_draws, make_group
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, collect
from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, to_bytes
from reinforce_ada_jax.collection.simulate import run_strategy
from reinforce_ada_jax.collection.strategies import PromptProgress, uniform_at_address
from reinforce_ada_jax.config import collection_rules, values
from reinforce_ada_jax.types import PartialRollouts, Prompt, Response, Verdict
from reinforce_ada_jax.user_code import UserCodeError
from tests import standins

PROMPT = Prompt("p", "", "", np.zeros(1, np.int32))


def config(strategy: str, group_size: int = 5, samples_per_round: int = 8, max_rounds: int = 4, **settings):
    return SimpleNamespace(
        strategy=strategy, group_size=group_size, samples_per_round=samples_per_round, max_rounds=max_rounds, **settings
    )


def progress(rounds: int, drawn: int, correct: int) -> PromptProgress:
    return PromptProgress(PROMPT, rounds=rounds, drawn=drawn, correct=correct)


def draw(section, bits: dict[str, str], replacements: int = 0, estimates=None, **options):
    """Pools by `section` of prompts whose i-th response is correct where `bits[name][i]` is 1, or always at "1*".

    The last `replacements` prompts replace dropped ones; `estimates` are pass rates by name.
    """

    def sample(queue):
        while requests := queue.take(1000):
            yield [
                Response(request.prompt.id, request.draw, np.zeros(1, np.int32), np.zeros(1, np.float32), False)
                for request in requests
            ]

    def verify(pairs):
        scripts = [(bits[prompt.id], response.draw) for prompt, response in pairs]
        right = [script[0 if script.endswith("*") else draw] == "1" for script, draw in scripts]
        return [Verdict(correct, float(correct)) for correct in right]

    prompts = [Prompt(name, "", "", np.zeros(1, np.int32)) for name in bits]
    estimate_fn = estimates and (lambda prompts: np.array([estimates[prompt.id] for prompt in prompts]))
    first = len(prompts) - replacements
    return collect(
        prompts[:first],
        sample,
        verify,
        section,
        CollectOptions(replacements=prompts[first:], estimate_fn=estimate_fn, **options),
    )


# ---- every strategy, by hand -----------------------------------------------------------------------------------------

QUARTERS = {"group_size": 4, "samples_per_round": 4, "max_rounds": 2}
# All of w is paid by draws, so advantages have the factor 1.
ESTIMATE = config("estimate", **QUARTERS, objective="log", allocation="sampling")
SIX, RETRY = (
    config(**vars(ESTIMATE) | {"samples_per_round": 6, "max_draws": 8}),
    config("ngu", **QUARTERS, retry_probability=1.0),
)


@pytest.mark.parametrize(
    ("section", "bits", "drawn", "met", "kept", "advantages"),
    [
        # One round of n, compared with itself: mean 1/4.
        (config("grpo", 4), "10000000", 4, True, [0, 1, 2, 3], [0.75, -0.25, -0.25, -0.25]),
        # The first hit is in round 2: mean of the pool 1/8, of the group it would be 1/4.
        (config("positive", **QUARTERS), "00000100", 8, True, [0, 1, 2, 5], [-0.125, -0.125, -0.125, 0.875]),
        (config("positive", **QUARTERS), "01000100", 4, True, [0, 1, 2, 3], [-0.25, 0.75, -0.25, -0.25]),
        # All correct meets `positive`, and nothing is wrong to compare with.
        (config("positive", **QUARTERS), "11110000", 4, True, [0, 1, 2, 3], [0, 0, 0, 0]),
        # 2 correct and 2 wrong after round 2; mean 2/8.
        (config("balance", **QUARTERS), "01000010", 8, True, [0, 1, 2, 6], [-0.25, 0.75, -0.25, 0.75]),
        (config("balance", **QUARTERS), "01100010", 4, True, [0, 1, 2, 3], [-0.5, 0.5, 0.5, -0.5]),
        # Never met: one wrong, so three correct fill up; mean 7/8.
        (config("balance", **QUARTERS), "11110111", 8, False, [0, 1, 2, 4], [0.125, 0.125, 0.125, -0.875]),
        # The whole budget of one prompt (M = 4) in one round, all of it kept.
        (ESTIMATE, "01000000", 4, True, [0, 1, 2, 3], [-0.25, 0.75, -0.25, -0.25]),
        (SIX, "01000000", 6, True, [0, 1, 2, 3, 4, 5], [-1 / 6, 5 / 6] + [-1 / 6] * 4),
        # One round of n whatever comes; nothing is kept of a group without variance.
        (config("dapo", 4), "01000000", 4, True, [0, 1, 2, 3], [-0.25, 0.75, -0.25, -0.25]),
        (config("dapo", 4), "00000000", 4, False, [], []),
        (config("dapo", 4), "11110000", 4, False, [], []),
        # Rounds of n while all is wrong (always, at probability 1); mean 1/8, and 7 wrong ones share -7/8.
        (RETRY, "00000100", 8, True, list(range(8)), [-0.125] * 5 + [0.875] + [-0.125] * 2),
        # Mixed or all correct: no further round. All correct: dropped.
        (RETRY, "11010000", 4, True, [0, 1, 2, 3], [0.25, 0.25, -0.75, 0.25]),
        (RETRY, "11110000", 4, True, [], []),
        # The retry is all correct: with the failures before it that is a group, mean 4/8.
        (RETRY, "00001111", 8, True, list(range(8)), [-0.5] * 4 + [0.5] * 4),
        # Given up on (M * N = 8 draws): dropped; rows of zeros would dilute the token mean of the others.
        (RETRY, "00000000", 8, False, [], []),
    ],
)  # fmt: skip
def test_by_hand(section, bits, drawn, met, kept, advantages):
    """Draws, kept responses and advantages are those counted by hand."""
    (pool,) = run_strategy(section, np.array([[int(bit) for bit in bits]]))
    assert (len(pool.responses), pool.met) == (drawn, met)
    group = make_group(pool, strategies.build(section))
    assert group.kept.tolist() == kept
    np.testing.assert_allclose(group.advantages, advantages, rtol=1e-14)


def test_every_configured_name_builds_from_the_defaults():
    assert tuple(strategies.BUILT_IN) == values.STRATEGIES
    for name in values.STRATEGIES:
        section = dataclasses.replace(config_module.Config().collection, strategy=name)
        asked = dataclasses.replace(progress(0, 0, 0), planned=8)
        assert strategies.build(section).next_draws(asked) > 0


def test_what_a_section_lacks_has_its_default():
    # n = 4, M = 8, N = 4, and every other key of config.py's defaults: the published run of `balance`.
    section = strategies.with_defaults(config("balance", 4))
    for key, value in config_module.defaults().collection.items():
        assert getattr(section, key) == value
    assert strategies.with_defaults(config("balance", 4, k_pos=3)).k_pos == 3


# ---- rounds until a rule is met --------------------------------------------------------------------------------------


def test_grpo_draws_one_round_of_the_group():
    strategy = strategies.build(config("grpo"))
    assert strategy.next_draws(progress(0, 0, 0)) == 5  # not samples_per_round
    assert strategy.next_draws(progress(1, 5, 0)) == 0
    assert strategy.met(progress(1, 5, 0))
    assert (strategy.max_draws, strategy.max_kept, strategy.baseline) == (5, 5, "group")
    assert strategy.keep(np.array([False, True, True])).tolist() == [0, 1, 2]


def test_fixed_draws_one_round_and_keeps_it():
    strategy = strategies.fixed(3)
    assert [strategy.next_draws(progress(0, 0, 0)), strategy.next_draws(progress(1, 3, 1))] == [3, 0]
    assert strategy.keep(np.zeros(3, bool)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "drawn", "correct", "met"),
    [
        ("positive", 8, 0, False),
        ("positive", 8, 1, True),
        ("positive", 8, 8, True),  # all correct meets it, though the group will have no variance of its own
        ("balance", 8, 1, False),
        ("balance", 8, 2, True),  # n = 5: 2 correct and 3 wrong
        ("balance", 8, 5, True),
        ("balance", 8, 6, False),  # only 2 wrong: rounding the other way would have stopped here
        ("balance", 8, 8, False),
    ],
)
def test_rules(name, drawn, correct, met):
    """A prompt stops when the rule of its strategy is met."""
    strategy = strategies.build(config(name))
    after_one = progress(1, drawn, correct)
    assert strategy.met(after_one) == met
    assert strategy.next_draws(after_one) == (0 if met else 8)


@pytest.mark.parametrize("name", ["positive", "balance"])
def test_the_round_limit_ends_an_unmet_rule(name):
    strategy = strategies.build(config(name))
    draws = [strategy.next_draws(progress(rounds, 8 * rounds, 0)) for rounds in range(5)]
    assert draws == [8, 8, 8, 8, 0]
    assert (strategy.max_draws, strategy.max_kept, strategy.baseline) == (32, 5, "pool")
    assert not strategy.met(progress(4, 32, 0))


def test_a_rule_true_of_nothing_still_draws_a_round():
    next_draws = strategies.until(
        lambda progress: progress.correct == progress.drawn, samples_per_round=2, max_rounds=3
    )
    assert [next_draws(progress(0, 0, 0)), next_draws(progress(1, 2, 2)), next_draws(progress(1, 2, 1))] == [2, 0, 2]


def test_goals_other_than_the_groups_halves():
    # 8 correct and 8 wrong, group of 4: 2 of 8 correct a round gives (2, 6), (4, 12), (6, 18), (8, 24).
    # With the usual goals of 2 and 2 the first round would do; with 8 correct alone, 5 of 8 a round would stop after 2.
    section = config("balance", 4, k_pos=8, k_neg=8)
    scarce, even, never = run_strategy(section, np.array([[1, 1, 0, 0, 0, 0, 0, 0] * 4, [1, 0] * 16, [1] * 32]))
    assert [len(pool.responses) for pool in (scarce, even, never)] == [32, 16, 32]
    assert [pool.met for pool in (scarce, even, never)] == [True, True, False]
    # The group stays one of n: 2 of the 8 hits, at the pool's mean of 8/32.
    group = make_group(scarce, strategies.build(section))
    assert group.kept.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(group.advantages, [0.75, 0.75, -0.25, -0.25])
    # One goal set, the other the strategy's own; and `positive` with more than one hit.
    assert collection_rules.goals(strategies.with_defaults(config("balance", 5, k_pos=1))) == (1, 3)
    assert not strategies.build(config("positive", k_pos=2)).met(progress(1, 8, 1))


# ---- keep ------------------------------------------------------------------------------------------------------------


def test_keeping_the_pool_or_a_group_of_it():
    rewards = np.array([[0, 1, 0, 0, 0, 0, 1, 0]])
    section = config("balance", **QUARTERS, keep="pool")
    (pool,) = run_strategy(section, rewards)
    strategy = strategies.build(section)
    group = make_group(pool, strategy)
    assert group.kept.tolist() == list(range(8))
    np.testing.assert_array_equal(group.advantages, np.where(rewards[0] == 1, 0.75, -0.25))
    assert strategy.max_kept == 8
    # Only groups need rounds that fill them.
    assert strategies.build(config("positive", 16, keep="pool")).max_kept == 32
    with pytest.raises(ValueError, match="group_size is 16, collection.samples_per_round is 8"):
        strategies.build(config("positive", 16))

    # The draws of `estimate` pay a part of each prompt's weight, which a group of one size would lose.
    with pytest.raises(ValueError, match="keep is 'group' with the strategy estimate"):
        strategies.build(config(**vars(ESTIMATE), keep="group"))


@pytest.mark.parametrize("name", ["dapo", "ngu"])
@pytest.mark.parametrize("keep", ["group", "pool"])
def test_keep_must_not_undo_what_a_strategy_drops(name, keep):
    # dapo would keep groups without variance, and be grpo.
    with pytest.raises(ValueError, match=f"keep is '{keep}' with the strategy {name}.*leave it empty"):
        strategies.build(config(name, keep=keep))


# ---- estimate --------------------------------------------------------------------------------------------------------

# With eps = 0.01 the pass rates count as 0.25, 0.04 and 1; 24 draws, from 2 to 32 each.
ESTIMATES = {"p0": 0.24, "p1": 0.03, "p2": 0.99}


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        # w sqrt(p (1 - p)) with 0.77, 0.98 and 0.02 for 1 - p: 0.4387 : 0.1980 : 0.1414, so 13.53, 6.11 and 4.36. The
        # other allocations would give 8 to all.
        ({"objective": "identity"}, [14, 6, 4]),
        # Times 1 / (2 sqrt(p)): 0.4387 : 0.4950 : 0.0707 gives 1.7 to the last; of 22, 10.34 and 11.66.
        ({"objective": "power", "allocation": "variance"}, [10, 12, 2]),
        ({"objective": "log"}, [6, 15, 3]),  # 1/sqrt: 2 : 5 : 1, times 3
        # 1/p: 4 : 25 : 1 gives 0.8 to the last; at its bound of 2, 22 * 4/29 = 3.03 and 18.97 are left.
        ({"objective": "log", "allocation": "sampling"}, [3, 19, 2]),
        # sqrt((1 - p + eps) / (p + eps)): 1.755 : 4.950 : 0.141, so 0.5 to the last; of 22, 5.76 and 16.24.
        ({"objective": "log", "allocation": "variance"}, [6, 16, 2]),
        # (p + eps)^(-1/4): 1.4142 : 2.2361 : 1, so 7.299, 11.540 and 5.161.
        ({"objective": "power"}, [7, 12, 5]),
        ({"objective": "log", "max_draws": 12}, [8, 12, 4]),  # 5 * 3 over the bound; 12 left at 2 : 1
        (
            {"objective": "log", "samples_per_round": 4},
            [3, 7, 2],
        ),  # 12 in all: 3, 7.5, 1.5; at its bound of 2: 10 * 2/7 = 2.86
    ],
)
def test_draws_fixed_beforehand(settings, draws):
    """Estimates decide all draws of a prompt before its first one."""
    bits = dict.fromkeys(ESTIMATES, "0*")
    pools = draw(config("estimate", 4, objective_epsilon=0.01, **settings), bits, estimates=ESTIMATES)
    assert [len(pool.responses) for pool in pools] == draws
    assert [pool.estimate for pool in pools] == list(ESTIMATES.values())
    assert all(pool.rounds == 1 and pool.met for pool in pools)


@pytest.mark.parametrize(
    "settings", [{"objective": "power", "objective_alpha": 400.0}, {"objective": "log", "objective_epsilon": 1e-300}]
)
def test_weights_that_floating_point_lacks_are_refused(settings):
    """0.01^399 is 0: the plan would divide by it after the first collection, and so would the advantages."""
    with pytest.raises(ValueError, match="Lower objective_alpha, or raise objective_epsilon"):
        strategies.build(config("estimate", **settings))
    strategies.build(config("estimate", objective="power", objective_alpha=20.0))


def test_without_estimates_all_prompts_are_alike():
    pools = draw(config("estimate", 4, objective="log"), {"p0": "0*", "p1": "1*"})
    assert [(len(pool.responses), pool.estimate) for pool in pools] == [(8, 0.5), (8, 0.5)]


@pytest.mark.parametrize("estimates", [{"p0": 0.5, "p1": 1.1}, {"p0": -0.1, "p1": 0.5}, {"p0": np.nan, "p1": 0.5}])
def test_estimates_that_are_no_pass_rates_are_refused(estimates):
    with pytest.raises(ValueError, match=r"must return 2 pass rates in \[0, 1\]"):
        draw(config("estimate", 4), {"p0": "0*", "p1": "0*"}, estimates=estimates)


# ---- dapo ------------------------------------------------------------------------------------------------------------


def test_replacement_prompts_take_the_place_of_dropped_ones():
    # Two are wanted. p0 is dropped, s0 comes for it and is dropped too, s1 is kept; s2 is never opened.
    bits = {"p0": "00", "p1": "10", "s0": "11", "s1": "01", "s2": "01"}
    section = config("dapo", 2)
    pools = draw(section, bits, replacements=3)
    assert [pool.prompt.id for pool in pools] == ["p0", "p1", "s0", "s1"]
    groups = [make_group(pool, strategies.build(section)) for pool in pools]
    assert [group.kept.tolist() for group in groups] == [[], [0, 1], [], [0, 1]]
    np.testing.assert_array_equal(groups[3].advantages, [-0.5, 0.5])


def test_a_batch_stays_short_when_the_replacements_run_out():
    bits = {"p0": "00", "p1": "10", "p2": "00", "s0": "11"}
    pools = draw(config("dapo", 2), bits, replacements=1)
    assert [pool.prompt.id for pool in pools] == list(bits)
    assert [pool.met for pool in pools] == [False, True, False, False]


@pytest.mark.parametrize("section", [config("dapo"), config("ngu"), config("balance", unmet="replace")])
def test_batches_beyond_the_first(section):
    assert strategies.build(section).extra_batches == 3
    section = config(**vars(section), max_extra_batches=0)
    assert strategies.build(section).extra_batches == 0


@pytest.mark.parametrize(
    "section", [config("grpo"), config("positive"), config("estimate"), config("balance", unmet="drop")]
)
def test_strategies_that_replace_nothing(section):
    assert strategies.build(section).extra_batches == 0


# ---- prompts whose rule is not met -----------------------------------------------------------------------------------

# k_pos = k_neg = 2 within 8 draws: never met, met at once, one wrong response too few, met after two rounds, all alike.
UNMET = {"p0": "00000000", "p1": "01010000", "p2": "11110111", "p3": "00000011", "p4": "1*"}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [4, 4, 4, 4, 4]),  # the published program trains on what there is
        ({"unmet": "drop"}, [0, 4, 0, 4, 0]),  # 2510.04996 v1, section 2.2
        ({"unmet": "drop", "keep": "pool"}, [0, 4, 0, 8, 0]),
        ({"unmet": "drop", "k_neg": 1}, [0, 4, 4, 4, 0]),
        # k_pos = 1, k_neg = 0: the first round of p2 and p4 meets the rule of `positive`, and has one side only.
        ({"strategy": "positive"}, [4, 4, 4, 4, 4]),
        ({"strategy": "positive", "unmet": "drop"}, [0, 4, 0, 4, 0]),
    ],
)
def test_prompts_that_end_unmet(settings, kept):
    section = config(**{"strategy": "balance"} | QUARTERS | settings)
    pools = draw(section, UNMET)
    assert [pool.prompt.id for pool in pools] == list(UNMET)
    assert [len(make_group(pool, strategies.build(section)).kept) for pool in pools] == kept


def test_prompts_that_end_unmet_are_replaced():
    # As DAPO replaces (2503.14476, section 3.2), with which v3 of 2510.04996 combines Ada-Seq. Two are wanted: p0 makes
    # way for s0, which is unmet too; s1 needs two rounds; s2 is not opened.
    section = config("balance", **QUARTERS, unmet="replace")
    bits = {"p0": "0*", "p1": "0101", "s0": "1*", "s1": "00000011", "s2": "0101"}
    pools = draw(section, bits, replacements=3)
    assert [(pool.prompt.id, pool.met) for pool in pools] == [("p0", False), ("p1", True), ("s0", False), ("s1", True)]
    short = draw(config(**vars(section), max_extra_batches=0), {"p0": "0*", "p1": "0101"})
    assert len(short) == 2


@pytest.mark.parametrize("name", ["positive", "balance"])
def test_what_filtering_leaves_by_enumeration(name):
    # Every prompt that remains has n rows and a signal; `positive` is met by an all-correct first round, too.
    p = np.array([0.02, 0.3, 0.9])
    published = expectations(config(name, 4), p)
    filtered = expectations(config(name, 4, unmet="drop"), p)
    lost = published.unmet + (p**8 if name == "positive" else 0.0)
    np.testing.assert_allclose(filtered.zero_signal, lost, rtol=1e-12)
    np.testing.assert_allclose(filtered.kept_correct + filtered.kept_wrong, 4 * (1 - lost), rtol=1e-12)
    np.testing.assert_array_equal(filtered.draws, published.draws)


# ---- ngu -------------------------------------------------------------------------------------------------------------


def test_retries_end_at_max_draws():
    # Rounds of 4: a third one would make 12 > 10. A limit that is a multiple is reached.
    for limit, drawn in ((10, 8), (12, 12), (4, 4)):
        section = config("ngu", 4, max_draws=limit, retry_probability=1.0)
        (pool,) = draw(section, {"p": "0*"})
        assert (len(pool.responses), pool.met) == (drawn, False)
        assert strategies.build(section).max_draws == limit
    assert strategies.build(config("ngu", 4)).max_draws == 32
    assert strategies.build(config("ngu", 4, max_draws=0)).max_draws is None


def test_solved_prompts_and_prompts_given_up_on_are_replaced():
    # Two are wanted: p0 is solved and s0 comes for it; p1 is given up on, and so is s1 after it; s2 is kept.
    section = config("ngu", **QUARTERS, retry_probability=1.0)
    bits = {"p0": "1*", "p1": "0*", "s0": "00000100", "s1": "0*", "s2": "1000", "s3": "1000"}
    pools = draw(section, bits, replacements=4)
    strategy = strategies.build(section)
    kept = {pool.prompt.id: len(make_group(pool, strategy).kept) for pool in pools}
    assert kept == {"p0": 0, "p1": 0, "s0": 8, "s1": 0, "s2": 4}
    assert [pool.met for pool in pools] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("rewards", "drawn"),
    [
        # All at 1/2, nothing correct (0.7). The retry has nothing above 1/2; that it has something below makes its mean
        # 15/32, which is not passed by 1/4 but by 0.6.
        ([0.5] * 4 + [0.5, 0.5, 0.25, 0.5] + [0.25] * 4 + [0.25, 0.6, 0.25, 0.25], 16),
        ([0.5] * 4 + [0.5, 0.5, 0.25, 0.55] + [0.0] * 8, 8),
        # Above the mean of the rounds before it, 15/32, though not above the best.
        ([0.5] * 4 + [0.5, 0.5, 0.25, 0.5] + [0.48] * 4 + [0.0] * 4, 12),
        # A first round that varies is a group.
        ([0.25, 0.5, 0.25, 0.25] + [0.0] * 12, 4),
        ([0.1] * 12 + [0.0] * 4, 16),  # three times 0.1 is 0.30000000000000004, and no improvement
        ([0.8, 0.9, 0.8, 0.8] + [0.0] * 12, 4),  # all correct, and not alike
    ],
)
def test_a_retry_asks_for_more_than_the_mean_so_far(rewards, drawn):
    section = config("ngu", 4, max_draws=16, retry_probability=1.0)
    (pool,) = run_strategy(section, np.array([rewards]))
    assert len(pool.responses) == drawn
    group = make_group(pool, strategies.build(section))
    assert group.kept.tolist() == (list(range(drawn)) if pool.met else [])
    np.testing.assert_allclose(group.advantages.sum(), 0.0, atol=1e-15)
    assert pool.met == (len(set(rewards[:drawn])) > 1 and rewards[drawn - 1] != 0)
    assert (group.advantages > 0).any() == pool.met


def test_a_prompt_begun_ahead_goes_on_from_its_own_mean():
    # Rounds of 4 at 1/2 were drawn by the collection before; the third needs more than their mean.
    section = config("ngu", 4, max_draws=12, retry_probability=1.0)
    scores = [0.5] * 8 + [0.5, 0.6, 0.5, 0.5]
    responses = tuple(Response("p", i, np.zeros(1, np.int32), np.zeros(1, np.float32), False) for i in range(8))
    for earlier, drawn in ((scores[:8], 12), ([0.5] * 7 + [0.6], 8)):
        begun = PartialRollouts(responses, tuple(Verdict(False, score) for score in earlier), 2, (4, 4))

        def sample(queue):
            while requests := queue.take(100):
                yield [dataclasses.replace(responses[0], draw=request.draw) for request in requests]

        def verify(pairs):
            return [Verdict(scores[response.draw] > 0.7, scores[response.draw]) for _, response in pairs]

        (pool,) = collect([PROMPT], sample, verify, section, carried=CarriedRollouts(partial={"p": begun}))
        assert len(pool.responses) == drawn and pool.met


def test_the_first_round_and_the_last_word_are_not_left_to_chance():
    # At probability 0 there is one round; a mixed prompt stops at any probability.
    assert [len(pool.responses) for pool in draw(config("ngu", 4, retry_probability=0.0), {"p": "0*", "q": "1*"})] == [
        4,
        4,
    ]
    (mixed,) = draw(config("ngu", 4, retry_probability=1.0), {"p": "0001"})
    assert len(mixed.responses) == 4


def test_retries_are_as_frequent_as_asked_for():
    # 1000 prompts never solved, without a limit: rounds are geometric, mean 1 / (1 - 3/4) = 4 and deviation
    # sqrt(3/4) / (1/4) = 3.46, so four standard errors of the mean are 0.44. 750 +- 4 * 13.7 go on after the first.
    section = config("ngu", 2, max_draws=0, retry_probability=0.75)
    bits = {f"p{number}": "0*" for number in range(1000)}
    pools = draw(section, bits, seed=1, iteration=5)
    rounds = np.array([pool.rounds for pool in pools])
    assert abs(rounds.mean() - 4) < 0.44
    assert abs((rounds > 1).sum() - 750) < 55
    assert (rounds == np.array([len(pool.responses) for pool in pools]) // 2).all()
    # The address decides, and each part of it does.
    for name, drawn in zip(bits, rounds[:50], strict=False):
        continued = [uniform_at_address(1, 5, name, number) < 0.75 for number in range(1, drawn + 1)]
        assert continued == [True] * (drawn - 1) + [False]
    again = [
        [pool.rounds for pool in draw(section, bits, seed=seed, iteration=iteration)]
        for seed, iteration in ((1, 5), (2, 5), (1, 6))
    ]
    assert again[0] == rounds.tolist()
    for other in again[1:]:
        # Independent geometric rounds agree with probability sum q^2 = (1/16) / (1 - 9/16) = 1/7.
        assert abs(np.mean(np.array(other) == rounds) - 1 / 7) < 4 * np.sqrt(6 / 49 / 1000)


# ---- a strategy of the user's own ------------------------------------------------------------------------------------

SOURCE = """
from reinforce_ada_jax.collection.strategies import Strategy, always, keep_all, one_round, until

def {name}(config):
    size = 2 * config.group_size
    draws = until(one_round, size, 1)
    return Strategy(draws, one_round, keep_all, max_draws=size, max_kept=size, normalize_by_std=True)

def nothing(config):
    pass
"""


@pytest.fixture
def users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.format(name="double"))
    return file


def test_a_function_in_a_file_of_the_users(users_file):
    section = config(f"{users_file}:double", 2)
    (pool,) = run_strategy(section, np.array([[1, 0, 0, 0]]))
    assert len(pool.responses) == 4
    # Deviation and objective are the configuration's, for every strategy; baseline and keep where it names them.
    strategy = strategies.build(section)
    np.testing.assert_array_equal(make_group(pool, strategy).advantages, [0.75, -0.25, -0.25, -0.25])
    section.keep, section.baseline, section.objective = "group", "group", "log"
    group = make_group(pool, strategies.build(section))
    assert group.kept.tolist() == [0, 1]
    np.testing.assert_array_equal(group.advantages, [2.0, -2.0])  # +-1/2 at 1/p = 4


LATE = """import os, sys
from reinforce_ada_jax.collection.strategies import Strategy
def mine(config):
    def next_draws(progress):
        return 2 if progress.rounds == 0 else {late}
    return Strategy(next_draws, lambda progress: True, lambda correct: [0], max_draws=8, max_kept=8)
"""


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ("1 // 0", r", which failed: ZeroDivisionError: .* \(.*mine.py, line 5\)"),
        ("sys.exit(3)", r", which failed: it called sys.exit\(3\), and must not end the command \(.*mine.py, line 5\)"),
        ("-1", r": The strategy asks for -1 more responses .* max_draws = 8 \(.*mine.py, line 4\)"),
        ("0.5", r": The strategy asks for 0.5 more responses .* must return a whole number \(int\) \(.*, line 4\)"),
    ],
)
def test_an_error_within_a_run_names_the_file_and_the_line(tmp_path, late, message):
    file = tmp_path / "mine.py"
    file.write_text(LATE.format(late=late))
    with pytest.raises(UserCodeError, match=f"collection.strategy is '{file}:mine'{message}$"):
        run_strategy(config(f"{file}:mine", 2), np.zeros((1, 8)))


def test_a_users_strategy_that_is_not_there(users_file):
    with pytest.raises(ValueError, match=r"there is no file 'absent\.py'"):
        strategies.build(config("absent.py:double"))
    text = users_file.rename(users_file.with_suffix(".txt"))
    with pytest.raises(ValueError, match="mine.txt' is no Python file"):
        strategies.build(config(f"{text}:double"))
    text.rename(users_file)
    with pytest.raises(ValueError, match="mine.py defines no 'treble'"):
        strategies.build(config(f"{users_file}:treble"))
    with pytest.raises(ValueError, match="mine.py:nothing', which returned None; it must return a Strategy"):
        strategies.build(config(f"{users_file}:nothing"))
    with pytest.raises(ValueError, match="'best'; it must be one of grpo, positive, balance, .*, or"):
        strategies.build(config("best"))
    users_file.write_text("from math import *\n")
    with pytest.raises(ValueError, match="mine.py defines no 'double'"):
        strategies.build(config(f"{users_file}:double"))


WITH_A_DATACLASS = """
from __future__ import annotations
import dataclasses
import beside
from reinforce_ada_jax.collection.strategies import fixed
from reinforce_ada_jax.user_code import UserCodeError

@dataclasses.dataclass(frozen=True)
class Sizes:
    first: int = beside.FOUR

def mine(config):
    return fixed(Sizes().first)
"""


@pytest.fixture
def import_state(monkeypatch):
    """Removes the import paths and modules that a test adds."""
    standins.import_paths(monkeypatch)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("stem", ["mine", "wave", "my.own"])
def test_a_users_file_is_a_module_with_a_name_of_its_own(tmp_path, import_state, stem):
    # `wave` is a module of the standard library that nothing here has imported: the file must not replace it.
    (tmp_path / "beside.py").write_text("FOUR = 4\n")
    file = tmp_path / f"{stem}.py"
    file.write_text(WITH_A_DATACLASS)
    before = list(sys.path)
    for _ in range(2):
        assert strategies.build(config(f"{file}:mine")).max_draws == 4
    assert sys.path == [*before, str(tmp_path)]
    assert stem not in sys.modules and (stem != "wave" or hasattr(importlib.import_module(stem), "Wave_read"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef mine(:\n", r"mine.py is not valid Python: .*line 2"),
        ("return 3\n", r"mine.py is not valid Python: .*outside function.*line 1"),
        ("x = '\0'\n", r"mine.py is not valid Python"),
        ("mine = 3\n", r"mine.py:mine', which is 3; it must be a function"),
    ],
)
def test_a_users_file_that_can_not_be_read_is_one_line(tmp_path, import_state, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        strategies.build(config(f"{tmp_path / 'mine.py'}:mine"))
    assert "\n" not in str(error.value)


def test_a_users_file_that_fails_says_where(tmp_path, import_state):
    (tmp_path / "mine.py").write_text("\nimport a_package_that_is_not_there as mine\n")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"No module named 'a_package_that_is_not_there' \(.*mine.py, line 2\)"):
        strategies.build(config(f"{tmp_path / 'mine.py'}:mine"))
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (np.array([True, True, False]), r"must return indices of 3 draws, ascending; it returned array\(\[ True"),
        ([1.0, 2.0], "indices of 3 draws"), ([2, 1], "ascending"), ([1, 1], "ascending"), ([-1, 0], "ascending"),
        ([1, 3], "indices of 3 draws"), ([0, 1, 2], "keeps 3 responses of a prompt, and its max_kept is 2"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_users_strategy_keeps_are_indices(kept, message):
    mine = dataclasses.replace(strategies.fixed(3), keep=lambda correct: kept, max_kept=2)
    with pytest.raises(ValueError, match=message):
        keep_draws(mine, np.zeros(3, bool))


def drawn(rewards):
    """The pool of one round with these rewards."""
    (pool,) = run_strategy(config("grpo", group_size=len(rewards)), np.array([rewards], float))
    return pool


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        (None, "None"),
        (np.ones(2), "an array of float64 with the shape (2,) ([1.0, 1.0])"),
        (([0, 1], [1.0, 2.0], 3), "([0, 1], [1.0, 2.0], 3)"),
        (([0, 1], [1.0]), "([0, 1], [1.0])"),  # later rows would have the coefficients of others
        ((np.arange(2), np.ones((2, 1))), "an array of float64 with the shape (2, 1)"),
        ((np.ones(3, bool), np.ones(3)), "an array of bool with the shape (3,)"),  # True would be the index 1
        (([0.0, 1.0], [1.0, 1.0]), "([0.0, 1.0], [1.0, 1.0])"),
        (([-1, 0], [1.0, 1.0]), "([-1, 0]"),
        (([1, 1], [1.0, 1.0]), "([1, 1]"),
        (([2, 3], [1.0, 1.0]), "([2, 3]"),
        (([0], ["1"]), "([0], ['1'])"),
        (([0], [1j]), "([0], [1j])"),
        (([0], [[1.0], [1.0, 2.0]]), "([0], [[1.0], [1.0, 2.0]])"),
    ],
    ids=str,
)
def test_what_the_coefficients_of_a_users_strategy_return(returned, described):
    def mine(pool, usable):
        return returned

    strategy = dataclasses.replace(strategies.fixed(3), coefficients=mine)
    said = (
        "coefficients of the Strategy (mine) returned ",
        described,
        "two arrays of the same length: the indices of the draws to keep, whole numbers from 0 to 2, ascending",
    )
    for coefficients in (mine, corrections.with_first_round(mine)):
        with pytest.raises(ValueError) as refused:
            make_group(drawn([1, 0, 1]), dataclasses.replace(strategy, coefficients=coefficients))
        for part in said:
            assert part in str(refused.value)


def test_a_prompt_that_is_replaced_has_no_rows():
    # With an entropy or KL term its first round would be kept, and count beside that of the prompt in its place.
    of_all = corrections.with_first_round(lambda pool, usable: ([], []))
    strategy = dataclasses.replace(strategies.build(config("dapo", 2)), coefficients=of_all)
    assert [len(make_group(drawn(bits), strategy).kept) for bits in ([1, 0], [0, 0], [1, 1])] == [2, 0, 0]
    kept = dataclasses.replace(strategy, extra_batches=0)
    assert [len(make_group(drawn(bits), kept).kept) for bits in ([1, 0], [0, 0], [1, 1])] == [2, 2, 2]


def test_coefficients_may_be_lists_and_are_bounded():
    strategy = dataclasses.replace(strategies.fixed(3), coefficients=lambda pool, usable: ([0, 2], [1, -2]), max_kept=2)
    group = make_group(drawn([1, 0, 1]), strategy)
    np.testing.assert_array_equal(group.kept, [0, 2])
    np.testing.assert_array_equal(group.advantages, [1.0, -2.0])
    none = dataclasses.replace(strategy, coefficients=lambda pool, usable: ([], []))
    assert make_group(drawn([1, 0, 1]), none).kept.size == 0
    with pytest.raises(ValueError, match="keeps 2 responses of a prompt, and its max_kept is 1"):
        make_group(drawn([1, 0, 1]), dataclasses.replace(strategy, max_kept=1))
    with pytest.raises(ValueError, match="keep draw 2, which is older than its max_age"):
        make_group(drawn([1, 0, 1]), dataclasses.replace(strategy, max_age=1), np.array([0, 0, 2]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("extra_batches", -1, "extra_batches of a Strategy is -1; it must be a whole number of at least 0."),
        ("max_draws", 0, "max_draws of a Strategy is 0; it must be a whole number of at least 1, or None."),
        ("max_age", -1, "max_age of a Strategy is -1; it must be a whole number of at least 0, or None."),
    ],
)
def test_fields_that_are_out_of_range(field, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(strategies.fixed(3), **{field: value})


@pytest.mark.parametrize("weight", [np.nan, np.inf, None, "1.0"])
def test_the_weight_of_a_users_strategy_is_a_finite_number(weight):
    mine = dataclasses.replace(strategies.fixed(4), weight=lambda pass_rate: weight)
    with pytest.raises(ValueError, match=r"weight of the strategy is .* for a pass rate of 0.25; it must be a finite"):
        make_group(drawn([1, 0, 0, 0]), mine)


@pytest.mark.parametrize("probability", [2.0, -0.1, np.nan])
def test_what_a_users_strategy_goes_on_with_is_a_probability(probability):
    more = {"next_draws": lambda progress: 1, "continue_probability": lambda progress: probability}
    with pytest.raises(ValueError, match=r"continue_probability of the strategy is .* after 1 rounds .* in \[0, 1\]"):
        strategies.next_round(dataclasses.replace(strategies.fixed(3), **more), progress(1, 2, 0), seed=0, iteration=1)


def test_a_users_strategy_may_keep_and_plan_lists():
    mine = dataclasses.replace(strategies.fixed(3), keep=lambda correct: [0, 2], plan=lambda estimates, ids: [1, 3])
    np.testing.assert_array_equal(keep_draws(mine, np.zeros(3, bool)), [0, 2])
    np.testing.assert_array_equal(strategies.plan_draws(mine, np.full(2, 0.5), ["a", "b"]), [1, 3])
    assert keep_draws(dataclasses.replace(mine, keep=lambda correct: []), np.zeros(3, bool)).dtype == int
    for planned in ([1.0, 3.0], [1]):
        mine = dataclasses.replace(mine, plan=lambda estimates, ids, planned=planned: planned)
        with pytest.raises(ValueError, match="plan must return 2 whole numbers, one for each prompt"):
            strategies.plan_draws(mine, np.full(2, 0.5), ["a", "b"])


def test_a_users_strategy_may_count_with_numpy():
    """`to_bytes` writes JSON, which has neither numpy's integers nor its bools."""
    mine = dataclasses.replace(
        strategies.fixed(3),
        next_draws=lambda progress: np.int64(0 if progress.rounds else 3),
        met=lambda progress: np.sum([progress.correct]) > 1,
    )
    pools = draw(mine, {"a": "110", "b": "000"})
    assert [pool.met for pool in pools] == [True, False]
    found = from_bytes(to_bytes(CollectedShard(pools)), [pool.prompt for pool in pools]).pools
    assert [(pool.round_sizes, pool.met) for pool in found] == [((3,), True), ((3,), False)]


@pytest.mark.parametrize(
    ("fields", "overlap", "message"),
    [
        ("", "finish", "overlap is 'finish', but .*mine plans draws.*set it to 'none'"),
        ("plan=None, needs_estimates=True", "finish", "overlap is 'finish', but .*mine estimates pass rates"),
        ("extra_batches=2", "none", "mine estimates pass rates .*extra_batches are 2: .* Set extra_batches to 0"),
        (
            "plan=None, needs_estimates=True, extra_batches=2",
            "none",
            "prompts that replace others have no estimate in time",
        ),
    ],
)
def test_estimates_of_a_strategy_of_ones_own_are_there_in_time(tmp_path, fields, overlap, message):
    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses\n\nfrom reinforce_ada_jax.collection.strategies import estimate\n\n\n"
        f"def mine(config):\n    return dataclasses.replace(estimate(config), {fields})\n\n\n"
        "def planned(config):\n    return estimate(config)\n"
    )
    assert strategies.build(config(f"{file}:planned", group_size=4)).estimates
    with pytest.raises(ValueError, match=message):
        strategies.build(config(f"{file}:mine", group_size=4, overlap=overlap))


def test_estimates_of_a_control_variate_are_there_in_time():
    settings = {"objective": "log", "control_variate": "noise", "overlap": "finish"}
    with pytest.raises(ValueError, match="balance estimates pass rates after .* or use a number as control variate"):
        strategies.build(config("balance", group_size=4, **settings))
