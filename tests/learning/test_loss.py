"""Losses and their gradients against literal numbers, for every ratio, clip, aggregation and term."""

import functools
import itertools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.config import values
from reinforce_ada_jax.learning.loss import (
    Denominators,
    SampledTokens,
    aggregate,
    clipped_policy_loss,
    denominators,
    kl_estimate,
    metric_weights,
    policy_loss,
)
from reinforce_ada_jax.learning.token_losses import LossConfig, policy_terms

REFERENCE = pathlib.Path(__file__).parents[1] / "golden" / "reference"
# Those of the reference program; the other one divides by T, so padding changes it (`row_tokens` of a run does not).
REFERENCE_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
SEQUENCE = LossConfig(**CLIPS, aggregation="seq-mean-token-mean", ratio="sequence")
KINDS = ("k1", "k2", "k3")
ARRAYS = ("logprobs", "old_logprobs", "advantages", "mask", "behaviour_logprobs")


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (REFERENCE / name).read_text().splitlines()]


POLICY_CASES = read("policy_loss.jsonl")


def value_and_gradient(arrays, clips, aggregation, truncated_is_cap):
    """The loss, its metrics and the gradient with respect to the log-probabilities."""

    def loss(logprobs):
        rest = {name: arrays[name] for name in ARRAYS[1:]}
        return clipped_policy_loss(
            logprobs, **rest, **clips, aggregation=aggregation, truncated_is_cap=truncated_is_cap
        )

    return jax.value_and_grad(loss, has_aux=True)(arrays["logprobs"])


def jitted_value_and_gradient(arrays, clips, aggregation, truncated_is_cap):
    return _jitted(arrays, tuple(clips.items()), aggregation, truncated_is_cap)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _jitted(arrays, clips, *options):
    return value_and_gradient(arrays, dict(clips), *options)


