"""The policy loss of a minibatch and the KL estimates. Arrays in, arrays out; float32 inside.

A minibatch may be computed in micro-batches: `policy_loss` on each, with the `counts` of the whole minibatch. The
parts sum to the loss of the whole, and so do their gradients.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.learning import token_losses
from reinforce_ada_jax.learning.token_losses import LossConfig, Mask, SampledTokens, SegmentOneHot, Tokens, masked

# Bound of k3, as in the reference program.
MAX_K3 = 10.0
# The series of exp(-d) - 1 + d is cut before d^12. For |d| < 1 the rest is less than 6e-9 of the value.
SERIES_LENGTH = 12


class Denominators(NamedTuple):
    """Sizes of a whole minibatch, both at least 1."""

    num_tokens: Float[Array, ""] | float
    num_rows: Float[Array, ""] | float  # responses that have tokens


def denominators(mask: Mask, segment_one_hot: SegmentOneHot | None = None) -> Denominators:
    """Counts a minibatch's tokens, and its responses that have any; rows without a token count nowhere."""
    mask = mask.astype(bool)
    of_responses = mask[..., None] if segment_one_hot is None else segment_one_hot & mask[..., None]
    return make_denominators(mask.sum(), of_responses.any(axis=-2).sum())


def make_denominators(num_tokens: Int[Array, ""] | np.integer, num_rows: Int[Array, ""] | np.integer) -> Denominators:
    """Returns counts as floats, at least 1, to divide by."""
    return Denominators(*(jnp.maximum(x, 1).astype(jnp.float32) for x in (num_tokens, num_rows)))


def metric_weights(
    advantages: Float[Array | np.ndarray, "*B T"], mask: Bool[Array | np.ndarray, "*B T"], num_left_out: Int[Array, ""]
) -> Float[Array, "*B T"]:
    """Computes the weights of tokens in means over a minibatch from which responses with advantage 0 were left out.

    Tokens with advantage 0 stand for all such tokens: their weight is 1 + left out / computed. If none of them was
    computed, the other tokens stand for all. The weights sum to the number of tokens of the whole minibatch, unless no
    token was computed at all.
    """
    is_zero = mask & (advantages == 0)
    num_zero, num_computed, left_out = (jnp.sum(x).astype(jnp.float32) for x in (is_zero, mask, num_left_out))
    of_zeros = 1 + left_out / jnp.maximum(num_zero, 1)
    of_others = jnp.where(num_zero > 0, 1.0, 1 + left_out / jnp.maximum(num_computed, 1))
    return jnp.where(is_zero, of_zeros, of_others)


def aggregate(
    per_token: Tokens,
    mask: Mask,
    aggregation: str,
    counts: Denominators,
    *,
    row_tokens: int | None = None,
    segment_one_hot: SegmentOneHot | None = None,
) -> Float[Array, ""]:
    """Computes one number from per-token values.

        token-mean               sum of all tokens / num_tokens: every token weighs the same (DAPO, arXiv 2503.14476)
        seq-mean-token-sum       sum of all tokens / num_rows
        seq-mean-token-sum-norm  sum of all tokens / (num_rows row_tokens), a constant length (Dr. GRPO, 2503.20783)
        seq-mean-token-mean      sum over responses of their token means / num_rows (GRPO, 2402.03300)

    Values where the mask is 0 may be anything (though nan there would spoil a gradient: mask before computing). The
    counts are those of the whole minibatch, of which these values may be a part. `row_tokens` is the most tokens
    that a response may have; None: T. `segment_one_hot` is as for `segment_sums`. Raises ValueError for an unknown
    name.
    """
    row_sums = masked(per_token, mask).sum(axis=-1)
    if aggregation == "token-mean":
        return row_sums.sum() / counts.num_tokens
    if aggregation == "seq-mean-token-sum":
        return row_sums.sum() / counts.num_rows
    if aggregation == "seq-mean-token-sum-norm":
        return row_sums.sum() / (counts.num_rows * (mask.shape[-1] if row_tokens is None else row_tokens))
    if aggregation == "seq-mean-token-mean":
        lengths = token_losses.segment_sums(mask.astype(jnp.float32), segment_one_hot)
        return (masked(per_token, mask) / jnp.maximum(lengths, 1.0)).sum() / counts.num_rows
    raise ValueError(
        f"aggregation is {aggregation!r}; it must be one of token-mean, seq-mean-token-sum, seq-mean-token-sum-norm, "
        "seq-mean-token-mean."
    )


def _kl(config: LossConfig, logprobs: Tokens, reference_logprobs: Tokens | None, mask: Mask) -> Float[Array, "B T"]:
    """Computes the KL of every token, 0 without a reference; raises ValueError where its coefficient needs one."""
    if reference_logprobs is not None:
        # They are masked before the difference: values where the mask is 0 must reach neither the loss nor its slope.
        return kl_estimate(masked(logprobs, mask), masked(reference_logprobs, mask), config.kl_kind)
    if config.kl_coefficient:
        raise ValueError(
            f"kl_coefficient is {config.kl_coefficient}, but there are no reference_logprobs: score the batch with the "
            "reference's weights first, or set the coefficient to 0."
        )
    return jnp.zeros_like(logprobs)


