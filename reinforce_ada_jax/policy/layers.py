"""The parts of a decoder layer. Each weight's shape, logical axes and initial values are in one declaration.

The layers of a decoder are *declared stacked*, with a leading "layers" axis on every weight, and *called one at a
time*: `transformer.run` scans over the stack and merges one layer's slice, so the methods below see weights without
that axis. Numbers are float32 in norms and rotary angles, and in `x.dtype` everywhere else.

The matrix of a projection may be `Adapted` or `RowAdapted`, as `lora.py` makes them, or `Quantized`; in the decoder
only `project` distinguishes them. `embed` and `head_logits` (transformer.py) take a quantised embedding.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from reinforce_ada_jax.policy import experts, rotary, rounded
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.quantization import Quantized
from reinforce_ada_jax.policy.record import Record
from reinforce_ada_jax.policy.rounded import Rounded


class Declare:
    """Declares weights: `declare(shape, axes, fan_in)`; with `layers`, stacked along a leading axis.

    Without a fan-in a weight starts at `constant`; with one, at N(0, 1 / fan_in).
    """

    def __init__(self, key: jax.Array, dtype: DTypeLike, layers: int | None = None):
        self.key, self.dtype, self.layers, self.count = key, dtype, layers, 0

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int | None = None, constant: float = 0.0
    ) -> nnx.Param:
        if self.layers is not None:
            shape, axes = (self.layers, *shape), ("layers", *axes)
        self.count += 1
        if fan_in is None:
            value = jnp.full(shape, constant, self.dtype)
        else:
            key = jax.random.fold_in(self.key, self.count)
            value = (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(self.dtype)
        return nnx.Param(value, axes=axes)


class Adapted(Record):
    """A frozen weight, and the low-rank product that is added to it: W + scaling * A B.

    "in" and "out" are the weight's own axes, as many as it has; stacked layers have one more in front.
    """

    weight: jax.Array  # [*in, *out]
    a: jax.Array  # [*in, rank]
    b: jax.Array  # [rank, *out]
    scaling: float = struct.field(pytree_node=False)


class RowAdapters(Record):
    """Adapters of a bank that the rows of a batch use."""

    adapter: jax.Array  # [B]; -1: none
    in_use: jax.Array  # [count], numbers of all adapters; those that some row uses come first
    num_in_use: jax.Array


class RowAdapted(Record):
    """A weight and a bank of adapters, whose scaling is part of B; each row of a batch uses one adapter or none."""

    weight: jax.Array  # [*in, *out]
    a: jax.Array  # [count, *in, rank]
    b: jax.Array  # [count, rank, *out]
    rows: RowAdapters | None = None


def _is_bank(weight: Any) -> bool:
    return isinstance(weight, RowAdapted)


def row_adapters(weights: Any, adapter: Int[Array, " B"]) -> RowAdapters | None:
    """Returns which adapters the rows use; None if no weight of the stacked layers is a bank."""
    counts = {weight.a.shape[1] for weight in jax.tree.leaves(weights, is_leaf=_is_bank) if _is_bank(weight)}
    if not counts:
        return None
    (count,) = counts
    is_used = jnp.any(adapter[None] == jnp.arange(count)[:, None], axis=1)
    return RowAdapters(adapter, jnp.argsort(~is_used), jnp.sum(is_used, dtype=jnp.int32))


def choose_adapters(weights: Any, rows: RowAdapters) -> Any:
    """Returns a layer's weights, with these rows set in its banks."""
    return jax.tree.map(
        lambda weight: dataclasses.replace(weight, rows=rows) if _is_bank(weight) else weight,
        weights, is_leaf=_is_bank,
    )  # fmt: skip