def random_batch(seed: int, rows: int = 8, length: int = 7) -> dict[str, np.ndarray]:
    """Rows of every length down to 0, ratios far enough from 1 that every clip decides somewhere."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (rows, length))
    batch = {
        "logprobs": old + rng.normal(0, 3, (rows, length)),
        "old_logprobs": old,
        "advantages": np.repeat(rng.normal(size=(rows, 1)), length, axis=1),
        "mask": np.arange(length) < rng.permutation(np.linspace(0, length, rows).astype(int))[:, None],
        "behaviour_logprobs": old + rng.normal(0, 0.5, (rows, length)),
    }
    return {name: np.asarray(values, bool if name == "mask" else np.float32) for name, values in batch.items()}


def check_against_reference(case: dict, loss, metrics, gradient):
    actual = {"loss": loss, "grad_logprobs": gradient, **metrics}
    assert actual.keys() == case["expected"].keys()
    for name, expected in case["expected"].items():
        np.testing.assert_allclose(actual[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


# All compiled, and of the others, which take longer, one with each aggregation and cap: see the test of the cases.
EAGER = [0, 4, 5, 15, 28, 34]


@pytest.mark.parametrize(
    ("case", "jitted"),
    [(case, True) for case in POLICY_CASES]
    + [
        pytest.param(case, False, marks=[pytest.mark.slow] * (number not in EAGER))
        for number, case in enumerate(POLICY_CASES)
    ],
)
def test_policy_loss_reference(case, jitted):
    rows, length = np.shape(case["mask"])
    # All in one shape, so that little is compiled: rows and columns of padding must change nothing.
    padding = ((0, 6 - rows), (0, 11 - length))
    arrays = {name: np.pad(np.array(case[name], np.float32), padding) for name in ARRAYS}
    clips = {name: case[name] for name in CLIPS}
    function = jitted_value_and_gradient if jitted else value_and_gradient
    (loss, metrics), gradient = function(arrays, clips, case["aggregation"], case["truncated_is_cap"])
    gradient = np.asarray(gradient)
    check_against_reference(case, loss, metrics, gradient[:rows, :length])
    assert not gradient[rows:].any() and not gradient[:, length:].any()


def test_all_36_reference_cases_are_here():
    assert len(POLICY_CASES) == 36
    for cases in (POLICY_CASES, [POLICY_CASES[number] for number in EAGER]):
        assert {(case["aggregation"], case["truncated_is_cap"]) for case in cases} == set(
            itertools.product(REFERENCE_AGGREGATIONS, [None, 2.0])
        )


@pytest.mark.parametrize("case", POLICY_CASES[::9])
def test_policy_loss_reference_as_recorded(case):
    arrays = {name: jnp.asarray(case[name], jnp.float32) for name in ARRAYS}
    clips = {name: case[name] for name in CLIPS}
    (loss, metrics), gradient = jitted_value_and_gradient(arrays, clips, case["aggregation"], case["truncated_is_cap"])
    check_against_reference(case, loss, metrics, gradient)


@pytest.mark.parametrize("jitted", [False, True])
def test_kl_reference(jitted):
    function = jax.jit(kl_estimate, static_argnums=2) if jitted else kl_estimate
    cases = read("kl.jsonl")
    assert len(cases) == 9
    for case in cases:
        for kind in KINDS:
            actual = function(jnp.asarray(case["logprobs"]), jnp.asarray(case["ref_logprobs"]), kind)
            np.testing.assert_allclose(actual, case["expected"][kind], rtol=1e-5, atol=1e-5, err_msg=kind)


def test_kl_by_hand():
    # d = log 2: k1 = 0.693147, k2 = d^2 / 2 = 0.240227, k3 = 1/2 - 1 + d = 0.193147.
    # With the sign of d turned round k3 would be 2 - 1 - 0.693147 = 0.306853.
    logprobs, reference = jnp.array([-1.0]), jnp.array([-1.0 - math.log(2)])
    actual = [kl_estimate(logprobs, reference, kind)[0] for kind in KINDS]
    np.testing.assert_allclose(actual, [0.693147, 0.240227, 0.193147], rtol=0, atol=1e-6)
    # Far apart: exp(30) is bounded, and so is its gradient.
    far = functools.partial(kl_estimate, ref_logprobs=jnp.array([0.0]), kind="k3")
    assert far(jnp.array([-30.0])) == 10.0
    assert jax.grad(lambda logprobs: far(logprobs).sum())(jnp.array([-30.0])) == 0.0


@pytest.mark.parametrize("jitted", [False, True])
def test_k3_and_its_slope_near_zero_are_those_of_float64(jitted):
    # At d = 1e-4 exp(-d) - 1 + d is off by 4 times its value, and expm1(-d) + d by 2.5e-4 of it.
    magnitudes = np.concatenate([np.geomspace(1e-12, 0.99, 300), np.geomspace(1.01, 19, 50)])
    d = np.float32(np.concatenate([magnitudes, -magnitudes[magnitudes < 2]]))
    exact = d.astype(np.float64)
    # In float64 the same cancellation is below 1e-9 from 1e-3 on; below that three terms are exact to 1e-13.
    value = np.where(np.abs(exact) < 1e-3, exact**2 / 2 - exact**3 / 6 + exact**4 / 24, np.expm1(-exact) + exact)

    def k3(d):
        return kl_estimate(d, jnp.zeros_like(d), "k3")

    function = jax.vmap(jax.value_and_grad(k3))
    actual, slope = (jax.jit(function) if jitted else function)(jnp.asarray(d))
    bounded = value < 10  # above, k3 is 10 and has no slope
    np.testing.assert_allclose(actual, np.minimum(value, 10), rtol=1e-6)
    np.testing.assert_allclose(slope[bounded], -np.expm1(-exact[bounded]), rtol=1e-6)
    assert (value > 10).any() and not slope[value > 10].any()


def test_no_gradient_into_the_reference():
    gradient = jax.grad(lambda reference: kl_estimate(jnp.array([-1.0]), reference, "k3").sum())(jnp.array([-2.0]))
    assert gradient == 0.0


def test_slopes_of_the_kl_estimates():
    # Five tokens; the sum over all of them, weighted by the policy, is the expectation over its samples.
    rng = np.random.default_rng(0)
    logits, reference = rng.normal(size=5), rng.normal(size=5)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, reference))

    def expected_slope(kind):
        def loss(logits):
            logprobs = jax.nn.log_softmax(logits)
            estimates = kl_estimate(logprobs, jnp.asarray(np.log(q), jnp.float32), kind)
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(logprobs)) * estimates)

        return jax.grad(loss)(jnp.asarray(logits, jnp.float32))

    # With d = log p - log q and F = sum p d = KL(p || q):  dF / dlogit = p (d - F); of KL(q || p): p - q.
    d = np.log(p) - np.log(q)
    np.testing.assert_allclose(expected_slope("k2"), p * (d - (p * d).sum()), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(expected_slope("k3"), p - q, rtol=1e-5, atol=1e-6)
    assert np.abs(p - q).max() > 0.1
    # k1's mean is the KL itself, but as a loss it pulls nowhere.
    np.testing.assert_allclose(expected_slope("k1"), np.zeros(5), atol=1e-7)


def gspo(logprobs, batch):
    """GSPO's loss in float64, as its paper writes it: row by row, min of products."""
    rows = []
    for row, mask in enumerate(np.asarray(batch["mask"])):
        if mask.any():
            ratio = np.exp(np.mean(logprobs[row, mask] - np.asarray(batch["old_logprobs"], np.float64)[row, mask]))
            advantage = float(batch["advantages"][row, 0])
            objective = min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
            rows.append(-max(objective, 10 * advantage) if advantage < 0 else -objective)
    return np.mean(rows)


