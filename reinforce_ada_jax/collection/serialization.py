"""Pools as bytes: what the processes of a run tell each other of their shares.

A JSON header and two arrays, in NumPy's own format and read without pickle; float32 numbers survive unchanged.
"""

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Response, Verdict


@dataclasses.dataclass(frozen=True, eq=False)
class CollectedShard:
    """What came of one process's shard of the prompts.

    Attributes:
      pools: of its prompts.
      partial: of its prompts of the next collection, by id.
      counts: of its sampler.
    """

    pools: list[Pool]
    partial: dict[str, PartialRollouts] = dataclasses.field(default_factory=dict)
    counts: dict[str, float] = dataclasses.field(default_factory=dict)


def _draws(draws: Pool | PartialRollouts) -> dict[str, Any]:
    return {
        "rounds": draws.rounds,
        "verdicts": [[verdict.correct, verdict.reward, verdict.reason] for verdict in draws.verdicts],
        "responses": [
            None
            if response is None
            else [response.draw, len(response.tokens), response.truncated, response.policy_version]
            for response in draws.responses
        ],
    }


def to_bytes(shard: CollectedShard) -> bytes:
    """The shard without its prompts, which everybody has."""
    header = {
        "pools": [
            _draws(pool) | {"prompt": pool.prompt.id, "met": pool.met, "estimate": pool.estimate}
            for pool in shard.pools
        ],
        "partial": [_draws(partial) | {"prompt": prompt_id} for prompt_id, partial in shard.partial.items()],
        "counts": shard.counts,
    }
    responses = [r for draws in (*shard.pools, *shard.partial.values()) for r in draws.responses if r is not None]
    file = io.BytesIO()
    np.savez(
        file,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        tokens=np.concatenate([np.zeros(0, np.int32), *(response.tokens for response in responses)]),
        logprobs=np.concatenate([np.zeros(0, np.float32), *(response.logprobs for response in responses)]),
    )
    return file.getvalue()


def from_bytes(data: bytes, prompts: Iterable[Prompt]) -> CollectedShard:
    """What `to_bytes` told; `prompts` are those that its pools may be of."""
    prompt_of = {prompt.id: prompt for prompt in prompts}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        header, tokens, logprobs = json.loads(arrays["header"].tobytes()), arrays["tokens"], arrays["logprobs"]
    read = 0

    def draws(record: Mapping[str, Any]) -> tuple[tuple[Response | None, ...], tuple[Verdict, ...]]:
        nonlocal read
        responses: list[Response | None] = []
        for told in record["responses"]:
            if told is None:
                responses.append(None)
                continue
            draw, length, truncated, policy_version = told
            part = slice(read, read + length)
            responses.append(Response(record["prompt"], draw, tokens[part], logprobs[part], truncated, policy_version))
            read += length
        return tuple(responses), tuple(Verdict(*verdict) for verdict in record["verdicts"])

    # In the order in which they were written: the arrays have no other index.
    pools = [
        Pool(prompt_of[record["prompt"]], *draws(record), record["rounds"], record["met"], record["estimate"])
        for record in header["pools"]
    ]
    partial = {record["prompt"]: PartialRollouts(*draws(record), record["rounds"]) for record in header["partial"]}
    return CollectedShard(pools, partial, header["counts"])