def project(x: Array, weight: Array | Adapted | RowAdapted | Quantized | Rounded, num_inputs: int = 1) -> Array:
    """Contracts the last axes of x with the first of the weight, in x.dtype: x W, x W + scaling * (x A) B, or (x V) s.

    Rows and positions of x [B, T, *in] are one axis to the product. With two, XLA would transpose the activations for
    the weight's gradient, which on CPUs takes as long as all products. Neither A B nor a gradient of its size is ever
    made. `num_inputs` axes of the weight are contracted.
    """

    def contract(x: Array, weight: Array | Rounded, num_inputs: int) -> Array:
        if isinstance(weight, Rounded):
            return rounded.product(x, weight, num_inputs).astype(x.dtype)
        # The innermost axis comes first, as in einsum: another order would round differently.
        last, first = [-1 - axis for axis in range(num_inputs)], list(reversed(range(num_inputs)))
        return jnp.tensordot(x, weight.astype(x.dtype), axes=(last, first))

    def product(weight: Array | Quantized | Rounded) -> Array:
        if not isinstance(weight, Quantized):
            return contract(merged, weight, num_inputs)
        sums = contract(merged, weight.values, num_inputs)
        return (sums.astype(jnp.float32) * weight.scale[None]).astype(x.dtype)

    merged = x.reshape(-1, *x.shape[2:])
    if isinstance(weight, Adapted):
        inner = contract(merged, weight.a, num_inputs)
        result = product(weight.weight) + weight.scaling * contract(inner, weight.b, 1)
    elif isinstance(weight, RowAdapted):
        rows = weight.rows
        assert rows is not None  # choose_adapters sets it
        adapter = jnp.repeat(rows.adapter, x.shape[1])

        def add_adapter(index: Array, result: Array) -> Array:
            number = rows.in_use[index]
            added = contract(contract(merged, weight.a[number], num_inputs), weight.b[number], 1)
            # `where` selects the rows, because 0 times an adapter that is not finite would make the other rows NaN.
            own = (adapter == number).reshape(-1, *[1] * (result.ndim - 1))
            return jnp.where(own, result + added, result)

        # The loop is over the adapters in use: free places of the bank cost no time.
        result = jax.lax.fori_loop(0, rows.num_in_use, add_adapter, product(weight.weight))
    else:
        result = product(weight)
    return result.reshape(*x.shape[:2], *result.shape[1:])


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], epsilon: float) -> Float[Array, "... D"]:
    """Computes x / sqrt(mean(x^2) + epsilon) * scale: the mean in float32, the product in x.dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return jnp.broadcast_to(scale.astype(x.dtype), x.shape) * normed.astype(x.dtype)


def norm(architecture: Architecture, x: Float[Array, "... D"], scale: Float[Array, " D"]) -> Float[Array, "... D"]:
    """Computes `rms_norm` with an architecture's epsilon; Gemma multiplies by 1 + scale, all in float32."""
    if architecture.is_gemma:
        wide, scale = x.astype(jnp.float32), 1.0 + scale.astype(jnp.float32)
        return rms_norm(wide, scale, architecture.norm_epsilon).astype(x.dtype)
    return rms_norm(x, scale, architecture.norm_epsilon)


def rotary_frequencies(architecture: Architecture, slides: Bool[Array, ""] | None = None) -> Float[Array, " half"]:
    """Returns the inverse frequencies of a layer; those of sliding layers may have another base, and no stretching.

    `slides`: whether the layer is a sliding one; None: no layer is.
    """
    rotated = architecture.rotary_dim or architecture.head_dim
    everywhere = rotary.frequencies(rotated, architecture.rope_theta, architecture.rope_scaling)
    if slides is None or architecture.sliding_theta is None:
        return everywhere
    return jnp.where(slides, rotary.frequencies(architecture.head_dim, architecture.sliding_theta), everywhere)


def rotary_factor(
    architecture: Architecture, slides: Bool[Array, ""] | None = None, rotates: Bool[Array, ""] | None = None
) -> float | Float[Array, ""]:
    """Returns the factor by which a layer multiplies its rotated queries and keys; 1 where it rotates none.

    `slides` is as for `rotary_frequencies`; `rotates`: whether the layer rotates; None: all layers do.
    """
    factor = 1.0 if architecture.rope_scaling is None else architecture.rope_scaling.attention_factor
    if factor == 1.0:
        return factor
    if slides is not None and architecture.sliding_theta is not None:
        factor = jnp.where(slides, 1.0, factor)
    return factor if rotates is None else jnp.where(rotates, factor, 1.0)


def norm_start(architecture: Architecture) -> float:
    """Returns the weight with which a norm multiplies by 1."""
    return 0.0 if architecture.is_gemma else 1.0