def sequence_batch(seed):
    """`random_batch` with rows on either side of each clip."""
    batch = random_batch(seed)
    shift = np.linspace(-3, 3, 8, dtype=np.float32)[:, None]
    old, logprobs = batch["old_logprobs"], batch["logprobs"]
    return batch | {"logprobs": old + shift + np.float32(0.1) * (logprobs - old)}


def eager_sequence_value_and_gradient(batch, aggregation="seq-mean-token-mean"):
    def loss(logprobs):
        rest = {name: batch[name] for name in ARRAYS[1:]}
        return clipped_policy_loss(logprobs, **rest, **CLIPS, aggregation=aggregation, ratio="sequence")

    return jax.value_and_grad(loss, has_aux=True)(batch["logprobs"])


sequence_value_and_gradient = jax.jit(eager_sequence_value_and_gradient, static_argnums=1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sequence_ratio_is_gspo(seed):
    batch = sequence_batch(seed)
    (loss, metrics), gradient = sequence_value_and_gradient(batch)
    assert 0 < metrics["clip_fraction"] < 1
    at = np.asarray(batch["logprobs"], np.float64)
    np.testing.assert_allclose(loss, gspo(at, batch), rtol=1e-5)
    slope = np.zeros(at.shape)
    for place in np.ndindex(at.shape):
        step = np.zeros(at.shape)
        step[place] = 1e-6
        slope[place] = (gspo(at + step, batch) - gspo(at - step, batch)) / 2e-6
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


def test_sequence_ratio_by_hand():
    # Row 0: log ratios log 1.1 and log 1.21, mean log 1.1^1.5: ratio 1.153690, A = 1. Their product, 1.331, would be
    # clipped at 1.28. Row 1: log 2 and -log 2: ratio 1, A = 2, where each token's own would be 1.28 (clipped) and 1/2.
    # Row 2: one token, ratio 1/2, A = -1: clipped at 0.8.
    old = np.full((3, 2), -3.0, np.float32)
    mask = np.array([[1, 1], [1, 1], [1, 0]], bool)
    logprobs = old + np.log(np.float32([[1.1, 1.21], [2.0, 0.5], [0.5, 1.0]]))
    advantages = np.broadcast_to(np.float32([[1.0], [2.0], [-1.0]]), (3, 2))
    for jitted in (False, True):
        function = functools.partial(policy_terms, SEQUENCE)
        terms = (jax.jit(function) if jitted else function)(logprobs, SampledTokens(old, advantages, mask))
        expected = [[-1.153690, -1.153690], [-2.0, -2.0], [0.8, 0.0]]
        np.testing.assert_allclose(terms.loss, expected, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(terms.clipped, [[0, 0], [0, 0], [1, 0]])
        # Of the tokens themselves, as ever: -log of their own ratios.
        np.testing.assert_allclose(terms.old_minus_new[1], [-0.693147, 0.693147], atol=1e-5)


@pytest.mark.parametrize("aggregation", values.AGGREGATIONS)
def test_a_response_of_one_token_has_the_tokens_ratio(aggregation):
    batch = random_batch(8) | {"mask": np.tile(np.arange(7) == 2, (8, 1))}
    expected = value_and_gradient(batch, CLIPS, aggregation, None)
    jax.tree.map(np.testing.assert_array_equal, eager_sequence_value_and_gradient(batch, aggregation), expected)


@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
def test_garbage_under_the_mask_reaches_no_sequence_ratio(garbage):
    clean = sequence_batch(3)
    assert not clean["mask"].any(axis=1).all()  # a row without tokens is among them
    dirty = {
        name: values if name == "mask" else np.where(clean["mask"], values, np.float32(garbage))
        for name, values in clean.items()
    }
    expected, actual = sequence_value_and_gradient(clean), sequence_value_and_gradient(dirty)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    gradient = np.asarray(actual[1])
    assert np.isfinite(gradient).all() and not gradient[~clean["mask"]].any()
    # Padding is in no mean: the same rows with none of it.
    cut = {name: np.pad(values, [(0, 0), (0, 5)]) for name, values in clean.items()}
    np.testing.assert_allclose(sequence_value_and_gradient(cut)[0][0], expected[0][0], rtol=1e-6)


def test_sequence_ratio_jit_equals_eager():
    batch = sequence_batch(5)
    for aggregation in values.AGGREGATIONS:
        compiled = sequence_value_and_gradient(batch, aggregation)
        eager = eager_sequence_value_and_gradient(batch, aggregation)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), compiled, eager)


