"""MoPPS, prompt selection by predicted pass rate (arXiv 2507.04632).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/mopps \
        --config.collection.strategy=grpo --config.collection.selection=examples/rivals/mopps.py:MoPPS

Each prompt has a Beta distribution of its pass rate. One pass rate is drawn from each (Thompson sampling), and the
prompts nearest to 1/2 are chosen. The update is a plain mean over them, so prompts of middle pass rate count for more
than others.

Rule, prior, target and decay are those of the authors' program (thu-rllab/MoPPS: `sample_batch` with "topk" and `train`
of recipe/ours/mopps.py, and cd_verl_3b_topk_noinit.sh; its scripts for MATH do not decay). Ours: all prompts of the
data are candidates, where the program draws 8 or 16 times as many as it needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt

PRIOR = 1.0, 1.0  # alpha and beta
DECAY = 0.5
TARGET = 0.5


class MoPPS:
    """The selection; its state is the Beta distribution of every prompt that was drawn."""

    def __init__(self, prompts: Sequence[Prompt], config: CollectionConfig):
        """Begins with the prior for every prompt."""
        del config
        self._prompts = prompts
        self._posterior: dict[str, tuple[float, float]] = {}

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns the prompts whose drawn pass rates are nearest to the target."""
        alpha, beta = np.array([self._posterior.get(prompt.id, PRIOR) for prompt in self._prompts]).T
        distances = np.abs(rng.beta(alpha, beta) - TARGET)
        return Choice([self._prompts[index] for index in np.argsort(distances, kind="stable")[:count]])

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Updates alpha <- decay alpha + (1 - decay) alpha_0 + correct draws, and beta by the wrong ones."""
        for group in groups:
            name, drawn, correct = group.pool.prompt.id, len(group.pool.correct), int(group.pool.correct.sum())
            alpha, beta = self._posterior.get(name, PRIOR)
            self._posterior[name] = (
                DECAY * alpha + (1.0 - DECAY) * PRIOR[0] + correct,
                DECAY * beta + (1.0 - DECAY) * PRIOR[1] + drawn - correct,
            )
        return {}

    def to_json(self) -> Mapping[str, Any]:
        """Returns alpha and beta by prompt id."""
        return self._posterior

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Restores alpha and beta."""
        self._posterior = {name: (alpha, beta) for name, (alpha, beta) in saved.items()}
