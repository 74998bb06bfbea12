"""The losses by name and the importance weights: values and slopes by hand, on single tokens and on responses."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.learning import token_losses
from reinforce_ada_jax.learning.learner import loss_config
from reinforce_ada_jax.learning.token_losses import LossConfig, SampledTokens, policy_terms

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=10.0, aggregation="token-mean")
OLD = -1.0  # log-probability before the update, of every token here


def terms_and_slopes(config, ratios, advantages, log_weights=None, segments=None):
    """Returns the terms of tokens with these ratios, and the slope of each token's loss to its own log-probability."""
    ratios = np.asarray(ratios, np.float32)
    old = np.full(ratios.shape, OLD, np.float32)
    behaviour = None if log_weights is None else old - np.asarray(log_weights, np.float32)
    advantages = np.broadcast_to(np.asarray(advantages, np.float32), ratios.shape)

    def total(logprobs):
        sampled = SampledTokens(old, advantages, np.ones(ratios.shape, bool), behaviour, segment_one_hot=segments)
        terms = policy_terms(config, logprobs, sampled)
        return terms.loss.sum(), terms

    (_, terms), slopes = jax.jit(jax.value_and_grad(total, has_aux=True))(old + np.log(ratios))
    return terms, slopes


def changed(settings):
    config = config_lib.defaults()
    config.update_from_flattened_dict({"model.path": "model", "data.prompts": "prompts.jsonl"} | settings)
    return config_lib.validate(config)


def with_loss(loss, **changes):
    return dataclasses.replace(CONFIG, loss=loss, **changes)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.1, 2.0, 1.1, False),
        (2.0, 2.0, 1.28, True),  # PPO would give this token no gradient
        (0.5, 2.0, 0.8, True),
        (2.0, -2.0, 1.28, True),
        (2.0, 0.0, 1.28, False),
    ],
)
def test_cispo_by_hand(ratio, advantage, weight, clipped):
    # The loss is -weight A log p with a constant weight, so the slope is -weight A.
    terms, slopes = terms_and_slopes(with_loss("cispo"), [[ratio]], [[advantage]])
    np.testing.assert_allclose(terms.loss, [[-weight * advantage * (OLD + math.log(ratio))]], rtol=1e-5)
    np.testing.assert_allclose(slopes, [[-weight * advantage]], rtol=1e-5)
    assert bool(terms.clipped[0, 0]) == clipped


@pytest.mark.parametrize(("ratio", "advantage"), [(1.0, 2.0), (1.0, -2.0), (3.0, 2.0), (0.2, -1.5), (3.0, -1.0)])
def test_sapo_by_hand(ratio, advantage):
    # f = (4 / tau) sigmoid(tau (rho - 1)); f' = 4 s (1 - s), which is 1 at rho = 1; d rho / d log p = rho.
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    terms, slopes = terms_and_slopes(with_loss("sapo"), [[ratio]], [[advantage]])
    np.testing.assert_allclose(terms.loss, [[-4 / tau * gate * advantage]], rtol=1e-5)
    np.testing.assert_allclose(slopes, [[-4 * gate * (1 - gate) * ratio * advantage]], rtol=1e-5)
    assert ratio != 1 or float(slopes[0, 0]) == pytest.approx(-advantage)


def test_gspo_token_has_the_value_of_gspo_and_each_tokens_own_slope():
    # One response, ratios 2 and 0.5 and 1.331: the mean log ratio is log(1.331) / 3 = log 1.1. A = 1 and 3.
    ratios, advantages = [[2.0, 0.5, 1.331]], [[1.0, 3.0, 1.0]]
    sequence, sequence_slopes = terms_and_slopes(dataclasses.replace(CONFIG, ratio="sequence"), ratios, advantages)
    token, token_slopes = terms_and_slopes(dataclasses.replace(CONFIG, ratio="sequence-token"), ratios, advantages)
    np.testing.assert_allclose(token.loss, [[-1.1, -3.3, -1.1]], rtol=1e-5)
    np.testing.assert_allclose(sequence.loss, token.loss, rtol=1e-6)
    np.testing.assert_allclose(token_slopes, [[-1.1, -3.3, -1.1]], rtol=1e-5)  # each by its own advantage
    np.testing.assert_allclose(sequence_slopes, np.full((1, 3), -5.5 / 3), rtol=1e-5)


def weights_of(importance, log_weights, segments=None, **changes):
    """Returns the importance weights: losses of ratio 1 and advantage -1."""
    config = dataclasses.replace(CONFIG, importance=importance, truncated_is_cap=2.0, **changes)
    ones = np.ones(np.shape(log_weights))
    return terms_and_slopes(config, ones, -ones, log_weights, segments)[0].loss


