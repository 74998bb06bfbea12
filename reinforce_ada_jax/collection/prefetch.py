"""What one collection draws for the next one's prompts where slots would be idle, and how that is saved."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.types import PartialRollouts, Prompt, Response, Verdict


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Prompts of the next collection, of which responses may be drawn already.

    Attributes:
      prompts: with ids that differ from each other's and from the current prompts'.
      partial: what came of it, by prompt id: `collect` adds to it, and the next collection goes on from it.
    """

    prompts: Sequence[Prompt]
    partial: dict[str, PartialRollouts] = dataclasses.field(default_factory=dict)


def to_json(partial: Mapping[str, PartialRollouts]) -> dict[str, Any]:
    """As JSON; float32 numbers survive the way there and back unchanged."""

    def response(one: Response | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return dataclasses.asdict(one) | {"tokens": one.tokens.tolist(), "logprobs": one.logprobs.tolist()}

    return {
        prompt_id: {
            "responses": [response(one) for one in draws.responses],
            "verdicts": [dataclasses.asdict(verdict) for verdict in draws.verdicts],
            "rounds": draws.rounds,
        }
        for prompt_id, draws in partial.items()
    }


def from_json(saved: Mapping[str, Any]) -> dict[str, PartialRollouts]:
    """What `to_json` saved."""

    def response(one: dict[str, Any] | None) -> Response | None:
        if one is None:
            return None
        arrays = {"tokens": np.array(one["tokens"], np.int32), "logprobs": np.array(one["logprobs"], np.float32)}
        return Response(**(one | arrays))

    return {
        prompt_id: PartialRollouts(
            responses=tuple(response(one) for one in draws["responses"]),
            verdicts=tuple(Verdict(**verdict) for verdict in draws["verdicts"]),
            rounds=draws["rounds"],
        )
        for prompt_id, draws in saved.items()
    }
