from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax import config as config_module
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.strategies import Record
from reinforce_ada_jax.types import Prompt

PROMPT = Prompt("p", "", "", np.zeros(1, np.int32))


def config(strategy: str, group_size: int = 5, samples_per_round: int = 8, max_rounds: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        strategy=strategy, group_size=group_size, samples_per_round=samples_per_round, max_rounds=max_rounds
    )


def record(rounds: int, drawn: int, correct: int) -> Record:
    return Record(PROMPT, rounds=rounds, drawn=drawn, correct=correct)


def test_every_configured_name_builds_from_the_defaults():
    for name in config_module.STRATEGIES:
        section = config_module.defaults().collection
        section.strategy = name
        assert strategies.build(section).next_draws(record(0, 0, 0)) > 0


def test_unknown_name():
    with pytest.raises(ValueError, match="'best'; it must be one of grpo, positive, balance"):
        strategies.build(config("best"))


def test_grpo_draws_one_round_of_the_group():
    strategy = strategies.build(config("grpo"))
    assert strategy.next_draws(record(0, 0, 0)) == 5  # not samples_per_round
    assert strategy.next_draws(record(1, 5, 0)) == 0
    assert strategy.met(record(1, 5, 0))
    assert strategy.max_draws == 5
    assert strategy.keep(np.array([False, True, True])).tolist() == [0, 1, 2]
    assert not strategy.pool_baseline


def test_fixed_draws_one_round_and_keeps_it():
    strategy = strategies.fixed(3)
    assert [strategy.next_draws(record(0, 0, 0)), strategy.next_draws(record(1, 3, 1))] == [3, 0]
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
    strategy = strategies.build(config(name))
    after_one = record(1, drawn, correct)
    assert strategy.met(after_one) == met
    assert strategy.next_draws(after_one) == (0 if met else 8)


@pytest.mark.parametrize("name", ["positive", "balance"])
def test_the_round_limit_ends_an_unmet_rule(name):
    strategy = strategies.build(config(name))
    draws = [strategy.next_draws(record(rounds, 8 * rounds, 0)) for rounds in range(5)]
    assert draws == [8, 8, 8, 8, 0]
    assert strategy.max_draws == 32
    assert not strategy.met(record(4, 32, 0))
    assert strategy.pool_baseline


def test_a_rule_true_of_nothing_still_draws_a_round():
    next_draws = strategies.until(lambda record: record.correct == record.drawn, samples_per_round=2, max_rounds=3)
    assert [next_draws(record(0, 0, 0)), next_draws(record(1, 2, 2)), next_draws(record(1, 2, 1))] == [2, 0, 2]
