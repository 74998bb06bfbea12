"""The policy loss and the KL estimates, per token and aggregated. Arrays in, arrays out; float32 inside.

A minibatch may be computed in micro-batches: `policy_loss` on each, with the `counts` of the whole minibatch. The
parts sum to the loss of the whole, and so do their gradients.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Tokens = Float[Array | np.ndarray, "B T"]
Mask = Bool[Array | np.ndarray, "B T"] | Float[Array | np.ndarray, "B T"]
SegmentOneHot = Bool[Array | np.ndarray, "B T S"]

# Bounds of the reference program: of a log ratio before it is exponentiated, and of k3.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
# The series of exp(-d) - 1 + d ends before d^12: below 1 the rest is less than 5e-9 of the value.
SERIES_LENGTH = 12


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Settings of `policy_loss`; the fields of the configuration's `learning` section with the same names.

    Attributes:
      clip_low: the ratio is clipped at 1 - clip_low, in (0, 1).
      clip_high: the ratio is clipped at 1 + clip_high, > 0.
      dual_clip: bound of the loss at negative advantages, in units of |A|, > 1.
      aggregation: as for `aggregate`.
      ratio: "token" or "sequence". A sequence's ratio moves far less than a token's: it needs clips narrower by orders
        of magnitude (GSPO's runs: 3e-4 and 4e-4).
      truncated_is_cap: cap of the importance weight between sampler and learner, > 0; None: no such weight. Each token
        has its own weight with either `ratio`.
      kl_kind: as for `kl_estimate`.
      kl_coefficient: weight of the KL term.
      entropy_coefficient: weight of the entropy bonus.
    """

    clip_low: float
    clip_high: float
    dual_clip: float
    aggregation: str
    ratio: str = "token"
    truncated_is_cap: float | None = None
    kl_kind: str = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0


class Counts(NamedTuple):
    """Sizes of a whole minibatch, both at least 1."""

    num_tokens: Float[Array, ""] | float
    num_rows: Float[Array, ""] | float  # responses that have tokens


class PolicyTerms(NamedTuple):
    """Per-token terms of the policy loss, all 0 where the mask is 0.

    Attributes:
      loss: to be minimised.
      clipped: 1 where the clipped ratio decides.
      dual_clipped: 1 where the dual clip decides.
      old_minus_new: logp_old - logp, whose mean estimates KL(old || new).
    """

    loss: Float[Array, "B T"]
    clipped: Float[Array, "B T"]
    dual_clipped: Float[Array, "B T"]
    old_minus_new: Float[Array, "B T"]


def _masked(values: Array | np.ndarray, mask: Array | np.ndarray) -> Array:
    """Float32 values, 0 where the mask is: before any exp, so that nothing there reaches a value or a slope."""
    return jnp.where(mask.astype(bool), values.astype(jnp.float32), 0.0)


def segment_sums(values: Tokens, segment_one_hot: SegmentOneHot | None) -> Float[Array, "B T"]:
    """Computes at each token the sum over its own response's tokens.

    Args:
      values: 0 under the mask.
      segment_one_hot: True where the token belongs to its row's response s; None: a row is one response.
    """
    if segment_one_hot is None:
        return jnp.broadcast_to(values.sum(axis=-1, keepdims=True), values.shape)
    sums = jnp.where(segment_one_hot, values[..., None], 0.0).sum(axis=-2, keepdims=True)
    return jnp.where(segment_one_hot, sums, 0.0).sum(axis=-1)


