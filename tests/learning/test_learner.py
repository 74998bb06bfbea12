import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reinforce_ada_jax import mesh as mesh_lib
from reinforce_ada_jax.config import defaults
from reinforce_ada_jax.learning.batch import make_batch
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.loss import aggregate, clipped_policy_loss, denominators
from reinforce_ada_jax.metrics import CompileCounter
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.types import Response
from tests.policy import recording

ARCHITECTURE, PARAMS, _ = recording.golden("qwen2")
TEMPERATURE = 0.7
# Very different lengths, so that whoever takes a mean of means is far off.
PROMPT_LENGTHS, RESPONSE_LENGTHS = (1, 5, 3, 2, 5, 4, 1, 2), (1, 8, 1, 7, 2, 1, 8, 1)


@functools.cache
def learner(micro_batches=1, mesh=(1, 1, 1), **changes) -> Learner:
    """A learner whose first moment after one update is the gradient, and whose step is smooth in it."""
    config = defaults()
    config.model.compute_dtype = "float32"
    config.sampling.temperature = TEMPERATURE
    config.learning.update(
        dict(b1=0.0, clip_norm=1e9, epsilon=1e-3, learning_rate=1e-3, warmup_updates=0, logprob_chunk=3)
    )
    config.learning.update(dict(micro_batches=micro_batches, **changes))
    return Learner(ARCHITECTURE, config, mesh_lib.make_mesh(*mesh))


def fresh_state(of: Learner, params=PARAMS):
    """A state over copies, for it is donated."""
    return of.init(jax.device_put(jax.tree.map(jnp.copy, params), of.param_shardings))


@functools.cache
def responses():
    rng = np.random.default_rng(0)
    return [
        (rng.integers(3, 96, before).astype(np.int32),
         Response("p", 0, rng.integers(3, 96, after).astype(np.int32), rng.normal(-4, 1, after), False),
         rng.normal())
        for before, after in zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)
    ]  # fmt: skip


