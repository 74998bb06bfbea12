"""Reads our weights from the files of a model folder, each number for one device, and fetches what the files lack."""

import contextlib
import functools
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh, NamedSharding

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.files import gguf, partial_copy
from reinforce_ada_jax.files.partial_copy import Watch
from reinforce_ada_jax.policy import gguf_files, mxfp4, transformer, weight_files
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.tensor_table import parts
from reinforce_ada_jax.policy.weight_files import Header

Region = tuple[slice, ...]
Layouts = Mapping[str, NamedSharding | None]  # of our weights; None: the default device


def _opened(file: pathlib.Path) -> contextlib.AbstractContextManager[Any]:
    if file.suffix == gguf.SUFFIX:
        return contextlib.nullcontext(gguf_files.Tensors(file))
    return safetensors.safe_open(file, framework="numpy")


class TensorFiles:
    """Open files of a folder, which reads regions of their tensors."""

    def __init__(self, folder: pathlib.Path, headers: dict[str, Header], stack: contextlib.ExitStack):
        self._folder, self._headers = folder, headers
        scales = [header.scales for header in headers.values() if header.scales is not None]
        files = sorted({header.file for header in (*headers.values(), *scales)})
        found = {file: partial_copy.find(file) for file in files}
        self._partial = {file: partial for file, partial in found.items() if partial is not None}
        self._opened = {
            file: stack.enter_context(_opened(file if partial is None else partial.file))
            for file, partial in found.items()
        }

    def _regions(self, name: str, region: Region) -> list[tuple[Header, Region]]:
        """Returns the regions of tensors in the files that a region of a tensor is made of."""
        header = self._headers[name]
        if header.scales is not None:  # MXFP4: whole experts are read, and cut afterwards
            return [(header, region[:1]), (header.scales, region[:1])]
        if header.first_row is not None:
            begin, end, _ = region[0].indices(header.shape[0])
            return [(header, (slice(header.first_row + begin, header.first_row + end), *region[1:]))]
        return [(header, region)]

    def _span(self, header: Header, region: Region) -> partial_copy.Span:
        return self._partial[header.file].span(header.name, region[0])

    def _region(self, header: Header, region: Region) -> np.ndarray:
        if header.file in self._partial:
            for _ in self._partial[header.file].copy([self._span(header, region)]):
                pass
        file, sizes = self._opened[header.file], zip(region, header.shape, strict=False)
        if header.first_row is None and all(part in (slice(None), slice(0, size)) for part, size in sizes):
            return file.get_tensor(header.name)  # without the copy that a slice makes
        return file.get_slice(header.name)[region]

    def fetch(self, wanted: Iterable[tuple[str, Region]], watch: Watch = lambda numbers, what: numbers) -> None:
        """Copies what the files lack of these regions of tensors to this machine; BucketError if that fails."""
        spans: dict[partial_copy.PartialCopy, list[partial_copy.Span]] = {}
        for name, region in wanted if self._partial else ():
            for header, part in self._regions(name, region):
                if header.file in self._partial:
                    spans.setdefault(self._partial[header.file], []).append(self._span(header, part))
        partial_copy.copy(spans, watch)

    def read(self, name: str, region: Region) -> np.ndarray:
        """Returns a region of a tensor, which is fetched if need be; ValueError if a number there is not finite."""
        value, *scales = (self._region(*each) for each in self._regions(name, region))
        if scales:
            value = mxfp4.numbers(value, scales[0])[:, *region[1:]]
        remedy = "Fetch the folder again; if a training wrote it, export an earlier checkpoint of that run."
        weight_files.check_finite(str(self._folder), name, value, remedy)
        return value


class Weights:
    """Our weights in the files of a folder, or one layer of them."""

    def __init__(self, architecture: Architecture, files: TensorFiles, layouts: Layouts):
        self._files, self._layouts, self._parts = files, layouts, parts(architecture)
        self._by_layer: dict[int | None, dict[str, list[str]]] = {}
        for name, part in self._parts.items():
            self._by_layer.setdefault(part.layer, {}).setdefault(part.weight, []).append(name)
        self._shapes = {name: shape for name, (shape, _) in transformer.weight_shapes(architecture).items()}

    def names(self, layer: int | None) -> list[str]:
        """Returns the weights that a layer has, or those outside of the layers."""
        return [*self._by_layer[layer]]

    def _layout(self, weight: str, layer: int | None) -> tuple[tuple[int, ...], NamedSharding | None]:
        """Returns the shape of a weight, or of a layer of it, and the layout in which it is read."""
        shape, there = self._shapes[weight], self._layouts[weight]
        shape = shape if layer is None else (1, *shape[1:])
        order = self._parts[self._by_layer[layer][weight][0]].order
        if there is None:
            return shape, None
        assert isinstance(there.mesh, Mesh)
        return shape, mesh_lib.read_layout(shape, there.mesh, order)

    def _tensors(self, weight: str, layer: int | None, index: Region) -> tuple[list[str], Region]:
        """Returns the tensors with the elements at `index` of a weight, and the index in each."""
        names = self._by_layer[layer][weight]
        if self._parts[names[0]].expert is not None:
            return names[index[1]], (index[0], slice(None), *index[2:])
        return names, index

    def _wanted(self) -> Iterator[tuple[str, Region]]:
        for layer, weights in self._by_layer.items():
            for weight in weights:
                shape, layout = self._layout(weight, layer)
                everything = (slice(None),) * len(shape)
                indices = [everything] if layout is None else layout.addressable_devices_indices_map(shape).values()
                for index in indices:
                    names, inside = self._tensors(weight, layer, index or everything)
                    yield from ((name, self._parts[name].region(inside)) for name in names)

    def fetch(self, watch: Watch) -> None:
        """Copies what the devices of this process read to this machine, if the files hold it in part only."""
        self._files.fetch(self._wanted(), watch)

    def read(self, weight: str, layer: int | None) -> jax.Array:
        """Returns a weight, or a layer of it, as `mesh_lib.exchanged`; each number is read for one device.

        Where sizes do not divide, several devices read the same.
        """
        shape, layout = self._layout(weight, layer)
        everything = (slice(None),) * len(shape)

        def value(index: Region | None) -> np.ndarray:
            names, inside = self._tensors(weight, layer, index or everything)
            first, *others = (
                self._parts[name].read(inside, functools.partial(self._files.read, name)) for name in names
            )
            return np.concatenate([first, *others], axis=1) if others else first

        there = self._layouts[weight]
        if layout is None or there is None:
            read = jax.device_put(value(everything))
        else:
            read = mesh_lib.exchanged(jax.make_array_from_callback(shape, layout, value), there)
        return jax.block_until_ready(read)  # the transfer ends before the next one is read
