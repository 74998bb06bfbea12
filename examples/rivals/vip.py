"""VIP: a Gaussian process predicts pass rates, and a budget of draws follows it (arXiv 2602.01601).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/vip --config.collection.group_size=8 \
        --config.collection.strategy=examples/rivals/vip.py:vip --config.collection.selection=examples/rivals/vip.py:VIP

The gradient of a prompt of pass rate p has the noise p (1 - p) / (n - 1) from n draws compared with each other (RLOO,
proposition 4.3). P prompts share P group_size draws with the least sum: n - 1 is proportional to sqrt(p (1 - p))
(theorem 5.2). p is the sigmoid of a Gaussian process over embeddings of the prompts, with a Gaussian kernel (5.1).

The sources are readers' notes on the paper, and the authors' program, which takes p of 0.8 or more for 1. Ours: token
counts as embeddings; a kernel as wide as the root mean square distance; a process of variance 4 around the mean of all
seen, theirs begins at 0; the last visit of a prompt, with its noise; 2 draws or more, theirs 3 (program: 4) or more.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.allocation import allocate
from reinforce_ada_jax.collection.corrections import relative_rewards
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.collection.strategies import Strategy, keep_all, one_round
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt

DRAWS, VARIANCE = "draws", 4.0  # a label of prompts; the variance of the process


def vip(config: CollectionConfig) -> Strategy:
    """Returns the strategy: one round of as many draws as the prompt's label says; a prompt counts once."""
    most = config.samples_per_round * config.max_rounds
    return Strategy(
        lambda progress: 0 if progress.rounds else int(progress.prompt.labels.get(DRAWS, 2)),
        one_round, keep_all, max_draws=most, max_kept=most,
        coefficients=lambda pool, usable: (np.flatnonzero(usable), relative_rewards(pool) / (len(usable) - 1)),
    )  # fmt: skip


class VIP:
    """The selection: random prompts, each with a label of its draws; the state is the last visit of each prompt."""

    def __init__(self, prompts: Sequence[Prompt], config: CollectionConfig):
        self._prompts, self._size, self._most = prompts, config.group_size, config.samples_per_round * config.max_rounds
        size = 1 + max(int(prompt.tokens.max()) for prompt in prompts)
        counts = np.stack([np.bincount(each.tokens, minlength=size) for each in prompts]).astype(float)
        self._embeddings = dict(zip([each.id for each in prompts], counts, strict=True))
        self._width = 2.0 * counts.var(axis=0).sum()  # squared: the mean over all pairs
        self._seen: dict[str, Sequence[float]] = {}  # correct and wrong draws, each plus 1/2

    def predict(self, names: Sequence[str]) -> np.ndarray:
        if not self._seen:
            return np.full(len(names), 0.5)
        points = np.stack([self._embeddings[name] for name in (*self._seen, *names)])
        squares, count = np.square(points).sum(axis=1), len(self._seen)
        distances = squares[:, None] + squares - 2.0 * points @ points.T  # squared
        kernel = VARIANCE * np.exp(-distances / (2.0 * self._width))[:, :count]
        right, wrong = np.array([*self._seen.values()]).T
        logits, noise = np.log(right / wrong), 1.0 / right + 1.0 / wrong
        solved = np.linalg.solve(kernel[:count] + np.diag(noise), logits - logits.mean())
        return 1.0 / (1.0 + np.exp(-logits.mean() - kernel[count:] @ solved))

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        chosen = [self._prompts[index] for index in rng.permutation(len(self._prompts))[:count]]
        names = [each.id for each in chosen]
        rates = self.predict(names)
        draws = 1 + allocate(np.sqrt(rates * (1.0 - rates)), count * (self._size - 1), 1, self._most - 1, names)
        return Choice([dataclasses.replace(x, labels={DRAWS: str(n)}) for x, n in zip(chosen, draws, strict=True)])

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        pools = [group.pool for group in groups]
        self._seen |= {each.prompt.id: (each.correct.sum() + 0.5, (~each.correct).sum() + 0.5) for each in pools}
        return {}

    def to_json(self) -> dict[str, Sequence[float]]:
        return dict(self._seen)

    def load_json(self, saved: dict[str, Sequence[float]]) -> None:
        self._seen = dict(saved)
