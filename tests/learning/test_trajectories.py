"""Trajectories of several turns in a batch: tokens of the environment are inputs, and nothing else has them."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.types import Response
from tests.learning.test_learner import (
    EVERYTHING,
    RESPONSE_LENGTHS,
    assert_trees_close,
    batch,
    gradient,
    learner,
    responses,
    score,
    updated,
)

SHORT = Example(np.array([5], np.int32), Response("p", 1, np.array([9], np.int32), np.float32([-0.1]), False))


def trajectory(draw=0):
    """Two sampled tokens, three of an environment, and one more sampled."""
    logprobs = np.array([-1.0, -0.5, 0, 0, 0, -0.25], np.float32)
    return Response("p", draw, np.array([8, 2, 31, 32, 33, 9], np.int32), logprobs, False, 4, (2, 3, 1))


@pytest.mark.parametrize("segments", [(6, 0), (2, 3), (2, 3, 2), (2, 1, 1)])
def test_segments_that_are_no_trajectory_are_refused(segments):
    with pytest.raises(ValueError, match="a response of 6 tokens has the segments"):
        dataclasses.replace(trajectory(), segments=segments)


def test_tokens_of_the_environment_are_inputs_only():
    example = Example(np.array([5, 6], np.int32), trajectory(), 1.5)
    batch = make_batch([example], max_prompt_tokens=2, max_response_tokens=7)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 8, 2, 31, 32, 33, 9, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 5, 6, 7, 0]])
    # The model's tokens are at 2, 3 and 7 of the row; a mask of the whole response would have 2 to 7.
    np.testing.assert_array_equal(batch.response_positions, [[2, 3, 7, 1, 1, 1, 1]])
    np.testing.assert_array_equal(batch.response_mask, [[True] * 3 + [False] * 4])
    np.testing.assert_array_equal(batch.response_length, [[3]])
    np.testing.assert_array_equal(batch.behaviour_logprobs, np.float32([[-1, -0.5, -0.25, 0, 0, 0, 0]]))
    np.testing.assert_array_equal(batch.advantages, np.float32([[1.5] * 3 + [0] * 4]))
    np.testing.assert_array_equal(batch.policy_version, [[4] * 3 + [0] * 4])


def test_packed_trajectories():
    """Trajectories share a row with other responses, each behind its own prompt."""
    examples = [Example(np.array([5, 6], np.int32), trajectory()), SHORT]
    batch = make_batch(examples, max_prompt_tokens=4, max_response_tokens=7, layout=RowLayout(3))
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 8, 2, 31, 32, 33, 9, 5, 9, 0]])
    # The second response is behind all eight tokens of the first sequence, and its column behind three.
    np.testing.assert_array_equal(batch.response_positions[0, :5], [2, 3, 7, 9, 1])
    np.testing.assert_array_equal(batch.response_segment_ids[0, :5], [0, 0, 0, 1, 3])
    np.testing.assert_array_equal(batch.response_length, [[3, 1, 0]])


def test_left_out_trajectories_count_sampled_tokens():
    examples = [SHORT._replace(advantage=1.0)]
    examples += [Example(np.array([5], np.int32), trajectory())] * 2
    batch = make_batch(examples, max_prompt_tokens=1, max_response_tokens=6, micro_rows=1)
    assert batch.left_out.tolist() == [[6, 2]]


# ---- the update ------------------------------------------------------------------------------------------------------

# Of the learner's eight responses these have 8, 7 and 8 tokens.
SEGMENTS = {1: (2, 3, 3), 3: (1, 2, 1, 2, 1), 6: (4, 3, 1)}


def trajectories():
    """The learner's responses, three of them with tokens of an environment."""
    return [
        example._replace(response=dataclasses.replace(example.response, segments=SEGMENTS.get(row, ())))
        for row, example in enumerate(responses())
    ]


def masks():
    """True at the sampled tokens of the eight responses, [8, 8]."""
    mask = np.arange(8) < np.array(RESPONSE_LENGTHS)[:, None]
    mask[1, 2:5] = mask[3, 1:3] = mask[3, 4:6] = mask[6, 4:7] = False
    return mask


def to_the_front(values):
    """[8, 8] values of response tokens, those of sampled tokens alone, in order, then zeros."""
    rows = [values[row][mask] for row, mask in enumerate(masks())]
    return np.array([np.pad(row, (0, 8 - len(row))) for row in rows])


@pytest.mark.parametrize(("micro_batches", "options"), [(1, {}), (4, EVERYTHING)], ids=["plain", "everything"])
def test_the_gradient_is_that_of_a_hand_masked_batch(micro_batches, options):
    whole, of = batch(), learner(micro_batches, **options)
    by_hand = whole.replace(
        response_mask=masks(), response_length=masks().sum(axis=1, dtype=np.int32)[:, None],
        response_segment_ids=np.where(masks(), 0, 1).astype(np.int32),
    )  # fmt: skip
    made = make_batch(trajectories(), max_prompt_tokens=5, max_response_tokens=8)
    np.testing.assert_array_equal(made.tokens, whole.tokens)
    made = made.replace(old_logprobs=to_the_front(whole.old_logprobs))
    (state, metrics), (expected, expected_metrics) = updated(of, made), updated(of, by_hand)
    assert_trees_close(gradient(state), gradient(expected), rtol=1e-5, atol=1e-6)
    assert_trees_close(metrics, expected_metrics, rtol=1e-5, atol=1e-6)
    # Trained on the environment's tokens too, the gradient would be another one.
    wrong = jax.tree.map(lambda x, y: x - y, gradient(updated(of, whole)[0]), gradient(expected))
    assert optax.tree.norm(wrong) > 0.1 * optax.tree.norm(gradient(expected))


def test_scores_of_sampled_tokens_see_the_environment():
    made = make_batch(trajectories(), max_prompt_tokens=5, max_response_tokens=8)
    np.testing.assert_allclose(score(learner(), made), to_the_front(score(learner(), batch())), rtol=1e-5, atol=1e-6)
