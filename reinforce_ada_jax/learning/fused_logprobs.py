"""Log-probabilities and entropies straight from hidden states and the output head, without an array [B, T, V].

Logits are computed tile by tile and dropped; the backward pass computes them again. The forward pass ends before any
cotangent is known: the loss's slope at a token depends on its ratio, and so on its log-probability.

This file makes one differentiable function, over one device or a mesh, of the passes in `scan_logprobs.py` (CPU, GPU)
and `pallas_logprobs.py` (TPU). The loss is in `loss.py`.
"""

import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import scan_logprobs
from reinforce_ada_jax.learning.scan_logprobs import Cotangents, HeadConfig


def _passes(backend: str) -> types.ModuleType:
    """Returns the module with the two passes of a backend."""
    if backend == "scan":
        return scan_logprobs
    from reinforce_ada_jax.learning import pallas_logprobs  # noqa: PLC0415  (importing Pallas takes a fifth of a second)

    return pallas_logprobs


def token_logprobs(
    config: HeadConfig, hidden: Float[Array, "*B D"], head: Float[Array, "_ _"], targets: Int[Array, "*B"]
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Computes log pi(target | hidden) and the entropy of pi, by an online log-sum-exp over tiles of the vocabulary.

    With z = hidden . head / temperature:  logprob = z[target] - log sum exp z,  entropy = log sum exp z - sum p z.
    Backward:  dz = g_logprob (1[target] - p) - g_entropy p (log p + entropy), tile by tile, from logits computed again.

    Source: online softmax, arXiv 1805.02867; cut cross-entropy, 2411.09009, here with entropy and its slope.

    It is differentiable in `hidden` and `head`; both gradients have the dtype of their argument and are summed in
    float32 (d_head over data and fsdp: in its own dtype). Logits and statistics are float32. The products have the
    dtype of `hidden`, to which the head is cast tile by tile: a float32 head with bfloat16 states needs no copy.

    On a mesh the rows, all axes of `targets` together, are split over context, data and fsdp. The vocabulary is split
    over tensor: the forward pass sums four numbers a row over it, the backward pass sums d_hidden. The head is
    gathered over fsdp and context in the products' dtype, in each pass, and its gradient is scattered over them.

    Args:
      config: temperature, layout of the head, and how to compute.
      hidden: states that predict `targets`; their number is a multiple of context * data * fsdp.
      head: the output head [D, V], or with `config.tied` the embedding [V, D].
      targets: ids in [0, V). The result of others is finite and without meaning.
    """
    logprob, entropy = _token_logprobs(config, hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1))
    return logprob.reshape(targets.shape), entropy.reshape(targets.shape)


def _specs(config: HeadConfig, gathered: bool) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the partitions of row arrays and of the head; `gathered`: that of the vocabulary only, as in a pass."""
    embed = None if gathered else "embed"
    return mesh_lib.spec(("parts",)), mesh_lib.spec(("vocab", embed) if config.tied else (embed, "vocab"))


def _first_entry(config: HeadConfig, head: Array) -> int | Array:
    """Returns the index of the first vocabulary entry in this device's part of the head."""
    return 0 if config.mesh is None else jax.lax.axis_index("tensor") * head.shape[config.vocab_axis]


def _to_gather(config: HeadConfig, head: Array, hidden: Array) -> Array:
    """Returns the head for a pass; where it is gathered, in the products' dtype, so that fewer bytes move."""
    return head if config.mesh is None or mesh_lib.parts(config.mesh, "embed") == 1 else head.astype(hidden.dtype)


def _statistics(config: HeadConfig, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Returns (logprob, entropy, log_sum_exp) of every row."""

    def local(hidden, head, targets):
        targets -= _first_entry(config, head)
        max_logit, sum_exp, weighted, target_logit = _passes(config.backend).statistics(config, hidden, head, targets)
        if config.mesh is not None:
            here = max_logit
            max_logit = jax.lax.pmax(here, "tensor")
            shrink = jnp.exp(here - max_logit)
            weighted, sum_exp = shrink * (weighted + sum_exp * (here - max_logit)), shrink * sum_exp
            sum_exp, weighted, target_logit = jax.lax.psum((sum_exp, weighted, target_logit), "tensor")
        # sum p (z - max_logit) = weighted / sum_exp, and the entropy is log sum exp z less sum p z.
        log = jnp.log(sum_exp)
        # target_logit - (max_logit + log) would round a log-probability near 0 as if it were as large as a logit.
        return (target_logit - max_logit) - log, log - weighted / sum_exp, max_logit + log

    if config.mesh is not None:
        rows, of_head = _specs(config, gathered=True)
        in_specs = rows, of_head, rows
        local = mesh_lib.shard_map(local, config.mesh, in_specs=in_specs, out_specs=rows)
    return local(hidden, _to_gather(config, head, hidden), targets)


def _undifferentiated(config: HeadConfig, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
    return _statistics(config, hidden, head, targets)[:2]


def _forward(config, hidden, head, targets):
    logprob, entropy, log_sum_exp = _statistics(config, hidden, head, targets)
    return (logprob, entropy), (hidden, head, targets, log_sum_exp, entropy)


def _backward(config, residuals, cotangents):
    hidden, head, targets, log_sum_exp, entropy = residuals

    def local(hidden, part, targets, *cotangents):
        targets -= _first_entry(config, part)
        gradients = _passes(config.backend).gradients
        d_hidden, d_head = gradients(config, hidden, part, targets, Cotangents(*cotangents), head.dtype)
        if config.mesh is not None:
            d_hidden = jax.lax.psum(d_hidden, "tensor")
        if config.mesh is not None and not config.frozen_head:
            axes = mesh_lib.LOGICAL_TO_MESH["embed"]
            d_head = jax.lax.psum_scatter(d_head, axes, scatter_dimension=1 - config.vocab_axis, tiled=True)
            d_head = jax.lax.psum(d_head, "data")
        return d_hidden.astype(hidden.dtype), d_head

    if config.mesh is not None:
        rows, of_head = _specs(config, gathered=True)
        of_d_head = None if config.frozen_head else _specs(config, gathered=False)[1]
        in_specs, out_specs = (rows, of_head, *[rows] * 5), (rows, of_d_head)
        local = mesh_lib.shard_map(local, config.mesh, in_specs=in_specs, out_specs=out_specs)
    d_hidden, d_head = local(hidden, _to_gather(config, head, hidden), targets, log_sum_exp, entropy, *cotangents)
    return d_hidden, d_head, None


_token_logprobs = jax.custom_vjp(_undifferentiated, nondiff_argnums=(0,))
_token_logprobs.defvjp(_forward, _backward)