@functools.cache
def batch(max_prompt_tokens=5, max_response_tokens=8):
    """Eight rows, old log-probabilities far enough from the present ones that some ratios are clipped."""
    rows = make_batch(responses(), max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
    scored = learner().score(PARAMS, learner().put(rows))
    noise = np.random.default_rng(1).normal(0, 0.3, (8, 8))
    old = np.zeros(scored.shape, np.float32)
    old[:, :8] = np.asarray(scored)[:, :8] + noise * (np.arange(8) < rows.response_length[:, None])
    return rows.replace(old_logprobs=old)


def updated(of: Learner, rows=None, params=PARAMS):
    """(state, metrics) after one update."""
    return of.update(fresh_state(of, params), of.put(batch() if rows is None else rows))


def gradient(state):
    return optax.tree_utils.tree_get(state.optimizer, "mu")


def shifted(rows):
    """[B, T - 1] arrays over "token t predicts t + 1", filled row by row: another layout than the learner's."""
    size, length = rows.tokens.shape
    arrays = {name: np.zeros((size, length - 1), np.float32) for name in ("old", "behaviour", "advantage", "mask")}
    for row in range(size):
        first, count = rows.prompt_length[row] - 1, rows.response_length[row]
        arrays["old"][row, first : first + count] = rows.old_logprobs[row, :count]
        arrays["behaviour"][row, first : first + count] = rows.behaviour_logprobs[row, :count]
        arrays["advantage"][row, first : first + count] = rows.advantages[row]
        arrays["mask"][row, first : first + count] = 1
    return arrays


@functools.partial(jax.jit, static_argnames=("aggregation", "truncated_is_cap", "entropy_coefficient"))
def naive(params, tokens, arrays, aggregation="token-mean", truncated_is_cap=None, entropy_coefficient=0.0):
    """((loss, metrics), gradient) by whole logits and the whole minibatch's loss."""

    def loss(params):
        distribution = jax.nn.log_softmax(transformer.logits(ARCHITECTURE, params, tokens)[:, :-1] / TEMPERATURE)
        logprobs = jnp.take_along_axis(distribution, tokens[:, 1:, None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(distribution) * distribution, axis=-1)
        value, metrics = clipped_policy_loss(
            logprobs, arrays["old"], arrays["advantage"], arrays["mask"], clip_low=0.2, clip_high=0.28, dual_clip=10.0,
            aggregation=aggregation, behaviour_logprobs=arrays["behaviour"], truncated_is_cap=truncated_is_cap,
        )  # fmt: skip
        num_tokens, num_rows = denominators(arrays["mask"])
        mean = functools.partial(aggregate, entropy, arrays["mask"], num_tokens=num_tokens, num_rows=num_rows)
        value = value - entropy_coefficient * mean(aggregation)
        return value, metrics | {"loss": value, "entropy": mean("token-mean")}

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def assert_trees_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_score_is_the_full_forward_pass():
    rows = batch()
    distribution = jax.nn.log_softmax(transformer.logits(ARCHITECTURE, PARAMS, jnp.asarray(rows.tokens)) / TEMPERATURE)
    scored = np.asarray(learner().score(PARAMS, learner().put(rows)))
    for row, (before, after) in enumerate(zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)):
        at = np.arange(before, before + after)
        np.testing.assert_allclose(
            scored[row, :after], distribution[row, at - 1, rows.tokens[row, at]], rtol=1e-5, atol=1e-5
        )
        assert not scored[row, after:].any()


# Another aggregation, the importance weight and the entropy bonus, in four micro-batches.
EVERYTHING = {"aggregation": "seq-mean-token-mean", "truncated_is_cap": 1.2, "entropy_coefficient": 0.01}


@pytest.mark.parametrize(("micro_batches", "options"), [(1, {}), (4, EVERYTHING)], ids=["plain", "everything"])
def test_the_update_follows_the_naive_gradient(micro_batches, options):
    state, metrics = updated(learner(micro_batches, **options))
    rows = batch()
    (_, expected), slope = naive(PARAMS, jnp.asarray(rows.tokens), shifted(rows), **options)
    assert expected["clip_fraction"] > 0.1
    assert_trees_close(gradient(state), slope, rtol=1e-5, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(slope))
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(metrics, name), value, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(slope), rtol=1e-5)
    assert metrics.finite and state.updates == 1


def test_eight_micro_batches_are_one():
    (one, one_metrics), (eight, eight_metrics) = updated(learner()), updated(learner(8))
    assert_trees_close(gradient(eight), gradient(one), rtol=1e-5, atol=1e-6)
    assert_trees_close(eight.params, one.params, rtol=1e-6, atol=1e-6)
    assert_trees_close(eight_metrics, one_metrics, rtol=1e-5, atol=1e-6)


def test_a_mean_over_micro_batches_would_be_something_else():
    # The known bug that the test above is there for: each micro-batch divided by its own token count.
    rows = batch()
    arrays, tokens = shifted(rows), jnp.asarray(rows.tokens)
    right = naive(PARAMS, tokens, arrays)[1]
    alone = [
        naive(PARAMS, tokens[row : row + 1], {name: x[row : row + 1] for name, x in arrays.items()})[1]
        for row in range(8)
    ]
    wrong = jax.tree.map(lambda *slopes: sum(slopes) / 8, *alone)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, wrong, right))
    assert difference > 0.5 * optax.tree.norm(right)


def test_score_keeps_the_rows_in_order():
    np.testing.assert_allclose(
        learner(8).score(PARAMS, learner(8).put(batch())), learner().score(PARAMS, learner().put(batch())), rtol=1e-5
    )


