"""Reads and writes Hugging Face folders, by the table of names and layouts in `tensor_table`.

Weights travel one tensor at a time. Names and shapes are checked from the files' headers before any is read, so a
folder that doesn't fit its config.json is refused within seconds.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.files import gguf, gguf_tokenizer, model_files
from reinforce_ada_jax.files.partial_copy import Watch
from reinforce_ada_jax.policy import gguf_files, mxfp4, transformer, weight_files
from reinforce_ada_jax.policy.architecture import Architecture, from_hf, to_hf
from reinforce_ada_jax.policy.tensor_files import TensorFiles, Weights
from reinforce_ada_jax.policy.tensor_table import joined, parts, stored

# Prefixes of names in the text part of an image model (Gemma 3 4B and larger), in place of "model." or "lm_head."; then
# prefixes of names in its other parts.
IMAGE_TEXT = re.compile(r"(?:language_model\.(model|lm_head)|(model)\.language_model)\.")
IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def read_config(folder: str | pathlib.Path) -> Architecture:
    """Returns the architecture that config.json in a Hugging Face folder, or a GGUF file, describes.

    Raises:
      ValueError: no such folder, no or malformed config.json, or a model that this decoder doesn't compute.
    """
    folder = pathlib.Path(folder)
    file = gguf.find(folder)
    if file is None and not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: name a Hugging Face folder or a GGUF file on this machine, or OWNER/MODEL."
        )
    config = weight_files.read_json(folder / "config.json") if file is None else gguf_files.config(file)
    try:
        return from_hf(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _check(folder: pathlib.Path, architecture: Architecture, headers: dict[str, weight_files.Header]) -> None:
    # One error lists all problems, so that a folder is repaired once.
    wanted, problems = parts(architecture), []
    codes = weight_files.DTYPE_CODES.values()
    for name, part in wanted.items():
        if name not in headers:
            problems.append(f"{name} is missing")
        elif headers[name].shape != part.theirs:
            problems.append(f"{name} has shape {headers[name].shape}, config.json asks for {part.theirs}")
        elif headers[name].dtype not in codes:
            problems.append(f"{name} has dtype {headers[name].dtype}, not one of {', '.join(codes)}")
    for name in headers:
        # Old exports carry the rotary frequencies, and a head that is the embedding (see `_check_tied_head`).
        ignorable = name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and architecture.tied_embedding)
        if name not in wanted and not ignorable:
            problems.append(f"{name!r:.120} is unknown")  # it may have any characters
    if problems:
        more = f"; and {len(problems) - 8:,} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{folder}: its weights are not those of the {architecture.family} model in its config.json, "
            f"{len(problems):,} problems: {'; '.join(problems[:8])}{more}. Fetch the folder again, or put the "
            "config.json there that belongs to these weights."
        )


def _check_tied_head(folder: pathlib.Path, headers: dict[str, weight_files.Header]) -> None:
    # If the two differ, transformers unties them. To use the embedding alone would silently give another model.
    names = ("model.embed_tokens.weight", "lm_head.weight")
    shape, block = headers[names[0]].shape, 4096  # rows at a time: 64 MB of a float32 model with 4,096 columns
    differs = headers[names[1]].shape != shape
    with contextlib.ExitStack() as stack:
        files = TensorFiles(folder, headers, stack)
        files.fetch([(name, (slice(None),)) for name in names])
        for row in range(0, 0 if differs else shape[0], block):
            rows = (slice(row, min(row + block, shape[0])), slice(None))
            differs = differs or not np.array_equal(files.read(names[0], rows), files.read(names[1], rows))
    if differs:
        raise ValueError(
            f"{folder}: config.json says tie_word_embeddings, but {names[1]} differs from {names[0]}. Set "
            f"tie_word_embeddings to false to use it, or remove {names[1]}."
        )


def _text_headers(headers: dict[str, weight_files.Header]) -> dict[str, weight_files.Header]:
    """Returns the headers under a text model's names; the tensors of an image model's encoder are left out."""
    if not any(map(IMAGE_TEXT.match, headers)):
        return headers
    found = {}
    for name, header in headers.items():
        if begin := IMAGE_TEXT.match(name):
            found[f"{begin[1] or begin[2]}.{name[begin.end() :]}"] = header
        elif not name.startswith(IMAGE_PREFIXES):
            found[name] = header
    return found


def _split(
    folder: pathlib.Path, architecture: Architecture, headers: dict[str, weight_files.Header]
) -> dict[str, weight_files.Header]:
    """Returns headers in which each tensor that holds several of ours is replaced by its parts."""
    wanted, headers = parts(architecture), dict(headers)
    for name, names in joined(architecture).items():
        if (header := headers.pop(name, None)) is None:
            continue
        rows = [wanted[each].theirs[0] for each in names]
        shape = (sum(rows), *wanted[names[0]].theirs[1:])
        if header.shape != shape:
            raise ValueError(
                f"{folder}: {name} has shape {header.shape}, config.json asks for {shape}. Fetch the folder again."
            )
        for each, begin in zip(names, itertools.accumulate(rows, initial=0), strict=False):
            headers[each] = dataclasses.replace(header, shape=wanted[each].theirs, first_row=begin)
    return headers


def check_weights(folder: pathlib.Path, architecture: Architecture) -> dict[str, weight_files.Header]:
    """Returns the headers of a folder's tensors, after checking that each is there with its shape.

    Raises ValueError where a file or a tensor is missing, or does not fit the architecture.
    """
    headers = mxfp4.joined(_text_headers(weight_files.read_headers(weight_files.find(folder))))
    headers = _split(folder, architecture, headers)
    _check(folder, architecture, headers)
    if architecture.tied_embedding and "lm_head.weight" in headers:
        _check_tied_head(folder, headers)
    return headers


def _write_layer(
    stacks: dict[str, jax.Array], layer: dict[str, jax.Array], index: jax.typing.ArrayLike
) -> dict[str, jax.Array]:
    return {
        name: jax.lax.dynamic_update_index_in_dim(stack, layer[name].astype(stack.dtype)[0], index, axis=0)
        for name, stack in stacks.items()
    }


def _owned(weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a copy, because on CPUs an array may share numpy's memory and could then not be donated."""
    return jnp.copy(weight).astype(dtype)


