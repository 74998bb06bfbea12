"""PCL: prompts whose predicted pass rate is nearest to 1/2 (arXiv 2510.01135).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/pcl --config.collection.group_size=8 \
        --config.collection.strategy=grpo --config.collection.selection=examples/rivals/pcl.py:PCL

Among k times as many candidates, the prompts whose value V(x) is nearest to 1/2 are chosen. After their responses are
drawn, V takes a step down the gradient of the mean of (V(x) - mean reward)^2.

The sources are the abstract and a reader's notes with the formulas, not the paper; k = 4 and 1/2 are its values. Ours:
V is a sigmoid of a linear function of the counts of the prompt's tokens, with a step size of 4, where the paper's is a
language model. A selection sees neither the policy nor its hidden states.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt

CANDIDATES = 4
STEP = 4.0
TARGET = 0.5


class PCL:
    """The selection; its state is the weights of V."""

    def __init__(self, prompts: Sequence[Prompt], config: CollectionConfig):
        """Begins with V = 1/2 for every prompt."""
        del config
        self._prompts, self._index = prompts, {prompt.id: index for index, prompt in enumerate(prompts)}
        size = 1 + max(int(prompt.tokens.max()) for prompt in prompts)
        counts = np.stack([np.bincount(prompt.tokens, minlength=size) for prompt in prompts])
        self._features = counts / np.linalg.norm(counts, axis=1, keepdims=True)
        self._weights = np.zeros(size)

    def values(self, indices: np.ndarray) -> np.ndarray:
        """Returns V of prompts."""
        return 1.0 / (1.0 + np.exp(-self._features[indices] @ self._weights))

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns those of the candidates that are nearest to the target."""
        candidates = rng.permutation(len(self._prompts))[: CANDIDATES * count]
        nearest = np.argsort(np.abs(self.values(candidates) - TARGET), kind="stable")[:count]
        return Choice([self._prompts[index] for index in candidates[nearest]])

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes a step; returns the mean of |V - mean reward| before it."""
        indices = np.array([self._index[group.pool.prompt.id] for group in groups])
        values = self.values(indices)
        errors = values - np.array([group.pool.rewards.mean() for group in groups])
        slopes = 2.0 * errors * values * (1.0 - values)
        self._weights = self._weights - STEP * slopes @ self._features[indices] / len(groups)
        return {"selection/value_error": float(np.abs(errors).mean())}

    def to_json(self) -> Mapping[str, Any]:
        """Returns the weights."""
        return {"weights": self._weights.tolist()}

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Restores the weights."""
        self._weights = np.array(saved["weights"])
