"""Slots that a collection keeps busy, from the collection loop and a clock."""

import dataclasses

import numpy as np
import pytest

from reinforce_ada_jax.collection import slot_choice, strategies
from reinforce_ada_jax.config import CollectionConfig


def durations(prompts: int, draws: int) -> np.ndarray:
    noise = [[np.random.default_rng((row, draw)).standard_normal() for draw in range(draws)] for row in range(prompts)]
    return np.exp(slot_choice.LENGTH_SPREAD * np.array(noise))


def test_one_slot_is_always_busy():
    assert slot_choice.busy_share(strategies.fixed(3), [0.5] * 4, slots=1) == pytest.approx(1.0)


def test_a_slot_for_each_response_waits_for_the_longest():
    times = durations(prompts=4, draws=3)
    assert slot_choice.busy_share(strategies.fixed(3), [0.5] * 4, slots=12) == pytest.approx(times.mean() / times.max())
    # As many again are idle all the time.
    assert slot_choice.busy_share(strategies.fixed(3), [0.5] * 4, slots=24) == pytest.approx(
        times.mean() / times.max() / 2
    )


def test_rounds_of_a_prompt_follow_one_another():
    """Unsolvable prompts, rounds of 1, a slot each: a prompt takes the sum of its responses."""
    strategy = strategies.build(
        dataclasses.replace(CollectionConfig(), strategy="positive", objective="log", samples_per_round=1, max_rounds=5)
    )
    times = durations(prompts=3, draws=5).sum(axis=1)
    assert slot_choice.busy_share(strategy, [0.0] * 3, slots=3) == pytest.approx(times.mean() / times.max())
    # Prompts that are always solved draw once.
    once = durations(prompts=3, draws=1)
    assert slot_choice.busy_share(strategy, [1.0] * 3, slots=3) == pytest.approx(once.mean() / once.max())


@pytest.mark.parametrize(
    ("collection", "prompts", "slots"),
    [
        (
            dict(strategy="positive", objective="log", samples_per_round=2, max_rounds=8),
            32,
            16,
        ),  # of 64 slots 0.22 are busy
        (dict(strategy="positive", objective="log", samples_per_round=2, max_rounds=8), 512, 32),
        (dict(strategy="grpo", group_size=8), 32, 32),
        (dict(strategy="grpo", group_size=8), 512, 64),
        (
            dict(strategy="positive", objective="log", samples_per_round=1, max_rounds=16),
            2,
            16,
        ),  # the fewest, whatever is busy
    ],
    ids=str,
)
def test_small_rounds_get_few_slots(collection, prompts, slots):
    strategy = strategies.build(dataclasses.replace(CollectionConfig(), **collection))
    chosen, share = slot_choice.choose_slots(strategy, prompts)
    assert chosen == slots
    assert share >= slot_choice.BUSY or slots == 16
