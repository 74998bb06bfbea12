"""Strategies on given rewards: rounds and draws against literal ones, and strategies of users."""

import dataclasses
import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.groups import balanced_group
from reinforce_ada_jax.collection.simulate import check_own, run_strategy
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt

REFERENCE = pathlib.Path(__file__).parents[1] / "golden" / "reference" / "adaptive_rounds.jsonl"
CASES = [json.loads(line) for line in REFERENCE.read_text().splitlines()]


def config_of(case: dict) -> SimpleNamespace:
    return SimpleNamespace(**{key: case[key] for key in ("strategy", "group_size", "samples_per_round", "max_rounds")})


@pytest.mark.parametrize("case", CASES)
def test_reference_rounds(case):
    """Draws and choices are those of the published program."""
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": lambda correct: []}, "keeps no response of a prompt, whether they are right, wrong or both"),
        ({"next_draws": lambda progress: 8, "max_draws": None}, "without max_draws; the limit of this trial is 2000"),
        ({"max_draws": 10**12, "max_kept": 2}, "max_kept is 2"),  # without an array of that many rewards
    ],
)
def test_a_trial_of_a_users_strategy(changes, message):
    mine = dataclasses.replace(strategies.fixed(8), **changes)
    prompts = [Prompt(name, problem="", answer="", tokens=np.zeros(1, np.int32)) for name in "abc"]
    with pytest.raises(ValueError, match=f"collection.strategy is 'mine.py:f'.*{message}"):
        check_own(CollectionConfig(strategy="mine.py:f"), mine, prompts)


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