def test_a_sequence_ratio_is_bounded():
    # The mean log ratio is bounded, not each token's: exp(20) at A = -1, where the dual clip holds it at 10.
    ones = jnp.ones((1, 2))
    terms = policy_terms(SEQUENCE, jnp.array([[100.0, 0.0]]), SampledTokens(0 * ones, -ones, ones))
    np.testing.assert_array_equal(terms.loss, [[10.0, 10.0]])
    terms = policy_terms(SEQUENCE, jnp.array([[-100.0, 0.0]]), SampledTokens(0 * ones, ones, ones))
    np.testing.assert_allclose(terms.loss, -math.exp(-20) * ones, rtol=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "expected", "bug"),
    [
        # Ratio 1, so the loss of a token is -A: row 0 has one token with A = 2, row 1 three with A = -1, row 2 none.
        # Sum of all tokens: -2 + 3 * 1 = 1.
        ("token-mean", 1 / 4, 1 / 9),  # 4 tokens; padding counted: 9; divided by B once more: 1 / 12
        ("seq-mean-token-sum", 1 / 2, 1 / 3),  # 2 rows with tokens; the empty one counted: 3
        ("seq-mean-token-sum-norm", 1 / 6, 1 / 9),  # also by the 3 tokens that a row may have
        ("seq-mean-token-mean", (-2 + 1) / 2, (-2 + 1) / 3),  # row means -2 and 1
    ],
)
def test_aggregations_by_hand(aggregation, expected, bug):
    mask = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
    logprobs = np.full((3, 3), -0.5, np.float32)
    advantages = np.broadcast_to(np.float32([[2.0], [-1.0], [7.0]]), (3, 3))
    loss, metrics = clipped_policy_loss(logprobs, logprobs, advantages, mask, aggregation=aggregation, **CLIPS)
    assert float(loss) == pytest.approx(expected) != bug
    assert {name: float(value) for name, value in metrics.items()} == dict.fromkeys(metrics, 0.0)
    as_float, _ = clipped_policy_loss(
        logprobs, logprobs, advantages, mask.astype(np.float32), aggregation=aggregation, **CLIPS
    )
    assert as_float == loss


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope"),
    [
        (math.log(1.1), 2.0, -2.2, -2.2),  # inside: -rho A, and d/dlogp of it is -rho A again
        (math.log(2.0), 2.0, -2.56, 0.0),  # above 1.28: no more is gained; symmetric clipping at 1.2 would say -2.4
        (math.log(0.5), 2.0, -1.0, -1.0),  # below 0.8 at A > 0: the plain term is the larger loss
        (math.log(0.5), -2.0, 1.6, 0.0),  # below 0.8 at A < 0: clipped at 0.8
        (math.log(2.0), -2.0, 4.0, 4.0),  # above at A < 0: plain
        (math.log(40.0), -2.0, 20.0, 0.0),  # dual clip: 10 |A|, not 80
        (math.log(40.0), 2.0, -2.56, 0.0),  # which does not touch A > 0
        (25.0, -2.0, 20.0, 0.0),
        (0.0, 2.0, -2.0, -2.0),  # both sides equal: the slope is whole, not halved
    ],
)
def test_clipping_by_hand(log_ratio, advantage, loss, slope):
    one = np.ones((1, 1), np.float32)
    arrays = {"logprobs": (log_ratio - 3) * one, "old_logprobs": -3 * one, "advantages": advantage * one, "mask": one}
    arrays["behaviour_logprobs"] = one
    (actual, metrics), gradient = jitted_value_and_gradient(arrays, CLIPS, "token-mean", None)
    np.testing.assert_allclose([actual, gradient[0, 0]], [loss, slope], rtol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], -log_ratio, rtol=0, atol=1e-6)
    assert bool(metrics["dual_clip_fraction"]) == (loss == 20.0)
    assert bool(metrics["clip_fraction"]) == (slope == 0.0 and loss != 20.0)