def policy_terms(
    config: LossConfig,
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    behaviour_logprobs: Tokens | None = None,
    segment_one_hot: SegmentOneHot | None = None,
) -> PolicyTerms:
    """Computes the clipped policy loss of every token.

    rho = exp(clip(logp - logp_old, -20, 20))
    L   = max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A),  and where A < 0 at most dual_clip |A|
    L  *= min(exp(logp_old - logp_behaviour), cap)                 when a cap is given

    With ratio "sequence" all tokens of a response have one rho: that of the mean of logp - logp_old over them, the
    geometric mean of the tokens' ratios. With the aggregation "seq-mean-token-mean" that is the objective of GSPO.

    Source: PPO (arXiv 1707.06347), clip-higher (DAPO, 2503.14476), dual clip (1912.09729), as the reference program
    of arXiv 2510.04996 puts them together; tests/golden/reference/policy_loss.jsonl. GSPO: 2507.18071, section 4.1.

    Only `logprobs` is differentiated. Values under the mask may be anything, nan and infinities included.

    Args and errors: as for `policy_loss`.
    """
    if config.ratio not in ("token", "sequence"):
        raise ValueError(f"ratio is {config.ratio!r}; it must be one of token, sequence.")
    logprobs = _masked(logprobs, mask)
    old_logprobs = jax.lax.stop_gradient(_masked(old_logprobs, mask))
    advantages = jax.lax.stop_gradient(_masked(advantages, mask))
    log_ratio = logprobs - old_logprobs
    if config.ratio == "sequence":
        lengths = jnp.maximum(segment_sums(mask.astype(jnp.float32), segment_one_hot), 1.0)
        log_ratio = segment_sums(log_ratio, segment_one_hot) / lengths
    rho = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -rho * advantages
    clipped = -jnp.clip(rho, 1 - config.clip_low, 1 + config.clip_high) * advantages
    pessimistic = jnp.maximum(plain, clipped)
    bound = -config.dual_clip * advantages
    loss = jnp.where(advantages < 0, jnp.minimum(pessimistic, bound), pessimistic)
    if config.truncated_is_cap is not None:
        if behaviour_logprobs is None:
            raise ValueError("truncated_is_cap needs behaviour_logprobs.")
        weight = jnp.exp(old_logprobs - _masked(behaviour_logprobs, mask))
        loss = loss * jax.lax.stop_gradient(jnp.minimum(weight, config.truncated_is_cap))
    return PolicyTerms(
        loss=loss,
        clipped=_masked(clipped > plain, mask),
        dual_clipped=_masked((advantages < 0) & (pessimistic > bound), mask),
        old_minus_new=old_logprobs - jax.lax.stop_gradient(logprobs),
    )


def denominators(mask: Mask, segment_one_hot: SegmentOneHot | None = None) -> Counts:
    """Counts the tokens of a minibatch and the responses that have any.

    Rows without a token are padding and count nowhere, as if they were cut off.
    """
    mask = mask.astype(bool)
    of_responses = mask[..., None] if segment_one_hot is None else segment_one_hot & mask[..., None]
    return make_counts(mask.sum(), of_responses.any(axis=-2).sum())


def make_counts(num_tokens: Int[Array, ""] | np.integer, num_rows: Int[Array, ""] | np.integer) -> Counts:
    """Counts as floats, at least 1, to divide by."""
    return Counts(*(jnp.maximum(x, 1).astype(jnp.float32) for x in (num_tokens, num_rows)))


