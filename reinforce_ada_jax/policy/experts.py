"""Mixture of experts: each token is computed by the few MLPs that a router chooses for it.

The rows of all experts are sorted by expert, and each matrix is one grouped product (`jax.lax.ragged_dot`): no token is
dropped, whatever the load. Tokens of padding have experts too, and reach no other token. XLA has the grouped product on
TPUs; on CPUs it multiplies every row by the matrices of all experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy.architecture import SWIGLU_ALPHA, Architecture


class Biases(NamedTuple):
    """Biases of the router, and of the products of each expert."""

    router: Float[Array, " E"]
    gate_up: Float[Array, "E Y"]
    down: Float[Array, "E D"]


def choose(architecture: Architecture, logits: Float[Array, "M E"]) -> tuple[Float[Array, "M C"], Int[Array, "M C"]]:
    """Returns the weights and the numbers of each token's experts: a softmax over all experts, then the largest."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), architecture.experts_per_token)
    if architecture.renormalizes_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def _permuted(x: Float[Array, "R D"], order: Int[Array, " R"]) -> Float[Array, "R D"]:
    # Said to be unique, or the gradient would be a sum of colliding rows, whose order a GPU does not fix.
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


def clamped_swiglu(gate_up: Float[Array, "R Y"], limit: float) -> Float[Array, "R X"]:
    """Computes (up + 1) gate sigmoid(alpha gate) of numbers of gate and up by turns, as gpt-oss does.

    Gates are at most `limit`, and the others within it on both sides.
    """
    gate, up = jnp.minimum(gate_up[:, ::2], limit), jnp.clip(gate_up[:, 1::2], -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def mixture(
    architecture: Architecture,
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    gate: Float[Array, "E D _"],
    up: Float[Array, "E D X"] | None,
    down: Float[Array, "E X D"],
    biases: Biases | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T C"]]:
    """Computes sum_e weight_e down_e(silu(gate_e(x)) * up_e(x)) over the experts of each token, and returns these, too.

    With biases it is the sum of gpt-oss: columns of `gate` are those of gate and up by turns, and `clamped_swiglu`.
    Logits, softmax and weights are in float32, of a router in x.dtype: learner and sampler choose alike.
    """
    tokens, chosen_each = x.reshape(-1, x.shape[-1]), architecture.experts_per_token
    logits = jnp.dot(tokens, router, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if biases is not None:
        logits = logits + biases.router.astype(jnp.float32)[None]
    weights, chosen = choose(architecture, logits)
    expert = chosen.reshape(-1)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=architecture.num_experts)
    rows = jnp.broadcast_to(tokens[:, None], (len(tokens), chosen_each, x.shape[-1])).reshape(-1, x.shape[-1])
    rows = _permuted(rows, order)
    if up is not None:
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
        results = jax.lax.ragged_dot(hidden, down, sizes)
    else:
        assert biases is not None
        # A product: as the gradient of reading rows, the sum of colliding ones would have no order on a GPU.
        is_own = jax.nn.one_hot(expert[order], architecture.num_experts, dtype=x.dtype)
        gate_up = jax.lax.ragged_dot(rows, gate, sizes) + is_own @ biases.gate_up
        hidden = clamped_swiglu(gate_up, architecture.expert_limit)
        results = jax.lax.ragged_dot(hidden, down, sizes) + is_own @ biases.down
    results = _permuted(results, jnp.argsort(order))
    results = results.reshape(len(tokens), chosen_each, -1).astype(jnp.float32)
    mixed = jnp.einsum("MCD,MC->MD", results, weights).astype(x.dtype).reshape(x.shape)
    return mixed, chosen.reshape(*x.shape[:2], chosen_each)


def load(num_experts: int, chosen: Int[Array, "B T C"], counted: Bool[Array, "B T"]) -> Float[Array, " E"]:
    """Returns the number of tokens of each expert, of the tokens that are counted."""
    # Compared and summed: a sum into colliding places is slow on TPUs.
    is_own = (chosen[..., None] == jnp.arange(num_experts)[None, None, None]) & counted[..., None, None]
    return jnp.sum(is_own, axis=(0, 1, 2), dtype=jnp.float32)


def load_metrics(tokens: Float[Array, "L E"]) -> dict[str, Float[Array, ""]]:
    """Returns the load of the largest expert over the mean load, and the share of idle experts: means over layers."""
    mean = jnp.maximum(tokens.mean(axis=1), jnp.finfo(jnp.float32).tiny)
    return {
        "expert_load_max": jnp.mean(tokens.max(axis=1) / mean),
        "expert_idle_share": jnp.mean(tokens == 0, dtype=jnp.float32),
    }


def on_devices(compute: Callable[..., Any], rows: NamedSharding | None, mesh: Mesh | None) -> Callable[..., Any]:
    """Returns `mixture` on several devices: each sorts its own tokens and has a part of each expert's width.

    Left to the compiler, all tokens would be sorted together. `rows` is the sharding of x over a whole mesh; without
    it, x is the same on all devices along `tensor` of `mesh`.
    """
    mesh = mesh if rows is None else cast(Mesh, rows.mesh)
    if mesh is None or (mesh.shape["tensor"] if rows is None else mesh.size) == 1:
        return compute
    of_x = P() if rows is None else rows.spec
    wide = P(None, None, "tensor")

    def own_part(*arguments: Any) -> tuple[Array, Array]:
        *weights, biases = arguments
        if biases is not None:  # one part adds what is not divided
            is_first = jax.lax.axis_index("tensor") == 0
            biases = biases._replace(down=jnp.where(is_first, biases.down, jnp.zeros_like(biases.down)))
        mixed, chosen = compute(*weights, biases)
        return jax.lax.psum(mixed, "tensor"), chosen

    def on_parts(x: Array, router: Array, gate: Array, up: Array | None, down: Array, biases: Biases | None) -> Any:
        of_biases = None if biases is None else Biases(*cast(Any, (P(), P(None, "tensor"), P())))
        in_specs = (of_x, P(), wide, None if up is None else wide, P(None, "tensor", None), of_biases)
        apply = mesh_lib.on_own_part(own_part, mesh, in_specs=in_specs, out_specs=(of_x, of_x), always=True)
        return apply(x, router, gate, up, down, biases)

    return on_parts