def test_truncated_importance_weight_by_hand():
    # logp_old - logp_behaviour is log 3 and log 1/2; capped at 2: weights 2 and 1/2. Ratio 1, A = 1: losses -2, -1/2.
    # Uncapped: -(3 + 1/2) / 2 = -1.75; the wrong way round: -(1/3 + 2) / 2.
    ones = np.ones((1, 2), np.float32)
    behaviour = -np.log(np.float32([[3.0, 0.5]]))
    arguments = {"aggregation": "token-mean", "behaviour_logprobs": behaviour, **CLIPS}
    loss, _ = clipped_policy_loss(0 * ones, 0 * ones, ones, ones, truncated_is_cap=2.0, **arguments)
    assert float(loss) == pytest.approx(-1.25)
    # Without a cap the behaviour's log-probabilities are not looked at.
    loss, _ = clipped_policy_loss(0 * ones, 0 * ones, ones, ones, **arguments)
    assert float(loss) == -1.0


@pytest.mark.parametrize("aggregation", values.AGGREGATIONS)
def test_micro_batches_sum_to_the_whole(aggregation):
    batch = random_batch(1)
    (loss, metrics), gradient = jitted_value_and_gradient(batch, CLIPS, aggregation, 2.0)
    assert 0 < metrics["dual_clip_fraction"] < 1 and 0 < metrics["clip_fraction"] < 1
    counts = denominators(batch["mask"])

    @jax.jit
    @jax.value_and_grad
    def part(logprobs, rest):
        config = LossConfig(**CLIPS, aggregation=aggregation, truncated_is_cap=2.0)
        terms = policy_terms(config, logprobs, SampledTokens(**rest))
        return aggregate(terms.loss, rest["mask"], aggregation, counts)

    for rows in (4, 1):
        parts = [{name: values[start : start + rows] for name, values in batch.items()} for start in range(0, 8, rows)]
        losses, gradients = zip(*(part(rest.pop("logprobs"), rest) for rest in parts), strict=True)
        # The mean of per-part means is what goes wrong where rows differ in length.
        np.testing.assert_allclose(sum(losses), loss, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("aggregation", REFERENCE_AGGREGATIONS)
def test_mask_equals_slice(aggregation):
    batch = random_batch(2)
    batch["mask"] = (np.arange(8) < 5)[:, None] & (np.arange(7) < 4)
    cut = {name: values[:5, :4] for name, values in batch.items()}
    (loss, metrics), gradient = jitted_value_and_gradient(batch, CLIPS, aggregation, 2.0)
    (cut_loss, cut_metrics), cut_gradient = jitted_value_and_gradient(cut, CLIPS, aggregation, 2.0)
    np.testing.assert_allclose(loss, cut_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient[:5, :4], cut_gradient, rtol=1e-6)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], cut_metrics[name], rtol=1e-6)


