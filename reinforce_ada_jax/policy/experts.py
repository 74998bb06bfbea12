"""Mixture of experts: each token is computed by the few MLPs that a router chooses for it.

The rows of all experts are sorted by expert, and each matrix is one grouped product (`jax.lax.ragged_dot`): no token is
dropped, whatever the load. Padding tokens have experts, too, but change no other token. XLA has the grouped product on
TPUs; on CPUs it multiplies every row by the matrices of all experts.

Along `tensor` each device holds whole experts, and all tokens of its rows: it computes its own experts for them, and a
sum over the devices adds the others. Splitting the width of each expert would give the same sum. But 768 / 4 numbers
are no whole tiles of 128 on a TPU, so the sampler's compiled windows would copy the matrices
(docs/how_to/model_family.md).

The learner replays what the sampler chose (R3, arXiv 2510.11370): rounding differs between their programs, so that near
a tie the learner would choose another expert, and compute the log-probabilities of another policy. The sampler records
the experts of each token that it computes. The learner gives these experts the weights of its own router.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy.architecture import SWIGLU_ALPHA, Architecture


class Routing(NamedTuple):
    """Treatment of the routers' choices in a forward pass: replayed, counted, recorded."""

    replayed: UInt[Array, "B T LC"] | None = None  # record that tokens follow (`empty_record`); None: routers choose
    counted: Bool[Array, "B T"] | None = None  # tokens whose experts are counted; None: none are
    records: bool = False  # the experts of each token are returned


FREE = Routing()  # routers choose, and their choices are not returned


class Biases(NamedTuple):
    """Biases of the router, and of the products of each expert."""

    router: Float[Array, " E"]
    gate_up: Float[Array, "G Y"]
    down: Float[Array, "G D"]


def record_dtype(architecture: Architecture) -> np.dtype:
    """Returns the type of recorded expert numbers; its largest value means that no expert is recorded."""
    return np.dtype(np.uint8 if architecture.num_experts < np.iinfo(np.uint8).max else np.uint16)


def empty_record(architecture: Architecture, *shape: int) -> UInt[np.ndarray, "... LC"]:
    """Returns a record of tokens whose experts are not known: the learner's router chooses for them.

    A record has the L C numbers of a token in one axis: TPUs would pad a last axis of C numbers to 128.
    """
    dtype = record_dtype(architecture)
    return np.full((*shape, architecture.num_layers * architecture.experts_per_token), np.iinfo(dtype).max, dtype)


def record(architecture: Architecture, chosen: Int[Array, "L B T C"]) -> UInt[Array, "B T LC"]:
    """Returns the record of tokens, from the experts that each layer has chosen for them."""
    of_tokens = jnp.moveaxis(chosen, 0, 2)
    return of_tokens.reshape(*of_tokens.shape[:2], -1).astype(record_dtype(architecture))


def of_layer(architecture: Architecture, recorded: UInt[Array, "B T LC"], layer: Any) -> UInt[Array, "B T C"]:
    """Returns the part of a record that one layer replays."""
    count = architecture.experts_per_token
    return jax.lax.dynamic_slice_in_dim(recorded, layer * count, count, axis=2)


