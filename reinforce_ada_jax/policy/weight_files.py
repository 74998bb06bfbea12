"""Finds the JSON and safetensors files of a model folder, checks them by their headers, and writes them as a stream.

`huggingface.py` knows what the tensors mean. Nothing here opens a pickle.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import safetensors

from reinforce_ada_jax.files import gguf, model_files, partial_copy
from reinforce_ada_jax.files.partial_copy import MAX_HEADER_BYTES
from reinforce_ada_jax.policy import gguf_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
EARLIER = "Export an earlier checkpoint of the run, with --iteration."
POINTER = b"version https://git-lfs"  # a clone without Git LFS has a file that begins so in place of the real one
MAX_NAME = 255  # characters of a file's name


@dataclasses.dataclass(frozen=True)
class Header:
    """Entry of one tensor in a safetensors file's header; `dtype` is the format's code ("BF16")."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: "Header | None" = None  # of the scales, if this tensor is their blocks (`mxfp4.py`)
    first_row: int | None = None  # in the file's tensor, if this is a part of it (`tensor_table.joined`)


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; ValueError if there is no such file, or as `model_files.read_json` raises."""
    value = model_files.read_json(file)
    if value is None:
        raise ValueError(f"{file} is missing: name a folder as Hugging Face's save_pretrained writes it.")
    return value


def _indexed(folder: pathlib.Path) -> list[pathlib.Path]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f'{folder / INDEX} has no "weight_map" from tensors to files: fetch it again.')
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        # Only files of this folder: an index from elsewhere must not choose what else is opened.
        if not shard.endswith(".safetensors") or set("/\\\0") & set(shard) or len(shard) > MAX_NAME:
            raise ValueError(
                f"{folder / INDEX} names the shard {shard!r:.120}; a shard is a .safetensors file of the same folder. "
                "Correct the index, or fetch the folder from where you trust it."
            )
    missing = [shard for shard in shards if not model_files.is_present(folder / shard, None)]
    if missing or not shards:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(shards)} shards in {INDEX}: {', '.join(missing):.300}. The "
            "download is incomplete: fetch the folder again."
        )
    return [folder / shard for shard in shards]


def find(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files with a model's weights: `model.safetensors`, the shards of its index, or one GGUF file.

    Raises ValueError where there are none, or the index is malformed, incomplete, or names a file outside the folder.
    """
    if (file := gguf.find(folder)) is not None:
        return [file]
    if model_files.is_present(folder / SINGLE, None):
        return [folder / SINGLE]
    if model_files.is_present(folder / INDEX):
        return _indexed(folder)
    if files := sorted(folder.glob(f"*{gguf.SUFFIX}")):
        raise ValueError(
            f"{folder} has config.json and no safetensors, and {files[0].name} describes itself: name that file."
        )
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when it is opened and so is "
            "never read. Convert it where you trust it: transformers.AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder) writes safetensors."
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}: the download is incomplete, fetch it again.")


def read_headers(files: list[pathlib.Path]) -> dict[str, Header]:
    """Returns the headers of all tensors in `files`, by name; reads no tensor.

    The library refuses files in which a byte of the data belongs to no tensor or to two. Raises ValueError where a file
    is damaged or its header is wrong, or a tensor is in two of them.
    """
    headers: dict[str, Header] = {}
    for file in files:
        if file.suffix == gguf.SUFFIX:
            headers |= {name: Header(file, name, shape, "F32") for name, shape in gguf_files.shapes(file).items()}
            continue
        content = partial_copy.whole(file)
        with open(content, "rb") as stream:
            begin = stream.read(len(POINTER))
        if begin == POINTER:
            raise ValueError(
                f"{file} is a pointer of Git LFS, and not the weights: run git lfs pull in the folder that it was "
                "cloned to, or fetch the file from where you trust it."
            )
        length = int.from_bytes(begin[:8], "little")
        try:
            if length > MAX_HEADER_BYTES:
                raise safetensors.SafetensorError(f"a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,}")
            with safetensors.safe_open(content, framework="numpy") as opened:
                for name in opened.keys():
                    if name in headers:
                        raise ValueError(
                            f"{name} is in {headers[name].file.name} and in {file.name}: remove the wrong one."
                        )
                    described = opened.get_slice(name)
                    headers[name] = Header(file, name, tuple(described.get_shape()), described.get_dtype())
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} is not a whole safetensors file ({error}). Fetch it again from where you trust it."
            ) from error
    return headers


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    # Tensors fill the shards in order; a tensor larger than the limit has a shard of its own.
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def check_new(folder: pathlib.Path) -> None:
    """Raises ValueError if `folder` exists and is not an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: name another one, or remove it first.")


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields `.NAME.partial`, next to `folder`, to write into, and renames it at the end: all files appear, or none.

    Raises ValueError if `folder` exists and is not an empty folder.
    """
    check_new(folder)
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


def check_finite(folder: str, name: str, value: np.ndarray, remedy: str) -> None:
    """Raises ValueError, with the `remedy`, if a tensor of `folder` has values that are NaN or infinite."""
    # One block at a time: the mask of a whole tensor takes a quarter of its size in float32, half in bfloat16. 7
    # billion bfloat16 take 11 s.
    flat, block = value.reshape(-1), 2**20
    count = sum(int((~np.isfinite(flat[begin : begin + block])).sum()) for begin in range(0, flat.size, block))
    if count:
        raise ValueError(f"{folder}: {count:,} of the {value.size:,} values of {name} are NaN or infinite. {remedy}")


def write_json(file: pathlib.Path, value: dict[str, Any]) -> None:
    """Writes an object as indented JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write(
    folder: pathlib.Path,
    specs: dict[str, tuple[tuple[int, ...], np.dtype]],
    read: Callable[[str], np.ndarray],
    max_shard_bytes: int | float,
) -> None:
    """Writes `read(name)` for every name of `specs` (shape, dtype), in one file or in shards with an index.

    The format is the length of a JSON header, that header, then raw bytes (huggingface/safetensors, "Format"). It is
    written here because the library's `save_file` wants all tensors of a file in memory at once; this function needs
    one at a time.
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
        write_json(folder / INDEX, index)