@pytest.mark.parametrize("aggregation", values.AGGREGATIONS)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, math.inf, 1e30])
def test_garbage_under_the_mask_reaches_nothing(aggregation, garbage):
    clean = random_batch(3)
    dirty = {
        name: values if name == "mask" else np.where(clean["mask"], values, np.float32(garbage))
        for name, values in clean.items()
    }
    expected = jitted_value_and_gradient(clean, CLIPS, aggregation, 2.0)
    actual = jitted_value_and_gradient(dirty, CLIPS, aggregation, 2.0)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    gradient = np.asarray(actual[1])
    assert np.isfinite(gradient).all() and not gradient[~clean["mask"]].any()


@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
def test_the_pieces_keep_garbage_out_by_themselves(garbage):
    batch = random_batch(3)
    mask = batch["mask"]
    dirty = {name: np.where(mask, values, np.float32(garbage)) for name, values in batch.items() if name != "mask"}
    config = LossConfig(**CLIPS, aggregation="token-mean", truncated_is_cap=2.0)
    logprobs = dirty.pop("logprobs")
    for term in policy_terms(config, logprobs, SampledTokens(**dirty, mask=mask)):
        assert np.isfinite(term).all() and not np.asarray(term)[~mask].any()
    # As an entropy comes from the policy: nan where there is no token.
    expected = aggregate(batch["logprobs"], mask, "token-mean", Denominators(4.0, 2.0))
    assert aggregate(logprobs, mask, "token-mean", Denominators(4.0, 2.0)) == expected


def test_only_the_current_logprobs_are_differentiated():
    batch = random_batch(4)
    mask = batch.pop("mask")

    @jax.jit
    @jax.grad
    def gradient_of_all(arrays):
        options = {"aggregation": "token-mean", "truncated_is_cap": 2.0, **CLIPS}
        value, metrics = clipped_policy_loss(mask=mask, **arrays, **options)
        return value + sum(metrics.values())

    gradients = gradient_of_all(batch)
    assert gradients.pop("logprobs").any()
    for gradient in gradients.values():
        assert not gradient.any()


def test_jit_equals_eager():
    batch = random_batch(5)
    for aggregation in values.AGGREGATIONS:
        eager = value_and_gradient(batch, CLIPS, aggregation, 2.0)
        compiled = jitted_value_and_gradient(batch, CLIPS, aggregation, 2.0)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), compiled, eager)


def test_bfloat16_is_computed_in_float32():
    batch = {name: values.astype(jnp.bfloat16) for name, values in random_batch(6).items()}
    wide = {name: values.astype(jnp.float32) for name, values in batch.items()}
    options = {"aggregation": "token-mean", "truncated_is_cap": 2.0, **CLIPS}
    loss, metrics = clipped_policy_loss(**batch, **options)
    assert loss.dtype == jnp.float32
    assert all(value.dtype == jnp.float32 for value in metrics.values())
    assert loss == clipped_policy_loss(**wide, **options)[0]


