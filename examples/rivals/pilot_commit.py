"""Pilot-Commit: a few draws of each prompt decide which prompts get the others (arXiv 2605.26606).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/pilot \
        --config.collection.strategy=examples/rivals/pilot_commit.py:pilot_commit \
        --config.collection.selection=examples/rivals/pilot_commit.py:Unsolved

A prompt whose share of correct pilot responses is between 1/8 and 3/4 gets the commit round, and all its responses are
trained on. The others are skipped, and the next prompts take their places. A prompt whose pilot is all correct never
comes again.

The rule and the thresholds are those of the authors' program (databricks/pilot-commit: recipe/pc, and the script
pc_qwen2.5-1.5b_p32c96.sh), as is the pilot of a quarter of the draws. Ours: a prompt is committed in the iteration of
its pilot, and only prompts that are skipped are replaced. The program pilots three times as many prompts as an update
has, and commits those of the largest variance, up to four updates later.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt

LOW, HIGH = 0.125, 0.75


def pilot_commit(config: CollectionConfig) -> Strategy:
    """Returns the strategy, with a pilot of `samples_per_round` draws and three times as many committed."""
    pilot = config.samples_per_round

    def next_draws(progress: PromptProgress) -> int:
        if not progress.rounds:
            return pilot
        return 3 * pilot if progress.rounds == 1 and LOW <= progress.correct / pilot <= HIGH else 0

    return Strategy(
        next_draws,
        met=lambda progress: progress.rounds == 2,
        keep=lambda correct: np.arange(len(correct) if len(correct) > pilot else 0),
        max_draws=4 * pilot,
        max_kept=4 * pilot,
        baseline="group",
        extra_batches=config.max_extra_batches,
    )


class Unsolved:
    """The selection: the prompts drawn least often, in random order, without those whose pilot was all correct."""

    def __init__(self, prompts: Sequence[Prompt], config: CollectionConfig):
        """Begins without a visit."""
        self._prompts, self._extra = prompts, config.max_extra_batches
        self._visits: dict[str, int] = {}

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns the prompts of the fewest visits, and replacements; solved ones only where there are no others."""
        order = [self._prompts[index] for index in rng.permutation(len(self._prompts))]
        order = sorted(order, key=lambda prompt: self._visits.get(prompt.id, 0))
        return Choice(order[:count], replacements=order[count : count * (1 + self._extra)])

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Counts the visits; a solved prompt has more than any other will have."""
        for group in groups:
            name, pilot = group.pool.prompt.id, group.pool.correct[: group.pool.round_sizes[0]]
            self._visits[name] = self._visits.get(name, 0) + (10**9 if pilot.all() else 1)
        return {"selection/solved": float(sum(visits >= 10**9 for visits in self._visits.values()))}

    def to_json(self) -> Mapping[str, Any]:
        """Returns the visits."""
        return dict(self._visits)

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Restores the visits."""
        self._visits = dict(saved)