def load(
    folder: str | pathlib.Path,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    watch: Watch = lambda numbers, what: numbers,
) -> tuple[Architecture, transformer.Params]:
    """Returns a Hugging Face folder's architecture and weights, sharded from the start if a mesh is given.

    Where the sizes are divisible, each number of the files is read for one device only, by the process of this device.
    Then the devices exchange the numbers. In addition to the result the host holds one tensor of the files, or two
    copies of one matrix of all experts of a layer. The devices hold one layer more, or a second copy of one weight
    outside of the layers (embedding or head). What a partial copy lacks (`files/partial_copy.py`) is fetched first.

    Args:
      folder: holds config.json and `model.safetensors` (or its index and shards), float32, float16 or bfloat16, experts
        of gpt-oss also in MXFP4; or a GGUF file, or a folder that holds one.
      mesh: where the weights live; None: the default device.
      dtype: of the result.
      watch: gets the numbers of layers, and of MiB to fetch, and what they are, and returns an iterable of the numbers;
        each layer is read when its number comes.

    Raises:
      ValueError: config.json or the files are missing, malformed, or don't fit each other or the mesh, or a value is
        NaN or infinite.
      BucketError: weights can't be fetched.
    """
    folder = pathlib.Path(folder)
    architecture = read_config(folder)
    headers = check_weights(folder, architecture)

    shapes = {name: shape for name, (shape, _) in transformer.weight_shapes(architecture).items()}
    layouts: dict[str, NamedSharding | None] = dict.fromkeys(shapes)
    if mesh is not None:
        layouts = transformer.flatten(transformer.param_shardings(architecture, mesh))
    with contextlib.ExitStack() as stack:
        weights = Weights(architecture, TensorFiles(folder, headers, stack), layouts)
        weights.fetch(watch)
        stacked, others = weights.names(0), {}

        def zeros() -> dict[str, jax.Array]:
            return {name: jnp.zeros(shapes[name], dtype) for name in stacked}

        of_layers = {name: layouts[name] for name in stacked}
        stacks = jax.jit(zeros, out_shardings=of_layers)()
        # The stacks are donated, so that a layer is written in place; a copy of them would double their memory.
        write = jax.jit(_write_layer, donate_argnums=0, out_shardings=of_layers)
        for layer in watch(range(architecture.num_layers), "layers read"):
            read = {name: weights.read(name, layer) for name in stacked}
            stacks = jax.block_until_ready(write(stacks, read, np.int32(layer)))
        for name in weights.names(None):
            own = jax.jit(_owned, static_argnames="dtype", out_shardings=layouts[name])
            others[name] = jax.block_until_ready(own(weights.read(name, None), dtype=dtype))
    return architecture, transformer.nest({name: (stacks | others)[name] for name in shapes})


