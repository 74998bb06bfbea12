"""GRESO: prompts whose last groups had no signal are skipped before they are drawn (arXiv 2506.02177, section 4).

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/greso \
        --config.collection.strategy=dapo --config.collection.selection=examples/rivals/greso.py:GRESO

A prompt whose last z groups were all correct is skipped with probability 1 - max(e^z, 0.01), and so is one whose last z
groups were all wrong, with an e of its own. Each e moves by 0.01 after an iteration: down where the share of such
groups reaches its target, up where it does not. The strategy `dapo` replaces groups without a signal.

Constants and targets are those of the authors' program (Infini-AI-Lab/GRESO: `DataProfiler`, and `fit` of
ray_trainer.py). Ours: a run has only groups that are all correct, or all wrong, where the program takes mean rewards
from 0.98, or up to 0.11; and each e moves from the first iteration on, the program's from the second epoch on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.selection import Choice
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt

START, STEP, LOW, HIGH = 0.5, 0.01, 0.05, 0.95  # of e
TARGETS = {"easy": 0.25 / 3, "hard": 0.25 * 2 / 3}
LEAST = 0.01  # probability of a prompt


class GRESO:
    """The selection; its state is e, and kind and length of the last run of groups without a signal by prompt."""

    def __init__(self, prompts: Sequence[Prompt], config: CollectionConfig):
        """Begins without a run."""
        self._prompts, self._extra = prompts, config.max_extra_batches
        self._e = dict.fromkeys(TARGETS, START)
        self._runs: dict[str, tuple[str, int]] = {}

    def skip_probability(self, prompt: Prompt) -> float:
        """Returns the probability that a prompt is passed over."""
        kind, length = self._runs.get(prompt.id, ("easy", 0))
        return 1.0 - max(self._e[kind] ** length, LEAST)

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns prompts in random order that are not skipped, and replacements; skipped ones come last."""
        order = [self._prompts[index] for index in rng.permutation(len(self._prompts))]
        skipped = [bool(rng.random() < self.skip_probability(prompt)) for prompt in order]
        order = [order[place] for place in np.argsort(skipped, kind="stable")]
        return Choice(order[:count], replacements=order[count : count * (1 + self._extra)])

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Extends or ends the runs, and moves each e."""
        kinds = []
        for group in groups:
            name, rate = group.pool.prompt.id, group.pool.correct.mean()
            kinds.append({1.0: "easy", 0.0: "hard"}.get(float(rate), ""))
            kind, length = self._runs.pop(name, ("", 0))
            if kinds[-1]:
                self._runs[name] = kinds[-1], (length if kind == kinds[-1] else 0) + 1
        for kind, target in TARGETS.items():
            reached = kinds.count(kind) / len(kinds) >= target
            self._e[kind] = max(self._e[kind] - STEP, LOW) if reached else min(self._e[kind] + STEP, HIGH)
        return {f"selection/e_{kind}": e for kind, e in self._e.items()}

    def to_json(self) -> Mapping[str, Any]:
        """Returns e and the runs."""
        return {"e": dict(self._e), "runs": dict(self._runs)}

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Restores e and the runs."""
        self._e, self._runs = dict(saved["e"]), {name: (kind, length) for name, (kind, length) in saved["runs"].items()}
