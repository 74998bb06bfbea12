"""Low-rank adapters (LoRA, arXiv 2106.09685): their shapes, initial values, and how they are combined with weights.

Adapters are a plain tree of their own, {"layers": {"attention": {"query": {"a": [L, D, r], "b": [L, r, N, H]}}}}: W
becomes W + scaling * A B. For training, `adapted` puts both into one record. For export, and for decoding in float32,
`merged` adds them up to one weight: in a narrower type most of the change would be rounded away. The product inside a
layer is in `layers.py`, files are in `adapter_files.py`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from reinforce_ada_jax.config import LoraConfig
from reinforce_ada_jax.distributed.mesh import tensor_spec
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.layers import Adapted, RowAdapted
from reinforce_ada_jax.policy.transformer import Declared, Params, flatten, nest, weight_shapes

# PEFT's name of a projection: our weight.
TARGETS = {
    "q_proj": "layers.attention.query",
    "k_proj": "layers.attention.key",
    "v_proj": "layers.attention.value",
    "o_proj": "layers.attention.output",
    "gate_proj": "layers.mlp.gate",
    "up_proj": "layers.mlp.up",
    "down_proj": "layers.mlp.down",
}


@dataclasses.dataclass(frozen=True)
class Lora:
    """Rank, scaling and target projections of the adapters."""

    rank: int  # r, the inner size of A B; at least 1
    alpha: float  # numerator of the scaling
    targets: tuple[str, ...]  # names of `TARGETS`, in its order

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def make(settings: LoraConfig) -> Lora | None:
    """Returns the adapters that the `lora` section of a configuration describes; None where its rank is 0."""
    return Lora(settings.rank, settings.alpha, settings.projections) if settings.rank else None


def adapter_shapes(architecture: Architecture, lora: Lora) -> dict[str, Declared]:
    """Returns every adapter's (shape, logical axes), by dotted path.

    A has the input axes of the weight and B its output axes, so they are split over the mesh as the weight is. Raises
    ValueError for targets that the architecture does not have.
    """
    found: dict[str, Declared] = {}
    declared = weight_shapes(architecture)
    missing = [target for target in lora.targets if TARGETS[target] not in declared]
    if missing:
        raise ValueError(
            f"the experts of {architecture.family} can't have adapters on {', '.join(missing)}: set lora.targets to "
            "q_proj,k_proj,v_proj,o_proj."
        )
    for target in lora.targets:
        shape, axes = declared[TARGETS[target]]
        # One side of every projection is the model axis alone: the first axis after that of the layers, or the last.
        cut = 2 if axes[1] == "embed" else len(axes) - 1
        found[f"{TARGETS[target]}.a"] = ((*shape[:cut], lora.rank), (*axes[:cut], None))
        found[f"{TARGETS[target]}.b"] = ((shape[0], lora.rank, *shape[cut:]), (axes[0], None, *axes[cut:]))
    return found


def num_parameters(architecture: Architecture, lora: Lora) -> int:
    return sum(math.prod(shape) for shape, _ in adapter_shapes(architecture, lora).values())


def shardings(architecture: Architecture, lora: Lora, mesh: Mesh) -> Params:
    """Returns the sharding of every adapter on `mesh`, in the shape of the adapters."""
    return transformer.shardings(mesh, adapter_shapes(architecture, lora))


def init(
    architecture: Architecture, lora: Lora, key: jax.Array, mesh: Mesh | None = None, dtype: DTypeLike = jnp.float32
) -> Params:
    """Returns adapters that change nothing yet: B is 0, and A uniform within 1 / sqrt(inputs), as PEFT begins.

    (PEFT writes it as Kaiming's uniform distribution with a = sqrt(5): the bound is sqrt(6 / ((1 + a^2) inputs)).) A
    depends on the key and its projection alone, not on which others have adapters.
    """
    order = list(TARGETS.values())

    def make(key):
        made = {}
        for name, (shape, _) in adapter_shapes(architecture, lora).items():
            weight, matrix = name.rsplit(".", 1)
            if matrix == "b":
                made[name] = jnp.zeros(shape, dtype)
                continue
            bound = math.prod(shape[1:-1]) ** -0.5
            own = jax.random.fold_in(key, order.index(weight))
            made[name] = jax.random.uniform(own, shape, jnp.float32, -bound, bound).astype(dtype)
        return nest(made)

    return jax.jit(make, out_shardings=None if mesh is None else shardings(architecture, lora, mesh))(key)


def adapted(base: Params, adapters: Params, lora: Lora) -> Params:
    """Returns the policy: the weights of `base`, each of which is `Adapted` if it has adapters."""
    weights, matrices = flatten(base), flatten(adapters)
    for name in (TARGETS[target] for target in lora.targets):
        weights[name] = Adapted(weights[name], matrices[f"{name}.a"], matrices[f"{name}.b"], lora.scaling)
    return nest(weights)


def split(policy: Params) -> tuple[Params, Params]:
    """Returns (base, adapters): the arrays that `adapted` put side by side."""
    weights, matrices = flatten(policy), {}
    for name, weight in weights.items():
        if is_adapted(weight):
            weights[name] = weight.weight
            matrices |= {f"{name}.a": weight.a, f"{name}.b": weight.b}
    return nest(weights), nest(matrices)


def is_adapted(weight: object) -> bool:
    """Returns True for a weight with adapters; as `is_leaf` of `jax.tree.map` it makes such a weight one leaf."""
    return isinstance(weight, Adapted)


def _merge_layer(layer: Adapted) -> Float[Array, "..."]:
    a, b = layer.a.astype(jnp.float32), layer.b.astype(jnp.float32)
    # By default a TPU multiplies in bfloat16. This runs once an iteration, so full precision costs nothing.
    change = jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
    return layer.weight.astype(jnp.float32) + layer.scaling * change


def merged(params: Params, dtype: DTypeLike | None = None) -> Params:
    """Returns plain weights: W + scaling * A B, summed in float32, where `params` has adapters; others do not change.

    Only one layer's matrix at a time exists in float32. Every weight gets `dtype`; None: that of its base.
    """

    def one(weight):
        if not is_adapted(weight):
            return weight if dtype is None else weight.astype(dtype)
        kind = weight.weight.dtype if dtype is None else dtype
        return jax.lax.map(lambda layer: _merge_layer(layer).astype(kind), weight)

    return jax.tree.map(one, params, is_leaf=is_adapted)


def bank(base: Params, architecture: Architecture, size: Lora, count: int, dtype: DTypeLike) -> Params:
    """Returns `base` with room for `count` adapters in `dtype`, of which each row of a batch uses one or none.

    There is room for the rank and targets of `size`; a smaller adapter fits in. `base` has the layout of decoding.
    """
    weights, mesh = flatten(base), jax.tree.leaves(base)[0].sharding.mesh
    declared = adapter_shapes(architecture, size)

    def room(name: str) -> Array:
        shape, axes = declared[name]
        sharding = NamedSharding(mesh, tensor_spec((axes[0], None, *axes[1:])))
        return jnp.zeros((shape[0], count, *shape[1:]), dtype, device=sharding)

    for name in (TARGETS[target] for target in size.targets):
        weights[name] = RowAdapted(weights[name], room(f"{name}.a"), room(f"{name}.b"))
    return nest(weights)


def put_into_bank(params: Params, adapters: Params, lora: Lora, index: int) -> Params:
    """Returns a bank with an adapter at `index`. The old bank's adapters are donated: only its base may still be used.

    Raises ValueError if the adapter has a larger rank than there is room for, or other targets.
    """
    weights, matrices = flatten(params), flatten(adapters)
    rooms = {name: room for name, room in weights.items() if isinstance(room, RowAdapted)}
    # Both checks come before the first `_put`, which donates: a refused adapter leaves the old bank as it is.
    if unknown := [name for name in matrices if name.rpartition(".")[0] not in rooms]:
        raise ValueError(f"the bank has no room for adapters of {', '.join(sorted(unknown))}.")
    most = min(room.a.shape[-1] for room in rooms.values())
    if lora.rank > most:
        raise ValueError(f"an adapter has rank {lora.rank}, and there is room for {most} at most.")
    for name, room in rooms.items():
        if f"{name}.a" in matrices:
            a, b = matrices[f"{name}.a"], lora.scaling * matrices[f"{name}.b"]
        else:
            a = jnp.zeros((room.a.shape[0], *room.a.shape[2:-1], 0))
            b = jnp.zeros((room.b.shape[0], 0, *room.b.shape[3:]))
        a, b = _put(room.a, room.b, a, b, jnp.int32(index))
        weights[name] = dataclasses.replace(room, a=a, b=b)
    return nest(weights)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _put(a: Array, b: Array, new_a: Array, new_b: Array, index: Array) -> tuple[Array, Array]:
    """Replaces one adapter of a bank of a weight, filled with zeros up to the bank's rank."""

    def replaced(x: Array, new: Array) -> Array:
        padding = [(0, most - size) for most, size in zip((x.shape[0], *x.shape[2:]), new.shape, strict=True)]
        return jax.lax.dynamic_update_index_in_dim(x, jnp.pad(new, padding).astype(x.dtype), index, 1)

    return replaced(a, new_a), replaced(b, new_b)
