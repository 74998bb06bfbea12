"""Pools and partial rollouts as bytes: the one format for messages between processes and for checkpoints.

The format is a JSON header and three arrays in NumPy's format, read without pickle; float32 numbers do not change.
"""

import base64
import collections
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Response, Verdict


@dataclasses.dataclass(frozen=True, eq=False)
class CollectedShard:
    """Results of one process."""

    pools: list[Pool]  # one for each of its prompts
    partial: dict[str, PartialRollouts] = dataclasses.field(default_factory=dict)  # of the next prompts, by their ids
    counts: dict[str, float | int] = dataclasses.field(default_factory=dict)  # of its sampler

    @property
    def num_responses(self) -> int:
        """Number of responses in pools and partial rollouts, also of those that have only begun."""
        rollouts = [*self.pools, *self.partial.values()]
        ended = sum(response is not None for each in rollouts for response in each.responses)
        return ended + sum(len(each.begun) for each in self.partial.values())

    def add_rollouts(self, other: "CollectedShard") -> None:
        """Adds the rollouts of another shard, its pools as partial ones, and its counts."""
        self.partial.update(other.partial)
        for pool in other.pools:
            rollouts = PartialRollouts(pool.responses, pool.verdicts, pool.rounds, pool.round_sizes)
            self.partial[pool.prompt.id] = rollouts
        self.counts.update(collections.Counter(self.counts) + collections.Counter(other.counts))


def to_bytes(shard: CollectedShard) -> bytes:
    """Returns the shard as bytes, with ids in place of prompts."""
    header = {
        "pools": [
            _header(pool.prompt.id, pool) | {"met": pool.met, "estimate": pool.estimate, "discarded": pool.discarded}
            for pool in shard.pools
        ],
        "partial": [
            _header(prompt_id, rollouts) | {"begun": [_response_header(r) for r in rollouts.begun]}
            for prompt_id, rollouts in shard.partial.items()
        ],
        "counts": shard.counts,
    }
    responses = [r for pool in shard.pools for r in pool.responses]
    for rollouts in shard.partial.values():
        responses += [*(r for r in rollouts.responses if r is not None), *rollouts.begun]
    file = io.BytesIO()
    np.savez(
        file,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        tokens=np.concatenate([np.zeros(0, np.int32), *(response.tokens for response in responses)]),
        logprobs=np.concatenate([np.zeros(0, np.float32), *(response.logprobs for response in responses)]),
        experts=np.concatenate(
            [np.zeros(0, np.uint8), *(r.experts.ravel() for r in responses if r.experts is not None)]
        ),
    )
    return file.getvalue()


def from_bytes(data: bytes, prompts: Iterable[Prompt]) -> CollectedShard:
    """Returns the shard that `to_bytes` wrote; `prompts` include those of its pools."""
    prompt_of = {prompt.id: prompt for prompt in prompts}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        tokens, logprobs, experts = arrays["tokens"], arrays["logprobs"], arrays["experts"]
    entries = [
        entry
        for record in (*header["pools"], *header["partial"])
        for entry in (*record["responses"], *record.get("begun", ()))
        if entry
    ]
    ends = np.cumsum([entry[1] for entry in entries], dtype=np.int64)[:-1]
    shapes = [entry[-1] for entry in entries]
    expert_ends = np.cumsum([math.prod(shape) if shape else 0 for shape in shapes], dtype=np.int64)[:-1]
    of_experts = (
        None if shape is None else numbers.reshape(shape)
        for shape, numbers in zip(shapes, np.split(experts, expert_ends), strict=False)
    )
    arrays_of = zip(np.split(tokens, ends), np.split(logprobs, ends), of_experts, strict=False)
    # Pools first, then partial rollouts, as they were written: the arrays have no other index.
    pools = [
        Pool(
            prompt_of[record["prompt"]], *_rollouts(record, arrays_of), record["met"], record["estimate"],
            tuple(record["round_sizes"]), tuple(record["discarded"]),
        )
        for record in header["pools"]
    ]  # fmt: skip
    partial = {
        record["prompt"]: PartialRollouts(
            *_rollouts(record, arrays_of), tuple(record["round_sizes"]),
            tuple(_response(record["prompt"], entry, *next(arrays_of)) for entry in record["begun"]),
        )
        for record in header["partial"]
    }  # fmt: skip
    return CollectedShard(pools, partial, header["counts"])


def partial_to_text(partial: Mapping[str, PartialRollouts]) -> str:
    """Returns partial rollouts as text, for the JSON record of a checkpoint."""
    return base64.b64encode(to_bytes(CollectedShard([], dict(partial)))).decode("ascii")


def partial_from_text(text: str) -> dict[str, PartialRollouts]:
    return from_bytes(base64.b64decode(text), ()).partial


def _header(prompt_id: str, rollouts: Pool | PartialRollouts) -> dict[str, Any]:
    return {
        "prompt": prompt_id,
        "rounds": rollouts.rounds,
        "round_sizes": rollouts.round_sizes,
        "verdicts": [[v.correct, v.reward, v.reason, v.penalty, dict(v.rewards)] for v in rollouts.verdicts],
        "responses": [r and _response_header(r) for r in rollouts.responses],
    }


def _response_header(r: Response) -> list[Any]:
    experts = None if r.experts is None else r.experts.shape
    return [r.draw, len(r.tokens), r.truncated, r.policy_version, r.segments, r.versions, r.is_cut, experts]


def _response(
    prompt_id: str, entry: list[Any], tokens: np.ndarray, logprobs: np.ndarray, experts: np.ndarray | None
) -> Response:
    """Returns the response of an entry of `_response_header`."""
    draw, _, truncated, policy_version, segments, versions, is_cut, _ = entry
    versions = tuple((version, count) for version, count in versions)
    return Response(
        prompt_id, draw, tokens, logprobs, truncated, policy_version, tuple(segments), versions, is_cut, experts
    )


def _rollouts(record: Mapping[str, Any], arrays: Iterator[tuple[Any, ...]]) -> tuple[Any, Any, int]:
    """Returns (responses, verdicts, rounds) of one record; takes the arrays of its responses from the iterator."""
    responses = tuple(entry and _response(record["prompt"], entry, *next(arrays)) for entry in record["responses"])
    return responses, tuple(Verdict(*verdict) for verdict in record["verdicts"]), record["rounds"]
