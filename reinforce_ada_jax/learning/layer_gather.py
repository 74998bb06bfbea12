"""Copy of the layers' weights that an update gathers once, before its loop over micro-batches.

Layers cast their weights to the dtype of activations where they use them, so the copy changes no number. Embedding and
head are not copied: the loss takes their gradients in the precision of the weights.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.policy.apart import LAYERS
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Declared, Params, nest, weight_shapes


def _layers(architecture: Architecture) -> dict[str, Declared]:
    shapes = weight_shapes(architecture).items()
    return {name.removeprefix(LAYERS): declared for name, declared in shapes if name.startswith(LAYERS)}


def copy_bytes(architecture: Architecture, mesh: Mesh, dtype: DTypeLike) -> int:
    """Returns the bytes of the copy on each device."""
    sizes = (
        math.prod(NamedSharding(mesh, mesh_lib.tensor_spec(axes)).shard_shape(shape))
        for shape, axes in _layers(architecture).values()
    )
    return sum(sizes) * jnp.dtype(dtype).itemsize


def is_chosen(architecture: Architecture, mesh: Mesh, config: Config) -> bool:
    """Returns True where an update of all weights makes the copy: there is a split, and room on each device."""
    size = copy_bytes(architecture, mesh, config.model.compute_dtype)
    memory = platform.tpu_bytes(mesh.devices.flat[0].device_kind)
    return mesh_lib.parts(mesh, "embed") > 1 and platform.gathers_once(size, memory)


def shardings(architecture: Architecture, mesh: Mesh) -> Params:
    """Returns the sharding of the copy, {"layers": ...}: over `tensor` alone."""
    layers = _layers(architecture).items()
    return {"layers": nest({name: NamedSharding(mesh, mesh_lib.tensor_spec(axes)) for name, (_, axes) in layers})}


def gathered(architecture: Architecture, mesh: Mesh, params: Params, dtype: DTypeLike) -> Params:
    """Returns the copy of the layers' weights in `dtype`, as {"layers": ...}."""
    layers = jax.tree.map(lambda x: x.astype(dtype), params["layers"])
    return {"layers": jax.tree.map(mesh_lib.in_layers, layers, shardings(architecture, mesh)["layers"])}


def scattered(gradients: Params, params: Params, param_shardings: Params) -> Params:
    """Returns gradients of `gathered` weights in the precision of `params`; each device has its own part of them."""
    gradients = jax.tree.map(lambda gradient, weight: gradient.astype(weight.dtype), gradients, params)
    return jax.lax.with_sharding_constraint(gradients, param_shardings)
