"""JSON and safetensors files of a model folder: found, checked by their headers, written as a stream.

What the tensors mean is `huggingface.py`'s. Nothing here opens a pickle.
"""

import dataclasses
import json
import math
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class Header:
    """What a safetensors file says of one tensor before it is read; `dtype` is the format's code ("BF16")."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: it isn't there, isn't JSON, or isn't an object.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing: name a folder as Hugging Face's save_pretrained writes it.")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of the decoder, and of text that isn't UTF-8
        raise ValueError(f"{file} is not JSON ({error}): fetch or write it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object: fetch or write it again.")
    return value


def _indexed(folder: pathlib.Path) -> list[pathlib.Path]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f'{folder / INDEX} has no "weight_map" from tensors to files: fetch it again.')
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        # Only files of this folder: an index from elsewhere must not choose what else is opened.
        if not shard.endswith(".safetensors") or set("/\\\0") & set(shard):
            raise ValueError(
                f"{folder / INDEX} names the shard {shard!r}; a shard is a .safetensors file of the same folder. "
                "Correct the index, or fetch the folder from where you trust it."
            )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing or not shards:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(shards)} shards in {INDEX}: {', '.join(missing[:8])}. The "
            "download is incomplete: fetch the folder again."
        )
    return [folder / shard for shard in shards]


def find(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that make up a model: `model.safetensors`, or else the shards of its index.

    Raises:
      ValueError: there are none, or the index is malformed, incomplete, or names a file outside the folder.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _indexed(folder)
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when it is opened and so is "
            "never read. Convert it where you trust it: transformers.AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder) writes safetensors."
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}: the download is incomplete, fetch it again.")


def read_headers(files: list[pathlib.Path]) -> dict[str, Header]:
    """Every tensor in `files`, by name; no tensor is read.

    Raises:
      ValueError: a file is damaged, or a tensor stands in two of them.
    """
    headers: dict[str, Header] = {}
    for file in files:
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                for name in opened.keys():
                    if name in headers:
                        raise ValueError(
                            f"{name} stands in {headers[name].file.name} and in {file.name}: remove the wrong one."
                        )
                    described = opened.get_slice(name)
                    headers[name] = Header(file, tuple(described.get_shape()), described.get_dtype())
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error}): fetch it again.") from error
    return headers


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    # In order, each filled as far as it goes; a tensor larger than the limit stands alone.
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def write(
    folder: pathlib.Path,
    specs: dict[str, tuple[tuple[int, ...], np.dtype]],
    read: Callable[[str], np.ndarray],
    max_shard_bytes: float,
) -> None:
    """Writes `read(name)` for every name of `specs` (shape, dtype), in one file or in shards with an index.

    The format is the length of a JSON header, that header, then raw bytes (huggingface/safetensors, "Format"). It is
    written here because the library's `save_file` wants all tensors of a file in memory at once; this needs one.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in specs.items()}
    shards = _shards(sizes, int(max_shard_bytes))
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that doesn't say so
        end = 0
        for name in names:
            shape, dtype = specs[name]
            start, end = end, end + sizes[name]
            header[name] = {"dtype": DTYPE_CODES[dtype.name], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data begin aligned
        with open(folder / file, "xb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                stream.write(np.ascontiguousarray(read(name)).view(np.uint8).data)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