def test_importance_weights_by_hand():
    log_weights = np.log([[3.0, 0.5, 0.25], [1.5, 1.5, 2.0]])
    np.testing.assert_allclose(weights_of("token", log_weights), [[2, 0.5, 0.25], [1.5, 1.5, 2]], rtol=1e-5)
    # Products 0.375 and 4.5.
    np.testing.assert_allclose(weights_of("sequence", log_weights), [[0.375] * 3, [2.0] * 3], rtol=1e-5)
    # Between 1/2 and the cap a weight counts.
    weights = weights_of("mask", np.log([[2.01, 0.501, 0.499], [1.5, 1.5, 1.99]]))
    np.testing.assert_allclose(weights, [[0, 0.501, 0], [1.5, 1.5, 1.99]], rtol=1e-5)


def test_importance_of_packed_responses_is_their_own():
    segments = np.array([[[1, 0], [1, 0], [0, 1]]], bool)
    weights = weights_of("sequence", np.log([[0.5, 0.5, 1.5]]), segments)
    np.testing.assert_allclose(weights, [[0.25, 0.25, 1.5]], rtol=1e-5)
    # A product beyond float32 is the cap, and one below it a number.
    np.testing.assert_allclose(weights_of("sequence", [[100.0, 100.0]]), [[2.0, 2.0]])
    assert np.isfinite(weights_of("sequence", [[-100.0, -100.0]])).all()


@pytest.mark.parametrize("loss", ["ppo", "cispo", "sapo"])
def test_garbage_under_the_mask_reaches_no_loss(loss):
    logprobs, old = jnp.array([[-0.5, -0.7, math.nan]]), jnp.array([[-0.6, -0.5, -math.inf]])
    mask, advantages = np.array([[1, 1, 0]], bool), jnp.array([[1.0, 1.0, math.nan]])

    def total(logprobs, width):
        cut = (array[:, :width] for array in (old, advantages, mask))
        return policy_terms(with_loss(loss), logprobs[:, :width], SampledTokens(*cut)).loss.sum()

    np.testing.assert_array_equal(
        jax.grad(total)(logprobs, 3), np.pad(jax.grad(total)(logprobs[:, :2], 2), [(0, 0), (0, 1)])
    )


def test_a_loss_of_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def plain(config, ratio, logprobs, advantages):\n    return -ratio * advantages\n")
    settings = loss_config(changed({"learning.loss": f"{path}:plain"}))
    terms, slopes = terms_and_slopes(settings, [[2.0]], [[3.0]])
    np.testing.assert_allclose([terms.loss, slopes], [[[-6.0]], [[-6.0]]], rtol=1e-6)
    assert not terms.clipped.any()


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("ratio.sum()", r"returned float32\[\] for ratios of float32\[2, 3\]; it must return the loss of each token"),
        ("(ratio > 1)", r"returned bool\[2, 3\]"),
        ("-ratio * advantages, ratio > 1", r"returned a tuple of 2; .* each token, or a TokenLoss.*mine.py, line 1\)"),
        ("None", r"returned None for ratios of float32\[2, 3\]"),
        ("ratio * float('nan')", r"whose loss is nan for advantages of 1 and -1 .* all must be finite"),
        ("abs(ratio - 1) ** 0.5 * advantages", "slopes from -inf to inf; all must be finite"),  # at ratio 1
        ("advantages", "does not change with the log-probabilities, .* nothing would be learned"),
    ],
)
def test_a_loss_of_another_shape_is_refused_before_training(tmp_path, result, said):
    path = tmp_path / "mine.py"
    path.write_text(f"def wrong(config, ratio, logprobs, advantages):\n    return {result}\n")
    with pytest.raises(ValueError, match=said):
        token_losses.load(f"{path}:wrong")


def test_what_is_refused():
    """Unknown losses and weights are named."""
    with pytest.raises(ValueError, match="it must be one of ppo, cispo, sapo, or name a function of yours"):
        changed({"learning.loss": "pppo"})
    with pytest.raises(ValueError, match="learning.importance is 'mask', but learning.truncated_is_cap is None"):
        changed({"learning.importance": "mask"})
    with pytest.raises(ValueError, match="cap is 0.9 with the importance mask, .* nothing would be learned"):
        changed({"learning.importance": "mask", "learning.truncated_is_cap": 0.9})
    with pytest.raises(ValueError, match="importance is 'row'"):
        weights_of("row", [[0.0]])