def choose(
    architecture: Architecture, logits: Float[Array, "M E"], replayed: UInt[Array, "M C"] | None = None
) -> tuple[Float[Array, "M C"], Int[Array, "M C"]]:
    """Returns the weights and the numbers of each token's experts: a softmax over all experts, then the largest.

    Tokens with a record (`replayed`) get the recorded experts in place of the most probable ones.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, architecture.experts_per_token)
    if replayed is not None:
        chosen = jnp.where(replayed < architecture.num_experts, replayed.astype(chosen.dtype), chosen)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if architecture.renormalizes_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def _permuted(x: Float[Array, "R D"], order: Int[Array, " R"]) -> Float[Array, "R D"]:
    # The indices are declared unique. Otherwise the gradient would add rows at equal indices, in no fixed order on a
    # GPU.
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


def clamped_swiglu(gate_up: Float[Array, "R Y"], limit: float) -> Float[Array, "R X"]:
    """Computes (up + 1) gate sigmoid(alpha gate), as gpt-oss does; columns of gate and up alternate.

    `gate` is clipped from above at `limit`, and `up` to [-limit, limit].
    """
    gate, up = jnp.minimum(gate_up[:, ::2], limit), jnp.clip(gate_up[:, 1::2], -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def mixture(
    architecture: Architecture,
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    gate: Float[Array, "G D _"],
    up: Float[Array, "G D X"] | None,
    down: Float[Array, "G X D"],
    biases: Biases | None = None,
    replayed: UInt[Array, "B T C"] | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T C"]]:
    """Computes sum_e weight_e down_e(silu(gate_e(x)) * up_e(x)) over the experts of each token, and returns these, too.

    With biases it computes the experts of gpt-oss, with `clamped_swiglu`; then `gate` holds the columns of gate and up,
    alternating. The router is in x.dtype; logits, softmax and weights are float32. `replayed` is as for `choose`. If
    there are fewer matrices than experts (those of this device along `tensor`), the sum is over these experts alone.
    """
    tokens, chosen_each = x.reshape(-1, x.shape[-1]), architecture.experts_per_token
    logits = jnp.dot(tokens, router, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if biases is not None:
        logits = logits + biases.router.astype(jnp.float32)[None]
    replayed = None if replayed is None else replayed.reshape(-1, chosen_each)
    weights, chosen = choose(architecture, logits, replayed)
    expert = chosen.reshape(-1)
    if len(down) < architecture.num_experts:  # counted from this device's first expert, so its rows come first
        expert = (expert - jax.lax.axis_index("tensor") * len(down)) % architecture.num_experts
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=architecture.num_experts)[: len(down)]
    rows = jnp.broadcast_to(tokens[:, None], (len(tokens), chosen_each, x.shape[-1])).reshape(-1, x.shape[-1])
    rows, is_computed = _permuted(rows, order), (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]

    def of_group(rows: Array) -> Array:
        # On TPUs the kernel neither computes nor writes rows behind the last group. They hold old memory, perhaps NaN,
        # so they are set to 0 after a product, and for its gradient also before it.
        return rows if len(down) == architecture.num_experts else jnp.where(is_computed, rows, jnp.zeros_like(rows))

    def product(rows: Array, matrices: Array) -> Array:
        return of_group(jax.lax.ragged_dot(of_group(rows), matrices, sizes))

    if up is not None:
        results = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)
    else:
        assert biases is not None
        # Biases are selected by a matrix product: the gradient of a gather would add rows in no fixed order on a GPU.
        is_own = jax.nn.one_hot(expert[order], len(down), dtype=x.dtype)
        gate_up = product(rows, gate) + is_own @ biases.gate_up
        results = product(clamped_swiglu(gate_up, architecture.expert_limit), down) + is_own @ biases.down
    results = _permuted(results, jnp.argsort(order))
    results = results.reshape(len(tokens), chosen_each, -1).astype(jnp.float32)
    mixed = jnp.einsum("MCD,MC->MD", results, weights).astype(x.dtype).reshape(x.shape)
    return mixed, chosen.reshape(*x.shape[:2], chosen_each)


def load(num_experts: int, chosen: Int[Array, "B T C"], counted: Bool[Array, "B T"]) -> Float[Array, " E"]:
    """Returns for each expert how many of the counted tokens it has."""
    # Compare and sum, because a scatter-add with equal indices is slow on TPUs.
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
    """Returns `mixture` on several devices: each sorts its own tokens and computes its own experts along `tensor`.

    The compiler alone would sort the tokens of all devices together. `rows` is the sharding of x over a whole mesh;
    without it, x is the same on all devices along `tensor` of `mesh`.
    """
    mesh = mesh if rows is None else cast(Mesh, rows.mesh)
    if mesh is None or (mesh.shape["tensor"] if rows is None else mesh.size) == 1:
        return compute
    of_x = P() if rows is None else rows.spec
    of_experts = mesh_lib.spec(("experts",))

    def own_part(*arguments: Any) -> tuple[Array, Array]:
        mixed, chosen = compute(*arguments)
        return jax.lax.psum(mixed, "tensor"), chosen

    def on_parts(x: Array, router: Array, gate: Array, up: Any, down: Array, biases: Any, replayed: Any) -> Any:
        of_biases = None if biases is None else Biases(*cast(Any, (P(), of_experts, of_experts)))
        of_up, of_record = None if up is None else of_experts, None if replayed is None else of_x
        in_specs = (of_x, P(), of_experts, of_up, of_experts, of_biases, of_record)
        apply = mesh_lib.on_own_part(own_part, mesh, in_specs=in_specs, out_specs=(of_x, of_x), always=True)
        return apply(x, router, gate, up, down, biases, replayed)

    return on_parts
