"""AERO: more draws where all are wrong, fewer wrong rows, and a posterior as the baseline (arXiv 2602.14338).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/aero \
        --config.collection.strategy=examples/rivals/aero.py:aero

A prompt draws n_explore responses. Where all are wrong, 2 more are drawn again and again until one is correct, or the
budget is spent. Where less than half are correct, all correct ones are trained on, and k wrong ones for each of them.
Rewards are compared with the mean of a Beta posterior of the pass rate, which is never 0 or 1, so a group of responses
that are all alike has advantages as well.

The sources are the abstract, and a summary and a program (after section 3) by readers, not the paper. k = 1, by lemma
4.2, and whole groups where half or more are correct are the program's. Ours: each prompt has a budget of its own,
samples_per_round * max_rounds, since a strategy sees one prompt at a time (in the summary it is that of the batch, in
the program 16 a prompt, 8 of them first); the prior is worth 2 draws of the estimator's pass rate; advantages are
(r - p) / sqrt(p (1 - p)), and each group counts once. The program has the posterior for groups that are all alike only,
with the prior Beta(1, 1) and four of their rows, and compares rewards with the mean of the group elsewhere.
"""

import numpy as np

from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, keep_all
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Pool

EXTRA = 2  # draws of a further round
RATIO = 1  # wrong rows for each correct one, where less than half are correct
STRENGTH = 2.0  # of the prior, in draws


def coefficients(pool: Pool, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and their advantages, divided by the number of rows."""
    num_correct, drawn = int(pool.correct.sum()), len(pool.correct)
    prior = 0.5 if pool.estimate is None else pool.estimate
    rate = (STRENGTH * prior + num_correct) / (STRENGTH + drawn)
    rank = np.where(pool.correct, 0, np.cumsum(~pool.correct))  # 1, 2, ... for wrong responses
    rejected = (rank > RATIO * num_correct) & (0 < num_correct < drawn / 2)
    kept = np.flatnonzero(usable & ~rejected)
    return kept, (pool.rewards[kept] - rate) / np.sqrt(rate * (1.0 - rate)) / max(len(kept), 1)


def aero(config: CollectionConfig) -> Strategy:
    """Returns the strategy; n_explore is `samples_per_round`."""
    most = config.samples_per_round * config.max_rounds

    def next_draws(progress: PromptProgress) -> int:
        if not progress.rounds:
            return config.samples_per_round
        return 0 if progress.correct else min(EXTRA, most - progress.drawn)

    return Strategy(
        next_draws,
        met=lambda progress: progress.correct > 0,
        keep=keep_all,
        max_draws=most,
        max_kept=most,
        coefficients=coefficients,
        needs_estimates=True,
    )
