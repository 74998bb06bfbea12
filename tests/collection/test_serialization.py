"""Pools and partial rollouts come back from bytes as they were."""

import dataclasses
import json

import numpy as np

from reinforce_ada_jax.collection import serialization
from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, to_bytes
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Response, Verdict

PROMPTS = [Prompt(name, "", "", np.zeros(1, np.int32)) for name in ("p0", "p1")]
# Numbers whose shortest decimal form is not exact in float32.
LOGPROBS = np.array([-0.1, -1 / 3, -1e-30], np.float32)


def response(prompt_id: str, draw: int) -> Response:
    tokens = np.arange(draw + 1, dtype=np.int32)
    return Response(prompt_id, draw, tokens, LOGPROBS[: draw + 1], truncated=draw == 1, policy_version=7 * draw)


PARTIAL = {"n0": PartialRollouts((None, response("n0", 1)), (), 0, (2,)), "n1": PartialRollouts((), (), 0)}


def described(record) -> str:
    return json.dumps(dataclasses.asdict(record), default=np.ndarray.tolist)


def test_a_shard_is_read_as_it_was_written():
    verdicts = (Verdict(True, 1.0, penalty=0.3), Verdict(False, -0.1, "too_long"), Verdict(False, 0.0, "no_answer"))
    full = Pool(PROMPTS[1], tuple(response("p1", draw) for draw in range(3)), verdicts, 2, True, round_sizes=(2, 1))
    empty = Pool(PROMPTS[0], (), (), 0, False, 0.25)
    shard = CollectedShard([full, empty], PARTIAL, {"tokens": 3.0})
    found = from_bytes(to_bytes(shard), PROMPTS)
    assert described(found) == described(shard)
    assert found.pools[0].prompt is PROMPTS[1]
    assert found.pools[0].responses[0].tokens.dtype == np.int32
    assert found.pools[0].responses[0].logprobs.dtype == np.float32
    assert from_bytes(to_bytes(CollectedShard([])), []).pools == []


def test_recorded_experts_come_back():
    def with_experts(prompt_id, draw, dtype):
        record = np.arange(4 * (draw + 2), dtype=dtype).reshape(draw + 2, 4)
        return dataclasses.replace(response(prompt_id, draw), experts=record)

    for dtype in (np.uint8, np.uint16):
        pool = Pool(PROMPTS[0], (with_experts("p0", 0, dtype), response("p0", 1)), (Verdict(True, 1.0),) * 2, 1, True)
        partial = {"n0": PartialRollouts((None, with_experts("n0", 2, dtype)), (), 0, (2,))}
        shard = CollectedShard([pool], partial)
        found = from_bytes(to_bytes(shard), PROMPTS)
        assert described(found) == described(shard)
        assert found.pools[0].responses[0].experts.dtype == dtype and found.pools[0].responses[1].experts is None


def test_segments_of_a_trajectory_come_back():
    trajectory = Response("p0", 0, np.arange(3, dtype=np.int32), LOGPROBS, truncated=False, segments=(1, 1, 1))
    pool = Pool(PROMPTS[0], (trajectory, response("p0", 1)), (Verdict(True, 1.0), Verdict(False, 0.0)), 1, True)
    found = from_bytes(to_bytes(CollectedShard([pool])), PROMPTS)
    assert [each.segments for each in found.pools[0].responses] == [(1, 1, 1), ()]


def test_partial_rollouts_of_a_checkpoint_are_text():
    text = json.loads(json.dumps(serialization.partial_to_text(PARTIAL)))
    found = serialization.partial_from_text(text)
    assert list(found) == list(PARTIAL)
    assert [described(rollouts) for rollouts in found.values()] == [
        described(rollouts) for rollouts in PARTIAL.values()
    ]
    assert serialization.partial_from_text(serialization.partial_to_text({})) == {}
