"""Models in GGUF files: the architecture and the weights, by the names and in the layouts of Hugging Face folders.

The package `gguf` converts quantised blocks to numbers; a tensor is read in chunks of rows. files/gguf_tokenizer.py
reads the tokenizer in such a file.
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.files import gguf

FAMILIES = ("llama", "qwen2", "qwen3")
# Names of GGUF by those of Hugging Face; {} is the layer.
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.q_proj.bias": "blk.{}.attn_q.bias",
    "model.layers.{}.self_attn.k_proj.bias": "blk.{}.attn_k.bias",
    "model.layers.{}.self_attn.v_proj.bias": "blk.{}.attn_v.bias",
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
CHUNK_BYTES = 2**24  # of quantised rows that are made into numbers at a time
# Names in the metadata, after "FAMILY.", by those of config.json; the last three may be missing.
SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "head_dim": "attention.key_length",
}  # fmt: skip


def _number(metadata: dict[str, Any], key: str, default: float) -> float:
    """Returns a number as the shortest decimal that rounds to its float32: 1e-05 for 9.999999747378752e-06."""
    number = metadata.get(key, default)
    if type(number) is not float:
        raise ValueError(f"{key} is {number!r:.40}, no number with decimals")
    return float(str(np.float32(number)))


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the `rope_scaling` of Llama 3.1 to 3.3 that gives these factors; the file has only the factors."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for factor in (8.0, 32.0):
        smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }  # fmt: skip
    raise ValueError(
        f"its rotary factors ({ROPE_FACTORS}) are not those of Llama 3.1 to 3.3, and a GGUF file does not say how they "
        "were made: use the model's Hugging Face folder"
    )


def _rotary(file: pathlib.Path, header: gguf.Header, family: str, theta: float) -> dict[str, Any]:
    """Returns `rope_scaling` where the file has factors; ValueError for a rotation that is not supported."""
    metadata, factors = header.metadata, header.tensors.get(ROPE_FACTORS)
    # Files of 2023 have only a factor, under one of two names; llama.cpp treats it as linear scaling.
    factor = metadata.get(f"{family}.rope.scaling.factor", metadata.get(f"{family}.rope.scale_linear", 0.0))
    kind = metadata.get(f"{family}.rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
    if kind != "none":
        raise ValueError(f"its rotary scaling is {kind!r:.60}, which is not supported")
    rotated = metadata.get(f"{family}.rope.dimension_count")
    if rotated is None and factors is None:
        return {}
    head_dim = metadata.get(f"{family}.attention.key_length")
    if head_dim is None:
        head_dim = metadata[f"{family}.embedding_length"] // metadata[f"{family}.attention.head_count"]
    if rotated not in (None, head_dim):
        raise ValueError(f"it rotates {rotated!r:.40} of the {head_dim!r:.40} components of a head; all are supported")
    if factors is None:
        return {}
    if 2 * math.prod(factors.shape) != head_dim:  # before anything of this size is allocated
        raise ValueError(f"its rotary factors have the shape {factors.shape}, and a head has the size {head_dim!r:.40}")
    return {"rope_scaling": _llama3_scaling(read_tensor(file, header, ROPE_FACTORS), theta, head_dim)}


def config(file: pathlib.Path) -> dict[str, Any]:
    """Returns the config.json that the Hugging Face folder of the model would have.

    Raises ValueError where the file is damaged, or its model is of another family or incomplete.
    """
    header = gguf.read(file)
    metadata, family = header.metadata, header.metadata.get("general.architecture")
    try:
        if family not in FAMILIES:
            raise ValueError(f"its architecture is {family!r:.60}; supported are {', '.join(FAMILIES)}")
        found = {name: metadata.get(f"{family}.{key}") for name, key in SIZES.items()}
        embedding = header.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError("it has no matrix token_embd.weight")
        theta = _number(metadata, f"{family}.rope.freq_base", 10000.0)
        found |= {
            "model_type": family,
            "vocab_size": embedding.shape[0],
            "rms_norm_eps": _number(metadata, f"{family}.attention.layer_norm_rms_epsilon", 1e-6),
            "rope_theta": theta,
            "tie_word_embeddings": "output.weight" not in header.tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        }
        found |= _rotary(file, header, family, theta)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {error}.") from error
    return {name: value for name, value in found.items() if value is not None}


def _names(layers: int) -> dict[str, str]:
    """Returns the names of GGUF by those of Hugging Face."""
    return {
        ours.format(layer): theirs.format(layer)
        for ours, theirs in NAMES.items()
        for layer in range(layers if "{}" in ours else 1)
    }


def shapes(file: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor by its Hugging Face name; tensors without one keep their GGUF name."""
    header = gguf.read(file)
    layers = header.metadata.get(f"{header.metadata.get('general.architecture')}.block_count", 0)
    ours = {theirs: name for name, theirs in _names(layers if isinstance(layers, int) else 0).items()}
    return {ours.get(name, name): tensor.shape for name, tensor in header.tensors.items() if name != ROPE_FACTORS}


def read_tensor(file: pathlib.Path, header: gguf.Header, name: str) -> np.ndarray:
    """Returns the tensor with this GGUF name, as float32."""
    from gguf.constants import GGMLQuantizationType  # noqa: PLC0415  (0.2 s, which folders need not spend)
    from gguf.quants import dequantize  # noqa: PLC0415

    tensor = header.tensors[name]
    rows = math.prod(tensor.shape[:-1])
    content = np.memmap(file, np.uint8, "r", tensor.begin, (rows, tensor.size // rows))
    at_a_time = max(1, CHUNK_BYTES // content.shape[1])
    values = np.empty((rows, tensor.shape[-1]), np.float32)
    for first in range(0, rows, at_a_time):
        chunk = np.ascontiguousarray(content[first : first + at_a_time])
        values[first : first + at_a_time] = dequantize(chunk, GGMLQuantizationType(tensor.type))
    return values.reshape(tensor.shape)


def _rotary_rows(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a head in Hugging Face's order: the first rows of all rotated pairs, then the second ones.

    llama.cpp's converter puts the two rows of a pair side by side, for Llama alone.
    """
    return matrix.reshape(heads, -1, 2, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


class Tensors:
    """Tensors of a file by their Hugging Face names, with the methods that `load` uses of a safetensors file."""

    def __init__(self, file: pathlib.Path):
        """Reads the header; raises ValueError as `gguf.read` does."""
        self._file, self._header = file, gguf.read(file)
        metadata = self._header.metadata
        self._family = metadata["general.architecture"]
        self._names = {
            ours: theirs
            for ours, theirs in _names(metadata[f"{self._family}.block_count"]).items()
            if theirs in self._header.tensors
        }

    def keys(self) -> Sequence[str]:
        return [*self._names]

    def get_tensor(self, name: str) -> np.ndarray:
        """Returns a tensor, as float32."""
        tensor = read_tensor(self._file, self._header, self._names[name])
        for part, heads in (("q_proj", "head_count"), ("k_proj", "head_count_kv")):
            if self._family == "llama" and part in name:
                metadata = self._header.metadata
                every = metadata[f"{self._family}.attention.head_count"]
                return _rotary_rows(tensor, metadata.get(f"{self._family}.attention.{heads}", every))
        return tensor

    def get_slice(self, name: str) -> np.ndarray:
        """Returns the whole tensor, as an array that the caller can slice; nothing less can be read."""
        return self.get_tensor(name)
