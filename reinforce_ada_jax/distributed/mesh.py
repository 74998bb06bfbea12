"""Device mesh, and the one table that maps logical axes to mesh axes.

Mesh axes are `data` (rows only), `fsdp` (rows, and weights along the model axis), `context` (the tokens of a row, and
weights along the model axis) and `tensor` (heads, feed-forward or experts, vocabulary). Every weight declares its
logical axes where it is declared (`policy/layers.py`); nothing else decides where an array lives.

A mesh over several TPU slices has one axis more, `slice`, the outermost one. The network between slices is slow. So
each slice has a copy of the weights and a share of the rows, and computes alone (`on_each_slice`) until an update sums
the gradients of all slices.

The learner cuts a row into as many parts as `context` has devices (`cut_rows`). A part is computed as a row is; only
attention reads the keys and values of the other parts (`all_parts`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.config import MeshConfig

AXES = ("data", "fsdp", "context", "tensor")
SLICE = "slice"  # the first axis of a mesh over several slices; other meshes lack it
# Platform of JAX_PLATFORMS: the extra of the package jax that has its plugin.
EXTRAS = {"cuda": "cuda12", "gpu": "cuda12", "tpu": "tpu"}

LOGICAL_TO_MESH: dict[str, str | tuple[str, ...] | None] = {
    "batch": (SLICE, "data", "fsdp"),  # rows of all slices
    "rows": ("data", "fsdp"),  # rows of one slice
    "parts": ("context", "data", "fsdp"),  # parts of rows, in the order of `cut_rows`
    "layers": None,
    "embed": ("fsdp", "context"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "mlp": "tensor",
    "experts": "tensor",
    "expert": None,  # the width of an expert
    "router": None,  # the outputs of the router, one for each expert
    "vocab": "tensor",
}


def available_devices() -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]  # a class at run time
    """Returns the devices of all processes; ValueError if JAX_PLATFORMS names a kind that JAX can't use here."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # where no plugin is installed for "cuda", JAX only asserts
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]  (defined at run time)
        if not platforms:
            raise
        reason = (str(error).splitlines() or ["no such device is found"])[0].partition(" (set JAX_PLATFORMS")[0]
        extra = EXTRAS.get(platforms.partition(",")[0])
        install = f" with pip install 'jax[{extra}]=={jax.__version__}'" if extra else ""
        raise ValueError(
            f"JAX_PLATFORMS is {platforms!r}, and JAX can't use it: {reason}.\nInstall its plugin{install}, and end "
            "other processes that hold the device. Without such a device, set JAX_PLATFORMS=cpu."
        ) from error


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # a class at run time
    context: int = 1,
    slices: int | None = None,
) -> Mesh:
    """Returns a mesh of exactly data * fsdp * context * tensor devices (the first of `devices`, or of all of JAX's).

    Devices of one process are neighbours. `tensor` is the innermost axis, so a decode replica is in one process. `data`
    goes over all slices, which are equal parts of the devices; `slices` is their number (None: read from the devices).

    Raises ValueError if there are fewer devices; if several processes would leave devices out, or `tensor` would span
    processes; or if `data` is not divisible by the number of slices.
    """
    devices = available_devices() if devices is None else devices
    devices = sorted(devices, key=lambda device: (_slice_of(device), device.process_index, device.id))
    size = data * fsdp * context * tensor
    product = "mesh.data * mesh.fsdp * mesh.context * mesh.tensor = "
    product += f"{data} * {fsdp} * {context} * {tensor} = {size}"
    if size > len(devices):
        raise ValueError(
            f"{product}, but there are {len(devices)} devices ({devices[0].platform}): lower one of them, or run where "
            "there are more."
        )
    processes = {device.process_index for device in devices}
    if len(processes) > 1 and (size != len(devices) or len(devices) // len(processes) % tensor):
        raise ValueError(
            f"{product}, over {len(processes)} processes of {len(devices) // len(processes)} devices: the product must "
            f"be {len(devices)}, and mesh.tensor a divisor of a process's devices."
        )
    slices = len({_slice_of(device) for device in devices[:size]}) if slices is None else slices
    if data % slices:
        raise ValueError(
            f"mesh.data is {data}, and the devices are {slices} slices: weights and products are split inside of a "
            f"slice, and each slice has a copy. Make mesh.data a multiple of {slices}."
        )
    shape = data // slices, fsdp, context, tensor
    if slices == 1:
        return Mesh(np.asarray(devices[:size]).reshape(shape), AXES)
    return Mesh(np.asarray(devices[:size]).reshape(slices, *shape), (SLICE, *AXES))


def _slice_of(device: Any) -> int:
    """Returns the number of a TPU's slice; for other devices JAX's `slice_index` has other meanings."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0  # planned devices may lack the number


def num_slices(mesh: Mesh) -> int:
    """Returns the number of slices of a mesh."""
    return mesh.shape.get(SLICE, 1)


def split_meshes(
    chosen: MeshConfig,
    devices: Sequence[Any] | None = None,  # of all processes; None: JAX's
) -> tuple[Mesh, Mesh]:
    """Returns the meshes of the learner and of the sampler: the same mesh or, with `mesh.sampler`, disjoint ones.

    The learner has the first devices, and the sampler the next ones; with several processes the last ones only draw.
    The sampler's replicas are along `data`, each of `mesh.tensor` devices. Raises ValueError if there are fewer
    devices, or if several processes would leave devices out, or one process would both learn and draw.
    """
    devices = available_devices() if devices is None else devices
    if not chosen.sampler:
        mesh = make_mesh(**chosen.axes, devices=devices)
        return mesh, mesh
    needed, sides = chosen.learner + chosen.sampler, f"{chosen.learner} + {chosen.sampler}"
    total = f"mesh.data * mesh.fsdp * mesh.context * mesh.tensor + mesh.sampler = {sides} = {needed}"
    if needed > len(devices):
        raise ValueError(
            f"{total}, but there are {len(devices)} devices ({devices[0].platform}): lower one of them, or run "
            "where there are more."
        )
    by_process = devices_of_processes(devices)
    count, of_process = len(by_process), len(by_process[0])
    if count > 1 and (needed != len(devices) or chosen.sampler % of_process):
        raise ValueError(
            f"{total}, over {count} processes of {of_process} devices: the sum must be {len(devices)}, and "
            f"mesh.sampler a multiple of {of_process}, because a process either learns or draws."
        )
    devices = list(itertools.chain(*by_process))
    learner = make_mesh(**chosen.axes, devices=devices[: chosen.learner])
    sampler = devices[chosen.learner : needed]
    return learner, make_mesh(data=chosen.sampler // chosen.tensor, tensor=chosen.tensor, devices=sampler)


def num_learning(learner: Mesh, sampler: Mesh) -> int:
    """Returns how many processes, the first ones, learn while the others only draw; 0 if no process only draws."""
    learning, drawing = ({device.process_index for device in mesh.devices.flat} for mesh in (learner, sampler))
    return 0 if learning & drawing else len(learning)


def devices_of_processes(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of each process, in order."""
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    return [list(own) for _, own in itertools.groupby(devices, key=lambda device: device.process_index)]


def describe(mesh: Mesh) -> str:
    """Returns the axes and their sizes as text, without `context` if its size is 1."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if axis != "context" or size > 1)


def parts(mesh: Mesh, axis: str | None) -> int:
    """Returns the number of parts in which a logical axis is split on `mesh`."""
    return math.prod(mesh.shape.get(name, 1) for name in _mesh_axes(axis))


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    of_mesh = None if axis is None else LOGICAL_TO_MESH[axis]
    return (of_mesh,) if isinstance(of_mesh, str) else of_mesh or ()


def cut_rows(x: Any, count: int) -> jax.Array:
    """Cuts rows [B, T, ...] into parts, [count * B, T / count, ...]: the first of each row, then the second, ..."""
    rows, rest = len(x), x.shape[2:]
    return x if count == 1 else x.reshape(rows, count, -1, *rest).swapaxes(0, 1).reshape(count * rows, -1, *rest)


def join_rows(x: Any, count: int) -> jax.Array:
    """Joins parts into rows [B, T, ...]: the inverse of `cut_rows`."""
    rows, rest = len(x) // count, x.shape[2:]
    return x if count == 1 else x.reshape(count, rows, -1, *rest).swapaxes(0, 1).reshape(rows, -1, *rest)


def all_parts(x: jax.Array, count: int) -> jax.Array:
    """Returns whole rows [B, T, ...] inside of a `shard_map`, where this device has one of `count` parts of them.

    The gradient of a part is summed over the devices that have read it.
    """
    return x if count == 1 else jax.lax.all_gather(x, "context", axis=1, tiled=True)


def local_rows(array: jax.Array) -> np.ndarray:
    """Returns this process's rows of an array that is split along its first axis over all processes, on the host."""
    shards = {shard.index[0].start: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def shard_bytes(tree: Any) -> int:
    """Returns the bytes on each device of a tree of arrays, or of their shapes: the sum of the largest shards."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def place(array: np.ndarray, there: NamedSharding | None) -> jax.Array:
    """Puts a host array, equal in all processes, on the devices of `there`; None: on the default device."""
    if there is None or there.is_fully_addressable:
        return jax.device_put(array, there)
    return jax.make_array_from_callback(array.shape, there, lambda index: array[index])


def read_layout(shape: tuple[int, ...], mesh: Mesh, order: Sequence[int]) -> NamedSharding:
    """Returns the layout in which no two devices have the same part of an array, where the sizes divide.

    The array is cut along the first axis of `order` as far as that goes, then along the next one. If a file has the
    axes in this order, a device has consecutive bytes of it, and so have the neighbouring devices of a host.
    """
    devices = mesh.devices.ravel()
    factors: list[int] = []  # an axis for each prime: 151,936 rows go over 128 of 256 devices, the columns over 2
    while (rest := len(devices) // math.prod(factors)) > 1:
        factors.append(next(number for number in range(2, rest + 1) if rest % number == 0))
    names = [f"part{number}" for number in range(len(factors))]
    split: list[tuple[str, ...]] = [()] * len(shape)
    sizes = [*shape]
    for name, factor in zip(names, factors, strict=True):
        for position in order:
            if sizes[position] % factor == 0:
                split[position], sizes[position] = (*split[position], name), sizes[position] // factor
                break
    return NamedSharding(Mesh(devices.reshape(factors), names), PartitionSpec(*split))


def exchanged(array: jax.Array, there: NamedSharding) -> jax.Array:
    """Returns an array of `read_layout` split as `there`, and also along the axes of the mesh that `there` leaves out.

    A program whose results have the layout `there` gathers these. In one step XLA would copy the whole array to each
    device, with two axes that the first layout mixes.
    """
    split = [(names,) if isinstance(names, str) else names or () for names in there.spec]
    split += [()] * (array.ndim - len(split))
    free = [axis for axis, size in there.mesh.shape.items() if size > 1 and all(axis not in names for names in split)]
    for axis in free:
        for position, names in enumerate(split):
            if array.shape[position] % math.prod(there.mesh.shape[name] for name in (*names, axis)) == 0:
                split[position] = (*names, axis)
                break
    layout = NamedSharding(there.mesh, PartitionSpec(*split))
    return array if layout.is_equivalent_to(array.sharding, array.ndim) else jax.jit(_same, out_shardings=layout)(array)


def _same(array: jax.Array) -> jax.Array:
    return array


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Returns the partition of an array with these logical axes (None: not split)."""
    return PartitionSpec(*(None if axis is None else LOGICAL_TO_MESH[axis] for axis in axes))


def tensor_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Returns the partition for decoding: split over `tensor` alone, whole along the other axes of the mesh."""
    return PartitionSpec(*(axis if axis == "tensor" else None for axis in spec(axes)))


def in_layers(stacked: jax.Array, whole: NamedSharding) -> jax.Array:
    """Returns an array [layers, ...] laid out as `whole`, inside a program that gathers one layer at a time.

    If all layers were gathered at once, XLA would use a temporary array of the same size, and copy it into the result.
    With several processes on CPUs they are gathered at once nevertheless: CPUs run the loops of several arrays at the
    same time, so two processes met in different gathers, and Gloo ended both. One loop for all arrays takes three times
    the temporaries of one loop for each array (Qwen3-30B-A3B on v5p:2x2x4: 3.6 GiB instead of 1.2).
    """
    mesh = whole.mesh
    assert isinstance(mesh, Mesh)
    if mesh.devices.flat[0].platform == "cpu" and len({device.process_index for device in mesh.devices.flat}) > 1:
        return jax.lax.with_sharding_constraint(stacked, whole)
    of_layer = NamedSharding(mesh, PartitionSpec(*whole.spec[1:]))
    return jax.lax.map(lambda layer: jax.lax.with_sharding_constraint(layer, of_layer), stacked)


def sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """Returns the sharding of an array with these logical axes on `mesh`.

    For a logical axis that is split over `context`, a `context` of size 1 is left out; if it is larger, the other mesh
    axes of size 1 are left out. The results of JAX's programs name the same axes. Arrays in layouts with other names
    would compile a program again.
    """

    def split(axis: str | None) -> str | tuple[str, ...] | None:
        names = tuple(name for name in _mesh_axes(axis) if name in mesh.axis_names)
        if "context" in names:
            cut = mesh.shape["context"] > 1
            names = tuple(name for name in names if (mesh.shape[name] > 1 if cut else name != "context"))
        return names[0] if len(names) == 1 else names or None

    return NamedSharding(mesh, PartitionSpec(*map(split, axes)))


def weight_sharding(mesh: Mesh, name: str, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """Returns `sharding` of a weight; ValueError, with the names and sizes, if a split axis does not divide."""
    for axis, size in zip(axes, shape, strict=True):
        if size % parts(mesh, axis):
            over = " * ".join(f"mesh.{name}" for name in _mesh_axes(axis) if mesh.shape[name] > 1)
            raise ValueError(
                f"{name}: axis {axis!r} of size {size} cannot be split over {over} = {parts(mesh, axis)}: choose "
                f"{over} as a divisor of {size}."
            )
    return sharding(mesh, axes)


def on_own_part(
    function: Callable[..., Any], mesh: Mesh | None, *, in_specs: Any, out_specs: Any, always: bool = False
) -> Callable[..., Any]:
    """Makes every device along `tensor` run `function` on its own part of the arguments, as `jax.shard_map` does.

    The compiler then adds no transfer between them. Without a mesh, or with one device along `tensor`, the function is
    returned as it is, except with `always`, which Pallas kernels need.
    """
    if not always and (mesh is None or mesh.shape["tensor"] == 1):
        return function
    assert mesh is not None
    return shard_map(function, mesh, in_specs=in_specs, out_specs=out_specs)


def shard_map(function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns `jax.shard_map` of a function over the axes of `mesh` that no surrounding `shard_map` has taken."""
    surrounding = jax.sharding.get_abstract_mesh()
    inside = not surrounding.empty
    return jax.shard_map(
        function,
        mesh=None if inside else mesh,
        axis_names=set(mesh.axis_names) - set(surrounding.manual_axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # a kernel doesn't say along which axes its result varies
    )


def on_each_slice(function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Makes each slice run `function` on its own part of the arguments; on one slice the function stays as it is.

    The specs name only the axis `slice`. Nothing is summed between slices: results whose spec does not name `slice`
    must be the same on all slices.
    """
    if num_slices(mesh) == 1:
        return function
    return jax.shard_map(
        function, mesh=mesh, axis_names={SLICE}, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def rows_of_table(table: jax.Array, rows: Any, mesh: Mesh) -> jax.Array:
    """Returns the rows [B, T, D] with the numbers `rows` [B, T] of a table [V, D] that is sharded like embeddings.

    The sums over devices are written out: XLA's partitioner (jaxlib 0.10.2) ends the process if two axes of a table
    are split and a surrounding `shard_map` has taken another mesh axis.
    """

    def local(part: jax.Array, rows: jax.Array) -> jax.Array:
        part = jax.lax.all_gather(part, LOGICAL_TO_MESH["embed"], axis=1, tiled=True)
        place = rows - jax.lax.axis_index("tensor") * len(part)
        is_here = (place >= 0) & (place < len(part))
        found = jnp.take(part, jnp.where(is_here, place, 0), axis=0)
        return jax.lax.psum(jnp.where(is_here[..., None], found, 0), "tensor")

    of_rows = spec(("parts",))
    return shard_map(local, mesh, in_specs=(spec(("vocab", "embed")), of_rows), out_specs=of_rows)(table, rows)
