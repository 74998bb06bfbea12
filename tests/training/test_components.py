"""Choices by device and by size of the model, where a configuration leaves them open."""

import dataclasses

import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config, replaced
from reinforce_ada_jax.training import components as components_lib
from tests.sampling import tiny

SMALL = tiny.ARCHITECTURE
LARGE = dataclasses.replace(SMALL, vocab_size=10**7)
ROUNDS_OF_TWO = {
    "collection.strategy": "positive", "collection.objective": "log", "collection.samples_per_round": 2,
    "collection.max_rounds": 8, "collection.prompts_per_iteration": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "platform", "set_slots", "slots"),
    [(LARGE, "cpu", 0, 16), (LARGE, "cpu", 40, 40), (LARGE, "tpu", 0, 256), (SMALL, "cpu", 0, 256)],
    ids=["large on a CPU", "as set", "TPU", "small"],
)
def test_slots_are_those_that_small_rounds_keep_busy_on_a_cpu(architecture, platform, set_slots, slots):
    config = replaced(Config(), ROUNDS_OF_TWO | {"sampling.slots": set_slots})
    strategy = strategies.build(config.collection)
    chosen, reason = components_lib.choose_slots(config, architecture, platform, strategy)
    assert chosen == slots
    assert bool(reason) == (set_slots == 0)


def test_commands_without_a_strategy_decode_as_many_rows_as_pay_on_a_cpu():
    assert components_lib.choose_slots(Config(), LARGE, "cpu")[0] == 64
