"""One array for each layer's weight, in place of one stacked array for all layers, as GPUs need it in decoding.

A loop over stacked weights takes one layer's part of them in each iteration. On GPUs a product can't read such a part
in place: XLA copies it first, so that the weights of the layers pass through memory three times in a step. A product
can read a whole array in place. So the layers are computed one after the other, without a loop (`transformer.run`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reinforce_ada_jax.policy.record import Record

LAYERS = "layers."  # begins the names of the stacked weights


class Apart(Record):
    """A weight of all layers, with one array for each layer."""

    arrays: tuple[Any, ...]


def apart(weights: dict[str, jax.Array]) -> dict[str, jax.Array | Apart]:
    """Returns weights by dotted path; each stacked weight becomes one array per layer."""
    return {
        name: Apart(tuple(weight[number] for number in range(len(weight)))) if name.startswith(LAYERS) else weight
        for name, weight in weights.items()
    }


def over_layers(
    one_layer: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]], state: Any, weights: Any, num_layers: int
) -> tuple[Any, Any]:
    """Computes (state, value) = one_layer(state, (weights of the layer, its number)) for each layer.

    Stacked weights are scanned. For weights that are apart the layers are computed one by one, without a loop. Returns
    the last state, and the values stacked along a leading axis.
    """
    if not any(isinstance(leaf, Apart) for leaf in jax.tree.leaves(weights, is_leaf=_is_apart)):
        return jax.lax.scan(one_layer, state, (weights, jnp.arange(num_layers)))
    values = []
    for number in range(num_layers):
        own = jax.tree.map(lambda weight: weight.arrays[number], weights, is_leaf=_is_apart)  # noqa: B023 (called here)
        state, value = one_layer(state, (own, number))
        values.append(value)
    return state, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *values)


def _is_apart(x: Any) -> bool:
    return isinstance(x, Apart)
