"""Several responses to a row: the layout by hand, and that no result knows of it."""

from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning import token_losses
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.packing import RowLayout, pack
from reinforce_ada_jax.training.run import Run
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.updates import Minibatch, check_logprobs
from reinforce_ada_jax.types import Response
from tests.learning.test_learner import (
    PARAMS,
    RESPONSE_LENGTHS,
    assert_trees_close,
    batch,
    gradient,
    learner,
    responses,
    updated,
    with_reference,
)

# Of the eight sequences, 2, 13, 4, 9, 7, 5, 9 and 3 tokens, three rows of up to 19 hold all.
LIMITS = dict(max_prompt_tokens=7, max_response_tokens=12)
ROWS = [[1, 5], [3, 6], [4, 2, 7, 0]]


def test_first_fit_decreasing():
    assert pack([2, 13, 4, 9, 7, 5, 9, 3], 19, 8) == ROWS
    # With three to a row the shortest one goes elsewhere, and with one they keep their order.
    assert pack([2, 13, 4, 9, 7, 5, 9, 3], 19, 3) == [[1, 5], [3, 6], [4, 2, 7], [0]]
    assert pack([2, 13, 4], 19, 1) == [[0], [1], [2]]
    assert pack([], 19, 8) == []


def test_packed_rows_hold_everything_once():
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    rows = pack(lengths.tolist(), 64, 16)
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert max(lengths[row].sum() for row in rows) <= 64 and max(map(len, rows)) <= 16
    assert len(rows) < 1.05 * lengths.sum() / 64


def response(tokens, logprobs, policy_version=0):
    return Response("p", 0, np.array(tokens, np.int32), np.array(logprobs, np.float32), False, policy_version)