def test_what_stands_in_the_padding_is_irrelevant():
    rows = batch()
    total = (rows.prompt_length + rows.response_length)[:, None]
    beyond = np.arange(8) >= rows.response_length[:, None]
    garbage = rows.replace(
        tokens=np.where(np.arange(13) < total, rows.tokens, 95).astype(np.int32),
        old_logprobs=np.where(beyond, np.float32(np.nan), rows.old_logprobs),
        behaviour_logprobs=np.where(beyond, np.float32(-np.inf), rows.behaviour_logprobs),
    )
    assert (garbage.tokens != rows.tokens).any()
    assert_trees_equal(updated(learner(), garbage), updated(learner()))


def test_mask_equals_slice():
    (state, metrics), (padded, padded_metrics) = updated(learner()), updated(learner(), batch(7, 12))
    assert_trees_close(gradient(padded), gradient(state), rtol=1e-5, atol=1e-6)
    assert_trees_close(padded_metrics, metrics, rtol=1e-5, atol=1e-6)


def test_no_advantage_no_change():
    state, metrics = updated(learner(), batch().replace(advantages=np.zeros(8, np.float32)))
    assert metrics.grad_norm == 0 and metrics.loss == 0
    assert_trees_equal(state.params, PARAMS)
    assert state.updates == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_advantage_that_is_not_finite_leaves_the_state_as_it_was(value):
    advantages = batch().advantages.copy()
    advantages[3] = value
    state, metrics = updated(learner(), batch().replace(advantages=advantages))
    assert not metrics.finite
    assert_trees_equal(state, fresh_state(learner()))
    assert state.updates == 0


def test_a_weight_that_is_not_finite_leaves_the_state_as_it_was():
    poisoned = PARAMS | {"final_norm": PARAMS["final_norm"].at[0].set(jnp.nan)}
    state, metrics = updated(learner(), params=poisoned)
    assert not metrics.finite
    assert_trees_equal(state, fresh_state(learner(), poisoned))


def test_eight_devices_are_one():
    spread = learner(2, (2, 2, 2))
    (one, one_metrics), (eight, eight_metrics) = updated(learner()), updated(spread)
    assert_trees_close(gradient(eight), gradient(one), rtol=1e-5, atol=1e-5)
    assert_trees_close(eight.params, one.params, rtol=1e-5, atol=1e-5)
    assert_trees_close(eight_metrics, one_metrics, rtol=1e-5, atol=1e-5)


def test_moments_live_where_their_weights_live():
    spread = learner(2, (2, 2, 2))
    state, _ = updated(spread)
    moments = [optax.tree_utils.tree_get(state.optimizer, name) for name in ("mu", "nu")]
    for tree in (state.params, *moments):
        same = jax.tree.map(lambda x, layout: x.sharding.is_equivalent_to(layout, x.ndim), tree, spread.param_shardings)
        assert all(jax.tree.leaves(same))
    # 2 layers of 32 x 48, the 32 split over fsdp and the 48 over tensor.
    gate = gradient(state)["layers"]["feed_forward"]["gate"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 16, 24)}
    # It comes back as it went in, so a second update compiles nothing.
    compiles = CompileCounter()
    spread.update(state, spread.put(batch()))
    assert compiles.since_last() == 0


def test_the_old_state_is_donated():
    before = fresh_state(learner())
    learner().update(before, learner().put(batch()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, gradient(before))))


def test_old_and_behaviour_logprobs_are_two_things():
    elsewhere = batch().replace(behaviour_logprobs=batch().behaviour_logprobs - 1)
    # Ratios are taken to the learner's own log-probabilities: the sampler's play no part ...
    assert_trees_equal(updated(learner(), elsewhere), updated(learner()))
    # ... unless their importance weight is asked for.
    capped = learner(4, **EVERYTHING)
    assert updated(capped, elsewhere)[1].loss != updated(capped)[1].loss
    older = batch().replace(old_logprobs=batch().old_logprobs - 1)
    assert updated(learner(), older)[1].loss != updated(learner())[1].loss
