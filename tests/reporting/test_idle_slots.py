"""The line that names the setting which would fill idle slots."""

import pytest

from reinforce_ada_jax.config import CollectionConfig, Config
from reinforce_ada_jax.reporting import idle_slots

# The run that was seen: 32 prompts in rounds of 2 over 64 slots.
SEEN = {"strategy": "balance", "prompts_per_iteration": 32, "samples_per_round": 2, "max_rounds": 4, "group_size": 2}


def line(busy=0.25, speculative=False, **collection):
    config = Config(collection=CollectionConfig(**SEEN | collection))
    return idle_slots.advice(config, busy=busy, num_slots=64, speculative=speculative)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "collection.speculative=True starts rounds"),
        ({"speculative": True}, "collection.overlap=finish starts"),
        ({"speculative": True, "overlap": "finish"}, "sampling.slots=20 costs less"),
        ({"barrier": True}, "collection.barrier=False starts"),
        ({"prompts_per_iteration": 16}, "16 prompts * 2 = 32 responses. collection.prompts_per_iteration=32 fills"),
        ({"prompts_per_iteration": 16}, "sampling.slots=32 leaves"),
        ({"strategy": "grpo", "group_size": 8}, "collection.overlap=finish starts"),
    ],
)
def test_a_quarter_of_the_slots_is_busy(changes, remedy):
    said = line(**changes)
    assert said.startswith("25% of 64 slots were busy in iteration 3: ") and remedy in said and "\n" not in said


def test_busy_slots_need_no_advice():
    assert line(busy=0.6) == ""