def test_a_minibatch_without_tokens_has_loss_0():
    batch = random_batch(7) | {"mask": np.zeros((8, 7), bool)}
    for aggregation in values.AGGREGATIONS:
        (loss, _), gradient = jitted_value_and_gradient(batch, CLIPS, aggregation, 2.0)
        assert loss == 0.0 and not gradient.any()


def test_regularization_weighs_entropy_and_kl_alone():
    # Two responses of two tokens and one: the first is not regularised, the second twice. Three tokens in all.
    mask = np.array([[True, True], [True, False]])
    logprobs, entropy = jnp.full((2, 2), -1.0), jnp.asarray([[0.5, 0.7], [0.9, jnp.nan]])
    rest = dict(old_logprobs=logprobs, advantages=np.ones((2, 2), np.float32), mask=mask)
    config = LossConfig(**CLIPS, aggregation="token-mean", kl_kind="k2", kl_coefficient=0.1, entropy_coefficient=0.01)

    def loss(logprobs, entropy):
        weights = np.float32([[0, 0], [2, 2]])
        sampled = SampledTokens(**rest, reference_logprobs=logprobs * 3, regularization=weights)
        return policy_loss(config, logprobs, entropy, sampled)[0]

    # -1 for the policy; d = -1 + 3 = 2, so k2 = 2.
    assert loss(logprobs, entropy) == pytest.approx(-1.0 - 0.01 * 2 * 0.9 / 3 + 0.1 * 2 * 2.0 / 3, rel=1e-6)
    slopes = jax.grad(loss, argnums=(0, 1))(logprobs, entropy)
    # The slope of the policy is -1 / 3 on each token, that of k2 is d = 2, times 0.1 * 2 / 3.
    np.testing.assert_allclose(slopes[0], [[-1 / 3, -1 / 3], [-1 / 3 + 0.4 / 3, 0]], rtol=1e-6)
    np.testing.assert_allclose(slopes[1], [[0, 0], [-0.02 / 3, 0]], rtol=1e-6)


def test_what_is_refused():
    """Unknown settings and missing arrays are named."""
    one = jnp.ones((1, 1))
    with pytest.raises(ValueError, match="needs behaviour_logprobs"):
        clipped_policy_loss(one, one, one, one, aggregation="token-mean", truncated_is_cap=2.0, **CLIPS)
    with pytest.raises(ValueError, match="aggregation is 'mean'; it must be one of token-mean"):
        clipped_policy_loss(one, one, one, one, aggregation="mean", **CLIPS)
    with pytest.raises(ValueError, match="ratio is 'row'; it must be one of token, sequence"):
        clipped_policy_loss(one, one, one, one, aggregation="token-mean", ratio="row", **CLIPS)
    with pytest.raises(ValueError, match="kind is 'k4'; it must be one of k1, k2, k3"):
        kl_estimate(one, one, "k4")


def test_tokens_without_advantage_stand_for_those_that_are_left_out():
    mask = np.array([[True, True, False], [True, True, True]])
    advantages = np.float32([[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]])
    # Three of nine such tokens are computed: each stands for three.
    weights = metric_weights(jnp.asarray(advantages), jnp.asarray(mask), jnp.int32(6))
    np.testing.assert_array_equal(np.where(mask, weights, 0), [[1, 1, 0], [3, 3, 3]])
    # None of six is: the five others stand for eleven.
    weights = metric_weights(jnp.asarray(advantages + 1), jnp.asarray(mask), jnp.int32(6))
    np.testing.assert_allclose(weights, np.full((2, 3), 11 / 5), rtol=1e-6)
    # Nothing is left out.
    weights = metric_weights(jnp.asarray(advantages), jnp.asarray(mask), jnp.int32(0))
    np.testing.assert_array_equal(weights, np.ones((2, 3)))
