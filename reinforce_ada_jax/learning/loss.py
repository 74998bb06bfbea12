"""The policy loss and the KL estimates, per token and aggregated. Arrays in, arrays out; float32 inside.

A minibatch may be computed in micro-batches: `policy_terms` on each, then `aggregate` with the `denominators` of the
whole minibatch. The parts sum to the loss of the whole, and so do their gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Mask = Bool[Array, "B T"] | Float[Array, "B T"]

# Of the reference program: bounds of a log ratio before it is exponentiated, and of k3.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


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


def _masked(values: Array, mask: Array) -> Array:
    """Float32 values, 0 where the mask is: before any exp, so that nothing there reaches a value or a slope."""
    return jnp.where(mask.astype(bool), values.astype(jnp.float32), 0.0)


def own_sums(values: Float[Array, "B T"], members: Bool[Array, "B T S"] | None) -> Float[Array, "B T"]:
    """At each token, the sum over its own sequence's tokens.

    Args:
      values: 0 under the mask.
      members: True where the token belongs to its row's sequence s; None: a row is one sequence.
    """
    if members is None:
        return jnp.broadcast_to(values.sum(axis=-1, keepdims=True), values.shape)
    sums = jnp.where(members, values[..., None], 0.0).sum(axis=-2, keepdims=True)
    return jnp.where(members, sums, 0.0).sum(axis=-1)


def policy_terms(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Mask,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    behaviour_logprobs: Float[Array, "B T"] | None = None,
    truncated_is_cap: float | None = None,
    ratio: str = "token",
    members: Bool[Array, "B T S"] | None = None,
) -> PolicyTerms:
    """The clipped policy loss of every token.

    rho = exp(clip(logp - logp_old, -20, 20))
    L   = max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A),  and where A < 0 at most dual_clip |A|
    L  *= min(exp(logp_old - logp_behaviour), cap)                 when a cap is given

    With ratio "sequence" all tokens of a sequence have one rho: that of the mean of logp - logp_old over them, the
    geometric mean of the tokens' ratios. With the aggregation "seq-mean-token-mean" that is the objective of GSPO.

    Source: PPO (arXiv 1707.06347), clip-higher (DAPO, 2503.14476), dual clip (1912.09729), as the reference program
    of arXiv 2510.04996 puts them together; tests/golden/reference/policy_loss.jsonl. GSPO: 2507.18071, section 4.1.

    Only `logprobs` is differentiated. What stands under the mask may be anything, nan and infinities included.

    Args:
      logprobs: of the sampled tokens, under the policy being updated.
      old_logprobs: the same under the policy before the iteration's first update.
      advantages: of the response, at each of its tokens.
      mask: True or 1 at tokens of responses.
      clip_low: how far the ratio may fall below 1, in (0, 1).
      clip_high: how far it may rise above 1, > 0.
      dual_clip: bound of the loss at negative advantages, in units of |A|, > 1.
      behaviour_logprobs: under the distribution the tokens were sampled from.
      truncated_is_cap: cap of the importance weight between sampler and learner, > 0. None: no such weight. It is each
        token's own, whatever `ratio` is.
      ratio: "token" or "sequence". A sequence's ratio moves far less than a token's: its clips are to be narrower by
        orders of magnitude (GSPO's runs: 3e-4 and 4e-4).
      members: which tokens are one sequence, where rows are packed; as for `own_sums`.

    Raises:
      ValueError: a cap without behaviour_logprobs, or an unknown ratio.
    """
    if ratio not in ("token", "sequence"):
        raise ValueError(f"ratio is {ratio!r}; it must be one of token, sequence.")
    logprobs = _masked(logprobs, mask)
    old_logprobs = jax.lax.stop_gradient(_masked(old_logprobs, mask))
    advantages = jax.lax.stop_gradient(_masked(advantages, mask))
    log_ratio = logprobs - old_logprobs
    if ratio == "sequence":
        own_tokens = jnp.maximum(own_sums(mask.astype(jnp.float32), members), 1.0)
        log_ratio = own_sums(log_ratio, members) / own_tokens
    rho = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -rho * advantages
    clipped = -jnp.clip(rho, 1 - clip_low, 1 + clip_high) * advantages
    pessimistic = jnp.maximum(plain, clipped)
    bound = -dual_clip * advantages
    loss = jnp.where(advantages < 0, jnp.minimum(pessimistic, bound), pessimistic)
    if truncated_is_cap is not None:
        if behaviour_logprobs is None:
            raise ValueError("truncated_is_cap needs behaviour_logprobs.")
        weight = jnp.exp(old_logprobs - _masked(behaviour_logprobs, mask))
        loss = loss * jax.lax.stop_gradient(jnp.minimum(weight, truncated_is_cap))
    return PolicyTerms(
        loss=loss,
        clipped=_masked(clipped > plain, mask),
        dual_clipped=_masked((advantages < 0) & (pessimistic > bound), mask),
        old_minus_new=old_logprobs - jax.lax.stop_gradient(logprobs),
    )


def denominators(
    mask: Bool[Array, "... T"] | Float[Array, "... T"], members: Bool[Array, "... T S"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The number of tokens of a minibatch and of sequences that have any, both at least 1.

    Rows without a token are padding and count nowhere, as if they were cut off. `members` is as for `own_sums`.
    """
    mask = mask.astype(bool)
    of_sequences = mask[..., None] if members is None else members & mask[..., None]
    num_tokens, num_rows = mask.sum(), of_sequences.any(axis=-2).sum()
    return jnp.maximum(num_tokens, 1).astype(jnp.float32), jnp.maximum(num_rows, 1).astype(jnp.float32)


def aggregate(
    per_token: Float[Array, "B T"],
    mask: Mask,
    aggregation: str,
    *,
    num_tokens: Float[Array, ""] | float,
    num_rows: Float[Array, ""] | float,
    members: Bool[Array, "B T S"] | None = None,
) -> Float[Array, ""]:
    """One number from per-token values.

    token-mean           sum of all tokens / num_tokens: every token weighs the same (DAPO, arXiv 2503.14476)
    seq-mean-token-sum   sum of all tokens / num_rows (Dr.GRPO, 2503.20783, up to a constant)
    seq-mean-token-mean  sum over sequences of their token means / num_rows (GRPO, 2402.03300)

    Args:
      per_token: values; anything under the mask (though nan there would spoil a gradient: mask before computing).
      mask: True or 1 at tokens of responses.
      aggregation: one of the three names.
      num_tokens: tokens of the whole minibatch, of which these rows may be a part (`denominators`).
      num_rows: its sequences that have tokens, each a row unless rows are packed.
      members: which tokens are one sequence, where rows are packed; as for `own_sums`.

    Raises:
      ValueError: an unknown name.
    """
    row_sums = _masked(per_token, mask).sum(axis=-1)
    if aggregation == "token-mean":
        return row_sums.sum() / num_tokens
    if aggregation == "seq-mean-token-sum":
        return row_sums.sum() / num_rows
    if aggregation == "seq-mean-token-mean":
        own_tokens = own_sums(mask.astype(jnp.float32), members)
        return (_masked(per_token, mask) / jnp.maximum(own_tokens, 1.0)).sum() / num_rows
    raise ValueError(
        f"aggregation is {aggregation!r}; it must be one of token-mean, seq-mean-token-sum, seq-mean-token-mean."
    )


def clipped_policy_loss(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Mask,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    aggregation: str,
    behaviour_logprobs: Float[Array, "B T"] | None = None,
    truncated_is_cap: float | None = None,
    ratio: str = "token",
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The clipped policy loss of a whole minibatch: `policy_terms`, then `aggregate`.

    Returns:
      The loss, and the means over all tokens of the minibatch: "clip_fraction" and "dual_clip_fraction", where a clip
      decided, in [0, 1], and "approx_kl", of logp_old - logp.
    """
    terms = policy_terms(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        behaviour_logprobs=behaviour_logprobs,
        truncated_is_cap=truncated_is_cap,
        ratio=ratio,
    )
    num_tokens, num_rows = denominators(mask)

    def token_mean(per_token):
        return aggregate(per_token, mask, "token-mean", num_tokens=num_tokens, num_rows=num_rows)

    loss = aggregate(terms.loss, mask, aggregation, num_tokens=num_tokens, num_rows=num_rows)
    return loss, {
        "clip_fraction": token_mean(terms.clipped),
        "dual_clip_fraction": token_mean(terms.dual_clipped),
        "approx_kl": token_mean(terms.old_minus_new),
    }


def kl_estimate(logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."], kind: str) -> Float[Array, "..."]:
    """Per-token estimates of KL(policy || reference) from tokens that the policy sampled.

    With d = logp - logp_ref:  k1 = d;  k2 = d^2 / 2;  k3 = clip(exp(-d') - 1 + d', -10, 10), d' = clip(d, -20, 20).
    Source: http://joschu.net/blog/kl-approx.html; bounds of the reference program; tests/golden/reference/kl.jsonl.

    As a loss, by the expectation over the policy of each one's slope:

        k1  grad logp                  0: it penalises nothing, whatever the reference is
        k2  d grad logp                the slope of KL(policy || reference)
        k3  (1 - exp(-d)) grad logp    the slope of KL(reference || policy), which is the same to first order in d

    So k2 or k3 are the ones to train with; k1 is a figure to look at.

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
        return jnp.clip(jnp.exp(-difference) - 1 + difference, -MAX_K3, MAX_K3)
    raise ValueError(f"kind is {kind!r}; it must be one of k1, k2, k3.")
