"""Prompts of the next collection, of which one collection may draw responses where slots would be idle."""

import dataclasses
from collections.abc import Sequence

from reinforce_ada_jax.types import PartialRollouts, Prompt


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Prompts of the next collection.

    Attributes:
      prompts: with ids that differ from each other's and from the current prompts'.
      partial: rollouts by prompt id: `collect` adds those that it drew, and the next collection resumes from them.
    """

    prompts: Sequence[Prompt]
    partial: dict[str, PartialRollouts] = dataclasses.field(default_factory=dict)
