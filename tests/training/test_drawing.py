"""Prompts of an iteration: those that a selection chooses, within the bounds of the strategy."""

from unittest.mock import Mock

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.training import drawing
from reinforce_ada_jax.training.run import Run
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import Prompt
from tests.running import tiny

PROMPTS = [Prompt(str(number), "", "", np.ones(1, np.int32)) for number in range(9)]


class Offers:
    """Two prompts, and all others as replacements, whatever the strategy does."""

    def choose(self, count, rng):
        return Choice(PROMPTS[:count], replacements=PROMPTS[count:])

    def observe(self, groups):
        return {}

    def to_json(self):
        return {}

    def load_json(self, saved):
        pass


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"strategy": "balance", "unmet": "drop"}, 0),  # what is dropped is not replaced
        # A group of 4 would be looked for among single draws.
        ({"strategy": "positive", "objective": "log", "samples_per_round": 1}, 0),
        ({"strategy": "balance", "unmet": "replace", "max_extra_batches": 2}, 4),
        ({"strategy": "dapo"}, 6),  # 3 extra batches
    ],
)
def test_replacements_are_those_that_the_strategy_allows(settings, allowed):
    changes = {f"collection.{key}": value for key, value in settings.items()}
    config = tiny(**{"collection.prompts_per_iteration": 2, "learning.prompts_per_update": 2} | changes)
    run = Mock(spec=Run, config=config, strategy=strategies.build(config.collection), selection=Offers())
    run.policy = lambda state: {}
    choice = drawing.choose(run, RunState(LearnerState({}, (), 0), {})).choice
    assert choice.prompts == PROMPTS[:2] and choice.replacements == PROMPTS[2 : 2 + allowed]
