"""Responses without advantage that are left out of a minibatch, and updates without a scoring pass: nothing changes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.learning.batch import make_batch
from reinforce_ada_jax.learning.logprob_gap import LogprobGap
from reinforce_ada_jax.learning.packing import RowLayout, pack_without_zeros
from tests.learning.test_learner import (
    PARAMS,
    TEMPERATURE,
    assert_trees_close,
    assert_trees_equal,
    batch,
    fresh_state,
    gradient,
    learner,
    norm,
    responses,
    score,
    subtracted,
    updated,
)

LIMITS = dict(max_prompt_tokens=7, max_response_tokens=12)
ZEROS = (0, 2, 3, 5, 6)  # 1, 1, 7, 1 and 8 tokens; the others have 8, 2 and 1
NUM_TOKENS = 29


def examples(zeros=ZEROS):
    """Eight responses, some without advantage; their log-probabilities are near those of the weights.

    The ratio of the fifth is 1.6 or 0.6 and is clipped.
    """
    old = batch().old_logprobs.copy()
    old[4] -= 0.5 * np.sign(batch().advantages[4])
    return [
        example._replace(
            response=dataclasses.replace(example.response, logprobs=old[row, : len(example.response.tokens)]),
            advantage=0.0 if row in zeros else example.advantage,
        )
        for row, example in enumerate(responses())
    ]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zeros", "micro_rows", "expected"),
    [
        # Three others: one micro-batch of four, filled with the first zero response.
        (ZEROS, 4, [1, 4, 7, 0]),
        (ZEROS, 3, [1, 4, 7]),
        (ZEROS, 1, [1, 4, 7]),
        # Nothing would be saved: all, in their order.
        (ZEROS, 8, list(range(8))),
        ((0, 2, 3), 4, list(range(8))),
        ((), 1, list(range(8))),
        (tuple(range(8)), 8, []),
    ],
)
def test_rows_of_their_own(zeros, micro_rows, expected):
    is_zero = np.isin(np.arange(8), zeros)
    assert pack_without_zeros([5] * 8, is_zero, 19, 1, micro_rows) == [[index] for index in expected]


def test_packed_rows():
    # The others need one row of 10: 6 + 4. The second row of a micro-batch takes the first zero, 3, and later 1.
    lengths, is_zero = [3, 6, 9, 4, 8, 1], np.array([True, False, True, False, True, True])
    assert pack_without_zeros(lengths, is_zero, 10, 8, 2) == [[1, 3], [0, 5]]
    assert pack_without_zeros(lengths, is_zero, 10, 8, 1) == [[1, 3]]
    # Four rows hold all, and the others need one of them; with four to a micro-batch nothing is saved.
    assert sorted(itertools.chain(*pack_without_zeros(lengths, is_zero, 10, 8, 4))) == [0, 1, 2, 3, 4, 5]
    # Two to a row.
    assert pack_without_zeros([1] * 6, is_zero, 10, 2, 1) == [[1, 3]]


def test_what_is_left_out_is_counted():
    made = make_batch(examples(), **LIMITS, micro_rows=1)
    assert made.left_out.tolist() == [[18, 5], [0, 0], [0, 0]]
    assert made.response_length.sum() + 18 == NUM_TOKENS
    assert not make_batch(examples(), **LIMITS).left_out.any()


# ---- the update ------------------------------------------------------------------------------------------------------


OPTIONS = {
    "tokens": {"aggregation": "token-mean"},
    "sums": {"aggregation": "seq-mean-token-sum", "truncated_is_cap": 1.2},
    "means": {"aggregation": "seq-mean-token-mean", "ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05},
}
# Each value of each once; all others are slow.
CASES = {("tokens", 1, 1), ("sums", 2, 1), ("means", 2, 5)}


@pytest.mark.parametrize(
    ("name", "micro_batches", "per_row"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in CASES))
        for case in itertools.product(OPTIONS, (1, 2), (1, 5))
    ],
)
def test_the_gradient_is_that_of_all_rows(name, micro_batches, per_row):
    options = OPTIONS[name]
    made = [
        make_batch(examples(), **LIMITS, num_rows=8, layout=RowLayout(per_row), micro_rows=micro_rows)
        for micro_rows in (None, 1)
    ]
    assert made[1].left_out.any() and not made[0].left_out.any()
    (state, metrics), (less, less_metrics) = (updated(learner(micro_batches, **options), rows) for rows in made)
    assert_trees_close(gradient(less), gradient(state), rtol=1e-5, atol=1e-6)
    assert_trees_close(less.params, state.params, rtol=1e-6, atol=1e-6)
    assert 0 < metrics.clip_fraction < 0.3 and metrics.grad_norm > 0.1
    for metric in ("loss", "clip_fraction", "dual_clip_fraction", "grad_norm"):
        np.testing.assert_allclose(getattr(less_metrics, metric), getattr(metrics, metric), rtol=1e-5, err_msg=metric)
    left_out = made[1].left_out[0, 0]
    assert metrics.computed_share == 1 and less_metrics.computed_share == np.float32(1 - left_out / NUM_TOKENS)


def test_the_computed_responses_stand_for_the_others():
    # Five zero responses that are alike: one of them is as good as all.
    alike = [examples()[ZEROS[0]] if row in ZEROS else example for row, example in enumerate(examples())]
    whole, sampled = make_batch(alike, **LIMITS), make_batch(alike, **LIMITS, num_rows=8, micro_rows=4)
    assert sampled.left_out[0].tolist() == [4, 4]
    exact, estimated = (updated(learner(2), rows)[1] for rows in (whole, sampled))
    np.testing.assert_allclose(estimated.entropy, exact.entropy, rtol=1e-5)
    np.testing.assert_allclose(estimated.approx_kl, exact.approx_kl, rtol=1e-5)
    # Without one the others stand for all.
    others = make_batch(alike, **LIMITS, num_rows=8, micro_rows=1)
    alone = make_batch([alike[row] for row in range(8) if row not in ZEROS], **LIMITS, num_rows=8)
    np.testing.assert_allclose(updated(learner(2), others)[1].entropy, updated(learner(2), alone)[1].entropy, rtol=1e-5)


def test_a_minibatch_without_advantages_costs_nothing_but_the_optimizer():
    changes = {"b1": 0.9, "weight_decay": 0.1}
    all_rows, no_rows = (
        make_batch(examples(range(8)), **LIMITS, num_rows=8, micro_rows=micro_rows) for micro_rows in (None, 8)
    )
    assert not no_rows.response_length.any() and no_rows.left_out[0].tolist() == [NUM_TOKENS, 8]
    of = learner(**changes)
    states = []
    for rows in (all_rows, no_rows):
        state, _ = updated(
            of, make_batch(examples(()), **LIMITS, num_rows=8)
        )  # momentum, which moves the weights without a gradient, as does the decay
        states.append(of.update(state, of.put(rows)))
    (computed, metrics), (skipped, skipped_metrics) = states
    assert_trees_equal(skipped, computed)
    assert skipped.updates == 2 and skipped_metrics.finite
    assert skipped_metrics.loss == metrics.loss == 0 and skipped_metrics.grad_norm == metrics.grad_norm == 0
    # No forward pass: weights that are not finite are not met.
    poisoned = PARAMS | {"final_norm": PARAMS["final_norm"].at[0].set(jnp.nan)}
    assert updated(learner(), no_rows, poisoned)[1].finite and not updated(learner(), all_rows, poisoned)[1].finite


# ---- without a scoring pass ------------------------------------------------------------------------------------------


def unscored(rows):
    """The batch without old log-probabilities, as an iteration with one update makes it."""
    return rows.replace(old_logprobs=None)


@pytest.mark.slow  # the tests of the gap below have such updates of one device
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 1, 1), {"aggregation": "token-mean"}),
        ((1, 1, 1), {"aggregation": "seq-mean-token-mean", "ratio": "sequence", "entropy_coefficient": 0.01}),
        ((2, 2, 2), {"aggregation": "seq-mean-token-sum", "truncated_is_cap": 1.2}),
    ],
)
def test_three_updates_are_those_of_a_scoring_pass(mesh, options):
    of = learner(2, mesh, b1=0.9, **options)
    near = batch().replace(behaviour_logprobs=score(learner(), batch()))
    states = []
    for scored in (True, False):
        state = fresh_state(of)
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(8)
            placed = of.put(jax.tree.map(lambda x, order=order: x[order], unscored(near)))
            if scored:
                placed = placed.replace(old_logprobs=of.score(state.params, placed))
            # Only the first pass is under the weights that the tokens were drawn from.
            state, metrics = of.update(state, placed, None, np.int32(0 if seed == 0 else 1))
            assert metrics.finite and metrics.clip_fraction == 0
        states.append(state)
    assert_trees_close(states[1].params, states[0].params, rtol=1e-6, atol=1e-7)
    assert states[1].updates == 3
    assert norm(subtracted(states[1].params, fresh_state(of).params)) > 1e-3


def gap_of(behaviour, policy_version, params=PARAMS, **changes):
    """(state, metrics) of an update without a scoring pass, of responses with these log-probabilities."""
    of = learner(2, **changes)
    rows = unscored(batch()).replace(behaviour_logprobs=behaviour)
    versions = np.where(np.arange(8) < 6, 3, 2)[:, None]  # the last two responses, of 9 tokens, are of older weights
    rows = rows.replace(policy_version=np.broadcast_to(versions, behaviour.shape).astype(np.int32))
    return of.update(fresh_state(of, params), of.put(rows), None, np.int32(policy_version))


def test_the_gap_is_of_responses_drawn_from_these_weights():
    scored, mask = score(learner(), batch()), batch().response_mask
    behaviour = np.where(mask, scored - 5e-6, np.nan).astype(np.float32)
    behaviour[1, 3] += 5.5e-5  # 5e-5 above
    behaviour[7, 0] -= 5.0  # older
    state, metrics = gap_of(behaviour, 3)
    assert state.updates == 1 and metrics.finite and metrics.gap.num_tokens == 20
    np.testing.assert_allclose(metrics.gap.total / 20, (19 * 5e-6 + 5e-5) / 20, rtol=0.1)
    np.testing.assert_allclose(metrics.gap.largest, 5e-5, rtol=0.1)
    # Under the older weights it is the last two that count, and this one is far off.
    state, metrics = gap_of(behaviour, 2)
    assert metrics.gap.num_tokens == 9 and metrics.gap.largest == pytest.approx(5, rel=1e-3)


def test_a_gap_beyond_rounding_leaves_the_state_as_it_was():
    # In float32 the limit of the mean is 1e-5, divided by a temperature below 1. One of 20 tokens differs.
    limit = 20 * 1e-5 / TEMPERATURE
    for gap, made in ((0.9 * limit, 1), (1.1 * limit, 0)):
        behaviour = score(learner(), batch())
        behaviour[4, 1] += gap
        state, metrics = gap_of(behaviour, 3)
        assert metrics.finite and state.updates == made
        np.testing.assert_allclose(metrics.gap.largest, gap, rtol=0.05)
        if not made:
            assert_trees_equal(state, fresh_state(learner(2)))


@pytest.mark.parametrize("row", [4, 7])  # drawn from these weights, and from older ones
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_an_engine_log_probability_that_is_not_finite_leaves_the_state_as_it_was(row, value):
    behaviour = score(learner(), batch())
    behaviour[row, 0] = value
    state, metrics = gap_of(behaviour, 3)
    assert not metrics.finite and metrics.gap.num_not_finite == 1
    assert_trees_equal(state, fresh_state(learner(2)))


def test_no_gap_is_computed_where_the_scoring_pass_was():
    scored = make_batch(examples(), **LIMITS, num_rows=8)
    assert scored.old_logprobs is not None and updated(learner(), scored)[1].gap is None
    assert isinstance(updated(learner(2), unscored(batch()))[1].gap, LogprobGap)
