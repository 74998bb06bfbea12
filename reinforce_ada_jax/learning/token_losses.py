"""The policy loss of every token: ratios, the losses by name, importance weights. Arrays in, arrays out; float32.

A loss of the user's is a function in a file, with the signature of those in `LOSSES`
(`learning.loss=mine.py:function`, docs/how_to/loss.md).
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from reinforce_ada_jax import user_code

Tokens = Float[Array | np.ndarray, "B T"]
Mask = Bool[Array | np.ndarray, "B T"] | Float[Array | np.ndarray, "B T"]
SegmentOneHot = Bool[Array | np.ndarray, "B T S"]

# Bound of a log ratio before it is exponentiated, as in the reference program.
MAX_LOG_RATIO = 20.0
# SAPO's temperatures at A > 0 and at A <= 0 (arXiv 2511.20347).
SAPO_TEMPERATURES = (1.0, 1.05)
# Least importance weight that "mask" lets through, as in IcePop's runs (arXiv 2510.18855).
LEAST_WEIGHT = 0.5


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Settings of `policy_loss`; the fields of the configuration's `learning` section with the same names.

    Attributes:
      clip_low: the ratio is clipped at 1 - clip_low, in (0, 1).
      clip_high: the ratio is clipped at 1 + clip_high, > 0.
      dual_clip: bound of the loss "ppo" at negative advantages, in units of |A|, > 1.
      aggregation: as for `loss.aggregate`.
      row_tokens: tokens that a response may have, for the aggregation "seq-mean-token-sum-norm"; None: T.
      loss: a name in `LOSSES`, or a function with their signature.
      ratio: "token", "sequence" or "sequence-token". A sequence's ratio moves far less than a token's: it needs clips
        narrower by orders of magnitude (GSPO's runs: 3e-4 and 4e-4).
      truncated_is_cap: cap of the importance weight between sampler and learner, > 0; None: no such weight.
      importance: "token", "sequence" or "mask": as for `importance_weights`.
      kl_kind: as for `loss.kl_estimate`.
      kl_coefficient: weight of the KL term.
      entropy_coefficient: weight of the entropy bonus.
    """

    clip_low: float
    clip_high: float
    dual_clip: float
    aggregation: str
    row_tokens: int | None = None
    loss: "str | TokenLossFn" = "ppo"
    ratio: str = "token"
    truncated_is_cap: float | None = None
    importance: str = "token"
    kl_kind: str = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0


class TokenLoss(NamedTuple):
    loss: Float[Array, "B T"]  # to be minimised
    clipped: Bool[Array | np.ndarray, "B T"] | bool = False  # where the clipped ratio decides
    dual_clipped: Bool[Array | np.ndarray, "B T"] | bool = False  # where the dual clip does


# (settings, ratio, log-probabilities, advantages) -> loss of each token; ratio and log-probabilities have slopes.
TokenLossFn = Callable[[LossConfig, Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]], TokenLoss]


def surrogates(
    ratio: Float[Array | np.ndarray, "*B T"], advantages: Float[Array | np.ndarray, "*B T"], low: Any, high: Any
) -> tuple[Float[Array, "*B T"], Float[Array, "*B T"]]:
    """Computes -rho A, and the same with rho clipped to [low, high]; PPO takes the larger of them."""
    return jnp.multiply(-ratio, advantages), -jnp.clip(ratio, low, high) * advantages


