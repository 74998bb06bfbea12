"""Header of a GGUF file, the format of llama.cpp: metadata and the places of the tensors. No tensor is read here.

The file may come from anybody. Every count, length and offset is compared with the size of the file before it is used.
Source: ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian.
"""

import dataclasses
import itertools
import math
import mmap
import pathlib
import struct
from typing import Any

from reinforce_ada_jax.files import model_files

SUFFIX = ".gguf"
# Published files have 40 keys, 1,000 tensors, templates of 20 kB, and at most 540,000 items in all arrays together
# (Llama 3: 128,000 tokens, as many kinds of tokens, 280,000 merges). 2**20 texts take 1 s.
MAX_KEYS, MAX_TENSORS, MAX_ITEMS, MAX_HEADER_BYTES, MAX_DIMENSIONS = 4096, 65_536, 2**20, 64 * 2**20, 4
# (name, elements of a block, bytes of a block) by the number of a type; other types are not read.
BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2),
}  # fmt: skip
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Place of one tensor."""

    shape: tuple[int, ...]  # outermost axis first, as in numpy; the file has the reverse
    type: int  # a key of `BLOCKS`
    begin: int  # first byte in the file
    size: int  # bytes


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata and tensors of a file, by their names; `begin` is the first byte of the tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    begin: int


class _Reader:
    """Bytes of a header, read in order; ValueError where they end."""

    def __init__(self, content: mmap.mmap):
        self._content, self.place, self._items = content, 0, 0
        self._end = min(len(content), MAX_HEADER_BYTES)

    def take(self, count: int) -> bytes:
        if count > self._end - self.place:
            raise ValueError(f"its header needs byte {self.place + count:,}, and ends at {self._end:,}")
        self.place += count
        return self._content[self.place - count : self.place]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode("utf-8")

    def count(self, most: int, what: str) -> int:
        count = self.number("<Q")
        if count > most:
            raise ValueError(f"it has {count:,} {what}, more than {most:,}")
        return count

    def value(self) -> Any:
        kind = self.number("<I")
        if kind != _ARRAY:
            return self._item(kind)
        kind, count = self.number("<I"), self.count(MAX_ITEMS, "items in an array")
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"its arrays have more than {MAX_ITEMS:,} items")
        if kind in _NUMBERS:
            form = _NUMBERS[kind][1]
            return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}"))))
        # An array of arrays is in no model, and could be nested without end: `_item` refuses it.
        return [self._item(kind) for _ in range(count)]

    def _item(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the type {kind}, which is none of a model's")
        return self.number(_NUMBERS[kind])


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text()
    dimensions = reader.number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{name!r:.80} has {dimensions} axes")
    shape = tuple(reader.number("<Q") for _ in range(dimensions))[::-1]
    kind, offset = reader.number("<I"), reader.number("<Q")
    if kind not in BLOCKS:
        known = ", ".join(block[0] for block in BLOCKS.values())
        raise ValueError(f"{name!r:.80} has the type number {kind}; those that are read are {known}")
    if not all(shape) or shape[-1] % BLOCKS[kind][1]:
        raise ValueError(f"{name!r:.80} of type {BLOCKS[kind][0]} has the shape {shape}")
    return name, shape, kind, offset


def _parsed(content: mmap.mmap) -> Header:
    reader = _Reader(content)
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, and those that are read are 2 and 3, little-endian")
    num_tensors, num_keys = reader.count(MAX_TENSORS, "tensors"), reader.count(MAX_KEYS, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"the key {key!r:.80} is there twice")
        metadata[key] = reader.value()
    described = [_tensor(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**16:
        raise ValueError(f"its alignment is {alignment!r:.40}")
    begin = -(-reader.place // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in described:
        _, elements, size = BLOCKS[kind]
        tensor = Tensor(shape, kind, begin + offset, math.prod(shape) // elements * size)
        if name in tensors:
            raise ValueError(f"the tensor {name!r:.80} is there twice")
        if tensor.begin + tensor.size > len(content):
            raise ValueError(f"{name!r:.80} ends at byte {tensor.begin + tensor.size:,} of {len(content):,}")
        tensors[name] = tensor
    ordered = sorted(tensors.items(), key=lambda item: item[1].begin)
    for (name, tensor), (following, after) in itertools.pairwise(ordered):
        if tensor.begin + tensor.size > after.begin:
            raise ValueError(f"{name!r:.80} and {following!r:.80} have bytes in common")
    return Header(metadata, tensors, begin)


def read(file: pathlib.Path) -> Header:
    """Returns the header of a GGUF file; ValueError says what is wrong with a damaged one."""
    if not model_files.is_present(file, None):
        raise ValueError(f"{file} is missing: name a GGUF file or a Hugging Face folder.")
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _parsed(content)
    except ValueError as error:  # also of an empty file, and of text that is not UTF-8
        raise ValueError(
            f"{file} is not a whole GGUF file ({error}). Fetch it again from where you trust it."
        ) from error


def find(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file at `path` (itself, or in a folder without config.json), or None; ValueError for several."""
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} has {len(found)} GGUF files ({names:.200}): name one of them.")
    return found[0] if found else None
