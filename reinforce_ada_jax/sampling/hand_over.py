"""Hand-over of weights from the processes that learn to those that only draw.

Each array is copied by one program of all devices, which the processes launch in the same order: those that learn with
`send`, the others with `receive`. Process 0 brings its values, split over its devices; the program adds zeros of all
other processes to them. So a device needs at most three times the memory of one array in addition to the result.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.distributed.mesh import AXES, devices_of_processes, make_mesh
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.programs import learner_shardings, weight_shardings
from reinforce_ada_jax.sampling.state import EngineOptions

PROCESSES = "processes"


class HandOver:
    """Programs that copy decode weights from the learner's layout to the sampler's, in other processes."""

    def __init__(self, architecture: Architecture, options: EngineOptions, learner: Mesh, sampler: Mesh):
        whole = _whole_in_each_process(learner)
        self._whole = learner_shardings(architecture, options, whole)
        self._decoded = weight_shardings(architecture, options, sampler)
        devices = devices_of_processes([*learner.devices.flat, *sampler.devices.flat])
        # The devices of each process on the axes of `whole`: its copies of the weights, and the parts of each copy.
        shape = -1, whole.shape["fsdp"], whole.shape["context"], whole.shape["tensor"]
        self._mesh = Mesh(np.array(devices).reshape(len(devices), *shape), (PROCESSES, *AXES))

    def send(self, weights: Params) -> None:
        """Copies weights, which have the learner's layout, to the other processes."""

        def send_one(x: jax.Array, whole: NamedSharding, decoded: NamedSharding) -> None:
            spec = PartitionSpec(None, *whole.spec)
            x = _with_axis(NamedSharding(whole.mesh, spec))(x)
            self._copy(x.shape[1:], [shard.data for shard in x.addressable_shards], whole, decoded)

        jax.tree.map(send_one, weights, self._whole, self._decoded)

    def receive(self, weights: Params) -> Params:
        """Returns the weights that the others send; `weights` has their shapes and dtypes."""

        def receive_one(x: jax.ShapeDtypeStruct, whole: NamedSharding, decoded: NamedSharding) -> jax.Array:
            zeros = np.zeros((1, *whole.shard_shape(x.shape)), x.dtype)
            zeros = [jax.device_put(zeros, device) for device in self._mesh.local_devices]
            copied = self._copy(x.shape, zeros, whole, decoded)
            shards = [shard.data for shard in copied.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, decoded, shards)

        return jax.tree.map(receive_one, weights, self._whole, self._decoded)

    def _copy(
        self, shape: tuple[int, ...], own: list[jax.Array], whole: NamedSharding, decoded: NamedSharding
    ) -> jax.Array:
        """Returns the array of process 0, in each process laid out for decoding; `own` has this process's parts."""
        parts = NamedSharding(self._mesh, PartitionSpec(PROCESSES, *whole.spec))
        x = jax.make_array_from_single_device_arrays((self._mesh.shape[PROCESSES], *shape), parts, own)
        return jax.block_until_ready(_of_first(NamedSharding(self._mesh, decoded.spec))(x))


@functools.cache
def _with_axis(there: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Returns the program that gives an array a first axis of one, and a layout."""
    return jax.jit(lambda x: x[None], out_shardings=there)


@functools.cache
def _of_first(there: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Returns the program that gives all processes the first row. It adds bits, because -0.0 + 0.0 would be 0.0."""

    def of_first(x: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        is_first = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 0
        bits = jnp.where(is_first, jax.lax.bitcast_convert_type(x, kind), 0)
        return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=0, dtype=kind), x.dtype)

    return jax.jit(of_first, out_shardings=there)


def _whole_in_each_process(learner: Mesh) -> Mesh:
    """Returns a mesh of the same devices on which the weights are whole in each process, and split inside of it.

    They are split in as many parts as the learner's `fsdp` and `context` and a process's devices allow.
    """
    tensor, replicas = learner.shape["tensor"], learner.size // learner.shape["tensor"]
    devices = list(learner.devices.flat)
    of_process = len(devices_of_processes(devices)[0]) // tensor  # also in a process that has none of them
    fsdp = math.gcd(of_process, learner.shape["fsdp"] * learner.shape["context"])
    return make_mesh(data=replicas // fsdp, fsdp=fsdp, tensor=tensor, devices=devices)