def ppo(config: LossConfig, ratio: Tokens, logprobs: Tokens, advantages: Tokens) -> TokenLoss:
    """Computes max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A), and where A < 0 at most dual_clip |A|.

    Source: PPO (arXiv 1707.06347), clip-higher (DAPO, 2503.14476), dual clip (1912.09729), as the reference program
    of arXiv 2510.04996 puts them together; tests/golden/reference/policy_loss.jsonl.
    """
    del logprobs
    plain, clipped = surrogates(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    pessimistic = jnp.maximum(plain, clipped)
    bound = -config.dual_clip * advantages
    loss = jnp.where(advantages < 0, jnp.minimum(pessimistic, bound), pessimistic)
    return TokenLoss(loss, clipped > plain, (advantages < 0) & (pessimistic > bound))


def cispo(config: LossConfig, ratio: Tokens, logprobs: Tokens, advantages: Tokens) -> TokenLoss:
    """Computes -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log p: a clipped token keeps its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5; its runs have no lower bound (clip_low near 1).
    """
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss = -jax.lax.stop_gradient(clipped) * advantages * logprobs
    return TokenLoss(loss, (clipped != ratio) & (advantages != 0))


def sapo(config: LossConfig, ratio: Tokens, logprobs: Tokens, advantages: Tokens) -> TokenLoss:
    """Computes -(4 / tau) sigmoid(tau (rho - 1)) A, whose slope at rho = 1 is that of -rho A and falls on both sides.

    Source: SAPO (arXiv 2511.20347); tau is 1 where A > 0, otherwise 1.05.
    """
    del config, logprobs
    temperature = jnp.where(advantages > 0, *SAPO_TEMPERATURES)
    return TokenLoss(-4.0 / temperature * jax.nn.sigmoid(temperature * (ratio - 1.0)) * advantages)


LOSSES: dict[str, TokenLossFn] = {"ppo": ppo, "cispo": cispo, "sapo": sapo}

# Settings with which a user's loss is tried.
_TRIAL = LossConfig(clip_low=0.2, clip_high=0.2, dual_clip=10.0, aggregation="token-mean")


def load(loss: str) -> str | TokenLossFn:
    """Returns the loss that `learning.loss` names: its name, or the function of a user's file.

    The function may return a `TokenLoss` or the array of losses alone. Raises ValueError if there is no such file or
    function, or its result has another shape or type.
    """
    if loss in LOSSES:
        return loss
    setting = f"learning.loss is {loss!r}"
    function = user_code.load(loss, setting)

    def checked(config: LossConfig, ratio: Tokens, logprobs: Tokens, advantages: Tokens) -> TokenLoss:
        found = function(config, ratio, logprobs, advantages)
        if isinstance(found, tuple | list) and not isinstance(found, TokenLoss):
            raise user_code.wrong(
                function,
                f"{setting}, which returned a {type(found).__name__} of {len(found)}; it must return the loss of each "
                "token, or a TokenLoss(loss, clipped).",
            )
        result = found if isinstance(found, TokenLoss) else TokenLoss(found)
        shape, dtype = np.shape(result.loss), jnp.result_type(result.loss)
        if shape != np.shape(ratio) or dtype != jnp.float32:
            returned = "None" if result.loss is None else f"{dtype}{list(shape)}"
            raise user_code.wrong(
                function,
                f"{setting}, which returned {returned} for ratios of float32{list(np.shape(ratio))}; it must return "
                "the loss of each token, or a TokenLoss.",
            )
        return result

    with user_code.failures(pathlib.Path(loss.rpartition(":")[0]), setting):  # also in a gradient of its own
        value, slopes = _tried(checked, [-0.5, 0.0, 0.5], [1.0, -1.0])
    if not (jnp.isfinite(value) and jnp.isfinite(slopes).all()):
        raise user_code.wrong(
            function,
            f"{setting}, whose loss is {value:g} for advantages of 1 and -1 and ratios of 0.6 to 1.6, with slopes from "
            f"{slopes.min():g} to {slopes.max():g}; all must be finite.",
        )
    if not slopes.any():
        raise user_code.wrong(
            function,
            f"{setting}, whose loss does not change with the log-probabilities, for advantages of 1 and -1 and ratios "
            "of 0.6 to 1.6: nothing would be learned. Compute it from `ratio` or `logprobs`.",
        )
    return checked


def _tried(
    loss: TokenLossFn, log_ratios: Sequence[float], advantages: Sequence[float]
) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    """Returns the summed loss of one token for each pair of log ratio and advantage, and its slopes."""
    old = np.full((len(advantages), len(log_ratios)), -1.0 - max(log_ratios), np.float32)
    of_rows = np.broadcast_to(np.array(advantages, np.float32)[:, None], old.shape)

    def total(logprobs: Float[Array, "B T"]) -> Array:
        return loss(_TRIAL, jnp.exp(logprobs - old), logprobs, jnp.asarray(of_rows)).loss.sum()

    return jax.jit(jax.value_and_grad(total))(jnp.asarray(old + np.array(log_ratios, np.float32)))


def has_slope_without_advantage(loss: str | TokenLossFn) -> bool:
    """Returns True if a token with advantage 0 has a gradient: under some losses of users, and none of `LOSSES`."""
    return not isinstance(loss, str) and bool(_tried(loss, [-3.0, -0.5, -0.1, 0.0, 0.1, 0.5, 3.0], [0.0])[1].any())


class SampledTokens(NamedTuple):
    """Constants of the sampled tokens of a minibatch, or a part of it; where the mask is 0 they may be anything."""

    old_logprobs: Tokens  # under the policy before the iteration's first update
    advantages: Tokens  # of the response, at each of its tokens
    mask: Mask  # True or 1 at tokens of responses
    behaviour_logprobs: Tokens | None = None  # under the distribution the tokens were sampled from; needed with a cap
    reference_logprobs: Tokens | None = None  # under the reference policy; without them the metric "kl" is 0
    regularization: Tokens | None = None  # factors of the tokens' entropy and KL in the loss; None: 1
    segment_one_hot: SegmentOneHot | None = None  # tokens of each response, where rows are packed


class PolicyTerms(NamedTuple):
    """Per-token terms of the policy loss, all 0 where the mask is 0."""

    loss: Float[Array, "B T"]  # to be minimised
    clipped: Float[Array, "B T"]  # 1 where the clipped ratio decides
    dual_clipped: Float[Array, "B T"]  # 1 where the dual clip decides
    old_minus_new: Float[Array, "B T"]  # logp_old - logp, whose mean estimates KL(old || new)


def masked(values: Array | np.ndarray, mask: Array | np.ndarray) -> Array:
    """Returns float32 values, 0 where the mask is 0. Before any exp: nothing there may reach a value or a slope."""
    return jnp.where(mask.astype(bool), values.astype(jnp.float32), 0.0)


def segment_sums(values: Tokens, segment_one_hot: SegmentOneHot | None) -> Float[Array, "B T"]:
    """Computes at each token the sum over its own response's tokens, of values that are 0 where the mask is 0.

    `segment_one_hot` is True where the token belongs to its row's response s; None: a row is one response.
    """
    if segment_one_hot is None:
        return jnp.broadcast_to(values.sum(axis=-1, keepdims=True), values.shape)
    sums = jnp.where(segment_one_hot, values[..., None], 0.0).sum(axis=-2, keepdims=True)
    return jnp.where(segment_one_hot, sums, 0.0).sum(axis=-1)


def _ratios(
    kind: str, logprobs: Tokens, old_logprobs: Tokens, mask: Mask, segment_one_hot: SegmentOneHot | None
) -> Float[Array, "B T"]:
    """Computes the ratios of a kind, as `policy_terms` describes them; raises ValueError for an unknown one."""
    if kind not in ("token", "sequence", "sequence-token"):
        raise ValueError(f"ratio is {kind!r}; it must be one of token, sequence, sequence-token.")
    log_ratio = logprobs - old_logprobs
    if kind != "token":
        lengths = jnp.maximum(segment_sums(mask.astype(jnp.float32), segment_one_hot), 1.0)
        log_ratio = segment_sums(log_ratio, segment_one_hot) / lengths
    if kind == "sequence-token":
        log_ratio = jax.lax.stop_gradient(log_ratio) + (logprobs - jax.lax.stop_gradient(logprobs))
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance_weights(
    config: LossConfig, log_weights: Tokens, segment_one_hot: SegmentOneHot | None
) -> Float[Array, "B T"]:
    """Computes the weights between sampler and learner, from w = exp(logp_old - logp_behaviour) of each token.

    token      min(w, cap)
    sequence   min(product of w over the response, cap), for all its tokens
    mask       w where LEAST_WEIGHT <= w <= cap, otherwise 0

    Log-weights are 0 where the mask is 0. Source: by token https://fengyao.notion.site/off-policy-rl; by sequence
    https://richardli.xyz/rl-collapse; the mask is that of IcePop (arXiv 2510.18855), with 0.5 and 5. Raises ValueError
    for an unknown `importance`.
    """
    if config.importance not in ("token", "sequence", "mask"):
        raise ValueError(f"importance is {config.importance!r}; it must be one of token, sequence, mask.")
    cap = config.truncated_is_cap
    assert cap is not None
    if config.importance == "sequence":
        log_weights = jnp.clip(segment_sums(log_weights, segment_one_hot), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = jnp.exp(log_weights)
    if config.importance == "mask":
        return jnp.where((weights >= LEAST_WEIGHT) & (weights <= cap), weights, 0.0)
    return jnp.minimum(weights, cap)


def policy_terms(config: LossConfig, logprobs: Tokens, sampled: SampledTokens) -> PolicyTerms:
    """Computes the policy loss of every token: that of `config.loss`, times the importance weight if a cap is given.

    The ratio is rho = exp(clip(logp - logp_old, -20, 20)). With "sequence" all tokens of a response have one rho: that
    of the mean of logp - logp_old over them, the geometric mean of the tokens' ratios. With the aggregation
    "seq-mean-token-mean" that is the objective of GSPO (arXiv 2507.18071, section 4.1). With "sequence-token" rho has
    that value, and at each token the slope of its own ratio alone (GSPO-token, section 4.3).

    Only `logprobs` is differentiated. Values where the mask is 0 may be anything, nan and infinities included. Errors
    are those of `loss.policy_loss`.
    """
    mask = sampled.mask
    logprobs = masked(logprobs, mask)
    old_logprobs = jax.lax.stop_gradient(masked(sampled.old_logprobs, mask))
    advantages = jax.lax.stop_gradient(masked(sampled.advantages, mask))
    rho = _ratios(config.ratio, logprobs, old_logprobs, mask, sampled.segment_one_hot)
    compute = LOSSES[config.loss] if isinstance(config.loss, str) else config.loss
    loss, clipped, dual_clipped = compute(config, rho, logprobs, advantages)
    if config.truncated_is_cap is not None:
        if sampled.behaviour_logprobs is None:
            raise ValueError("truncated_is_cap needs behaviour_logprobs.")
        log_weights = old_logprobs - masked(sampled.behaviour_logprobs, mask)
        loss = loss * jax.lax.stop_gradient(importance_weights(config, log_weights, sampled.segment_one_hot))
    return PolicyTerms(
        loss=loss,
        clipped=masked(jnp.broadcast_to(clipped, rho.shape), mask),
        dual_clipped=masked(jnp.broadcast_to(dual_clipped, rho.shape), mask),
        old_minus_new=old_logprobs - jax.lax.stop_gradient(logprobs),
    )