class Attention(nnx.Module):
    """Grouped-query projections; the caller computes the attention between them (`transformer.run`)."""

    def __init__(self, architecture: Architecture, declare: Declare):
        d, n = architecture.hidden_size, architecture.num_heads
        k, h = architecture.num_kv_heads, architecture.head_dim
        self.architecture = architecture
        self.query = declare((d, n, h), ("embed", "heads", "head"), fan_in=d)
        self.key = declare((d, k, h), ("embed", "kv_heads", "head"), fan_in=d)
        self.value = declare((d, k, h), ("embed", "kv_heads", "head"), fan_in=d)
        self.output = declare((n, h, d), ("heads", "head", "embed"), fan_in=n * h)
        if architecture.qkv_bias:
            self.query_bias = declare((n, h), ("heads", "head"))
            self.key_bias = declare((k, h), ("kv_heads", "head"))
            self.value_bias = declare((k, h), ("kv_heads", "head"))
        if architecture.output_bias:
            self.output_bias = declare((d,), ("embed",))
        if architecture.attention_sinks:
            self.sinks = declare((n,), ("heads",))
        if architecture.qk_norm:
            whole = architecture.qk_norm_whole
            one = norm_start(architecture)
            self.query_norm = declare(*(((n, h), ("heads", "head")) if whole else ((h,), ("head",))), constant=one)
            self.key_norm = declare(*(((k, h), ("kv_heads", "head")) if whole else ((h,), ("head",))), constant=one)

    def project(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array | np.ndarray, "B T"],
        slides: Bool[Array, ""] | None = None,
        rotates: Bool[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Returns queries, keys and values of `x`, rotated to `positions`; the others are as for `rotary_factor`."""
        dtype = x.dtype
        query = project(x, self.query.get_value())
        key = project(x, self.key.get_value())
        value = project(x, self.value.get_value())
        if self.architecture.qkv_bias:
            query = query + self.query_bias[...].astype(dtype)[None, None]
            key = key + self.key_bias[...].astype(dtype)[None, None]
            value = value + self.value_bias[...].astype(dtype)[None, None]
        if self.architecture.qk_norm:
            query = self._norm(query, self.query_norm[...])
            key = self._norm(key, self.key_norm[...])
        rotation = rotary_frequencies(self.architecture, slides), rotary_factor(self.architecture, slides, rotates)
        query, key = rotary.rotate(query, positions, *rotation), rotary.rotate(key, positions, *rotation)
        if self.architecture.query_scalar is not None:
            query = query * jnp.asarray((self.architecture.head_dim / self.architecture.query_scalar) ** 0.5, dtype)
        return query, key, value

    def _norm(self, x: Float[Array, "B T N H"], scale: Float[Array, "*N H"]) -> Float[Array, "B T N H"]:
        """Normalises each head, or all heads of a token as one vector."""
        if not self.architecture.qk_norm_whole:
            return norm(self.architecture, x, scale)
        return norm(self.architecture, x.reshape(*x.shape[:2], -1), scale.reshape(-1)).reshape(x.shape)

    def sinks_of(self, dtype: DTypeLike) -> Float[Array, " N"] | None:
        """Returns the sinks in float32, rounded as in decoding if `dtype` is bfloat16; None: there are none."""
        if not self.architecture.attention_sinks:
            return None
        sinks = self.sinks[...].astype(jnp.float32)
        return rounded.round_to_bfloat16(sinks) if jnp.dtype(dtype) == jnp.bfloat16 else sinks

    def merge_heads(self, mixed: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Computes the output projection."""
        merged = project(mixed, self.output.get_value(), num_inputs=2)
        if not self.architecture.output_bias:
            return merged
        return merged + self.output_bias[...].astype(merged.dtype)[None, None]


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); Gemma has gelu, approximated by tanh, in place of silu."""

    def __init__(self, architecture: Architecture, declare: Declare):
        d, f = architecture.hidden_size, architecture.ffn_size
        self.activation = jax.nn.gelu if architecture.is_gemma else jax.nn.silu
        self.gate = declare((d, f), ("embed", "mlp"), fan_in=d)
        self.up = declare((d, f), ("embed", "mlp"), fan_in=d)
        self.down = declare((f, d), ("mlp", "embed"), fan_in=f)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = project(x, self.gate.get_value())
        up = project(x, self.up.get_value())
        return project(self.activation(gate) * up, self.down.get_value())


class Experts(nnx.Module):
    """A router and the MLPs of which it chooses some for each token (`experts.py`)."""

    def __init__(self, architecture: Architecture, declare: Declare):
        d, x, e = architecture.hidden_size, architecture.expert_size, architecture.num_experts
        self.architecture = architecture
        self.router = declare((d, e), ("embed", "router"), fan_in=d)
        if architecture.expert_limit:
            self.router_bias = declare((e,), ("router",))
            self.expert_gate_up = declare((e, d, 2 * x), ("experts", "embed", "expert"), fan_in=d)
            self.expert_gate_up_bias = declare((e, 2 * x), ("experts", "expert"))
            self.expert_down_bias = declare((e, d), ("experts", "embed"))
        else:
            self.expert_gate = declare((e, d, x), ("experts", "embed", "expert"), fan_in=d)
            self.expert_up = declare((e, d, x), ("experts", "embed", "expert"), fan_in=d)
        self.expert_down = declare((e, x, d), ("experts", "expert", "embed"), fan_in=x)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        replayed: UInt[Array, "B T C"] | None = None,
        rows: NamedSharding | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T C"]]:
        """Computes `experts.mixture`; `rows` and `mesh` are as for `experts.on_devices`."""
        compute = experts.on_devices(functools.partial(experts.mixture, self.architecture), rows, mesh)

        def cast(*weights):  # before the devices exchange weights, so that they exchange narrow numbers
            return [weight.get_value().astype(x.dtype) for weight in weights]

        if not self.architecture.expert_limit:
            weights = cast(self.router, self.expert_gate, self.expert_up, self.expert_down)
            return compute(x, *weights, None, replayed)
        router, gate_up, down = cast(self.router, self.expert_gate_up, self.expert_down)
        biases = experts.Biases(*cast(self.router_bias, self.expert_gate_up_bias, self.expert_down_bias))
        return compute(x, router, gate_up, None, down, biases, replayed)


class Layer(nnx.Module):
    """Attention and feed-forward, each with a norm and its residual (assembled in `transformer.run`)."""

    def __init__(self, architecture: Architecture, declare: Declare):
        d, one = (architecture.hidden_size,), norm_start(architecture)
        self.attention_norm = declare(d, ("embed",), constant=one)
        self.attention = Attention(architecture, declare)
        self.mlp_norm = declare(d, ("embed",), constant=one)
        self.mlp = Experts(architecture, declare) if architecture.num_experts else MLP(architecture, declare)
        if architecture.norm_place == "around":
            self.attention_out_norm = declare(d, ("embed",), constant=one)
            self.mlp_out_norm = declare(d, ("embed",), constant=one)
