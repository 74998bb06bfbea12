"""sGPO: groups of 1 / p responses, from easy to hard prompts (arXiv 2606.08854, section 4).

    python -m reinforce_ada_jax.prepare --config=configs/tiny.py --input=problems.jsonl --output=profiled.jsonl \
        --samples=8 --max_pass_rate=0.75
    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/sgpo \
        --config.data.prompts=profiled.jsonl --config.collection.strategy=examples/rivals/sgpo.py:sgpo \
        --config.collection.selection=examples/rivals/sgpo.py:EasyToHard

The pass rate p of a prompt under the initial policy is measured once, before training: `prepare` writes it. A group
has 1 / p responses, rounded down to a power of two, and at least 2. Prompts above p = 0.75 are left out, of those with
p = 0 one in ten is kept, and the others come from easy to hard.

The sources are the abstract and a reader's program that names sections, equations and constants, not the paper. Ours:
a group has at most samples_per_round * max_rounds responses, and prompts of p = 0, which `prepare` leaves out, come
last, with the most. There they are mixed into the prompts of each group size, which are trained until it converges.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.collection.strategies import PromptProgress, Strategy, keep_all, one_round
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt

EASIEST, KEPT_UNSOLVED = 0.75, 10  # the largest pass rate; one in this number


def pass_rate(prompt: Prompt) -> float:
    """Returns the pass rate under the initial policy."""
    if prompt.pass_rate is None:
        raise ValueError(f"sGPO: prompt {prompt.id!r} has no pass_rate; `prepare` adds it.")
    return prompt.pass_rate


def sgpo(config: CollectionConfig) -> Strategy:
    """Returns the strategy: one round of 1 / p responses, compared with its own mean."""
    most = config.samples_per_round * config.max_rounds

    def next_draws(progress: PromptProgress) -> int:
        if progress.rounds:
            return 0
        rate = pass_rate(progress.prompt)
        return min(max(2 ** math.floor(math.log2(1.0 / rate)), 2), most) if rate else most

    return Strategy(next_draws, one_round, keep_all, max_draws=most, max_kept=most, baseline="group")


class EasyToHard:
    """The selection: prompts in the order of falling pass rates, again and again."""

    def __init__(self, prompts: Sequence[Prompt], config: CollectionConfig):
        """Filters and sorts the prompts."""
        del config
        solved = sorted((each for each in prompts if 0 < pass_rate(each) <= EASIEST), key=pass_rate, reverse=True)
        self._prompts = solved + [prompt for prompt in prompts if pass_rate(prompt) == 0][::KEPT_UNSOLVED]
        self._position = 0

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns the next prompts."""
        del rng
        following = range(self._position, self._position + count)
        return Choice([self._prompts[place % len(self._prompts)] for place in following])

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Moves on."""
        self._position = (self._position + len(groups)) % len(self._prompts)
        return {}

    def to_json(self) -> Mapping[str, Any]:
        """Returns the position."""
        return {"position": self._position}

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Restores the position."""
        self._position = saved["position"]
