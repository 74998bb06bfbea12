"""Responses become rows of a batch: the layout, literally, and no response or row is lost."""

import dataclasses

import jax
import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.training.updates import examples
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict
from tests.policy import recording


def response(tokens, logprobs):
    return Response("p", 0, np.array(tokens, np.int32), np.array(logprobs, np.float32), truncated=False)


ROWS = [
    Example(np.array([5, 6, 7], np.int32), response([8, 2], [-1.0, -0.5]), 1.5),
    Example(np.array([5], np.int32), response([9, 9, 9, 2], [-0.1, -0.2, -0.3, -0.4]), -0.75),
]


def test_layout():
    """Rows have the prompt, its response at once, and padding on the right."""
    batch = make_batch(ROWS, max_prompt_tokens=3, max_response_tokens=4)
    # The response follows its own prompt at once; padding is on the right alone.
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 2, 0, 0], [5, 9, 9, 9, 2, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 4, 0, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
    np.testing.assert_array_equal(batch.response_positions, [[3, 4, 1, 1], [1, 2, 3, 4]])
    np.testing.assert_array_equal(batch.response_length, [[2], [4]])
    # At each token of the response.
    np.testing.assert_array_equal(batch.advantages, np.float32([[1.5, 1.5, 0, 0], [-0.75] * 4]))
    np.testing.assert_array_equal(batch.behaviour_logprobs, np.float32([[-1, -0.5, 0, 0], [-0.1, -0.2, -0.3, -0.4]]))
    np.testing.assert_array_equal(batch.old_logprobs, batch.behaviour_logprobs)
    assert {x.dtype.name for x in jax.tree.leaves(batch)} == {"int32", "float32", "bool"}
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(batch))


def test_recorded_experts_stand_at_their_tokens():
    architecture = recording.golden("qwen3_moe")[0]  # two layers, two experts of a token

    def with_experts(row, first):
        size = len(row.prompt) + len(row.response.tokens) - 1
        record = first + np.arange(4 * size, dtype=np.uint8).reshape(size, 4)
        return row._replace(response=dataclasses.replace(row.response, experts=record))

    rows = with_experts(ROWS[0], 0), ROWS[1], with_experts(ROWS[0], 100)
    batch = make_batch(rows, max_prompt_tokens=6, max_response_tokens=9, layout=RowLayout(3), architecture=architecture)
    assert len(batch.tokens) == 1
    for segment, row in enumerate(rows):
        record, own = row.response.experts, batch.experts[0][batch.segment_ids[0] == segment]
        np.testing.assert_array_equal(own[:-1], 255 if record is None else record)
        np.testing.assert_array_equal(own[-1], 255)  # the last token of a response is no input of the sampler
    assert (batch.experts[batch.segment_ids == 3] == 255).all()
    assert make_batch(ROWS, max_prompt_tokens=3, max_response_tokens=4).experts is None


def test_prompts_are_not_shared_with_experts():
    layout = RowLayout(2, shares_prompts=True)
    architecture = recording.golden("qwen3_moe")[0]
    with pytest.raises(ValueError, match="rows can't share prompts in a model with experts"):
        make_batch([], max_prompt_tokens=4, max_response_tokens=4, layout=layout, architecture=architecture)


def test_a_batch_without_an_advantage_counts_what_is_left_out():
    rows = [row._replace(advantage=0.0) for row in ROWS]
    batch = make_batch(rows, max_prompt_tokens=3, max_response_tokens=4, micro_rows=2)
    assert batch.tokens.shape == (2, 7) and batch.response_length.sum() == 0
    np.testing.assert_array_equal(batch.left_out, [[6, 2], [0, 0]])


def test_advantages_of_large_rewards():
    # Both rewards and their mean are 16,777,216 in float32, which would leave no advantage.
    pool = Pool(
        Prompt("p", "", "", np.array([5], np.int32)),
        tuple(row.response for row in ROWS),
        tuple(Verdict(True, reward) for reward in (2**24, 2**24 + 1)),
        1,
        True,
    )
    strategy = strategies.build(CollectionConfig(strategy="grpo", group_size=2, samples_per_round=2, max_rounds=1))
    batch = make_batch(examples(make_group(pool, strategy), 1.0), max_prompt_tokens=3, max_response_tokens=4)
    np.testing.assert_array_equal(batch.advantages, np.float32([[-0.5, -0.5, 0, 0], [0.5, 0.5, 0.5, 0.5]]))


@pytest.mark.parametrize("baseline", ["group", "pool", "leave_one_out", "anchored"])
@pytest.mark.parametrize("by_std", [False, True])
def test_advantages_are_those_of_the_groups(baseline, by_std):
    # Two hits in eight draws, and one of the wrong ones has a shaped reward; the objective log p weighs by 1 / p.
    rewards = np.array([0.0, 1.0, 0.1, 0.0, 0.0, 0.0, 1.0, 0.0])
    responses = tuple(response([draw + 3, 2], [-1.0, -1.0]) for draw in range(8))
    pool = Pool(
        Prompt("p", "", "", np.array([5], np.int32)),
        responses,
        tuple(Verdict(bool(r > 0.7), r) for r in rewards),
        2,
        True,
    )
    config = dict(
        strategy="balance", group_size=4, samples_per_round=4, max_rounds=2, objective="log", correction="none"
    )
    strategy = strategies.build(CollectionConfig(**config, baseline=baseline, normalize_by_std=by_std))
    group = make_group(pool, strategy)
    assert group.advantages.any()
    batch = make_batch(examples(group, 1.0), max_prompt_tokens=1, max_response_tokens=2)
    np.testing.assert_allclose(batch.advantages, np.repeat(group.advantages[:, None], 2, axis=1), rtol=1e-6)


def test_the_stop_token_is_trained():
    batch = make_batch(ROWS, max_prompt_tokens=3, max_response_tokens=4)
    # Token 2 ends both responses and is inside both masks: two and four tokens, not one and three.
    np.testing.assert_array_equal(batch.response_mask, [[True, True, False, False], [True, True, True, True]])


@pytest.mark.parametrize("limits", [(2, 4), (3, 3)])
def test_nothing_is_cut(limits):
    # The first row has 3 + 2 tokens, the second 1 + 4: one of them is beyond each of these limits.
    with pytest.raises(ValueError, match=f"the limits are 1 to {limits[0]} and {limits[1]}"):
        make_batch(ROWS, max_prompt_tokens=limits[0], max_response_tokens=limits[1])


def test_empty_rows_follow():
    limits = dict(max_prompt_tokens=3, max_response_tokens=4, regularized=True)
    few, padded = (make_batch(ROWS, **limits, num_rows=size) for size in (None, 5))
    assert few.tokens.shape == (2, 7) and padded.tokens.shape == (5, 7)
    absent = {"reference_logprobs", "experts", "shared_ids"}
    assert all(getattr(rows, name) is None for rows in (few, padded) for name in absent)
    for name in vars(few).keys() - absent:
        np.testing.assert_array_equal(getattr(padded, name)[:2], getattr(few, name))
    assert not padded.tokens[2:].any() and not padded.response_mask[2:].any() and not padded.response_length[2:].any()
    assert (padded.segment_ids[2:] == 1).all() and (padded.response_positions[2:] == 1).all()
    assert make_batch(ROWS, max_prompt_tokens=3, max_response_tokens=4, num_rows=2).tokens.shape == (2, 7)


def test_no_row_is_dropped():
    with pytest.raises(ValueError, match="2 rows are more than the 1 rows of the batch"):
        make_batch(ROWS, max_prompt_tokens=3, max_response_tokens=4, num_rows=1)
