"""The jitted programs of an engine: decode.py on a mesh, on every replica, with layouts and donation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.distributed.mesh import in_layers, tensor_spec, weight_sharding
from reinforce_ada_jax.policy import lora, rounded
from reinforce_ada_jax.policy.apart import LAYERS, Apart, apart
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.quantization import SUMMED_AXES, Quantized, quantized_weights
from reinforce_ada_jax.policy.rounded import Rounded
from reinforce_ada_jax.policy.transformer import Execution, Params, flatten, merge, nest, weight_shapes
from reinforce_ada_jax.sampling import decode
from reinforce_ada_jax.sampling.rings import layout
from reinforce_ada_jax.sampling.state import EngineOptions, empty_state


def replica_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which decoding has copies of the weights, each with its own slots, pages and queue."""
    return tuple(name for name in mesh.axis_names if name != "tensor")


def num_replicas(mesh: Mesh) -> int:
    """Returns the number of copies of the decode weights on a mesh."""
    return mesh.size // mesh.shape["tensor"]


def by_replica(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays whose first axis is the replica; one replica alone has no such axis."""
    return NamedSharding(mesh, PartitionSpec() if num_replicas(mesh) == 1 else PartitionSpec(replica_axes(mesh)))


def weight_shardings(architecture: Architecture, options: EngineOptions, mesh: Mesh) -> Params:
    """Returns the shardings of decode weights: split over `tensor` only, or the token loop would gather them."""
    return _map_weights(architecture, options, lambda _, shape, axes: NamedSharding(mesh, tensor_spec(axes)))


def learner_shardings(architecture: Architecture, options: EngineOptions, mesh: Mesh) -> Params:
    """Returns the shardings of decode weights where they keep the learner's layout, on its mesh."""
    return _map_weights(architecture, options, functools.partial(weight_sharding, mesh))


def _map_weights(architecture: Architecture, options: EngineOptions, make: Callable[..., Any]) -> Params:
    """Returns `make(name, shape, logical axes)` of each array of the decode weights, in the records of `_plain`."""

    def stored(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
        summed = SUMMED_AXES.get(name)
        if summed is not None and options.weight_dtype == "int8":
            outputs = [axis for axis in range(len(shape)) if axis not in summed]
            scale = tuple(shape[axis] for axis in outputs), tuple(axes[axis] for axis in outputs)
            return Quantized(values=make(name, shape, axes), scale=make(f"{name}.scale", *scale))
        if summed is not None and _as_bits(options):
            return Rounded(make(name, shape, axes))
        if options.apart and name.startswith(LAYERS):
            return Apart((make(name, shape[1:], axes[1:]),) * shape[0])
        return make(name, shape, axes)

    base = nest({name: stored(name, *declared) for name, declared in weight_shapes(architecture).items()})
    if options.adapters is None:
        return base
    adapters = lora.adapter_shapes(architecture, options.adapters).items()
    return lora.adapted(base, nest({name: make(name, *declared) for name, declared in adapters}), options.adapters)


def _as_bits(options: EngineOptions) -> bool:
    """Returns True if matrices are stored as bits; under adapters the learner's own arrays stay."""
    return options.rounds and options.adapters is None and options.weight_dtype == "model"


def as_decoded(params: Params, options: EngineOptions) -> Params:
    """Returns the learner's weights as decoding reads them: cast, matrices quantised if asked for.

    Adapters stay apart from their base if the options name them; otherwise they are merged into it.
    """
    if options.adapters is None:
        return _plain(params, options)
    base, adapters = lora.split(params)
    return lora.adapted(_plain(base, options), cast_adapters(adapters, options), options.adapters)


def _plain(params: Params, options: EngineOptions) -> Params:
    if options.weight_dtype == "int8":
        return nest(quantized_weights(flatten(lora.merged(params)), options.dtype))
    if _as_bits(options):
        return nest(rounded.as_bits(flatten(lora.merged(params))))
    plain = lora.merged(params, dtype=options.dtype)
    return nest(apart(flatten(plain))) if options.apart else plain


def _gathered_in_layers(
    architecture: Architecture, options: EngineOptions, shardings: Params
) -> Callable[[Params], Params]:
    """Returns a function that gathers decode weights from the learner's layout to `shardings`, layer by layer."""
    (mesh,) = {sharding.mesh for sharding in jax.tree.leaves(shardings)}
    split = learner_shardings(architecture, options, mesh)
    stacked = _map_weights(architecture, options, lambda name, *_: name.startswith(LAYERS) and not options.apart)

    def gathered(weight: jax.Array, split: NamedSharding, whole: NamedSharding, stacked: bool) -> jax.Array:
        moves = stacked and not split.is_equivalent_to(whole, weight.ndim)
        return in_layers(weight, whole) if moves else weight

    return lambda weights: jax.tree.map(gathered, weights, split, shardings, stacked)


def cast_adapters(adapters: Params, options: EngineOptions) -> Params:
    """Returns adapters in the type of activations, as the learner computes with them.

    On CPUs that is float32 in a bfloat16 run, too: with adapters rounded to bfloat16, the engine's log-probabilities
    differed from the learner's by 5e-5 a token.
    """
    return jax.tree.map(lambda x: x.astype(options.activations), adapters)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions; each one that takes a state donates it. `params` are decode weights."""

    init_state: Any  # () -> an empty state
    decode_window: Any  # (params, state, inputs, vote where there are several processes) -> (state, outputs)
    prefill: Any  # (params, tokens, length) -> prefix
    insert: Any  # (state, prefix, slot, address, sampling) -> state
    decode_token: Any  # (params, state) -> (state, int32[S, 3] of token, active, response tokens so far)
    cast_weights: Any  # the learner's weights -> decode weights on the learner's devices
    cast_adapters: Any  # the learner's adapters -> those of decoding, which then reads the learner's own base


def make_programs(architecture: Architecture, options: EngineOptions, mesh: Mesh, cast_shardings: Params) -> Programs:
    """Returns the programs of an engine on `mesh`; the shardings of cast weights may be on other devices."""
    replicas, own = num_replicas(mesh), by_replica(mesh)
    by_kv_head = NamedSharding(mesh, PartitionSpec(*own.spec, "tensor"))
    new_state = functools.partial(empty_state, options, architecture, layout(architecture, options).total)
    placed = jax.tree.map(lambda _: own, jax.eval_shape(new_state))
    placed = placed.replace(pools=jax.tree.map(lambda _: by_kv_head, placed.pools))
    # The old state is donated: nothing reads it again, and the pages are updated in place. The layout of outputs is
    # fixed: a state with another layout would compile everything again.
    jit_program = functools.partial(jax.jit, donate_argnums=1)

    def init_state():
        state = new_state()
        return state if replicas == 1 else jax.tree.map(lambda x: jnp.broadcast_to(x, (replicas, *x.shape)), state)

    def prefill(params, tokens, length):
        return decode.prefill(
            merge(architecture, params), tokens, length, execution=Execution(options.activations, options.rounds)
        )

    def decode_window(params, state, inputs, *vote):
        model, last_steps = merge(architecture, params), state.counts.decode_steps
        state, outputs = decode.decode_window(model, state, inputs, options=options, mesh=mesh)
        if vote:
            # Processes exchange nothing else. No token depends on it, so the exchange overlaps with the window.
            outputs = outputs.replace(agreed=jax.lax.pmax(jnp.stack([*vote, last_steps]), replica_axes(mesh)))
        return state, outputs

    def decode_token(params, state):
        active = state.slots.active
        state, ended = decode.decode_token(merge(architecture, params), state, options=options, mesh=mesh)
        result = jnp.stack([state.slots.token, active.astype(jnp.int32), state.slots.count], axis=1)
        return decode.release_slots(state, ended), result

    gathered = _gathered_in_layers(architecture, options, cast_shardings)

    def cast_weights(params):
        return gathered(as_decoded(params, options))

    insert = functools.partial(decode.insert, options=options, mesh=mesh)
    # The base is no argument: outputs of a program are new arrays, so it would be copied.
    as_adapters = functools.partial(cast_adapters, options=options)
    return Programs(
        init_state=jax.jit(init_state, out_shardings=placed),
        decode_window=jit_program(_on_each_replica(decode_window, mesh), out_shardings=(placed, own)),
        prefill=jax.jit(prefill),
        insert=jax.jit(insert, donate_argnums=0, out_shardings=placed),
        decode_token=jit_program(decode_token, out_shardings=(placed, own)),
        cast_weights=jax.jit(cast_weights, out_shardings=cast_shardings),
        cast_adapters=jax.jit(as_adapters, out_shardings=lora.split(cast_shardings)[1]),
    )


def _on_each_replica(program: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Runs `program(params, state, ...)` on every replica's devices, each with its own state and other arguments.

    Nothing else passes between replicas, so each goes at its own pace. One replica has no axis to map. Where the mesh
    has several processes, each launches the program for its own replicas, all in the same order.
    """
    if num_replicas(mesh) == 1:
        return program

    # The name of the function is that of the compiled program.
    @functools.wraps(program)
    def on_one(params, *own):
        outputs = program(params, *jax.tree.map(lambda x: x[0], own))
        return jax.tree.map(lambda x: x[None], outputs)

    shared, own = PartitionSpec(), PartitionSpec(replica_axes(mesh))
    return jax.shard_map(
        on_one,
        mesh=mesh,
        in_specs=(shared, own, own, *[own] * mesh.is_multi_process),
        out_specs=own,
        axis_names=set(replica_axes(mesh)),
        check_vma=False,  # the replicas' loops take different numbers of steps
    )
