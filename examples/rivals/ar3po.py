"""AR3PO: rounds until a response is correct, and correct responses of earlier iterations (arXiv 2509.25808).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/ar3po \
        --config.collection.samples_per_round=4 --config.collection.strategy=examples/rivals/ar3po.py:ar3po \
        --config.collection.selection=examples/rivals/ar3po.py:Reusing

A prompt draws rounds of k responses until one is correct, S rounds at most. Where none is, a correct response of an
earlier iteration takes the place of a wrong one. It is not trained on (option II of the paper), but the others are,
with the negative advantages that the group then has. Advantages are (r - mean) / std, as in GRPO.

The sources are the abstract and summaries of the method by readers, not the paper. Ours: the group has all responses of
a prompt and counts once, whatever its size; k is samples_per_round, S max_rounds; the correct response, which the paper
picks at random from earlier iterations, takes the place of the last wrong one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import STD_EPSILON, Group, pool_statistics
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, keep_all, until
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Pool, Prompt

SOLVED = "solved"  # label of a prompt that had a correct response


def coefficients(pool: Pool, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and their advantages, divided by the size of the group."""
    rewards, kept = pool.rewards, np.flatnonzero(usable)
    if not pool.correct.any():
        if SOLVED not in pool.prompt.labels:
            return kept[:0], np.zeros(0)
        rewards, kept = np.append(rewards[:-1], 1.0), kept[:-1]
    mean, std = pool_statistics(rewards)
    return kept, (rewards[kept] - mean) / (std + STD_EPSILON) / len(rewards)


def ar3po(config: CollectionConfig) -> Strategy:
    """Returns the strategy."""
    most = config.samples_per_round * config.max_rounds

    def met(progress: PromptProgress) -> bool:
        return progress.correct > 0

    next_draws = until(met, config.samples_per_round, config.max_rounds)
    return Strategy(next_draws, met, keep_all, max_draws=most, max_kept=most, coefficients=coefficients)


class Reusing:
    """The selection: the prompts drawn least often, in random order; it labels those that had a correct response."""

    def __init__(self, prompts: Sequence[Prompt], config: CollectionConfig):
        """Begins without a visit."""
        del config
        self._prompts = [(prompt, dataclasses.replace(prompt, labels={SOLVED: "yes"})) for prompt in prompts]
        self._seen: dict[str, tuple[int, int]] = {}  # visits and correct responses

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns the prompts of the fewest visits."""
        found = [(*self._seen.get(prompt.id, (0, 0)), prompt, solved) for prompt, solved in self._prompts]
        order = sorted((found[index] for index in rng.permutation(len(found))), key=lambda each: each[0])
        return Choice([solved if correct else prompt for _, correct, prompt, solved in order[:count]])

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Counts visits and correct responses."""
        for pool in (group.pool for group in groups):
            visits, correct = self._seen.get(pool.prompt.id, (0, 0))
            self._seen[pool.prompt.id] = visits + 1, correct + int(pool.correct.sum())
        return {}

    def to_json(self) -> Mapping[str, Any]:
        return self._seen

    def load_json(self, saved: Mapping[str, Any]) -> None:
        self._seen = {name: (visits, correct) for name, (visits, correct) in saved.items()}