def metric_weights(
    advantages: Float[Array | np.ndarray, "*B T"], mask: Bool[Array | np.ndarray, "*B T"], num_left_out: Int[Array, ""]
) -> Float[Array, "*B T"]:
    """Computes the weights of tokens in means over a minibatch from which responses with advantage 0 were left out.

    Tokens with advantage 0 stand for all such tokens: their weight is 1 + left out / computed. If none of them was
    computed, the other tokens stand for all. The weights sum to the number of tokens of the whole minibatch, unless no
    token was computed at all.

    Args:
      advantages: of the tokens that are computed.
      mask: True at tokens of responses.
      num_left_out: tokens of responses with advantage 0 that are not computed.
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
    *,
    num_tokens: Float[Array, ""] | float,
    num_rows: Float[Array, ""] | float,
    segment_one_hot: SegmentOneHot | None = None,
) -> Float[Array, ""]:
    """Computes one number from per-token values.

    token-mean           sum of all tokens / num_tokens: every token weighs the same (DAPO, arXiv 2503.14476)
    seq-mean-token-sum   sum of all tokens / num_rows (Dr.GRPO, 2503.20783, up to a constant)
    seq-mean-token-mean  sum over responses of their token means / num_rows (GRPO, 2402.03300)

    Args:
      per_token: values; anything under the mask (though nan there would spoil a gradient: mask before computing).
      mask: True or 1 at tokens of responses.
      aggregation: one of the three names.
      num_tokens: tokens of the whole minibatch, of which these rows may be a part (`denominators`).
      num_rows: its responses that have tokens, each a row unless rows are packed.
      segment_one_hot: the tokens of each response, where rows are packed; as for `segment_sums`.

    Raises:
      ValueError: an unknown name.
    """
    row_sums = _masked(per_token, mask).sum(axis=-1)
    if aggregation == "token-mean":
        return row_sums.sum() / num_tokens
    if aggregation == "seq-mean-token-sum":
        return row_sums.sum() / num_rows
    if aggregation == "seq-mean-token-mean":
        lengths = segment_sums(mask.astype(jnp.float32), segment_one_hot)
        return (_masked(per_token, mask) / jnp.maximum(lengths, 1.0)).sum() / num_rows
    raise ValueError(
        f"aggregation is {aggregation!r}; it must be one of token-mean, seq-mean-token-sum, seq-mean-token-mean."
    )


def _kl(config: LossConfig, logprobs: Tokens, reference_logprobs: Tokens | None, mask: Mask) -> Float[Array, "B T"]:
    """Computes the KL of every token, 0 without a reference; raises ValueError where its coefficient needs one."""
    if reference_logprobs is not None:
        # Masked before the difference: values under the mask must reach neither the loss nor its slope.
        return kl_estimate(_masked(logprobs, mask), _masked(reference_logprobs, mask), config.kl_kind)
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
    *,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    behaviour_logprobs: Tokens | None = None,
    reference_logprobs: Tokens | None = None,
    regularization: Tokens | None = None,
    segment_one_hot: SegmentOneHot | None = None,
    counts: Counts | None = None,
    metric_weights: Tokens | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes the policy loss of a minibatch, or its share of one.

    loss = aggregate(L) - entropy_coefficient aggregate(H) + kl_coefficient aggregate(KL), with L of `policy_terms`, H
    the entropy and KL of `kl_estimate`. H and KL of each token are multiplied by `regularization`.

    Values under the mask may be anything, nan included, and slopes are 0 there.

    Args:
      config: its settings.
      logprobs: of the sampled tokens, under the policy being updated; differentiated, as is `entropy`.
      entropy: of the policy where it chose them.
      old_logprobs: under the policy before the iteration's first update.
      advantages: of the response, at each of its tokens.
      mask: True or 1 at tokens of responses.
      behaviour_logprobs: under the distribution the tokens were sampled from; needed with a cap.
      reference_logprobs: under the reference policy; without them the metric "kl" is 0.
      regularization: factors of the tokens' entropy and KL in the loss; None: 1.
      segment_one_hot: the tokens of each response, where rows are packed; as for `segment_sums`.
      counts: of the whole minibatch, of which these rows may be a part; None: these rows are all.
      metric_weights: factors of the tokens in "entropy" and "approx_kl", where these rows are a sample of the minibatch
        (`metric_weights`); None: 1.

    Returns:
      The loss, and sums over tokens divided by `num_tokens`: "entropy", "clip_fraction", "dual_clip_fraction",
      "approx_kl" and "kl". Tokens whose advantage is 0 are never clipped.

    Raises:
      ValueError: a cap without behaviour_logprobs, a KL coefficient without reference_logprobs, or an unknown name.
    """
    sizes = (denominators(mask, segment_one_hot) if counts is None else counts)._asdict()
    terms = policy_terms(
        config, logprobs, old_logprobs, advantages, mask,
        behaviour_logprobs=behaviour_logprobs, segment_one_hot=segment_one_hot,
    )  # fmt: skip

    def mean(values, aggregation=config.aggregation):
        return aggregate(values, mask, aggregation, **sizes, segment_one_hot=segment_one_hot)

    def regularizer(values):
        return mean(values if regularization is None else regularization * values)

    loss = mean(terms.loss)
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * regularizer(entropy)
    kl = _kl(config, logprobs, reference_logprobs, mask)
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


def cross_entropy(logprobs: Tokens, weights: Tokens) -> Tokens:
    """Computes -weight log p of every token."""
    return -weights * logprobs


def clipped_policy_loss(
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
    config = LossConfig(clip_low, clip_high, dual_clip, aggregation, ratio, truncated_is_cap)
    loss, metrics = policy_loss(
        config, logprobs, jnp.zeros_like(logprobs), old_logprobs=old_logprobs, advantages=advantages, mask=mask,
        behaviour_logprobs=behaviour_logprobs,
    )  # fmt: skip
    return loss, {name: metrics[name] for name in ("clip_fraction", "dual_clip_fraction", "approx_kl")}


@jax.custom_jvp
def exp_remainder(d: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes exp(-d) - 1 + d, to a few units in the last place for any d, as is its slope 1 - exp(-d).

    Near 0 the value is d^2 / 2, and exp(-d) - 1 + d rounds it to multiples of 6e-8 in float32. expm1(-d) + d cancels
    too, in the term -d; so for |d| < 1 the value is the sum of the rest of the series, d^2 / 2 - d^3 / 6 + ...
    """
    small = jnp.where(jnp.abs(d) < 1, d, 0.0)  # the series of others would overflow
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
        difference = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return jnp.clip(exp_remainder(difference), -MAX_K3, MAX_K3)
    raise ValueError(f"kind is {kind!r}; it must be one of k1, k2, k3.")