def test_the_layout_of_a_packed_row():
    examples = [
        Example(np.array([5, 6], np.int32), response([8], [-1.0], 4), 1.5),
        Example(np.array([5], np.int32), response([9, 9, 2], [-0.1, -0.2, -0.3], 3), -0.75),
    ]
    packed = make_batch(examples, max_prompt_tokens=4, max_response_tokens=5, num_rows=2, layout=RowLayout(3))
    # The longer one first; the second row is padding.
    np.testing.assert_array_equal(packed.tokens, [[5, 9, 9, 2, 5, 6, 8, 0, 0], [0] * 9])
    np.testing.assert_array_equal(packed.segment_ids, [[0, 0, 0, 0, 1, 1, 1, 3, 3], [3] * 9])
    np.testing.assert_array_equal(packed.positions, [[0, 1, 2, 3, 0, 1, 2, 0, 0], [0] * 9])
    np.testing.assert_array_equal(packed.response_positions, [[1, 2, 3, 6, 1, 1, 1, 1, 1], [1] * 9])
    np.testing.assert_array_equal(packed.response_segment_ids, [[0, 0, 0, 1, 3, 3, 3, 3, 3], [3] * 9])
    np.testing.assert_array_equal(packed.response_mask, [[True] * 4 + [False] * 5, [False] * 9])
    np.testing.assert_array_equal(packed.response_length, [[3, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(packed.policy_version[0, :4], [3, 3, 3, 4])
    np.testing.assert_array_equal(packed.advantages[0], np.float32([-0.75, -0.75, -0.75, 1.5, 0, 0, 0, 0, 0]))
    np.testing.assert_array_equal(packed.behaviour_logprobs[0], np.float32([-0.1, -0.2, -0.3, -1, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("per_row", [1, 3])
def test_the_gap_between_engine_and_learner_is_of_fresh_responses(per_row):
    # Three tokens of weights as they are, and one of older ones, which is another policy's.
    examples = [
        Example(np.array([5, 6], np.int32), response([8], [-1.0], 3)),
        Example(np.array([5], np.int32), response([9, 9, 2], [-0.1, -0.2, -0.3], 4)),
    ]
    rows = make_batch(examples, max_prompt_tokens=4, max_response_tokens=5, num_rows=3, layout=RowLayout(per_row))
    older, far = rows.behaviour_logprobs == -1, rows.behaviour_logprobs == np.float32(-0.3)
    rows = rows.replace(old_logprobs=rows.behaviour_logprobs + 0.5 * older + 6e-5 * far)
    run, state = Mock(spec=Run, config=Config()), Mock(spec=RunState, iteration=4)
    _, gaps = check_logprobs(run, state, [Minibatch([], rows)])
    assert gaps["update/logprob_gap"] == pytest.approx(2e-5, rel=0.01)
    assert gaps["update/logprob_gap_max"] == pytest.approx(6e-5, rel=0.01)


def packed_from(unpacked, examples=None, num_rows=8):
    """The same batch, packed: its per-token arrays go the way that the behaviour's log-probabilities go."""

    def of(name):
        values = getattr(unpacked, name)
        if values is None:
            return None
        changed = [
            example._replace(response=response(example.response.tokens, values[row, : RESPONSE_LENGTHS[row]]))
            for row, example in enumerate(examples or responses())
        ]
        return make_batch(changed, num_rows=num_rows, layout=RowLayout(5), **LIMITS).behaviour_logprobs

    made = make_batch(examples or responses(), num_rows=num_rows, layout=RowLayout(5), **LIMITS)
    names = ("behaviour_logprobs", "old_logprobs", "reference_logprobs")
    return made.replace(**{name: of(name) for name in names})


def by_example(scored):
    """Log-probabilities of each response's tokens, from [micro-batches, rows, columns] of the packed rows."""
    found, flat = {}, np.concatenate(scored)
    for row, numbers in enumerate(ROWS):
        ends = np.cumsum([RESPONSE_LENGTHS[number] for number in numbers])
        found |= dict(zip(numbers, np.split(flat[row], ends)[:-1], strict=True))
    return [found[number] for number in range(8)]


def test_scores_are_those_of_rows_of_their_own():
    of = learner()
    (alone,), packed = of.score(PARAMS, of.put(batch())), of.score(PARAMS, of.put(packed_from(batch())))
    for row, ours in enumerate(by_example(packed)):
        np.testing.assert_allclose(ours, alone[row, : len(ours)], rtol=1e-5, atol=1e-5)
    assert not packed[0][3:].any()


@pytest.mark.parametrize("number", [4, 2, 0])  # the first, the second and the last one of a row
def test_no_segment_sees_another(number):
    of, changed = learner(), list(responses())
    example = changed[number]
    other = response(98 - example.response.tokens, example.response.logprobs)
    changed[number] = example._replace(prompt=98 - example.prompt, response=other)
    before = by_example(of.score(PARAMS, of.put(packed_from(batch()))))
    after = by_example(of.score(PARAMS, of.put(packed_from(batch(), changed))))
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if row == number:
            assert np.abs(old - new).max() > 0.1
        else:
            np.testing.assert_array_equal(old, new)


OPTIONS = {
    "plain": {},
    "everything": dict(
        aggregation="seq-mean-token-mean", ratio="sequence", clip_low=0.05, clip_high=0.05, truncated_is_cap=1.2,
        entropy_coefficient=0.01, kl_coefficient=0.3,
    ),
    "sums": dict(aggregation="seq-mean-token-sum"),
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    # "everything" has the lengths of responses and their number; test_fused_logprobs.py has packed means of tokens.
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name != "everything"))
        for name, options in OPTIONS.items()
    ],
)
def test_packed_equals_unpacked(options):
    rows = with_reference(batch()) if "kl_coefficient" in options else batch()
    (state, metrics), (packed, packed_metrics) = (
        updated(learner(2, **options), some) for some in (rows, packed_from(rows))
    )
    assert metrics.clip_fraction > 0.1
    assert_trees_close(packed_metrics, metrics, rtol=1e-5, atol=1e-6)
    # A sum over tokens is larger than their mean by a response's length, and so is its rounding.
    length = np.mean(RESPONSE_LENGTHS) if options.get("aggregation") == "seq-mean-token-sum" else 1.0
    assert_trees_close(gradient(packed), gradient(state), rtol=1e-5, atol=1e-6 * length)


@pytest.mark.slow  # test_context.py has packed rows on eight devices
def test_packed_rows_on_eight_devices_are_those_of_one():
    options = OPTIONS["everything"]
    rows = packed_from(with_reference(batch()))
    (one, one_metrics), (eight, eight_metrics) = (
        updated(learner(2, mesh, **options), rows) for mesh in ((1, 1, 1), (2, 2, 2))
    )
    assert_trees_close(gradient(eight), gradient(one), rtol=1e-5, atol=1e-5)
    assert_trees_close(eight_metrics, one_metrics, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # half a minute, interpreted
def test_splash_attention_makes_the_same_update():
    # Interpreted; on a CPU the plain one is chosen.
    of = learner(2, attention="splash")
    assert (of.platform.attention, learner(2).platform.attention) == ("splash", "blocks")
    rows = packed_from(batch())
    (plain, metrics), (ours, our_metrics) = updated(learner(2), rows), updated(of, rows)
    assert_trees_close(our_metrics, metrics, rtol=1e-5, atol=1e-5)
    assert_trees_close(gradient(ours), gradient(plain), rtol=1e-4, atol=1e-5)


def test_counts_are_of_responses():
    rows = packed_from(batch())
    mask, one_hot = rows.response_mask, rows.segment_one_hot()
    assert [float(x) for x in loss_lib.denominators(mask, one_hot)] == [sum(RESPONSE_LENGTHS), 8]
    # A row for a sequence would make three of the eight.
    assert [float(x) for x in loss_lib.denominators(mask)] == [sum(RESPONSE_LENGTHS), 3]
    lengths = token_losses.segment_sums(jnp.asarray(mask, jnp.float32), jnp.asarray(one_hot))
    wanted = np.concatenate([[RESPONSE_LENGTHS[number]] * RESPONSE_LENGTHS[number] for number in ROWS[2]])
    np.testing.assert_array_equal(lengths[2, : len(wanted)], wanted)
