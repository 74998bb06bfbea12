"""Tensors in int8, for decoding alone: the record, its rounding, and the weights of a policy that are stored in int8.

`layers.project` multiplies by a quantised matrix; attention over quantised pages is in `sampling/`.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from reinforce_ada_jax.policy.record import Record

# Axes over which a product sums. Each output has a scale of its own, which multiplies the sum. The embedding has one
# scale for each token; tokens are the outputs of a head that is tied to it.
SUMMED_AXES = {
    "embedding": (1,),
    "head": (0,),
    "layers.attention.query": (1,),
    "layers.attention.key": (1,),
    "layers.attention.value": (1,),
    "layers.attention.output": (1, 2),
    "layers.mlp.gate": (1,),
    "layers.mlp.up": (1,),
    "layers.mlp.down": (1,),
}


class Quantized(Record):
    """A tensor as `values * scale`; axes along which all values share a scale are missing in `scale`."""

    values: jax.Array  # int8
    scale: jax.Array  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def quantize(x: Float[Array, "..."], axes: Sequence[int]) -> Quantized:
    """Rounds to the nearest of 255 values, symmetric about 0: the largest magnitude along `axes` becomes 127.

    An entry is off by at most half a scale, 1/254 of that magnitude. If a number is not finite, its scale is not finite
    either.
    """
    axes = tuple(axes)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / 127
    values = jnp.rint(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return Quantized(values=values, scale=jnp.squeeze(scale, axes))


def quantized_weights(weights: Mapping[str, Array], dtype: DTypeLike) -> dict[str, Array | Quantized]:
    """Returns weights by dotted path, matrices in int8 and the others (norms, biases) in `dtype`."""
    return {
        name: quantize(weight, SUMMED_AXES[name]) if name in SUMMED_AXES else weight.astype(dtype)
        for name, weight in weights.items()
    }