def policy_loss(
    config: LossConfig,
    logprobs: Tokens,
    entropy: Tokens,
    sampled: SampledTokens,
    *,
    counts: Denominators | None = None,
    metric_weights: Tokens | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes the policy loss of a minibatch, or its share of one.

    loss = aggregate(L) - entropy_coefficient aggregate(H) + kl_coefficient aggregate(KL), with L of `policy_terms`, H
    the entropy and KL of `kl_estimate`. H and KL of each token are multiplied by `regularization`.

    Logprobs of the sampled tokens and entropies are those of the policy being updated, and are differentiated. Where
    the mask is 0 they may be anything, nan included, and slopes are 0. `counts` are those of the whole minibatch, of
    which these rows may be a part; None: they are the whole. If responses are left out, `metric_weights` weigh
    "entropy" and "approx_kl".

    Returns:
      The loss, and sums over tokens divided by `num_tokens`: "entropy", "clip_fraction", "dual_clip_fraction",
      "approx_kl" and "kl". Tokens whose advantage is 0 are never clipped.

    Raises:
      ValueError: a cap without behaviour_logprobs, a KL coefficient without reference_logprobs, or an unknown name.
    """
    mask, segment_one_hot, regularization = sampled.mask, sampled.segment_one_hot, sampled.regularization
    sizes = denominators(mask, segment_one_hot) if counts is None else counts
    terms = token_losses.policy_terms(config, logprobs, sampled)

    def mean(values, aggregation=config.aggregation):
        rest = {"row_tokens": config.row_tokens, "segment_one_hot": segment_one_hot}
        return aggregate(values, mask, aggregation, sizes, **rest)

    def regularizer(values):
        return mean(values if regularization is None else regularization * values)

    loss = mean(terms.loss)
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * regularizer(entropy)
    kl = _kl(config, logprobs, sampled.reference_logprobs, mask)
    if config.kl_coefficient:
        loss = loss + config.kl_coefficient * regularizer(kl)
    entropies, old_minus_new = entropy, terms.old_minus_new
    if metric_weights is not None:
        entropies, old_minus_new = metric_weights * entropies, metric_weights * old_minus_new
    per_token = {
        "entropy": entropies,
        "clip_fraction": terms.clipped,
        "dual_clip_fraction": terms.dual_clipped,
        "approx_kl": old_minus_new,
        "kl": kl,
    }
    return loss, {name: jax.lax.stop_gradient(mean(values, "token-mean")) for name, values in per_token.items()}


def clipped_policy_loss(  # noqa: PLR0913 (public: arrays, and the settings of the loss by name)
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    aggregation: str,
    behaviour_logprobs: Tokens | None = None,
    truncated_is_cap: float | None = None,
    ratio: str = "token",
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes the clipped policy loss of a whole minibatch: `policy_loss` without entropy and KL terms.

    Returns:
      The loss, and the means over all tokens of the minibatch: "clip_fraction" and "dual_clip_fraction", where a clip
      decided, in [0, 1], and "approx_kl", of logp_old - logp.
    """
    config = LossConfig(clip_low, clip_high, dual_clip, aggregation, ratio=ratio, truncated_is_cap=truncated_is_cap)
    sampled = SampledTokens(old_logprobs, advantages, mask, behaviour_logprobs)
    loss, metrics = policy_loss(config, logprobs, jnp.zeros_like(logprobs), sampled)
    return loss, {name: metrics[name] for name in ("clip_fraction", "dual_clip_fraction", "approx_kl")}


@jax.custom_jvp
def exp_remainder(d: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes exp(-d) - 1 + d, and its slope 1 - exp(-d), to a few units in the last place for any d.

    Near 0 the value is d^2 / 2, and exp(-d) - 1 + d rounds it to multiples of 6e-8 in float32. In expm1(-d) + d the
    term -d cancels, too. So for |d| < 1 the value is the sum of the rest of the series, d^2 / 2 - d^3 / 6 + ...
    """
    small = jnp.where(jnp.abs(d) < 1, d, 0.0)  # for larger ones the series would overflow
    series = jnp.zeros_like(d)
    for n in reversed(range(2, SERIES_LENGTH)):
        series = (-1) ** n / math.factorial(n) + small * series
    return jnp.where(jnp.abs(d) < 1, jnp.square(small) * series, jnp.expm1(-d) + d)


@exp_remainder.defjvp
def _exp_remainder_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (d,), (tangent,) = primals, tangents
    return exp_remainder(d), -jnp.expm1(-d) * tangent


def kl_estimate(logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."], kind: str) -> Float[Array, "..."]:
    """Computes per-token estimates of KL(policy || reference) from tokens that the policy sampled.

    With d = logp - logp_ref:  k1 = d;  k2 = d^2 / 2;  k3 = clip(exp(-d') - 1 + d', -10, 10), d' = clip(d, -20, 20).
    Near d = 0, where most tokens are, k3 has no rounding errors beyond those of d itself (`exp_remainder`).
    Source: http://joschu.net/blog/kl-approx.html; bounds of the reference program; tests/golden/reference/kl.jsonl.

    As a loss, by the expectation over the policy of each one's slope:

        k1  grad logp                  0: it penalises nothing, whatever the reference is
        k2  d grad logp                the slope of KL(policy || reference)
        k3  (1 - exp(-d)) grad logp    the slope of KL(reference || policy), which is the same to first order in d

    Train with k2 or k3; k1 is a metric.

    Args:
      logprobs: of the sampled tokens, under the policy; differentiated. No mask is taken: padding must be finite.
      ref_logprobs: under the reference policy; a constant.
      kind: "k1", "k2" or "k3".

    Raises:
      ValueError: an unknown kind.
    """
    difference = logprobs.astype(jnp.float32) - jax.lax.stop_gradient(ref_logprobs.astype(jnp.float32))
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * jnp.square(difference)
    if kind == "k3":
        difference = jnp.clip(difference, -token_losses.MAX_LOG_RATIO, token_losses.MAX_LOG_RATIO)
        return jnp.clip(exp_remainder(difference), -MAX_K3, MAX_K3)
    raise ValueError(f"kind is {kind!r}; it must be one of k1, k2, k3.")
