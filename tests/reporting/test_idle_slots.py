"""The line that names the setting which would fill idle slots."""

import pytest

from reinforce_ada_jax.config import CollectionConfig, Config, EnvironmentConfig, LearningConfig
from reinforce_ada_jax.reporting import idle_slots

# The run that was seen: 32 prompts in rounds of 2 over 64 slots.
SEEN = {"strategy": "balance", "prompts_per_iteration": 32, "samples_per_round": 2, "max_rounds": 4, "group_size": 2}


def line(busy=0.25, speculative=False, environment="", **collection):
    config = Config(
        collection=CollectionConfig(**SEEN | collection), learning=LearningConfig(prompts_per_update=8),
        environment=EnvironmentConfig(path=environment),
    )  # fmt: skip
    return idle_slots.advice(config, busy=busy, slots=16, replicas=4, speculative=speculative)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "collection.speculative=True starts rounds"),
        ({"speculative": True}, "collection.overlap=finish starts"),
        ({"speculative": True, "overlap": "finish"}, "sampling.slots=5 costs less"),
        ({"barrier": True}, "collection.barrier=False starts"),
        ({"prompts_per_iteration": 16}, "16 prompts * 2 = 32 responses. collection.prompts_per_iteration=32 fills"),
        # Whole updates of 8 prompts: 22 would fill the slots, and be refused.
        ({"prompts_per_iteration": 16, "samples_per_round": 3}, "collection.prompts_per_iteration=24 fills"),
        ({"prompts_per_iteration": 16}, "sampling.slots=8 leaves"),
        # An environment allows no overlap.
        ({"speculative": True, "environment": "game.py:Game"}, "sampling.slots=5 costs less"),
        # Its only round is planned, so there is nothing to start before verdicts.
        ({"strategy": "estimate", "samples_per_round": 4}, "sampling.slots=5 costs less"),
        ({"strategy": "estimate", "prompts_per_iteration": 8, "samples_per_round": 4}, "8 prompts * 4 = 32 responses."),
        ({"strategy": "grpo", "group_size": 8}, "collection.overlap=finish starts"),
    ],
)
def test_a_quarter_of_the_slots_is_busy(changes, remedy):
    said = line(**changes)
    assert said.startswith("25% of 64 slots were busy in iteration 3: ") and remedy in said and "\n" not in said


def test_busy_slots_need_no_advice():
    assert line(busy=0.6) == ""
