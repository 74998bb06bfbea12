"""Adapters as files: the folder that `peft` reads, and the fingerprint of the base that they belong to."""

import hashlib
import math
import os
import pathlib
import struct

import numpy as np
from safetensors import numpy as safetensors

from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.files import gguf, partial_copy
from reinforce_ada_jax.policy import hub_models, huggingface, weight_files
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.lora import TARGETS, Lora, adapter_shapes
from reinforce_ada_jax.policy.tensor_table import TABLE, joined
from reinforce_ada_jax.policy.transformer import Params, flatten

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Bytes that are read at the beginning, the middle and the end of each file of a base. Two trainings of one architecture
# differ in all three, and reading whole files would take as long as loading them.
SAMPLED_BYTES = 2**16


def fingerprint(folder: pathlib.Path) -> str:
    """Returns a hash of a base's architecture, file headers, file sizes and byte samples; its path does not matter."""
    digest = hashlib.sha256(repr(huggingface.read_config(folder)).encode())
    for file in weight_files.find(folder):
        with partial_copy.whole(file).open("rb") as stream:
            length = stream.read(8)
            is_gguf = file.suffix == gguf.SUFFIX
            rest = gguf.read(file).begin - len(length) if is_gguf else struct.unpack("<Q", length)[0]
            digest.update(length + stream.read(rest))
            begin, end = stream.tell(), stream.seek(0, os.SEEK_END)
            digest.update(struct.pack("<Q", end))
            places = begin, (begin + end) // 2, max(begin, end - SAMPLED_BYTES)
            partial_copy.whole(file, [(place, place + SAMPLED_BYTES) for place in places])
            for place in places:
                stream.seek(place)
                digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()


def check_base(folder: pathlib.Path, recorded: str) -> None:
    """Raises ValueError where `folder` isn't the base whose fingerprint was recorded with adapters."""
    found = fingerprint(folder)
    if found != recorded:
        raise ValueError(
            f"{folder} (fingerprint {found[:12]}) is not the model that these adapters were trained on "
            f"({recorded[:12]}): a checkpoint holds adapters only, and they are worth nothing on other weights. Put "
            "the base back where model.path says."
        )


def _peft_name(weight: str, matrix: str) -> str:
    """Returns PEFT's name of the matrix "a" or "b" of one of our weights; {} in it is the layer."""
    return f"base_model.model.{TABLE[weight][1].removesuffix('.weight')}.lora_{matrix.upper()}.weight"


def check_family(architecture: Architecture, remedy: str) -> None:
    """Raises ValueError, with the `remedy`, if PEFT has no format for the adapters of this model."""
    if joined(architecture):
        raise ValueError(
            f"PEFT adapts queries, keys and values of {architecture.family} as one matrix, and this program each of "
            f"them. {remedy}"
        )


def peft_tensors(architecture: Architecture, adapters: Params, lora: Lora) -> dict[str, np.ndarray]:
    """Returns PEFT's names and layouts, float32: `lora_A.weight` is [rank, inputs], `lora_B.weight` [outputs, rank]."""
    matrices = {name: processes.fetch(x).astype(np.float32) for name, x in flatten(adapters).items()}
    tensors = {}
    for weight in (TARGETS[target] for target in lora.targets):
        for layer in range(architecture.num_layers):
            a, b = (matrices[f"{weight}.{matrix}"][layer] for matrix in "ab")
            tensors[_peft_name(weight, "a").format(layer)] = np.ascontiguousarray(a.reshape(-1, lora.rank).T)
            tensors[_peft_name(weight, "b").format(layer)] = np.ascontiguousarray(b.reshape(lora.rank, -1).T)
    return tensors


def save(
    folder: str | pathlib.Path, architecture: Architecture, adapters: Params, lora: Lora, *, base: pathlib.Path
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained(model, folder)` reads; whole, or not at all.

    Raises ValueError if the folder exists and is not empty. The adapter's config names the folder `base`. Where several
    processes hold the adapters, each calls this, and process 0 writes.
    """
    tensors = peft_tensors(architecture, adapters, lora)
    for name, tensor in tensors.items():
        weight_files.check_finite("nothing is exported", name, tensor, weight_files.EARLIER)
    if not processes.is_writer():
        return
    with weight_files.new_folder(pathlib.Path(folder).absolute()) as partial:
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM",
            "base_model_name_or_path": hub_models.repository(base) or str(base.absolute()),
            "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets), "lora_dropout": 0.0,
            "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "modules_to_save": None,
            "inference_mode": True,
        }  # fmt: skip
        weight_files.write_json(partial / CONFIG, config)
        # Not by `save_file`, whose file only its owner may read (safetensors 0.8).
        (partial / WEIGHTS).write_bytes(safetensors.save(tensors, metadata={"format": "pt"}))


def load(folder: pathlib.Path, architecture: Architecture) -> tuple[Lora, dict[str, np.ndarray]]:
    """Reads a folder that `save` wrote; returns rank, alpha and targets, and the matrices by dotted path.

    Raises:
      ValueError: a file is missing, or does not hold adapters of this architecture.
    """
    config = weight_files.read_json(folder / CONFIG)
    try:
        lora = Lora(int(config["r"]), float(config["lora_alpha"]), tuple(config["target_modules"]))
        shapes = {name: shape for name, (shape, _) in adapter_shapes(architecture, lora).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} is not of adapters that this program writes ({error!r}).") from error
    weight_files.read_headers([folder / WEIGHTS])
    tensors = safetensors.load_file(folder / WEIGHTS)
    matrices = {}
    for name, shape in shapes.items():
        theirs = _peft_name(*name.rsplit(".", 1))
        layers = [tensors.get(theirs.format(layer)) for layer in range(shape[0])]
        if any(layer is None or layer.size != math.prod(shape[1:]) for layer in layers):
            raise ValueError(f"{folder / WEIGHTS} has no {theirs} of this model: it belongs to another one.")
        matrices[name] = np.stack([layer.T.reshape(shape[1:]) for layer in layers])  # pyright: ignore
    return lora, matrices