@functools.partial(jax.jit, static_argnames="shape")
def _read_part(whole: jax.Array, start: tuple[jax.typing.ArrayLike, ...], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(whole, start, shape)


def _check_params(architecture: Architecture, weights: dict[str, Any]) -> None:
    shapes = {name: shape for name, (shape, _) in transformer.weight_shapes(architecture).items()}
    problems = [f"{name} is missing" for name in shapes if name not in weights]
    problems += [f"{name} is unknown" for name in weights if name not in shapes]
    problems += [
        f"{name} has shape {weights[name].shape}, the architecture asks for {shape}"
        for name, shape in shapes.items()
        if name in weights and weights[name].shape != shape
    ]
    if problems:
        raise ValueError(
            f"these params are not those of the {architecture.family} architecture, {len(problems)} problems: "
            f"{'; '.join(problems[:8])}. Save params with the architecture that they were made for."
        )


def _check_tokenizer(folder: pathlib.Path) -> None:
    if gguf.find(folder) is None and not any(model_files.is_present(folder / name) for name in TOKENIZER_FILES):
        raise ValueError(
            f"{folder} has no tokenizer files ({', '.join(TOKENIZER_FILES[:3])}, ...): name the folder of the "
            "model that training began from."
        )


def _copy_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> None:
    if (file := gguf.find(source)) is not None:
        gguf_tokenizer.write(file, folder)
        return
    # The base model's generation_config.json replaces ours: it may list more stop tokens than config.json does.
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if model_files.is_present(source / name):
            shutil.copyfile(source / name, folder / name)


def _specs(architecture: Architecture, dtypes: dict[str, np.dtype]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Returns shape and type of each tensor of a folder; `dtypes` are those of our weights."""
    wanted, specs = parts(architecture), {}
    for name, names in stored(architecture).items():
        rows, part = sum(wanted[each].theirs[0] for each in names), wanted[names[0]]
        specs[name] = ((rows, *part.theirs[1:]), dtypes[part.weight])
    return specs


def save(
    folder: str | pathlib.Path,
    architecture: Architecture,
    params: transformer.Params,
    *,
    read: Callable[[str], jax.Array] | None = None,
    tokenizer_from: str | pathlib.Path | None = None,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int | float = 5e9,
) -> None:
    """Writes a folder that `load` and transformers' `from_pretrained` read; whole, or not at all.

    One tensor at a time is copied to the host. Every process that holds weights calls this; process 0 writes.

    Args:
      folder: doesn't exist yet, or is empty.
      architecture: of `params`.
      params: arrays on any mesh; with `read` their shapes are enough.
      read: returns a weight by its dotted name; it is called once for each, and the one before is released.
      tokenizer_from: a folder whose tokenizer files (and generation_config.json) are copied, or a GGUF file.
      dtype: of the files; None: as the weights are.
      max_shard_bytes: a model beyond this is written in several files and an index.

    Raises:
      ValueError: the destination is not empty, `tokenizer_from` has no tokenizer, the weights aren't those of the
        architecture, have a dtype that isn't written, or are not finite.
    """
    folder = pathlib.Path(folder).absolute()
    tokenizer_from = None if tokenizer_from is None else pathlib.Path(tokenizer_from)
    if tokenizer_from is not None:
        _check_tokenizer(tokenizer_from)
    weights = transformer.flatten(params)
    _check_params(architecture, weights)
    wanted = parts(architecture)
    dtypes = {name: jnp.dtype(weight.dtype if dtype is None else dtype) for name, weight in weights.items()}
    for name, kind in dtypes.items():
        if kind.name not in weight_files.DTYPE_CODES:
            raise ValueError(f"{name} would be written as {kind.name}; use {', '.join(weight_files.DTYPE_CODES)}.")

    tensors = stored(architecture)
    newest: dict[str, jax.Array] = {}

    def weight(name: str) -> jax.Array:
        if read is None:
            return weights[name]
        if name not in newest:
            newest.clear()  # before the next one is read: one at a time is in memory
            newest[name] = read(name)
        return newest[name]

    def fetch_part(name: str) -> np.ndarray:
        part = wanted[name]
        value = processes.fetch(_read_part(weight(part.weight), part.start, part.ours))
        value = value.astype(dtypes[part.weight], copy=False)
        weight_files.check_finite("nothing is exported", name, value, weight_files.EARLIER)
        return part.to_theirs(value)

    def fetch(name: str) -> np.ndarray:
        first, *others = map(fetch_part, tensors[name])
        return np.concatenate([first, *others]) if others else first

    if not processes.is_writer():
        for name in tensors:
            fetch(name)
        return
    with weight_files.new_folder(folder) as partial:
        config = to_hf(architecture, dtypes["embedding"].name)
        weight_files.write_json(partial / "config.json", config)
        ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        weight_files.write_json(partial / "generation_config.json", ends)
        if tokenizer_from is not None:
            _copy_tokenizer(tokenizer_from, partial)
        weight_files.write(partial, _specs(architecture, dtypes), fetch, max_shard_bytes)
